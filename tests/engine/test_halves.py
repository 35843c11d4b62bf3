"""Which half of a combination changed nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_step import make_batch

from replay_lib.engine.halves import watched
from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession
from replay_lib.loss import GrpoSettings
from replay_lib.patch import (
    Patch,
    batch_patch,
    model_patch,
    router_patch,
    routing_patch,
    rows_patch,
    settings_patch,
    token_weights_patch,
    weights_patch,
)

BATCH = make_batch()
FORCED = torch.ones((*BATCH.input_ids.shape, 2), dtype=torch.bool)
PADDING = ~BATCH.attention_mask[..., None]
WEIGHTS = torch.ones(BATCH.input_ids.shape)
PARAMETERS = {"w": torch.tensor([1.0, float("nan")])}


def in_place(batch: Any) -> Any:
    batch.advantage[0, 1] += 1.0
    return batch


def moves(patch: Patch, *present: Any) -> bool:
    moved: set[str] = set()
    (watching,) = watched([patch], "x", moved)
    assert watching.seam is patch.seam
    watching(*present)
    return moved == {"x"}


@pytest.mark.parametrize(
    ("patch", "present"),
    [
        (rows_patch("unmerged"), lambda: ["merged"]),
        (settings_patch(clip_ratio_low=0.11), lambda: [GrpoSettings()]),
        (model_patch(moe_router_dtype="fp64"), lambda: [{"moe_router_dtype": None}]),
        (weights_patch(lambda p: {"w": p["w"] + 1}), lambda: [dict(PARAMETERS)]),
        (routing_patch(lambda f, _b: ~f), lambda: [FORCED.clone(), BATCH]),
        (router_patch(lambda f, _o, _s: ~f), lambda: [FORCED[0, :, 0].clone(), WEIGHTS, WEIGHTS]),
        (batch_patch(in_place), lambda: [BATCH.clone()]),
        (batch_patch(lambda b: b.replace(ref_logprobs=None)), lambda: [BATCH.clone()]),
        (token_weights_patch(lambda w, _r, _l: w * 0.5), lambda: [WEIGHTS.clone(), BATCH, WEIGHTS]),
        (token_weights_patch(lambda _w, _r, _l: None), lambda: [WEIGHTS.clone(), BATCH, WEIGHTS]),
    ],
)
def test_a_change_is_seen_at_every_seam(patch: Patch, present: Callable[[], list[Any]]) -> None:
    assert moves(patch, *present())


@pytest.mark.parametrize(
    ("patch", "present"),
    [
        (rows_patch("merged"), lambda: ["merged"]),
        (settings_patch(), lambda: [GrpoSettings()]),
        (model_patch(moe_router_dtype=None), lambda: [{"moe_router_dtype": None, "x": 1}]),
        (weights_patch(lambda p: {"w": p["w"].clone()}), lambda: [dict(PARAMETERS)]),
        (weights_patch(lambda _p: {}), lambda: [dict(PARAMETERS)]),
        (router_patch(lambda f, _o, _s: f), lambda: [FORCED[0, :, 0].clone(), WEIGHTS, WEIGHTS]),
        (routing_patch(lambda f, _b: f & ~PADDING), lambda: [FORCED.clone(), BATCH]),
        (batch_patch(lambda b: b.replace(advantage=b.advantage * 1.0)), lambda: [BATCH.clone()]),
        (
            token_weights_patch(lambda w, r, _l: torch.where(r.loss_mask, w, 0.0)),
            lambda: [WEIGHTS.clone(), BATCH, WEIGHTS],
        ),
    ],
)
def test_what_changes_nothing_or_what_nobody_reads_is_idle(
    patch: Patch, present: Callable[[], list[Any]]
) -> None:
    assert not moves(patch, *present())


@pytest.mark.xdist_group("engine-plain")
def test_idle_halves_are_named_and_a_lone_method_is_never_one(plain: ReplaySession) -> None:
    idle, moving = "seam_examples:touches_nothing", "seam_examples:smaller_advantage"
    weights, field = "seam_examples:scaled_router", "seam_examples:scaled_topk"
    none_goes = "use-current-routing-on-disagreement:margin=1.0"
    asked = {
        f"{moving}+{idle}": (idle,),
        f"{idle}+{moving}": (idle,),
        idle: (),
        weights: (),  # shares its forward with the next
        f"{weights}+{moving}": (),
        f"{weights}+seam_examples:sequence_mean": (),
        f"{field}+seam_examples:weighted_tokens:share=1.0": (
            "seam_examples:weighted_tokens:share=1.0",
        ),
        f"{moving}+{none_goes}": (none_goes,),
        f"{moving}+use-current-routing-on-disagreement": (),
        f"{moving}+skip-spiking-step": (),  # it acts after the norm
    }
    outcomes = plain.run_many([Experiment.parse(name) for name in asked])
    assert {o.experiment.name: o.idle for o in outcomes} == asked
