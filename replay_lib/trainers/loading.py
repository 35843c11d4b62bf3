"""A name -> a trainer. Called in the worker: no other process imports a user's trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from replay_lib.trainers.names import AXRL, GRPO, check_name
from replay_lib.trainers.protocol import BUILT_IN, LoadedTrainer


def load_trainer(name: str, saved: Mapping[str, Any], places: Sequence[str] = ()) -> LoadedTrainer:
    """The trainer called ``name``; ``saved`` are the recorded settings as plain dictionaries.

    ``places``: directories of which module:factory must come from one; none: from anywhere.

    Raises UsageError for a text that names no trainer and TrainerError where one cannot be loaded.
    """
    if check_name(name) == GRPO:
        return BUILT_IN
    if name == AXRL:
        from replay_lib.trainers.axrl import load_axrl

        return load_axrl(saved)
    from replay_lib.trainers.user import load_user_trainer

    return load_user_trainer(name, saved, places)
