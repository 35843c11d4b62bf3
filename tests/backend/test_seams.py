"""What a replay directory can express, and what is refused by name."""

from __future__ import annotations

import pytest
import torch

from replay_lib.backend.seams import refuse_unexpressible, routes_of
from replay_lib.batch import RankBatch
from replay_lib.errors import PatchError
from replay_lib.patch import (
    batch_patch,
    model_patch,
    routing_patch,
    settings_patch,
    token_weights_patch,
    weights_patch,
)


def test_batch_settings_and_routes_can_be_expressed() -> None:
    refuse_unexpressible(
        "mine", [batch_patch(lambda b: b), settings_patch(), routing_patch(lambda m, b: m)]
    )


def test_the_others_are_refused_all_at_once() -> None:
    patches = [token_weights_patch(lambda w, r, p: w), batch_patch(lambda b: b), model_patch()]
    with pytest.raises(PatchError) as caught:
        refuse_unexpressible("mine+yours", [*patches, weights_patch(lambda w: w)])
    assert str(caught.value) == (
        "backend axrl: mine+yours acts at a seam that a replay directory cannot express: weights "
        "(the checkpoint is linked as it is); model (it has no fields of the live model); "
        "token_weights (AXRL's loss takes no weight a token from a file). Replay it with "
        "--backend native"
    )


@pytest.fixture
def batch() -> RankBatch:
    ids = torch.ones(2, 4, dtype=torch.int64)
    real = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool)
    loss = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 0]], dtype=torch.bool)
    return RankBatch(
        dp_rank=0,
        index=torch.arange(2),
        input_ids=ids,
        labels=ids,
        loss_mask=loss,
        attention_mask=real,
        advantage=torch.zeros(2, 4),
    )


def mask(rows: torch.Tensor) -> torch.Tensor:
    return rows[:, :, None].expand(2, 4, 3).clone()


def test_masks_are_told_in_axrls_terms(batch) -> None:
    everywhere = torch.ones(2, 4, 3, dtype=torch.bool)
    cases = {
        "all": [everywhere, mask(batch.attention_mask)],  # padding does not count
        "loss tokens": [mask(batch.loss_mask), mask(batch.loss_mask | ~batch.attention_mask)],
        "none": [torch.zeros_like(everywhere), mask(~batch.attention_mask), None],
    }
    for told, forced in cases.items():
        for one in forced:
            assert routes_of("mine", [batch], [one]) == told
    assert routes_of("mine", [batch, batch], [everywhere, everywhere]) == "all"


def test_a_mask_of_its_own_is_refused(batch) -> None:
    layered = torch.ones(2, 4, 3, dtype=torch.bool)
    layered[:, :, 0] = False
    mixed = [torch.ones(2, 4, 3, dtype=torch.bool), mask(batch.loss_mask)]
    for masks in ([layered], mixed):
        with pytest.raises(PatchError, match="mine forces saved routes in some layers or at tok"):
            routes_of("mine", [batch] * len(masks), masks)
