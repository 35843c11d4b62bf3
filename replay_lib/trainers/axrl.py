"""``axrl``: the loss of the installed trainer's own class, ``GrpoTrainer.loss_func``.

Nothing of the loss is written again here. The class gets settings, columns, log-probabilities and
entropies and returns its loss and denominator; their product is what AXRL's worker hands to
Megatron. The one method that is wrapped is ``get_loss_func``: the policy loss that it returns is
told which advantages are used and which weight multiplies each token's policy term, and there
token weights join in.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from replay_lib.batch import TOKEN_COLUMNS, RankBatch
from replay_lib.errors import SettingsError, TrainerError, fault
from replay_lib.loss import (
    EntropySettings,
    GrpoSettings,
    MicroBatchLoss,
    OpdSettings,
    micro_batch_loss,
)
from replay_lib.trainers.axrl_source import (
    TRAINER,
    TRAINER_CLASS,
    TRAINER_MODULE,
    fingerprint,
    outside_imports,
    require_axrl,
)
from replay_lib.trainers.names import AXRL
from replay_lib.trainers.protocol import LoadedTrainer, checked, token_loss
from replay_lib.trainers.stand_ins import standing_in


def load_axrl(saved: Mapping[str, Any]) -> LoadedTrainer:
    """AXRL's own loss; ``saved`` are the recorded settings, unknown ones of newer versions too.

    AXRL is the checkout that SPIKE_REPLAY_AXRL names, else the installed package. Raises
    TrainerError where it is absent, cannot be imported, or is not what this module knows.
    """
    module = import_axrl()
    real: Any = getattr(module, TRAINER_CLASS, None)
    config: Any = getattr(importlib.import_module("axrl.configs"), "GrpoTrainerConfig", None)
    if real is None or not issubclass(config, BaseModel):
        raise TrainerError(fault(TRAINER, TRAINER_MODULE, "no such class", TRAINER_CLASS))
    loss = AxrlLoss(real, config, saved)
    file = Path(str(module.__file__))
    note = f"the loss is {TRAINER_MODULE}.{TRAINER_CLASS} of {file} (sha256 {fingerprint(file)})"
    return LoadedTrainer(name=AXRL, loss=checked(AXRL, loss), notes=(note,))


def import_axrl() -> ModuleType:
    """The module of AXRL's trainer, imported with stand-ins for what is not installed."""
    root = require_axrl()
    with _router_replay_kept(), _importable(root):
        _import_what_is_installed(root)
        return _import_trainer(root)


def _import_trainer(root: Path) -> ModuleType:
    with standing_in() as packages:
        try:
            return importlib.import_module(TRAINER_MODULE)
        except Exception as error:
            beside = f" (stand-ins were used for {', '.join(packages)})" if packages else ""
            raise TrainerError(
                f"{TRAINER}: {TRAINER_MODULE} of {root} cannot be imported{beside}: "
                f"{type(error).__name__}: {error}"
            ) from error


def _import_what_is_installed(root: Path) -> None:
    """Import what AXRL imports beside itself first: no package but AXRL may meet a stand-in."""
    for name in outside_imports(root, TRAINER_MODULE):
        with contextlib.suppress(Exception):  # what is needed and fails is told by AXRL's import
            importlib.import_module(name)


@contextlib.contextmanager
def _importable(root: Path) -> Iterator[None]:
    """``root`` in front of the import path inside; afterwards the package knows its own path."""
    sys.path.insert(0, str(root))
    try:
        yield
    finally:
        sys.path.remove(str(root))


@contextlib.contextmanager
def _router_replay_kept() -> Iterator[None]:
    """Megatron's RouterReplay is afterwards what it was before.

    AXRL replaces a method of it when it is imported. The replayed model has to be the same
    whichever trainer's loss is taken.
    """
    kind: Any = importlib.import_module("megatron.core.transformer.moe.router_replay").RouterReplay
    before = dict(vars(kind))
    try:
        yield
    finally:
        for name in [n for n in vars(kind) if n not in before]:
            delattr(kind, name)
        for name, value in before.items():
            if vars(kind)[name] is not value:
                setattr(kind, name, value)


@dataclass
class _Seen:
    """What AXRL's policy loss was given, ``[B, T]``."""

    advantage_BT: Tensor | None = None
    weight_BT: Tensor | None = None


