"""Whose loss is replayed: the built-in one, AXRL's own class, or the user's.

    names       how a trainer is named on a command line; no torch
    findable    whether one can be there, without importing it; no torch
    protocol    what a trainer is, what it gives back, and how that is checked
    loading     a name -> a trainer, in the worker only
    user        module:factory
    axrl        the installed trainer's own loss
    axrl_source where AXRL is found, and what its source imports; no torch
    stand_ins   inert modules for what AXRL imports beside its loss

A trainer of your own: docs/trainers.md. Importing this imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replay_lib.trainers.protocol import Trainer, token_loss

__all__ = ["Trainer", "token_loss"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.protocol"), name)
