"""A debug dump to a snapshot directory, with a line about every field that a replay would need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from replay_lib import layout
from replay_lib.batch import RankBatch
from replay_lib.errors import SnapshotError, UsageError, fault
from replay_lib.importing.rows import Dump, batches_of, told
from replay_lib.snapshot.imported import Imported, ImportedField, State, as_document
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.opening import open_snapshot
from replay_lib.snapshot.write import whole_directory, write_rank_files

AUTO, SLIME, VERL = "auto", "slime", "verl"
FORMATS = (AUTO, SLIME, VERL)
_NEVER = {
    "weights": "no debug dump holds the model's weights",
    "architecture": "no debug dump holds the model's configuration",
    "loss settings": "no debug dump holds clipping, aggregation and denominator",
    "grad_norm": "no debug dump holds the gradient norm",
    "grad_norm_median": "no debug dump holds the norms of the steps before",
}


def import_dump(
    file: Path, out: Path, *, format_: str = AUTO, tokenizer: Path | None = None
) -> Snapshot:
    """Write the dump in ``file`` as the new snapshot directory ``out`` and open it.

    ``tokenizer`` encodes the text of dumps that hold no token ids. Nothing named by the file runs.
    Raises UsageError for an unknown format, UnsafePickleError, and SnapshotError or BatchError that
    name sample and field; then nothing is left at ``out``.
    """
    if not file.is_file():
        raise UsageError(fault(file, None, "no such file", "a debug dump of slime or verl"))
    dump = _read(file, format_, tokenizer)
    batches = batches_of(dump.rows)
    fields = (*_common(dump, batches), *dump.fields)
    missing = [told(name, State.MISSING, text) for name, text in _NEVER.items()]
    imported = Imported(format=dump.format, source=file.name, fields=(*missing, *fields))
    with whole_directory(out) as directory:
        _write(directory, dump.step, batches, imported)
    return open_snapshot(out)


def _read(file: Path, format_: str, tokenizer: Path | None) -> Dump:
    from replay_lib.importing.slime import read_slime
    from replay_lib.importing.verl import read_data_proto, read_generations

    if format_ not in FORMATS:
        raise UsageError(fault("--format", None, repr(format_), ", ".join(FORMATS)))
    with file.open("rb") as stream:
        head = stream.read(4)
    if head[:1] == b"{" and format_ != SLIME:
        return read_generations(file, None if tokenizer is None else _encoder(tokenizer))
    if head == b"PK\x03\x04" and format_ != VERL:
        return read_slime(file)
    if head[:1] == b"\x80" and format_ != SLIME:
        return read_data_proto(file)
    wanted = {SLIME: "a file of torch.save", VERL: "a pickled DataProto, or JSON lines"}
    expected = wanted.get(format_, "a file of torch.save (slime), a pickle or JSON lines (verl)")
    raise SnapshotError(fault(file, None, f"a file that begins with {head!r}", expected))


def _encoder(tokenizer: Path) -> Any:
    from replay_lib.importing.text import encoder

    return encoder(tokenizer)


def _common(dump: Dump, batches: list[RankBatch]) -> list[ImportedField]:
    """What is known of any dump: tokens, rewards, routes, advantages."""
    lines = []
    named = {one.name for one in dump.fields}
    if "input_ids" not in named:
        lines.append(told("input_ids", State.TAKEN, "tokens, masks and response lengths"))
    if "advantage" in named and not any("advantage" in row.values for row in dump.rows):
        lines.append(told("advantage column", State.COMPUTED, "zeros: a batch has to have one"))
    for name, what in (("reward", "the score of each row"), ("trajectory_id", "rollout ids")):
        has = all(getattr(batch, name) is not None for batch in batches)
        lines.append(told(name, *((State.TAKEN, what) if has else (State.MISSING, f"no {what}"))))
    if "reward_baseline" not in named and batches[0].reward_baseline is not None:
        lines.append(told("reward_baseline", State.COMPUTED, "the mean reward of the row's group"))
    routed = sum(row.routes is not None for row in dump.rows)
    state = State.TAKEN if routed else State.MISSING
    lines.append(told("routes", state, f"{routed} of {len(dump.rows)} rows have routed experts"))
    return lines


def _write(directory: Path, step: int, batches: list[RankBatch], imported: Imported) -> None:
    from replay_lib.snapshot.write_rank import handles_of

    counts = [
        write_rank_files(directory, rank, batch, handles_of(batch), None)
        for rank, batch in enumerate(batches)
    ]
    config = {
        "model": {"name": "", "seq_length": max(batch.width for batch in batches)},
        "dp_size": len(batches),
        "global_batch_size": sum(batch.rows for batch in batches),
        "enable_routing_replay": any(counts),
    }
    metadata = {
        "metadata_version": 2,
        "global_step": step,
        "grad_norm": None,
        "grad_norm_median": None,
        "spike_ratio_actual": None,
        "config": config,
        "megatron_worker_config_file": layout.WORKER_CONFIG,
        "routing_payload_count_rank0": counts[0],
    }
    for name, value in (
        (layout.WORKER_CONFIG, config),
        (layout.IMPORTED, as_document(imported)),
        (layout.AXRL_METADATA, metadata),
    ):
        (directory / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
