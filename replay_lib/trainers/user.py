"""``module:factory``: a trainer of the user's own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

from replay_lib.errors import SpikeReplayError, TrainerError
from replay_lib.trainers.findable import cannot_import, no_factory
from replay_lib.trainers.protocol import LoadedTrainer, checked, seams_from


def load_user_trainer(
    name: str, saved: Mapping[str, Any], places: Sequence[str] = ()
) -> LoadedTrainer:
    """Import ``module`` and call ``factory(saved)``; see docs/trainers.md for the contract.

    ``places``: the module must come from one of these directories; none: from anywhere.
    Raises TrainerError that names module, factory or field where one is not what it should be.
    """
    module_name, _, factory_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        told = f"{type(error).__name__}: {error}"
        raise TrainerError(cannot_import(name, module_name, told)) from error
    if places and not _inside(module, places):
        raise TrainerError(
            f"trainer {name}: found the module in {module.__file__}, expected it in one of "
            f"{', '.join(places)}: another copy of it was imported before"
        )
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        found = "nothing" if factory is None else type(factory).__name__
        raise TrainerError(no_factory(name, found, module.__file__))
    try:
        made = factory(deepcopy(dict(saved)))
    except SpikeReplayError:
        raise
    except (Exception, SystemExit) as error:
        raise TrainerError(
            f"trainer {name}: factory {factory_name!r} raised {type(error).__name__}: {error}"
        ) from error
    loss = _attribute(name, made, "loss", None)
    if not callable(loss):
        found = f"{type(made).__name__} without a method loss"
        raise TrainerError(
            f"trainer {name}: factory {factory_name!r} returned a {found}, expected an object "
            "with loss(settings, rows, log_prob_BT, entropy_BT, token_weight_BT)"
        )
    return LoadedTrainer(
        name=name,
        loss=checked(name, loss),
        refuses=seams_from(name, _attribute(name, made, "refuses", ())),
        notes=(f"the loss is that of {name} ({module.__file__})",),
    )


def _attribute(name: str, made: Any, attribute: str, absent: Any) -> Any:
    """``made.attribute``, which may be a property and run code of the user's."""
    try:
        return getattr(made, attribute, absent)
    except SpikeReplayError:
        raise
    except (Exception, SystemExit) as error:
        raise TrainerError(
            f"trainer {name}: its attribute {attribute} raised {type(error).__name__}: {error}"
        ) from error


def _inside(module: ModuleType, places: Sequence[str]) -> bool:
    file = Path(module.__file__ or "/").resolve()
    return any(file.is_relative_to(place) for place in places)
