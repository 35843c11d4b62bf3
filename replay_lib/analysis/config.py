"""Worker settings, model section and loss settings against each other, from the files alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from replay_lib import layout
from replay_lib.analysis.findings import Finding, Place, finding
from replay_lib.engine.effective import LAYOUT, unknown_fields, what_ran
from replay_lib.engine.refusals import refusals
from replay_lib.snapshot.model import Snapshot

_OFF = (None, False, 0, 0.0, "", "none")


def check_config(snapshot: Snapshot, fields: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings about the model section ``fields`` and how it fits the worker's settings."""
    ran = what_ran(snapshot.worker, snapshot.parallel, fields)
    for one in ran.contradictions:
        if one.matters or one.field in LAYOUT:
            yield finding("config-differs", layout.RUN_CONFIG, one.told())
    for each in ran.assumed:
        yield finding("model-field-assumed", layout.RUN_CONFIG, each.told())
    refused = refusals(snapshot, fields)
    if refused.run:
        yield finding("run-unsupported", layout.WORKER_CONFIG, "; ".join(refused.run))
    if refused.model:
        yield finding("model-unsupported", layout.RUN_CONFIG, "; ".join(refused.model))
    for told in refused.values:
        yield finding("model-value", layout.RUN_CONFIG, told)
    for one in unknown_fields(ran.fields):
        yield finding("model-field-unknown", layout.RUN_CONFIG, one.told())
    if not snapshot.worker.deterministic_mode:
        yield finding("not-deterministic", layout.WORKER_CONFIG, "deterministic_mode is off")


def check_unread(
    raw_worker: Mapping[str, Any],
    snapshot: Snapshot,
    raw_settings: Mapping[str, Any],
    unknown: Sequence[str],
) -> Iterator[Finding]:
    """Settings of the worker and of the loss that nothing here reads: an error where they are on.

    ``unknown`` names loss settings, nested ones with a dot.
    """
    for name in snapshot.worker.unknown:
        yield _unread(name, raw_worker.get(name), layout.WORKER_CONFIG)
    for name in unknown:
        value: Any = raw_settings
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        yield _unread(name, value, layout.TRAINER)


def _unread(name: str, value: Any, file: str) -> Finding:
    off = value in ([], {}, ()) or value in _OFF
    return finding("setting-unknown" if off else "setting-unread", file, f"{name}={value!r:.60}")


def check_balance(
    snapshot: Snapshot, fields: Mapping[str, Any], padding: Mapping[int, tuple[int, int]]
) -> Iterator[Finding]:
    """Padding in a run whose routers balance or cap; ``padding`` is (tokens, of all) by dp rank."""
    capacity = fields.get("moe_expert_capacity_factor")
    kind = fields.get("moe_router_load_balancing_type") or "none"
    reasons = [f"moe_expert_capacity_factor={capacity:g}"] if isinstance(capacity, float) else []
    if kind not in ("none", ["none"]) and (fields.get("moe_aux_loss_coeff") or 0):
        reasons.append(f"moe_aux_loss_coeff={fields['moe_aux_loss_coeff']!r}")
    if fields.get("moe_z_loss_coeff"):
        reasons.append(f"moe_z_loss_coeff={fields['moe_z_loss_coeff']!r}")
    if not reasons or not fields.get("num_moe_experts"):
        return
    for dp_rank, (padded, whole) in padding.items():
        if padded:
            found = f"{padded} of {whole} packed tokens are padding, with {', '.join(reasons)}"
            file = snapshot.files_of(dp_rank).batch
            yield finding("padding-moves-balance", file, found, Place(dp_rank=dp_rank))


def check_packed_lengths(
    snapshot: Snapshot, lengths: Mapping[int, Sequence[int]]
) -> Iterator[Finding]:
    """Rows whose length is no multiple of 2 x cp, which context parallelism has to pad."""
    cp = snapshot.parallel.cp
    if cp == 1:
        return
    for dp_rank, rows in lengths.items():
        uneven = [row for row, n in enumerate(rows) if n % (2 * cp)]
        if uneven:
            found = (
                f"{len(uneven)} of {len(rows)} rows are no multiple of 2 x {cp} tokens long, the "
                f"first one {rows[uneven[0]]}"
            )
            file = snapshot.files_of(dp_rank).batch
            at = Place(dp_rank=dp_rank, row=uneven[0])
            yield finding("packed-length-uneven", file, found, at)
