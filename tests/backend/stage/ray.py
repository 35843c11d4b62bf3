"""A ray that notes how it was started."""

from __future__ import annotations

_started: dict[str, object] = {}


def is_initialized() -> bool:
    """Whether ``init`` was called."""
    return bool(_started)


def init(**given: object) -> None:
    """Only a local one is allowed."""
    assert given["address"] == "local"
    _started.update(given)
