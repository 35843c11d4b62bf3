"""Writers of the variants in ``variants.py``, all from the embedded snapshot.

A writer takes a new directory and leaves a snapshot there. Sources are AXRL's writer
(``MegatronWorker._snapshot_spike_debug_info``, ``spike_snapshot_routing``), Megatron-Core's
``dist_checkpointing`` and Megatron-Bridge's ``run_config.yaml``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.routing import placeholder
from replay_lib.snapshot import (
    Content,
    SavedHandle,
    export_snapshot,
    object_ref,
    open_snapshot,
    read_content,
    write_snapshot,
)

TESTS = Path(__file__).parent
PLAIN = TESTS.parent / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
NORM_OF_MOE, NORM_OF_LOCAL = "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"

Write = Callable[[Path], object]


@functools.cache
def base() -> Content:
    """What the embedded snapshot holds, each path as one object."""
    return read_content(open_snapshot(PLAIN))


def changed(**changes: Any) -> Content:
    """The embedded content with other fields."""
    return dataclasses.replace(base(), **changes)


def parameters() -> list[tuple[str, Tensor]]:
    """The embedded parameters by checkpoint key."""
    return list(base().tensors.items())


def worker(content: Content | None = None, **keys: Any) -> Content:
    """``content`` (the embedded one) with other keys of the worker's configuration."""
    given = content or base()
    return dataclasses.replace(given, worker_config={**given.worker_config, **keys})


def model(content: Content, **lines: Any) -> Content:
    """``content`` with other values in the model section; plain values only."""
    text = content.run_config
    for key, value in lines.items():
        written = json.dumps(value)
        text, count = re.subn(rf"(?m)^  {key}:[^\n]*$", f"  {key}: {written}", text, count=1)
        assert count == 1, key
    return dataclasses.replace(content, run_config=text)


_RANKS = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}


def laid_out(content: Content, *, vpp: int | None = None, **sizes: int) -> Content:
    """``content`` as a run of this layout would save it: one file a global rank."""
    lines: dict[str, Any] = {f"{_RANKS[k]}_parallel_size": size for k, size in sizes.items()}
    lines["virtual_pipeline_model_parallel_size"] = vpp
    keys = {f"{k}_size": size for k, size in sizes.items()}
    return worker(model(content, **lines), vpp_size=vpp, **keys)


def saved(content: Content) -> Write:
    """The writer of ``content``."""
    return lambda directory: write_snapshot(directory, content)


# --- batches -----------------------------------------------------------------------------------


def shared_prefix() -> Content:
    """Rows 0 and 1 of each rank have the same first three rows of routes."""

    def shared(batch: RankBatch) -> RankBatch:
        first, second = batch.routes[0], batch.routes[1]
        assert first is not None and second is not None
        joined = torch.cat([first[:3], second[3:]])
        return batch.replace(routes=(first, joined, *batch.routes[2:]))

    return changed(batches=tuple(map(shared, base().batches)))


def views() -> Content:
    """The same routes as handles: several a path, views of one object, some shared by rows."""
    content = shared_prefix()

    def handles(batch: RankBatch) -> tuple[Any, ...]:
        rows: list[Any] = []
        for number, routes in enumerate(batch.routes):
            assert routes is not None
            ref, half = object_ref(batch.dp_rank, number), len(routes) // 2
            third = min(3, half)
            if number == 1:  # the prefix of row 0's object, then one of its own
                one = object_ref(batch.dp_rank, 0)
                parts = [SavedHandle(ref=one, rows=routes[:third], row_count=third)]
                parts.append(SavedHandle(ref=ref, rows=routes[third:]))
            else:
                cuts = ((0, third, third), (third, half, half - third), (half, len(routes), None))
                parts = [
                    SavedHandle(ref=ref, rows=routes[a:b], row_start=a, row_count=n)
                    for a, b, n in cuts
                    if b > a
                ]
            rows.append((tuple(parts),))
        return tuple(rows)

    return dataclasses.replace(content, handles=tuple(map(handles, content.batches)))