@dataclass(frozen=True)
class AxrlLoss:
    """AXRL's class ``real`` with its configuration class, as a loss of this library."""

    real: Any
    config: type[BaseModel]
    saved: Mapping[str, Any]

    def __call__(
        self,
        settings: GrpoSettings,
        rows: RankBatch,
        log_prob_BT: Tensor,
        entropy_BT: Tensor,
        token_weight_BT: Tensor | None = None,
    ) -> MicroBatchLoss:
        """See :meth:`replay_lib.trainers.protocol.Trainer.loss`."""
        trainer = self.real(config=axrl_config(self.config, settings, self.saved))
        seen = _watch(trainer, token_weight_BT)
        try:
            loss, denominator, metrics = trainer.loss_func(
                {"log_prob": log_prob_BT, "entropy": entropy_BT},
                _columns(rows, log_prob_BT.dtype),
            )
        except (AssertionError, KeyError, ValueError):
            # the built-in loss refuses the same, and its errors name the setting or the column
            micro_batch_loss(settings, rows, log_prob_BT, entropy_BT, token_weight_BT)
            raise
        if seen.advantage_BT is None or seen.weight_BT is None:
            raise TrainerError(
                fault(
                    f"{TRAINER}: {TRAINER_CLASS}.loss_func",
                    "get_loss_func",
                    "no policy loss that was called",
                    "one that gets advantages and token_mismatch_tir",
                    "This version of AXRL is not one that is known here.",
                )
            )
        if not loss.requires_grad:  # quantiles of no token at all are a constant in AXRL
            loss = loss + log_prob_BT[:0].sum()
        made = token_loss(
            loss,
            denominator,
            rows,
            token_weight_BT=_times(seen.weight_BT, token_weight_BT),
            keep_BT=seen.weight_BT != 0,
            advantage_BT=seen.advantage_BT,
        )
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
        return MicroBatchLoss(**{**vars(made), "read_metrics": lambda: numbers})


def _columns(rows: RankBatch, dtype: torch.dtype) -> dict[str, Tensor]:
    """The columns that are there; what is float is of the dtype of the log-probabilities."""
    present: dict[str, Tensor | None] = {name: getattr(rows, name) for name in TOKEN_COLUMNS}
    return {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in present.items()
        if value is not None
    }


def _times(weight_BT: Tensor, token_weight_BT: Tensor | None) -> Tensor:
    return weight_BT if token_weight_BT is None else weight_BT * token_weight_BT.detach()


def _watch(trainer: Any, token_weight_BT: Tensor | None) -> _Seen:
    """Let token weights into ``trainer``'s policy loss and note what that was given."""
    seen = _Seen()
    original = trainer.get_loss_func

    def get_loss_func() -> Any:
        policy_loss = original()

        def weighed(**given: Any) -> Any:
            seen.advantage_BT = given["advantages"].detach()
            seen.weight_BT = given["token_mismatch_tir"].detach()
            given["token_mismatch_tir"] = _times(given["token_mismatch_tir"], token_weight_BT)
            return policy_loss(**given)

        return weighed

    trainer.get_loss_func = get_loss_func
    return seen


def axrl_config(
    kind: type[BaseModel], settings: GrpoSettings, saved: Mapping[str, Any]
) -> BaseModel:
    """AXRL's configuration ``kind`` with the values of ``settings``.

    Saved settings that this library does not know, or that the loss does not read, are passed on
    as they were recorded. SettingsError for a value that AXRL does not take, and for a setting
    that this version of AXRL does not have, unless it has its default.
    """
    fields = _fields(kind, settings, saved, "")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise SettingsError(
            fault(
                f"{TRAINER}: {kind.__name__}",
                field,
                repr(first["input"]),
                f"a value that AXRL takes ({first['msg']})",
            )
        ) from error


def _fields(
    kind: type[BaseModel],
    ours: EntropySettings | GrpoSettings | OpdSettings,
    saved: Mapping[str, Any],
    prefix: str,
) -> dict[str, Any]:
    """Values for ``kind`` by name: the recorded ones, and over them those of ``ours``."""
    # an inert field that says nothing: its writer did not know it, and AXRL has its own default
    fields = {k: v for k, v in saved.items() if not (k in ours.inert and v is None)}
    for name, field in type(ours).model_fields.items():
        value: Any = getattr(ours, name)
        if name in ours.inert:
            continue
        if name not in kind.model_fields:
            fields.pop(name, None)
            if value != field.default:
                expected = "a setting that this version of AXRL has"
                raise SettingsError(
                    fault(f"{TRAINER}: {kind.__name__}", f"{prefix}{name}", repr(value), expected)
                )
        elif isinstance(value, EntropySettings | OpdSettings):
            group: Any = kind.model_fields[name].annotation
            fields[name] = _fields(group, value, saved.get(name, {}), f"{name}.")
        else:
            fields[name] = value
    return fields
