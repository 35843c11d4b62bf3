"""What ``show`` and ``methods`` tell, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from replay_lib.case import Case
from replay_lib.errors import SpikeReplayError
from replay_lib.patch import Mitigation
from replay_lib.record.result import Result
from replay_lib.record.standing import Standing, standing_of
from replay_lib.rule import Status, ratio_of
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.opening import open_snapshot

UNTRIED = "untried"


def describe_snapshot(path: str | Path) -> dict[str, Any]:
    """What the snapshot (or the snapshot of a case) at ``path`` states about itself.

    Routing payloads are counted in the files, which needs torch; the rest is read without it.
    ``model_differences`` is what a replay would run with instead of what was saved, ``refused`` why
    there would be none.
    """
    from replay_lib.snapshot.batches import payload_counts

    case = Case.open(path)
    case.require()
    snapshot = open_snapshot(case.snapshot)
    counts = payload_counts(snapshot)
    described: dict[str, Any] = {"case": case.name} if case.file else {}
    return described | {
        "snapshot": str(snapshot.path),
        "step": snapshot.step,
        "metadata_version": snapshot.metadata_version,
        "legacy": snapshot.legacy,
        "portable": snapshot.portable,
        "grad_norm_preclip": _json_number(snapshot.grad_norm_preclip),
        "grad_norm_median": _json_number(snapshot.grad_norm_median),
        "ratio": _ratio(snapshot),
        "ratio_recorded": _json_number(snapshot.spike_ratio_recorded),
        "spike_settings": snapshot.spike.model_dump(),
        "parallel": {"world_size": snapshot.parallel.world_size, **asdict(snapshot.parallel)},
        "worker": snapshot.worker.model_dump(mode="json"),
        "ranks": [_rank(snapshot, dp, counts[dp]) for dp in range(snapshot.parallel.dp)],
        "routing_payloads_rank0": snapshot.routing_payload_count_rank0,
        **_replayed_model(snapshot),
        "files": dict(snapshot.sizes),
        "bytes": snapshot.size,
        "quiet": str(case.quiet) if case.quiet else None,
        "provenance": case.provenance.model_dump(exclude_defaults=True) or None,
        "sealed_files": len(case.sha256) or None,
        "note": case.note.strip() or None,
    }


def _replayed_model(snapshot: Snapshot) -> dict[str, Any]:
    """Where a replay's model would not be the saved one, and what the engine refuses."""
    from replay_lib.engine.effective import planned_differences
    from replay_lib.engine.refusals import refusals
    from replay_lib.snapshot.run_config import load_model_fields

    try:
        fields = load_model_fields(snapshot)
    except SpikeReplayError as error:
        return {"model_differences": str(error), "refused": [str(error)]}
    refused = refusals(snapshot, fields)
    found: list[dict[str, Any]] | str
    try:
        found = [d.model_dump(mode="json") for d in planned_differences(snapshot, fields)]
    except SpikeReplayError as error:
        found = str(error)
    return {"model_differences": found, "refused": list(refused.all)}


def _ratio(snapshot: Snapshot) -> float | str | None:
    norm = snapshot.grad_norm_preclip
    return None if norm is None else _json_number(ratio_of(norm, snapshot.grad_norm_median))


def _json_number(value: float | None) -> float | str | None:
    """Strict JSON has no NaN: a recorded one is shown by its name."""
    if value is None or abs(value) < float("inf"):
        return value
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]


def _rank(snapshot: Snapshot, dp_rank: int, payloads: int) -> dict[str, Any]:
    files = snapshot.files_of(dp_rank)
    return {
        "dp_rank": dp_rank,
        "global_rank": files.rank,
        "batch": files.batch.name,
        "routing": files.routing.name if files.routing else None,
        "routing_payloads": payloads,
        "grad_info": files.grad_info.name if files.grad_info else None,
    }


def describe_methods(
    methods: Mapping[str, Mitigation], results: Sequence[Result] = ()
) -> list[dict[str, Any]]:
    """Every method with its status by the one rule, ``standing`` tells what is behind it."""
    standings = {slug: standing_of(slug, results) for slug in methods}
    return [
        {
            "slug": m.slug,
            "family": m.family,
            "seams": [str(seam) for seam in m.seams],
            "status": method_status(m, standings[m.slug]),
            "standing": standings[m.slug].told() if standings[m.slug].status else None,
            "parameters": m.defaults,
            "needs": list(m.needs),
            "diagnostic": m.diagnostic,
            "changes_unit": m.changes_unit,
            "summary": m.summary,
            "source": m.source,
        }
        for m in methods.values()
    ]


def method_status(method: Mitigation, standing: Standing) -> str:
    """``untried`` without a result; a diagnostic method is diagnostic before it was tried, too."""
    if method.diagnostic:
        return Status.DIAGNOSTIC
    return UNTRIED if standing.status is None else str(standing.status)
