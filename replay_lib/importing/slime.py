"""slime's debug dumps: ``--save-debug-rollout-data`` and ``--save-debug-train-data``.

Source: THUDM/slime, ``slime/observability/rollout_data_utils.py``, ``train_data_utils.py`` and
``slime/utils/types.py`` (commit 624b824a8). A rollout dump is ``{rollout_id, samples}`` with
``Sample.to_dict()``; a train dump of version 2 is the same with the train columns of each sample
and ``dp_shards``; before it had one file a rank: ``{rollout_id, rank, rollout_data}``, columns.
Per-token lists have one value a response token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from replay_lib.errors import SnapshotError, fault
from replay_lib.importing.rows import Dump, Row, told
from replay_lib.importing.values import floats, integer, integers, number, numpy_table, routes
from replay_lib.snapshot.imported import ImportedField, State
from replay_lib.snapshot.pickles import load_untrusted

#: Column of the batch, by slime's name.
TOKENS = {
    "log_probs": "old_logprobs",
    "rollout_log_probs": "rollout_logprobs",
    "ref_log_probs": "ref_logprobs",
    "teacher_log_probs": "teacher_logprobs",
    "advantages": "advantage",
    "returns": "returns",
    "values": "old_values",
}
#: Columns of a train dump by the name that a rollout dump has for them.
_SINGULAR = {
    "response_lengths": "response_length",
    "loss_masks": "loss_mask",
    "rewards": "reward",
    "rollout_ids": "rollout_id",
    "sample_indices": "index",
    "sample_index": "index",
}


def read_slime(path: Path) -> Dump:
    """The dump in ``path``; SnapshotError or BatchError names what does not fit."""
    found = load_untrusted(path, numpy_table(), "a debug dump of slime")
    if not isinstance(found, dict):
        raise SnapshotError(fault(path, None, f"a {type(found).__name__}", "a slime dump"))
    kind, samples = _samples(path, found)
    if not samples:
        raise SnapshotError(fault(path, "samples", "none", "one or more"))
    rows = [_row(f"{path}: sample {i}", sample) for i, sample in enumerate(samples)]
    step = integer(str(path), "rollout_id", found.get("rollout_id"))
    return Dump(format=f"slime {kind}", step=step, rows=rows, fields=_fields(kind, samples, rows))


def _samples(path: Path, found: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    if isinstance(found.get("samples"), list):
        samples = found["samples"]
        if not all(isinstance(sample, dict) for sample in samples):
            raise SnapshotError(fault(path, "samples", "no dictionaries", "one a sample"))
        kind = "train" if "format_version" in found else "rollout"
        return kind, [_renamed(sample) for sample in samples]
    columns = found.get("rollout_data")
    if not isinstance(columns, dict) or not isinstance(columns.get("tokens"), list | tuple):
        expected = "samples, or rollout_data with tokens"
        raise SnapshotError(fault(path, None, f"keys {sorted(map(str, found))}", expected))
    count = len(columns["tokens"])
    by_sample = {
        name: value
        for name, value in columns.items()
        if name != "raw_reward" and hasattr(value, "__len__") and len(value) == count
    }
    return "train (one rank)", [
        _renamed({name: value[i] for name, value in by_sample.items()}) for i in range(count)
    ]


def _renamed(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {_SINGULAR.get(str(name), str(name)): value for name, value in sample.items()}


def _row(where: str, sample: Mapping[str, Any]) -> Row:
    import torch

    for name in ("tokens", "response_length"):
        if sample.get(name) is None:
            raise SnapshotError(fault(where, name, "nothing", "a value of every sample"))
    answered = integer(where, "response_length", sample["response_length"])
    mask = sample.get("loss_mask")
    trains = torch.ones(answered) if mask is None else floats(where, "loss_mask", mask)
    if len(trains) != answered:
        raise SnapshotError(fault(where, "loss_mask", f"{len(trains)} values", f"{answered}"))
    if sample.get("remove_sample"):
        trains = torch.zeros(answered)
    experts = sample.get("rollout_routed_experts")
    trajectory = sample.get("rollout_id")
    rank = sample.get("data_parallel_rank")
    return Row(
        where=where,
        tokens=integers(where, "tokens", sample["tokens"]),
        trains=trains.bool(),
        values={
            column: floats(where, name, sample[name])
            for name, column in TOKENS.items()
            if sample.get(name) is not None
        },
        reward=_reward(sample.get("reward")),
        group=sample.get("group_index"),
        trajectory=None if trajectory is None else integer(where, "rollout_id", trajectory),
        routes=None if experts is None else routes(where, "rollout_routed_experts", experts),
        dp_rank=0 if rank is None else integer(where, "data_parallel_rank", rank),
    )


def _reward(value: Any) -> float | None:
    """Some reward models give several numbers; which one was trained on is not in the dump."""
    if isinstance(value, dict):
        value = next(iter(value.values())) if len(value) == 1 else None
    return number(value)


def _fields(
    kind: str, samples: Sequence[Mapping[str, Any]], rows: Sequence[Row]
) -> list[ImportedField]:
    names = [name for name in TOKENS if any(name in s and s[name] is not None for s in samples)]
    lines = [told(TOKENS[name], State.TAKEN, f"{name} of each sample") for name in names]
    lines += [
        told(TOKENS[name], State.MISSING, f"no sample has {name}")
        for name in TOKENS
        if name not in names and name not in ("teacher_log_probs", "returns", "values")
    ]
    splits = "the dump's micro_batch_indices are not AXRL's split, and are not kept"
    if kind == "rollout":
        splits = "rows of a rollout dump are not yet divided over ranks and micro-batches"
    elif kind != "train":
        splits = "the other data-parallel ranks wrote files of their own; " + splits
    lines.append(told("micro-batches", State.MISSING, splits))
    return lines
