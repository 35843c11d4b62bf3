"""Whether a layout can split a model and replay a snapshot: asked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from replay_lib.engine.layout import Layout
from replay_lib.engine.model_config import ModelConfig
from replay_lib.errors import UnsupportedModelError, UsageError, fault
from replay_lib.layout import RUN_CONFIG
from replay_lib.snapshot.model import Parallel


def refuse_what_cannot_be_split(layout: Layout, config: ModelConfig, vocab: int) -> None:
    """Raise UnsupportedModelError that names every field whose number ``layout`` does not divide.

    ``vocab`` is the number of rows of the embedding in the checkpoint.
    """
    values = config.transformer
    heads = int(values["num_attention_heads"])
    split: list[tuple[str, int, str, int]] = [
        ("num_layers", int(values["num_layers"]), "pp", layout.pp),
        ("num_attention_heads", heads, "tp", layout.tp),
        ("num_query_groups", int(values.get("num_query_groups") or heads), "tp", layout.tp),
        ("rows of the embedding", vocab, "tp", layout.tp),
    ]
    if not all(config.moe_layers):
        width = int(values.get("ffn_hidden_size") or 4 * int(values["hidden_size"]))
        split.append(("ffn_hidden_size", width, "tp", layout.tp))
    if any(config.moe_layers):
        split.append(("num_moe_experts", int(values["num_moe_experts"]), "ep", layout.ep))
    elif layout.ep > 1:
        split.append(("num_moe_experts", 1, "ep", layout.ep))
    if shared := values.get("moe_shared_expert_intermediate_size"):
        split.append(("moe_shared_expert_intermediate_size", int(shared), "tp", layout.tp))
    bad = [
        f"model.{name} is {number}, which {axis}={size} does not divide"
        for name, number, axis, size in split
        if number % size
    ]
    if bad:
        raise UnsupportedModelError(
            f"{RUN_CONFIG}: layout {layout} cannot split this model: {'; '.join(bad)}. "
            "Choose other sizes, or --layout dp=1."
        )


def refuse_idle_ranks(layout: Layout, dp_ranks: int, where: Path) -> None:
    """Raise UsageError where ``layout`` has more data-parallel ranks than there are batches."""
    if layout.dp > dp_ranks:
        found = f"dp={layout.dp} for {dp_ranks} data-parallel ranks to replay"
        raise UsageError(fault(where, "layout", found, f"dp from 1 to {dp_ranks}"))


def refuse_other_drops(
    layout: Layout, config: ModelConfig, recorded: Parallel, where: Path
) -> None:
    """Raise UnsupportedModelError where a finite capacity would drop other tokens.

    Megatron's routers drop by the capacity of their own part of the tokens, padding included, so
    the parts (and how each row was padded for them) decide which tokens are dropped.
    """
    if config.transformer.get("moe_expert_capacity_factor") is None:
        return
    parts = recorded.tp * recorded.cp
    if (parts, layout.shards) != (1, 1):
        raise UnsupportedModelError(
            fault(
                where,
                "model.moe_expert_capacity_factor",
                f"a finite capacity with tokens in {parts} parts (tp * cp) in the run "
                f"and {layout.shards} in the replay",
                "1 and 1",
                "Each part drops its own tokens, so the replay would be another step.",
            )
        )


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How many elements a model has: experts are shared out over other ranks than the rest."""

    dense: int
    experts: int


def needed_bytes(
    parameters: Parameters,
    layout: Layout,
    *,
    bytes_each: int,
    tokens: int,
    vocab: int,
    layers: int,
    hidden: int,
) -> int:
    """A lower estimate of what one replay needs on each rank, in bytes.

    Weights in their dtype and two float32 gradients (the baseline's and one experiment's); three
    float32 copies of the logits; about 34 hidden-sized float32 activations a layer and token
    (Korthikanti et al. 2022, table 2, without recompute and dropout masks). The layout divides
    matrices by tp, experts by ep, layers by pp, and tokens by tp and cp.
    """
    own = parameters.dense // layout.tp + parameters.experts // layout.ep
    weights = own // layout.pp * (bytes_each + 8)
    logits = 3 * 4 * tokens * vocab // layout.shards
    return weights + logits + 34 * 4 * layers // layout.pp * tokens * hidden // layout.shards