def with_padding(batch: RankBatch) -> RankBatch:
    """A padding row first, the others turned round, and a real row without a trajectory."""
    order = [0, *range(batch.rows - 1, -1, -1)]
    columns = batch.select(order)
    pad = torch.zeros(batch.rows + 1, dtype=torch.bool)
    pad[0] = True
    tokens = {"input_ids": 0, "labels": -100, "loss_mask": False, "advantage": 0.0}
    tokens |= {"old_logprobs": 0.0, "ref_logprobs": 0.0, "rollout_logprobs": 0.0, "turn_index": -1}
    found: dict[str, Any] = {}
    for name, value in tokens.items():
        column = getattr(columns, name)
        if column is not None:
            found[name] = torch.where(pad[:, None], torch.tensor(value).to(column.dtype), column)
    four = torch.arange(batch.width) < 4
    found["attention_mask"] = torch.where(pad[:, None], four, columns.attention_mask)
    found["index"] = torch.where(pad, -1, columns.index)
    assert columns.trajectory_id is not None
    found["trajectory_id"] = columns.trajectory_id.clone()
    found["trajectory_id"][:2] = -1  # the padding row and a real one
    filler = placeholder(4, 2).expand(3, 4, 2).clone()
    return columns.replace(routes=(filler, *columns.routes[1:]), **found)


def without(*names: str) -> Content:
    """Optional columns absent."""
    absent: dict[str, Any] = dict.fromkeys(names)
    return changed(batches=tuple(b.replace(**absent) for b in base().batches))


def without_routes(content: Content) -> Content:
    """No handles, so no payload file."""
    return dataclasses.replace(
        content, batches=tuple(b.replace(routes=()) for b in content.batches)
    )


def by_sequence(content: Content) -> Content:
    """A loss whose gradient depends on how rows are split into micro-batches."""
    settings = content.settings.model_copy(update={"micro_batch_denominator_type": "sequence"})
    return dataclasses.replace(content, settings=settings)


def in_pipeline(group: int | None) -> Content:
    """Two virtual stages on each of four pipeline ranks; ``group`` as Megatron saved it."""
    content = model(by_sequence(base()), microbatch_group_size_per_vp_stage=group)
    return laid_out(content, pp=4, vpp=2)


# --- models ------------------------------------------------------------------------------------


