"""Sizes, spans of time and names as text for a terminal."""

from __future__ import annotations


def size_text(count: int) -> str:
    """Bytes in a unit that is easily read."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, _ = value / 1024, units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def age_text(seconds: float | None) -> str:
    """A span of time in a unit that is easily read."""
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def printable(text: str) -> str:
    """Text with paths in it: control characters of a name must not reach the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
