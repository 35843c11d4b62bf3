"""A tiny step as a snapshot on disk, written anew in every variant, and replayed in one worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.engine.protocol import Experiment, Outcome
from replay_lib.engine.reference import ReferenceStep, reference_step
from replay_lib.engine.session import ReplaySession
from replay_lib.loss import GrpoSettings
from replay_lib.microbatch import split_ranks
from replay_lib.snapshot import Content, SpikeSettings, load_model_fields, open_snapshot
from replay_lib.snapshot import write_snapshot as write
from replay_lib.zoo.content import run_config, worker_config
from replay_lib.zoo.recipe import Grpo, Recipe, Shape

SHAPE = Shape(layers=2, hidden=16, heads=2, groups=1, channels=8, experts=4, expert_width=16)
#: Micro-batches of up to 64 tokens: the rows below, 144 tokens, make three of them.
RECIPE = Recipe(shape=SHAPE, grpo=Grpo(rows_at_once=1, seq_length=64))
LENGTHS = (19, 11, 26, 15, 8, 22, 30, 13)
WIDTH = 32
#: A policy term that clips on both sides, capped weights, and a KL term against the reference.
SETTINGS = GrpoSettings(
    loss_type="grpo2",
    kl_control_alpha=0.3,
    kl_base_logprobs="ref_logprobs",
    mismatch_token_clip_max=2.0,
)


def make_weights(seed: int = 0) -> dict[str, Tensor]:
    """Random weights under checkpoint keys, layers and experts stacked, float32."""
    g = torch.Generator().manual_seed(seed)
    n, h, d, e = SHAPE.layers, SHAPE.hidden, SHAPE.channels, SHAPE.experts
    projected = (SHAPE.heads + 2 * SHAPE.groups) * d
    layer = {
        "self_attention.linear_qkv.layer_norm_weight": (h,),
        "self_attention.linear_qkv.weight": (projected, h),
        "self_attention.linear_proj.weight": (h, SHAPE.heads * d),
        "self_attention.q_layernorm.weight": (d,),
        "self_attention.k_layernorm.weight": (d,),
        "pre_mlp_layernorm.weight": (h,),
        "mlp.router.weight": (e, h),
        "mlp.experts.experts.linear_fc1.weight": (e, 2 * SHAPE.expert_width, h),
        "mlp.experts.experts.linear_fc2.weight": (e, h, SHAPE.expert_width),
    }
    sizes = {f"decoder.layers.{name}": (n, *size) for name, size in layer.items()}
    sizes |= dict.fromkeys(
        ("embedding.word_embeddings.weight", "output_layer.weight"), (SHAPE.vocabulary, h)
    )
    sizes["decoder.final_layernorm.weight"] = (h,)
    drawn = {name: torch.randn(size, generator=g) * 0.3 for name, size in sizes.items()}
    return {name: w + 1 if "norm" in name else w for name, w in drawn.items()}


def make_batch(lengths: Sequence[int] = LENGTHS, width: int = WIDTH, seed: int = 0) -> RankBatch:
    """Rows of random tokens; the first third of each is a prompt, the rest trains."""
    g = torch.Generator().manual_seed(seed)
    at, n_B1 = torch.arange(width), torch.tensor(lengths)[:, None]
    shape = (len(lengths), width)
    real = at < n_B1
    mask = (at >= n_B1 // 3) & (at < n_B1 - 1)
    ids = torch.randint(1, SHAPE.vocabulary, shape, generator=g) * real
    old = -torch.rand(shape, generator=g) * 3 - 2
    near = [old + 0.4 * torch.randn(shape, generator=g) for _ in range(2)]
    routes = tuple(
        torch.rand(n - 1, SHAPE.layers, SHAPE.experts, generator=g)
        .topk(SHAPE.topk, dim=-1)
        .indices.to(torch.int16)
        for n in lengths
    )
    return RankBatch(
        dp_rank=0,
        index=torch.arange(shape[0]),
        input_ids=ids,
        labels=torch.where(mask, ids.roll(-1, dims=1), -100),
        loss_mask=mask,
        attention_mask=real,
        position_ids=at.expand(shape).contiguous(),
        trajectory_id=torch.arange(shape[0]),
        advantage=torch.randn(shape, generator=g) * mask,
        old_logprobs=old * real,
        rollout_logprobs=near[0] * mask,
        ref_logprobs=near[1] * real,
        routes=routes,
    )


def join(one: RankBatch, other: RankBatch) -> RankBatch:
    """The rows of both, which have the same columns and width."""
    columns = {
        field.name: torch.cat([getattr(one, field.name), getattr(other, field.name)])
        for field in dataclasses.fields(one)
        if isinstance(getattr(one, field.name), Tensor)
    }
    return one.replace(**columns, routes=one.routes + other.routes)


def empty_rows(count: int, length: int = 4, width: int = WIDTH) -> RankBatch:
    """Padding rows as the trainer adds them: real zero tokens without labels, experts 0..K-1."""
    rows = make_batch([length] * count, width)
    nothing = torch.zeros_like(rows.loss_mask)
    floats = ("advantage", "old_logprobs", "rollout_logprobs", "ref_logprobs")
    first = torch.arange(SHAPE.topk, dtype=torch.int16)
    return rows.replace(
        index=torch.full_like(rows.index, -1),
        trajectory_id=torch.full_like(rows.index, -1),
        input_ids=torch.zeros_like(rows.input_ids),
        labels=torch.full_like(rows.labels, -100),
        loss_mask=nothing,
        routes=(first.expand(length - 1, SHAPE.layers, SHAPE.topk).contiguous(),) * count,
        **{name: torch.zeros_like(rows.advantage) for name in floats},
    )


def content(
    *batches: RankBatch,
    weights: dict[str, Tensor] | None = None,
    settings: GrpoSettings = SETTINGS,
    model: dict[str, Any] | None = None,
    **worker: Any,
) -> Content:
    """A snapshot's content: one batch a data-parallel rank, settings and fields as given."""
    document = yaml.safe_load(run_config(RECIPE))
    document["model"] |= model or {}
    rows = sum(b.rows for b in batches)
    config = worker_config(RECIPE, 0, rows, SpikeSettings()) | {"dp_size": len(batches)}
    # the worker sets these fields of the model to settings of its own: both files state them
    config |= {name: value for name, value in (model or {}).items() if name in config}
    return Content(
        step=7,
        grad_norm_preclip=1.0,  # nothing here compares with it
        grad_norm_median=None,
        worker_config=config | worker,
        run_config=yaml.safe_dump(document),
        batches=tuple(b.replace(dp_rank=rank) for rank, b in enumerate(batches)),
        settings=settings,
        tensors=make_weights() if weights is None else weights,
    )