def rounded(dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Parameters rounded to bfloat16, kept in ``dtype``."""
    return {key: tensor.bfloat16().to(dtype) for key, tensor in base().tensors.items()}


def bfloat16(content: Content) -> Content:
    """Stored and run in bfloat16."""
    stored = dataclasses.replace(content, tensors=rounded(torch.bfloat16))
    dtype = r"(?m)^(  params_dtype:\n    _call_: false\n    _target_: torch\.)float32"
    text, count = re.subn(dtype, r"\1bfloat16", stored.run_config, count=1)
    assert count == 1
    return worker(model(dataclasses.replace(stored, run_config=text), bf16=True), bf16=True)


def dense_and_moe(*, all_layers: bool) -> Content:
    """Layers 0 and 2 dense; routes for all layers (dense ones carry dummies) or MoE ones alone."""
    content = model(base(), moe_layer_freq=[0, 1, 0, 1])
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}
    for key, stack in content.tensors.items():
        if not key.startswith("decoder.layers."):
            tensors[key] = stack
            continue
        for layer, tensor in enumerate(stack):
            name = key.replace("decoder.layers.", f"decoder.layers.{layer}.")
            dense = layer in (0, 2)
            if not dense or ".mlp." not in name:
                # production fuses the norm of a dense layer into its first projection
                name = name.replace(NORM_OF_MOE, NORM_OF_LOCAL) if dense else name
                tensors[name] = tensor
        for layer in (0, 2):
            head = f"decoder.layers.{layer}.mlp"
            for name, shape in (("linear_fc1", (256, 64)), ("linear_fc2", (64, 128))):
                drawn = torch.randn(shape, generator=generator) * 0.1
                tensors.setdefault(f"{head}.{name}.weight", drawn)

    def routed(batch: RankBatch) -> RankBatch:
        kept = []
        for routes in batch.routes:
            assert routes is not None
            changed_routes = routes.clone()
            changed_routes[:, [0, 2]] = torch.arange(2, dtype=routes.dtype)
            kept.append(changed_routes if all_layers else routes[:, [1, 3]].clone())
        return batch.replace(routes=tuple(kept))

    batches = tuple(map(routed, content.batches))
    return dataclasses.replace(content, tensors=tensors, batches=batches)


# --- files -------------------------------------------------------------------------------------


def by_megatron(directory: Path) -> None:
    """The checkpoint by the installed Megatron-Core's own writer."""
    write_snapshot(directory, base())
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(TESTS / "megatron_writer.py"), str(directory)]
    ended = subprocess.run(
        program, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


def without_common(directory: Path) -> None:
    """As Megatron-Core 0.19 leaves it: common state inside, two keys in ``metadata.json``."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from replay_lib.snapshot.write_checkpoint import CheckpointWriter

    write_snapshot(directory, base())
    for path in (*directory.glob("*.distcp"), directory / ".metadata", directory / "common.pt"):
        path.unlink()
    state: dict[str, Any] = {
        **base().tensors,
        "common_state/shard_0_1": {"iteration": 85, "checkpoint_version": 3.0},
        "decoder.layers.self_attention.core_attention._extra_state/shard_0_4": [None],
        "rng_state/shard_0_1": [b"state"],
        "optimizer.state.exp_avg.output_layer.weight": torch.zeros(3),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(state, storage_writer=CheckpointWriter(directory, directory.name), no_dist=True)
    kept = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(kept))


def legacy(version: int | None = None, **options: bool) -> Write:
    """AXRL's metadata over Megatron's; options take ``trainer``, ``worker`` or ``routes`` away."""

    def write(directory: Path) -> None:
        write_snapshot(directory, base(), legacy=True)
        if version is not None:
            edit_json(directory / "metadata.json", metadata_version=version)
        names = {"trainer": "trainer.pt", "worker": "megatron_worker_config.json"}
        names["routes"] = "routing_payload_rank*.pt"
        for key, pattern in names.items():
            if not options.get(key, True):
                for path in directory.glob(pattern):
                    path.unlink()

    return write


def edit_json(path: Path, **changes: Any) -> None:
    """Other keys in a JSON file, NaN and infinities as bare words."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2))


def metadata(**changes: Any) -> Write:
    """Other values in AXRL's metadata."""

    def write(directory: Path) -> None:
        write_snapshot(directory, base())
        edit_json(directory / "axrl_metadata.json", **changes)

    return write


def renamed(old_new: Mapping[bytes, bytes]) -> Write:
    """Pickles that name classes where other versions of numpy, ray and tensordict have them."""

    def write(directory: Path) -> None:
        write_snapshot(directory, base())
        count = sum(rename_globals(path, old_new) for path in directory.glob("*_rank*.pt"))
        assert count >= len(old_new), count

    return write


def rename_globals(path: Path, old_new: Mapping[bytes, bytes]) -> int:
    """Replace the text of GLOBAL opcodes in a torch file; how many were found."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    count = 0
    (program,) = (name for name in records if name.endswith("data.pkl"))
    for old, new in old_new.items():
        count += records[program].count(b"c" + old)
        records[program] = records[program].replace(b"c" + old, b"c" + new)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return count


def portable(directory: Path) -> None:
    """This library's own layout."""
    export_snapshot(open_snapshot(PLAIN), directory)
