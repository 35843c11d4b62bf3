"""Inert modules for what AXRL imports beside its loss, each with the reason why it is spared.

A stand-in is used only where the real package is missing, and only while AXRL is imported. Its
classes can be named and derived from; making an object of one is an error that names the package.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from replay_lib.errors import TrainerError


@dataclass(frozen=True)
class StandIn:
    """Names that AXRL reads from a module while it is imported, and why the loss needs none."""

    names: tuple[str, ...]
    reason: str


#: In the order of parents before children.
STAND_INS: dict[str, StandIn] = {
    "tensordict": StandIn(
        ("TensorDict",), "the loss reads its batch by column name alone, which a dict does too"
    ),
    "pandas": StandIn((), "draws KL curves and tabulates metrics; no tensor goes through it"),
    "zstandard": StandIn((), "compresses files of rollouts"),
    "ray": StandIn((), "fetches routes and moves batches between workers"),
    "ray._private": StandIn((), "parent of the next"),
    "ray._private.internal_api": StandIn((), "frees objects of the store"),
    "transformers": StandIn(("AutoTokenizer",), "turns conversations into tokens"),
}


def missing_packages() -> list[str]:
    """Top-level packages of the table that are not installed here."""
    packages = dict.fromkeys(name.split(".")[0] for name in STAND_INS)
    return [p for p in packages if p not in sys.modules and importlib.util.find_spec(p) is None]


@contextlib.contextmanager
def standing_in() -> Iterator[list[str]]:
    """Stand-ins for the missing packages inside the block; yields the packages' names.

    Afterwards they are gone from ``sys.modules``, so that nobody takes them for the real ones.
    """
    packages = missing_packages()
    made = {name: _module(name) for name in STAND_INS if name.split(".")[0] in packages}
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    sys.modules.update(made)
    try:
        yield packages
    finally:
        for name in made:
            sys.modules.pop(name, None)


def _module(name: str) -> ModuleType:
    module = ModuleType(name, f"Inert: {STAND_INS[name].reason}.")
    module.__path__ = []  # so that its children can be imported
    for attribute in STAND_INS[name].names:
        setattr(module, attribute, _inert(name, attribute))
    return module


def _inert(module: str, name: str) -> type:
    def refuse(_cls: type, *_args: Any, **_kwargs: Any) -> NoReturn:
        package = module.partition(".")[0]
        raise TrainerError(
            f"trainer axrl: it uses {module}.{name}, but {package} is not installed here; "
            f"install {package}"
        )

    return type(name, (), {"__module__": module, "__new__": refuse})
