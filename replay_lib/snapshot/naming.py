"""Pickle objects under the names of classes that are not installed here.

AXRL reads its snapshots with its own classes. The writer therefore emits pickle programs that
name them (``axrl.data.sample.SampleTensorDict``, ``ray.ObjectRef``, ...) without importing them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

PROTOCOL = 2  # torch.save's default, and what torch's restricted reader understands


@dataclass(frozen=True)
class Global:
    """A class or function by its full name."""

    module: str
    name: str


@dataclass(frozen=True, eq=False)
class Instance:
    """An object made without arguments, then given ``state``."""

    kind: Global
    state: Any


@dataclass(frozen=True, eq=False)
class Call:
    """The result of calling ``function`` with ``args``."""

    function: Global
    args: tuple[Any, ...]


@cache
def named(full_name: str) -> Global:
    """The global ``full_name``; the same object each time, so that a pickle names it once."""
    module, _, name = full_name.rpartition(".")
    return Global(module, name)


# The pure-Python pickler: the C one has no place to write an opcode of one's own.
class _NamingPickler(pickle._Pickler):
    if TYPE_CHECKING:  # what the standard library's stubs leave out
        memo: dict[int, tuple[int, Any]]
        write: Callable[[bytes], object]
        get: Callable[[int], bytes]
        memoize: Callable[[object], None]

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(obj, Global | Instance | Call):
            parent: Any = super()
            parent.save(obj, save_persistent_id)
        elif id(obj) in self.memo:
            self.write(self.get(self.memo[id(obj)][0]))
        elif isinstance(obj, Global):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
            self.memoize(obj)
        else:
            self._save_object(obj)

    def _save_object(self, obj: Instance | Call) -> None:
        if isinstance(obj, Call):
            self.save(obj.function)
            self.save(obj.args)
            self.write(pickle.REDUCE)
            self.memoize(obj)
            return
        self.save(obj.kind)
        self.save(())
        self.write(pickle.NEWOBJ)
        self.memoize(obj)
        self.save(obj.state)
        self.write(pickle.BUILD)


def save_named(value: Any, path: Path) -> None:
    """``torch.save`` of a value that may hold :class:`Instance`, :class:`Call` and tensors."""
    import torch

    module: Any = ModuleType("naming")
    module.Pickler = _NamingPickler
    torch.save(value, path, pickle_module=module, pickle_protocol=PROTOCOL)
