"""Methods that choose where saved routes are forced, on masks written out by hand."""

from __future__ import annotations

import pytest
import torch

from replay_lib.batch import RankBatch
from replay_lib.errors import PatchError
from replay_lib.methods import load_methods
from replay_lib.patch import Seam


def make_batch(loss_mask: list[list[int]]) -> RankBatch:
    mask = torch.tensor(loss_mask, dtype=torch.bool)
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    return RankBatch(
        dp_rank=0,
        index=torch.arange(len(mask)),
        input_ids=ids,
        labels=ids,
        loss_mask=mask,
        attention_mask=torch.ones_like(mask),
        advantage=ids.float(),
    )


def apply_method(slug: str, replayed: torch.Tensor, batch: RankBatch, **params) -> torch.Tensor:
    (patch,) = load_methods()[slug].patches(params)
    assert patch.seam is Seam.ROUTING
    before = replayed.clone()
    result = patch.apply(replayed, batch)
    assert torch.equal(replayed, before), "a patch must not change what it was given"
    assert result.dtype == torch.bool
    return result


# B = 2 rows, T = 3 tokens, L = 2 layers; the last token of the second row is padding
REPLAYED_BTL = torch.tensor([[[1, 1], [1, 1], [1, 1]], [[1, 1], [1, 1], [0, 0]]], dtype=torch.bool)
BATCH = make_batch([[0, 1, 1], [0, 1, 1]])


def test_first_moe_layer_is_current_and_later_ones_replay():
    result = apply_method("use-current-routing-for-first-moe-layer", REPLAYED_BTL, BATCH)
    expected = [[[0, 1], [0, 1], [0, 1]], [[0, 1], [0, 1], [0, 0]]]
    assert result.int().tolist() == expected


def test_all_layers_current_replays_nothing():
    slug = "use-current-routing-for-first-moe-layer"
    assert not apply_method(slug, REPLAYED_BTL, BATCH, layers=2).any()


def test_more_layers_than_the_model_has_are_refused():
    with pytest.raises(PatchError) as caught:
        apply_method("use-current-routing-for-first-moe-layer", REPLAYED_BTL, BATCH, layers=3)
    assert str(caught.value) == (
        "mitigation use-current-routing-for-first-moe-layer: found layers=3, expected at most the "
        "model's 2 MoE layers"
    )


@pytest.mark.parametrize("layers", [0, -1, 1.5, True, "1"])
def test_a_number_of_layers_that_makes_no_sense_is_refused(layers):
    method = load_methods()["use-current-routing-for-first-moe-layer"]
    with pytest.raises(PatchError, match=r"layers.*expected a whole number"):
        method.patches({"layers": layers})


def test_loss_tokens_only_replays_where_the_label_aligned_mask_is_true():
    result = apply_method("replay-r3-on-loss-tokens-only", REPLAYED_BTL, BATCH)
    # the padded token has a true loss mask here and still does not replay
    expected = [[[0, 0], [1, 1], [1, 1]], [[0, 0], [1, 1], [0, 0]]]
    assert result.int().tolist() == expected


def test_disabled_replay_forces_nothing_anywhere():
    assert not apply_method("disable-routing-replay", REPLAYED_BTL, BATCH).any()


def test_methods_compose_in_either_order():
    slugs = ["use-current-routing-for-first-moe-layer", "replay-r3-on-loss-tokens-only"]
    once = apply_method(slugs[1], apply_method(slugs[0], REPLAYED_BTL, BATCH), BATCH)
    other = apply_method(slugs[0], apply_method(slugs[1], REPLAYED_BTL, BATCH), BATCH)
    assert once.int().tolist() == [[[0, 0], [0, 1], [0, 1]], [[0, 0], [0, 1], [0, 0]]]
    assert torch.equal(once, other)


def test_prompt_tokens_replay_and_trainable_ones_are_current():
    result = apply_method("replay-r3-on-prompt-tokens-only", REPLAYED_BTL, BATCH)
    assert result.int().tolist() == [[[1, 1], [0, 0], [0, 0]], [[1, 1], [0, 0], [0, 0]]]


def test_both_halves_of_the_tokens_make_the_whole():
    halves = [
        apply_method(f"replay-r3-on-{half}-tokens-only", REPLAYED_BTL, BATCH)
        for half in ("loss", "prompt")
    ]
    assert torch.equal(halves[0] ^ halves[1], REPLAYED_BTL)


def test_later_layers_are_current():
    result = apply_method("use-current-routing-from-moe-layer", REPLAYED_BTL, BATCH)
    assert result.int().tolist() == [[[1, 0], [1, 0], [1, 0]], [[1, 0], [1, 0], [0, 0]]]
    assert not apply_method(
        "use-current-routing-from-moe-layer", REPLAYED_BTL, BATCH, layer=0
    ).any()


def test_one_layer_is_current():
    result = apply_method("use-current-routing-in-one-moe-layer", REPLAYED_BTL, BATCH, layer=0)
    assert result.int().tolist() == [[[0, 1], [0, 1], [0, 1]], [[0, 1], [0, 1], [0, 0]]]


@pytest.mark.parametrize("name", ["from-moe-layer", "in-one-moe-layer"])
@pytest.mark.parametrize("layer", [2, -1])
def test_a_layer_that_the_model_does_not_have_is_refused(name, layer):
    with pytest.raises(PatchError, match=f"found layer={layer}, expected"):
        apply_method(f"use-current-routing-{name}", REPLAYED_BTL, BATCH, layer=layer)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        # the mask turns true at 2 (the last prompt token) and false at 5 (the last response token)
        (1, [1, 1, 0, 0, 1, 0, 0, 1]),
        (2, [1, 0, 0, 0, 0, 0, 0, 0]),
        (9, [0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_turn_borders_are_current(width, expected):
    batch = make_batch([[0, 0, 1, 1, 1, 0, 0, 0]])
    replayed = torch.ones(1, 8, 1, dtype=torch.bool)
    result = apply_method("use-current-routing-at-turn-borders", replayed, batch, width=width)
    assert result.flatten().int().tolist() == expected


def test_a_row_without_borders_replays_whole():
    replayed = torch.ones(1, 3, 1, dtype=torch.bool)
    slug = "use-current-routing-at-turn-borders"
    assert apply_method(slug, replayed, make_batch([[1, 1, 1]])).all()
    with pytest.raises(PatchError, match="found width=0, expected a whole number >= 1"):
        apply_method(slug, replayed, make_batch([[1, 1, 1]]), width=0)
