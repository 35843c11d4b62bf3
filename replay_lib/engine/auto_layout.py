"""Choose a layout for the machine at hand. Needs no torch.

The rule of ``auto``: one rank wherever the replay fits one device (and always on a CPU, whose
processes share one memory). Else the recorded layout is folded onto the devices at hand: among all
layouts whose sizes divide the recorded ones and that the model and the devices allow, the one that
needs the least memory a rank; of equals the one with the fewest ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from replay_lib.engine.fitting import (
    Parameters,
    needed_bytes,
    refuse_idle_ranks,
    refuse_what_cannot_be_split,
)
from replay_lib.engine.layout import AUTO, ONE_RANK, Layout
from replay_lib.engine.machine import GIB, cuda_devices, memory_gib
from replay_lib.engine.model_config import ModelConfig, model_config
from replay_lib.engine.nodes import nodes_hint
from replay_lib.errors import SpikeReplayError, UnsupportedModelError, UsageError
from replay_lib.snapshot.model import Parallel, Snapshot
from replay_lib.snapshot.opening import open_snapshot
from replay_lib.snapshot.run_config import load_model_fields

#: Share of a device's memory that a replay may need by the estimate, which is a lower one.
USABLE = 0.8


def resolve_layout(
    wanted: Layout | str,
    snapshot: Path,
    device: str,
    precision: str = "recorded",
    *,
    dp_ranks: Sequence[int] | None = None,
    nodes: int = 1,
) -> Layout:
    """The layout that ``wanted`` names, or the one that ``auto`` chooses on this machine.

    ``device`` is cpu or cuda, ``dp_ranks`` the recorded data-parallel ranks to replay (None: all).
    ``nodes`` machines have an equal part of the ranks each, and are taken to be alike.
    Raises UsageError for a text that is no layout and where a layout needs more GPUs or batches
    than there are, UnsupportedModelError where it cannot split the model: no process is started
    for it. (What the checkpoint alone tells, the vocabulary's rows, the worker checks.)
    """
    if wanted == AUTO:
        return _shared_out(_automatic(snapshot, device, precision, nodes), nodes)
    layout = _shared_out(Layout.parse(wanted) if isinstance(wanted, str) else wanted, nodes)
    if device == "cuda" and layout.ranks > (here := cuda_devices()) * nodes:
        found = f"{here} found" if nodes == 1 else f"{here} on this one of {nodes} nodes"
        raise UsageError(
            f"layout {layout}: it needs {layout.ranks} NVIDIA devices, one a rank; "
            f"{found}{nodes_hint(layout.ranks, here)}"
        )
    if layout.ranks > 1:
        opened = open_snapshot(snapshot)
        refuse_idle_ranks(layout, len(dp_ranks or range(opened.parallel.dp)), opened.path)
        config = model_config(load_model_fields(opened), precision)
        refuse_what_cannot_be_split(layout, config, vocab=0)
    return layout


def _shared_out(layout: Layout, nodes: int) -> Layout:
    if layout.ranks % nodes:
        raise UsageError(
            f"layout {layout}: {layout.ranks} rank(s) cannot be shared out evenly over {nodes} "
            "nodes: name another one with --layout, or leave --nnodes out"
        )
    return layout


def _automatic(snapshot: Path, device: str, precision: str, nodes: int) -> Layout:
    devices = cuda_devices() * nodes
    if device != "cuda" or devices < 2:
        return ONE_RANK
    have = memory_gib(device)
    if have is None:
        return ONE_RANK
    try:
        opened = open_snapshot(snapshot)
        fields = load_model_fields(opened)
        config = model_config(fields, precision)
    except SpikeReplayError:
        return ONE_RANK  # the worker says what is wrong
    usable = int(have * GIB * USABLE)
    return choose_layout(opened, fields, config, devices=devices, memory=usable, nodes=nodes)


def choose_layout(
    snapshot: Snapshot,
    fields: dict[str, Any],
    config: ModelConfig,
    *,
    devices: int,
    memory: int,
    nodes: int = 1,
) -> Layout:
    """The rule of this module, for ``devices`` devices with ``memory`` usable bytes each.

    Over several ``nodes`` only layouts count that can be shared out over them.
    """
    vocab = int(fields.get("vocab_size") or 0)
    values = config.transformer

    def need(layout: Layout) -> int:
        return needed_bytes(
            parameters_of(config, vocab),
            layout,
            bytes_each=2 if config.dtype == "bfloat16" else 4,
            tokens=snapshot.worker.train_micro_batch_size * snapshot.worker.seq_length,
            vocab=vocab,
            layers=int(values["num_layers"]),
            hidden=int(values["hidden_size"]),
        )

    if need(ONE_RANK) <= memory:
        return ONE_RANK
    fitting = [
        layout
        for layout in _folded(snapshot.parallel, devices)
        if layout.ranks % nodes == 0 and _splits(layout, config, vocab)
    ]
    return min(fitting or [ONE_RANK], key=lambda layout: (need(layout), layout.ranks, -layout.dp))


def _folded(recorded: Parallel, devices: int) -> Iterator[Layout]:
    """Every layout of at most ``devices`` ranks whose sizes divide the recorded ones."""
    axes = (recorded.tp, recorded.pp, recorded.cp, recorded.ep, recorded.dp)
    for tp, pp, cp, ep, dp in itertools.product(*(_divisors(size) for size in axes)):
        if tp * pp * cp * dp <= devices and tp * cp * dp % ep == 0:
            yield Layout(tp=tp, pp=pp, cp=cp, ep=ep, dp=dp)


def _divisors(size: int) -> list[int]:
    return [n for n in range(1, size + 1) if size % n == 0]


def _splits(layout: Layout, config: ModelConfig, vocab: int) -> bool:
    try:
        refuse_what_cannot_be_split(layout, config, vocab)
    except UnsupportedModelError:
        return False
    return True


def parameters_of(config: ModelConfig, vocab: int) -> Parameters:
    """Elements of the model by its configuration (norms and biases, a thousandth, left out)."""
    values = config.transformer
    hidden, heads = int(values["hidden_size"]), int(values["num_attention_heads"])
    width = int(values.get("kv_channels") or hidden // heads)
    groups = int(values.get("num_query_groups") or heads)
    up = 3 if values.get("gated_linear_unit") else 2  # matrices of a feed-forward block
    attention = hidden * width * (2 * heads + 2 * groups)
    moe, layers = sum(config.moe_layers), len(config.moe_layers)
    feed = up * hidden * int(values.get("ffn_hidden_size") or 4 * hidden)
    shared = up * hidden * int(values.get("moe_shared_expert_intermediate_size") or 0)
    number = int(values.get("num_moe_experts") or 0)
    expert = (
        up * hidden * int(values.get("moe_ffn_hidden_size") or values.get("ffn_hidden_size") or 0)
    )
    tables = 1 if config.gpt["share_embeddings_and_output_weights"] else 2
    dense = tables * vocab * hidden + layers * attention
    dense += (layers - moe) * feed + moe * (shared + number * hidden)
    return Parameters(dense=dense, experts=moe * number * expert)
