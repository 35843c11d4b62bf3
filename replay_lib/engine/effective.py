"""What ran, by two saved files, and what the replay's model has instead.

A snapshot states its model twice: ``run_config.yaml`` holds the provider that the model was built
from, ``megatron_worker_config.json`` what AXRL's worker wrote into that provider before it built.
:func:`what_ran` settles the two; :func:`effective_differences` compares the outcome with the values
of a model, planned or live. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from replay_lib.engine.meanings import entry_of
from replay_lib.engine.model_config import (
    ASSUMED,
    OWN_SETTINGS,
    ModelConfig,
    activation_name,
    model_config,
)
from replay_lib.engine.protocol import Difference
from replay_lib.errors import UnsupportedModelError
from replay_lib.layout import RUN_CONFIG, WORKER_CONFIG
from replay_lib.snapshot.model import Parallel, Snapshot, WorkerConfig

#: The worker sets these fields to a setting of its own, whatever the setting is.
ALWAYS_SET = {
    "moe_aux_loss_coeff": "moe_aux_loss_coeff",
    "moe_router_load_balancing_type": "moe_router_load_balancing_type",
    "moe_enable_routing_replay": "enable_routing_replay",
    "recompute_granularity": "recompute_granularity",
    "recompute_method": "recompute_method",
    "recompute_num_layers": "recompute_num_layers",
}
#: These it sets where its setting is on; else the provider keeps what it has.
SET_WHERE_ON = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "fp8",
    "apply_rope_fusion": "apply_rope_fusion",
    "attention_backend": "attention_backend",
    "batch_invariant_mode": "batch_invariant_mode",
}
#: The layout, by the names of :class:`Parallel`.
LAYOUT = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
#: What AXRL's worker sets to one value. A file that says otherwise is followed: it was written by
#: what ran, which need not be this version of the worker.
CONSTANT = {
    "attention_softmax_in_fp32": True,
    "moe_router_dtype": "fp32",
    "calculate_per_token_loss": True,
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
}
#: Megatron computes these from other fields where they are not given.
DERIVED = frozenset(
    ["kv_channels", "num_query_groups", "ffn_hidden_size", "moe_ffn_hidden_size", "softmax_scale"]
)
_OFF: tuple[Any, ...] = (None, False, 0, 0.0, "", "none", [], {}, ())


@dataclass(frozen=True)
class Ran:
    """The model section as it ran, where the two files contradict each other, what none states."""

    fields: dict[str, Any]
    contradictions: tuple[Difference, ...]
    assumed: tuple[Difference, ...]

    @property
    def told(self) -> tuple[Difference, ...]:
        """All that a reader of the two files has to know."""
        return self.contradictions + self.assumed


def what_ran(worker: WorkerConfig, parallel: Parallel, fields: Mapping[str, Any]) -> Ran:
    """The saved model section ``fields`` with the worker's own settings put into it.

    AXRL's worker sets the provider's fields before it builds the model, so where both files state
    a field the worker's setting ran. A setting that the worker's file does not state settles
    nothing. Source: AXRL ``MegatronWorker`` (``_configure_provider``, ``get_model``).
    """
    stated = worker.model_fields_set
    settled = {f: getattr(worker, s) for f, s in ALWAYS_SET.items() if s in stated}
    settled |= {
        f: on for f, s in SET_WHERE_ON.items() if s in stated and (on := getattr(worker, s))
    }
    settled |= {f: getattr(parallel, s) for f, s in LAYOUT.items()}
    wrong = [
        _contradiction(field, fields[field], value)
        for field, value in settled.items()
        if field in fields and not same(fields[field], value)
    ]
    wrong += [
        _not_as_usual(field, fields[field], value)
        for field, value in CONSTANT.items()
        if field in fields and not same(fields[field], value) and _applies(field, fields)
    ]
    # what the section does not have is not put into it where it is off
    kept = {f: v for f, v in settled.items() if f in fields or not _off(v)}
    ran = dict(fields) | kept
    if ran.get("bf16"):  # Megatron's wrapper casts every parameter, whatever it was built in
        ran["params_dtype"] = "bfloat16"
    return Ran(fields=ran, contradictions=tuple(wrong), assumed=_assumed(ran))


def _assumed(fields: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Fields of weight that the section does not have, and that take Megatron-Core's default."""
    return tuple(
        Difference(
            field=field,
            kind="assumed",
            saved=None,
            source=RUN_CONFIG,
            effective=value,
            meaning="changes the step",
            reason="no file states it, so Megatron-Core's default is taken",
        )
        for field, value in ASSUMED.items()
        if field not in fields and _applies(field, fields)
    )


def _applies(field: str, fields: Mapping[str, Any]) -> bool:
    return not field.startswith("moe_") or bool(fields.get("num_moe_experts"))


