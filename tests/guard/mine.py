"""A module in which a trainer of any name may be; nothing here loads one."""

from __future__ import annotations


def __getattr__(name: str) -> None:
    raise AttributeError(name)
