"""Apply the patches of one experiment, seam by seam, and count what they touched.

Seams act in the order weights, model fields, rows, routing, router, batch, settings, token weights;
inside a seam in the order written. Every seam is a pure function here except the first two, which
change the live model inside a ``with`` block that puts everything back. A patch gets copies: one
that writes into what it was given changes its own experiment and no other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from replay_lib.batch import ROW_COLUMNS, TOKEN_COLUMNS, RankBatch
from replay_lib.engine.checkpoint import Elsewhere, Weights, nowhere
from replay_lib.engine.columns import unchanged_as_given
from replay_lib.engine.inputs import RankInput
from replay_lib.engine.model import LiveModel
from replay_lib.engine.sharing import counted_here
from replay_lib.engine.trees import ROWS, several_paths
from replay_lib.errors import PatchError
from replay_lib.loss import GrpoSettings
from replay_lib.patch import Patch, Seam

#: Columns that decide what the model reads: a batch patch that changes one replays another step.
MODEL_COLUMNS = ("input_ids", "labels", "attention_mask", "position_ids", "index")

#: Configuration fields that Megatron reads at every forward, and where it keeps a second copy.
LIVE_FIELDS: dict[str, str | None] = {
    "moe_router_dtype": None,
    "moe_router_pre_softmax": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_aux_loss_coeff": None,
    "moe_z_loss_coeff": None,
    "moe_expert_capacity_factor": None,
    "moe_router_score_function": "score_function",
    "moe_router_load_balancing_type": "routing_type",
}


#: Values that Megatron itself does not check.
FIELD_VALUES: dict[str, tuple[Any, ...]] = {
    "moe_router_dtype": (None, "fp32", "fp64"),
    "moe_router_score_function": ("softmax", "sigmoid"),
}


@dataclass(frozen=True, kw_only=True)
class Patched:
    """What an experiment replays, after its patches. ``touched`` counts changes by seam.

    Counts of rows, routing, batch and settings are known here; weights, fields, router and token
    weights add theirs while the model runs. ``rows`` says how merged rows go through the model.
    ``methods`` names the mitigations that act at each seam, for errors.
    """

    batches: tuple[RankBatch, ...]
    forced: tuple[Tensor | None, ...]
    settings: GrpoSettings
    weights: tuple[Patch, ...]
    model: tuple[Patch, ...]
    token_weights: tuple[Patch, ...]
    router: tuple[Patch, ...] = ()
    touched: dict[Seam, int]
    rows: str = "merged"
    methods: Mapping[Seam, str] = field(default_factory=dict)


def apply_patches(
    patches: Sequence[Patch],
    ranks: Sequence[RankInput],
    settings: GrpoSettings,
    rows: str = "merged",
) -> Patched:
    """Apply the pure seams of ``patches`` to the inputs; nothing given is modified.

    ``rows`` is how the session packs merged rows where no patch says otherwise.
    """
    by_seam = {seam: tuple(p for p in patches if p.seam is seam) for seam in Seam}
    touched = {seam: 0 for seam in Seam if by_seam[seam]}
    forced: list[Tensor | None] = []
    batches: list[RankBatch] = []
    packed_as = _apply_rows(by_seam[Seam.ROWS], rows)
    for rank in ranks:
        _add(touched, Seam.ROWS, several_paths(rank.trees) if packed_as != rows else 0)
        routing, count = _apply_routing(by_seam[Seam.ROUTING], rank)
        _add(touched, Seam.ROUTING, count)
        batch, count = _apply_batch(by_seam[Seam.BATCH], rank.batch)
        _add(touched, Seam.BATCH, count)
        forced.append(routing)
        batches.append(batch)
    changed, count = _apply_settings(by_seam[Seam.SETTINGS], settings)
    _add(touched, Seam.SETTINGS, count)
    return Patched(
        batches=tuple(batches),
        forced=tuple(forced),
        settings=changed,
        weights=by_seam[Seam.WEIGHTS],
        model=by_seam[Seam.MODEL],
        token_weights=by_seam[Seam.TOKEN_WEIGHTS],
        router=by_seam[Seam.ROUTER],
        touched=touched,
        rows=packed_as,
    )


def _add(touched: dict[Seam, int], seam: Seam, count: int) -> None:
    if seam in touched:
        touched[seam] += count


def _apply_rows(patches: Sequence[Patch], rows: str) -> str:
    for patch in patches:
        rows = patch(rows)
        if rows not in ROWS:
            raise PatchError(f"a rows patch must give one of {', '.join(ROWS)}; it gave {rows!r}")
    return rows


def _apply_routing(patches: Sequence[Patch], rank: RankInput) -> tuple[Tensor | None, int]:
    if rank.forced_BTL is None or not patches:
        return rank.forced_BTL, 0
    forced = rank.forced_BTL
    for patch in patches:
        nxt = patch(forced.clone(), rank.batch.clone())
        if not isinstance(nxt, Tensor) or nxt.shape != forced.shape or nxt.dtype != torch.bool:
            raise PatchError(
                f"a routing patch must return a bool tensor {list(forced.shape)} [B, T, L]; "
                f"it returned {_describe(nxt)}"
            )
        forced = nxt
    real = rank.batch.attention_mask.unsqueeze(-1)
    return forced, int(((forced != rank.forced_BTL) & real).sum())


def _apply_batch(patches: Sequence[Patch], batch: RankBatch) -> tuple[RankBatch, int]:
    if not patches:
        return batch, 0
    current = batch.clone()
    for patch in patches:
        current = patch(current)
        if not isinstance(current, RankBatch):
            raise PatchError(f"a batch patch must return a RankBatch, not {_describe(current)}")
    _same_routes(batch, current)
    count = 0
    for name in TOKEN_COLUMNS + ROW_COLUMNS:
        changed = _changed(getattr(batch, name), getattr(current, name), name)
        if changed and name in MODEL_COLUMNS:
            raise PatchError(
                f"a batch patch changed {changed} elements of {name}, which the model reads: that "
                "would be another step. Change loss columns only, or preserve another snapshot."
            )
        count += changed
    # experiments of one forward share what is the same tensor
    return unchanged_as_given(batch, current), count


def _same_routes(before: RankBatch, after: RankBatch) -> None:
    same = isinstance(after.routes, tuple) and len(before.routes) == len(after.routes)
    same = same and all(
        a is b if not (isinstance(a, Tensor) and isinstance(b, Tensor)) else torch.equal(a, b)
        for a, b in zip(before.routes, after.routes, strict=True)
    )
    if not same:
        raise PatchError(
            "a batch patch changed routes; where saved routes are forced is the routing seam's "
            "business, and other routes are another step"
        )


def _changed(before: Tensor | None, after: Tensor | None, name: str) -> int:
    if before is after:
        return 0
    if not all(value is None or isinstance(value, Tensor) for value in (before, after)):
        raise PatchError(f"a batch patch gave {name} as {_describe(after)}, expected a tensor")
    if before is None or after is None:
        return int((after if before is None else before).numel())  # type: ignore[union-attr]
    if before.shape != after.shape or before.dtype != after.dtype:
        raise PatchError(
            f"a batch patch gave {name} as {_describe(after)}, expected {_describe(before)}"
        )
    same = before == after
    if before.is_floating_point():
        same |= before.isnan() & after.isnan()
    return int((~same).sum())


def _apply_settings(patches: Sequence[Patch], settings: GrpoSettings) -> tuple[GrpoSettings, int]:
    if not patches:
        return settings, 0
    current = settings.model_copy(deep=True)
    for patch in patches:
        current = patch(current)
        if not isinstance(current, GrpoSettings):
            raise PatchError(f"a settings patch must return GrpoSettings, not {_describe(current)}")
    current.check()  # settings that contradict each other are told before any forward
    before, after = settings.model_dump(), current.model_dump()
    return current, sum(before[k] != after[k] for k in before)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


@contextlib.contextmanager
def patched_model(
    model: LiveModel, patched: Patched, elsewhere: Elsewhere = nowhere
) -> Iterator[dict[Seam, int]]:
    """Weights and model fields changed inside the block; yields what was touched by both."""
    own = model.parameters()
    others = model.buffers() if patched.weights else {}
    counted = _counted(model)
    with (
        patched_weights(own, patched.weights, counted, elsewhere, others) as weights,
        patched_fields(model, patched.model) as fields,
    ):
        counts = {Seam.WEIGHTS: weights, Seam.MODEL: fields}
        with refused_by_model(patched):
            yield {seam: n for seam, n in counts.items() if seam in patched.touched}


@contextlib.contextmanager
def refused_by_model(patched: Patched) -> Iterator[None]:
    """What the model says to fields of a model patch that it cannot run with, as a PatchError."""
    try:
        yield
    except (ArithmeticError, AssertionError, RuntimeError, TypeError, ValueError) as error:
        if not patched.model or isinstance(error, torch.OutOfMemoryError):
            raise
        raise PatchError(
            f"the model cannot run with the fields of a model patch: "
            f"{type(error).__name__}: {error}"
        ) from error


def try_router(model: LiveModel) -> None:
    """Route a few zeros by this rank's first router, which reads all fields that patches change.

    Without gradients, so that auxiliary losses, whose sums take all ranks, are left out.
    """
    for router in model.routers[:1]:
        shape = (2 * model.experts, 1, model.config.hidden_size)
        with torch.no_grad():
            router(torch.zeros(shape, dtype=model.config.params_dtype, device=model.device))


def _counted(model: LiveModel) -> frozenset[str]:
    return frozenset(model.whole_name(name) for name in counted_here(model))


@contextlib.contextmanager
def patched_weights(
    parameters: Mapping[str, Tensor],
    patches: Sequence[Patch],
    counted: Collection[str] | None = None,
    elsewhere: Elsewhere = nowhere,
    buffers: Mapping[str, Tensor] = MappingProxyType({}),
) -> Iterator[int]:
    """Replace parameters inside the block; yields how many elements differ.

    ``counted`` are the parameters whose changes count on this rank (None: all). ``elsewhere``
    reads a checkpoint for a patch that asks for it, and that may hold ``buffers`` too.
    """
    targets = {**parameters, **buffers}
    saved: dict[str, Tensor] = {}
    touched = 0
    try:
        for patch in patches:
            own = {name: p.detach().clone() for name, p in parameters.items()}
            view = Weights(own, elsewhere)
            replaced = patch(view)
            if not isinstance(replaced, dict):
                raise PatchError(
                    f"a weights patch must return a dict of tensors, not {_describe(replaced)}"
                )
            for name, value in replaced.items():
                changed = _replace_weight(targets, saved, name, value)
                touched += changed if counted is None or name in counted else 0
        yield touched
    finally:
        for name, value in saved.items():
            targets[name].data.copy_(value)


def _replace_weight(
    parameters: Mapping[str, Tensor], saved: dict[str, Tensor], name: str, value: Tensor
) -> int:
    if name not in parameters:
        raise PatchError(f"a weights patch replaces {name!r}, which the model does not have")
    target = parameters[name].data
    if not isinstance(value, Tensor):
        raise PatchError(f"a weights patch gave {name} as {_describe(value)}, expected a tensor")
    same_kind = value.dtype == target.dtype and value.device == target.device
    if value.shape != target.shape or not same_kind:
        raise PatchError(
            f"a weights patch gave {name} as {_describe(value)}, expected {_describe(target)}"
        )
    saved.setdefault(name, target.clone())
    changed = int((target != value).sum())
    target.copy_(value)
    return changed


@contextlib.contextmanager
def patched_fields(model: LiveModel, patches: Sequence[Patch]) -> Iterator[int]:
    """Set configuration fields of the live model inside the block; yields how many differ."""
    saved: list[tuple[Any, str, Any]] = []
    touched = 0
    try:
        for patch in patches:
            present = {f: getattr(model.config, f) for f in LIVE_FIELDS}
            for name, value in _fields_of(patch(present)).items():
                if name not in LIVE_FIELDS:
                    raise PatchError(
                        f"model field {name!r} cannot be changed on a live model; those that can: "
                        + ", ".join(sorted(LIVE_FIELDS))
                    )
                touched += getattr(model.config, name) != value
                _set(saved, model.config, name, value)
                copy = LIVE_FIELDS[name]
                for router in model.routers if copy else ():
                    _set(saved, router, str(copy), value)
        yield touched
    finally:
        for owner, name, value in reversed(saved):
            setattr(owner, name, value)


def _fields_of(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise PatchError(f"a model patch must return a dict of fields, not {_describe(given)}")
    for name, allowed in FIELD_VALUES.items():
        if name in given and given[name] not in allowed:
            raise PatchError(
                f"model field {name}: found {given[name]!r}, expected one of {allowed!r}"
            )
    return given


def _set(saved: list[tuple[Any, str, Any]], owner: Any, name: str, value: Any) -> None:
    saved.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)