class Replays:
    """Replays one written step after another in the worker of one session.

    A worker that is asked to open again builds the next model beside the last: that saves the
    seconds of a start, and routes have to find the live model among several.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.count = 0
        self.session: ReplaySession | None = None

    def __call__(self, step: Content, experiment: str = "baseline") -> Outcome:
        """The outcome of ``experiment`` on ``step``."""
        self.count += 1
        path = self.home / f"step{self.count}" / "iter_0000007"
        write(path, step)
        if self.session is None:
            self.session = ReplaySession.open(path, device="cpu")
        else:
            worker = self.session._worker
            worker.send({"op": "open", "snapshot": str(path)})
            worker.receive(60.0)
        return self.session.run(Experiment.parse(experiment))

    def oracle(self, step: Content, *, routed: bool = False) -> ReferenceStep:
        """The float64 oracle on the same step, split as the trainer splits it.

        ``routed``: no saved route is forced.
        """
        path = self.home / f"oracle{self.count}" / "iter_0000007"
        self.count += 1
        write(path, step)
        nowhere = [
            torch.zeros(*b.input_ids.shape, SHAPE.layers, dtype=torch.bool) for b in step.batches
        ]
        return reference_step(
            step.tensors,
            load_model_fields(open_snapshot(path)),
            step.batches,
            step.settings,
            split(step),
            replayed=nowhere if routed else None,
        )

    def close(self) -> None:
        """End the worker."""
        if self.session is not None:
            self.session.close()


def split(step: Content) -> list[list[list[int]]]:
    """Rows by rank and micro-batch."""
    worker = step.worker_config
    return split_ranks(
        [b.lengths() for b in step.batches],
        [b.width for b in step.batches],
        dynamic=worker["use_dynamic_batch_size"],
        micro_batch_size=worker["train_micro_batch_size"],
        seq_length=worker["model"]["seq_length"],
    )
