"""Everything for which the engine refuses a run, from the files alone: one list for all who ask.

``show`` tells it, the doctor makes findings of it, and the worker raises it before anything is
loaded. No torch and no Megatron here; what Megatron-Core alone knows is left to building the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replay_lib.engine.effective import (
    Ran,
    another_step,
    effective_differences,
    planned_values,
    what_ran,
)
from replay_lib.engine.field_values import wrong_values
from replay_lib.engine.model_config import model_config, refused_fields
from replay_lib.errors import UnsupportedModelError
from replay_lib.snapshot.model import Parallel, Snapshot, WorkerConfig


@dataclass(frozen=True, kw_only=True)
class Refusals:
    """Why a snapshot is not replayed, by what has to be done about it; all empty: it is.

    ``run``: settings of the worker that the engine does not model. ``model``: fields of the model
    section that it does not model or would have otherwise. ``values``: values that a field cannot
    have.
    """

    run: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Every reason, a line each."""
        return self.run + self.model + self.values


def refusals(snapshot: Snapshot, fields: Mapping[str, Any]) -> Refusals:
    """Why the engine would not replay ``snapshot`` with the saved model section ``fields``."""
    return refusals_of(snapshot.worker, snapshot.parallel, fields)


def refusals_of(worker: WorkerConfig, parallel: Parallel, fields: Mapping[str, Any]) -> Refusals:
    """Why the engine would not replay what these three describe, written or not."""
    ran = what_ran(worker, parallel, fields)
    model, values = refused_fields(ran.fields), wrong_values(ran.fields)
    if not model and not values:
        model = _planned(ran)
    return Refusals(run=refused_run(worker), model=tuple(model), values=tuple(values))


def refused_run(worker: WorkerConfig) -> tuple[str, ...]:
    """Settings of the run that the engine does not model, by the worker's names."""
    refused = {
        f"fp8={worker.fp8!r}": bool(worker.fp8),
        "fp16=True": worker.fp16,
        "enable_fp32_lm_head=True in bfloat16": worker.enable_fp32_lm_head and worker.bf16,
        f"model_role={worker.model_role!r}": worker.model_role != "actor",
    }
    return tuple(told for told, there in refused.items() if there)


def refuse_run(snapshot: Snapshot) -> None:
    """UnsupportedModelError with what :func:`refused_run` finds, if anything."""
    refused = refused_run(snapshot.worker)
    if refused:
        raise UnsupportedModelError(
            f"{snapshot.path}: the run used {', '.join(refused)}, which this engine does not model"
        )


def _planned(ran: Ran) -> list[str]:
    """What is left where each field by itself may be replayed."""
    try:
        config = model_config(ran.fields)
        config.moe_layers  # noqa: B018
    except UnsupportedModelError as error:  # the dtype, or the pattern of MoE layers
        return [str(error)]
    return another_step(effective_differences(ran.fields, planned_values(config)))