def _contradiction(field: str, saved: Any, ran: Any) -> Difference:
    entry = entry_of(field)
    return Difference(
        field=field,
        kind="contradiction",
        saved=saved,
        source=RUN_CONFIG,
        effective=ran,
        meaning=entry.meaning if entry else "unknown",
        reason=f"{WORKER_CONFIG} says {ran!r}, and the worker sets it before the model is built",
    )


def _not_as_usual(field: str, saved: Any, usual: Any) -> Difference:
    entry = entry_of(field)
    return Difference(
        field=field,
        kind="contradiction",
        saved=usual,
        source="the trainer's worker, which always sets it",
        effective=saved,
        meaning=entry.meaning if entry else "unknown",
        reason=f"{RUN_CONFIG} says {saved!r}: it was written by what ran",
    )


def effective_differences(
    ran: Mapping[str, Any], effective: Mapping[str, Any]
) -> tuple[Difference, ...]:
    """Where a model with the values ``effective`` is not the one that ran.

    Both are plain values by the model section's names. A field of ``ran`` that the model does not
    have counts only where it is switched on and nobody knows what it does.
    """
    found = [
        _replaced(field, saved, effective[field])
        for field, saved in sorted(ran.items())
        if field in effective
        and _applies(field, ran)
        and not _alike(field, saved, effective[field])
    ]
    return tuple(found) + unknown_fields({f: v for f, v in ran.items() if f not in effective})


def unknown_fields(fields: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Fields that are switched on and that nobody here knows: a newer Megatron's, say."""
    return tuple(
        _unknown(field, saved)
        for field, saved in sorted(fields.items())
        if entry_of(field) is None and not _off(saved)
    )


def planned_differences(snapshot: Snapshot, fields: Mapping[str, Any]) -> tuple[Difference, ...]:
    """What a replay of ``snapshot`` would differ in, the files themselves first; builds no model.

    Raises UnsupportedModelError as :func:`model_config` does.
    """
    ran = what_ran(snapshot.worker, snapshot.parallel, fields)
    return ran.told + effective_differences(ran.fields, planned_values(model_config(ran.fields)))


def planned_values(config: ModelConfig) -> dict[str, Any]:
    """The values that a model built from ``config`` is to have, by the model section's names."""
    values: dict[str, Any] = ASSUMED | config.transformer | config.gpt | OWN_SETTINGS
    return values | {
        "activation_func": f"torch.nn.functional.{config.activation}",
        "params_dtype": config.dtype,
        "attention_softmax_in_fp32": True,
    }


def another_step(differences: Iterable[Difference], *, allowed: Iterable[str] = ()) -> list[str]:
    """Each field whose difference makes the step another one, with its values and the reason.

    A contradiction between files is no reason: what ran is settled, and replayed. ``allowed`` are
    fields that were asked to differ.
    """
    return [
        f"model.{d.field}={d.saved!r}, where the model here has {d.effective!r}: {d.reason}"
        for d in differences
        if d.kind == "replaced" and d.meaning == "changes the step" and d.field not in set(allowed)
    ]


def refuse_another_step(differences: Iterable[Difference], *, allowed: Iterable[str] = ()) -> None:
    """UnsupportedModelError with what :func:`another_step` finds, if anything."""
    found = another_step(differences, allowed=allowed)
    if found:
        raise UnsupportedModelError(
            f"{RUN_CONFIG}: the model here is not the one that ran: {'; '.join(found)}. "
            "Replay it with a backend that takes these values."
        )


def difference_notes(differences: Iterable[Difference]) -> tuple[str, ...]:
    """A line for each difference that a reader of a result has to know: all but harmless ones."""
    return tuple(d.told() for d in differences if d.matters)


def _replaced(field: str, saved: Any, effective: Any) -> Difference:
    entry = entry_of(field)
    return Difference(
        field=field,
        kind="replaced",
        saved=saved,
        source=RUN_CONFIG,
        effective=effective,
        meaning=entry.meaning if entry else "unknown",
        reason=entry.reason if entry else "nobody looked at what it does",
    )


def _unknown(field: str, saved: Any) -> Difference:
    return Difference(
        field=field,
        kind="unknown",
        saved=saved,
        source=RUN_CONFIG,
        effective=None,
        meaning="unknown",
        reason="neither this engine nor the installed Megatron-Core knows it; it is not taken over",
    )


def _alike(field: str, saved: Any, effective: Any) -> bool:
    if field == "activation_func" and saved is not None:
        saved = activation_name({field: saved})
    return (saved is None and field in DERIVED) or same(saved, effective)


def _off(value: Any) -> bool:
    return any(value is off or (type(value) is type(off) and value == off) for off in _OFF)


def same(one: Any, other: Any) -> bool:
    """Equal as settings: what is off is off however it is written, numbers to 1e-6 relative."""
    if _off(one) and _off(other):
        return True
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)
