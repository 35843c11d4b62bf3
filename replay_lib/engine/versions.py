"""Versions of what decides a figure's last digits; imports neither torch nor Megatron."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("torch", "megatron-core", "axrl-spike-replay")


def versions() -> dict[str, str]:
    """Installed versions by distribution name."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"
