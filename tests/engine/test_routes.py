"""Releasing tokens from their saved experts while the model runs, on scores written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from replay_lib.engine.protocol import Experiment
from replay_lib.engine.routes import TokenRouterReplay, released
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import PatchError
from replay_lib.methods import load_methods
from replay_lib.patch import Seam, router_patch

SLUG = "use-current-routing-on-disagreement"
# N = 4 tokens, E = 4 experts, K = 2: probabilities whose sums are known
PROBABILITIES = torch.tensor(
    [[0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1], [0.7, 0.1, 0.1, 0.1], [0.4, 0.3, 0.2, 0.1]]
)
SAVED = torch.tensor([[1, 2], [2, 3], [3, 2], [2, 3]])  # sums 0.5, 0.3, 0.2; the last is padding
REAL = torch.tensor([True, True, True, False])


def replay_object(release, *, logits: bool) -> TokenRouterReplay:
    replay = TokenRouterReplay()
    replay.set_target_indices(SAVED)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    replay.token_mask, replay.real = torch.ones(4, dtype=torch.bool), REAL
    replay.release, replay.logits = release, logits
    return replay


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_sums_are_of_probabilities_whatever_the_router_ranks_by(pre_softmax: bool) -> None:
    seen = {}

    def release(replayed, own, saved):
        seen.update(replayed=replayed, own=own, saved=saved)
        return replayed & (own - saved <= 0.25)

    replay = replay_object(release, logits=not pre_softmax)
    _, chosen = topk_routing_with_score_function(
        PROBABILITIES.log() + 3.0, 2, use_pre_softmax=pre_softmax, router_replay=replay
    )
    assert seen["replayed"].tolist() == REAL.tolist()  # padding is not shown
    assert seen["own"][:3].tolist() == pytest.approx([0.7, 0.7, 0.8])
    assert seen["saved"][:3].tolist() == pytest.approx([0.5, 0.3, 0.2])
    # 0.2 stays, 0.4 and 0.6 are let go, padding keeps what it had
    assert replay.token_mask.tolist() == [True, False, False, True]
    used = [row.nonzero().flatten().tolist() for row in chosen.bool()]
    assert used[0] == [1, 2] and used[1] == [0, 1] and 0 in used[2] and used[3] == [2, 3]


def test_sigmoid_scores_are_taken_as_they_are() -> None:
    seen = {}

    def release(replayed, own, saved):
        seen.update(own=own, saved=saved)
        return replayed

    replay = replay_object(release, logits=False)
    logits = torch.zeros(4, 4)
    logits[:, 0] = math.log(3)  # sigmoid 0.75
    topk_routing_with_score_function(logits, 2, score_function="sigmoid", router_replay=replay)
    assert seen["own"].tolist() == pytest.approx([1.25] * 4)
    assert seen["saved"].tolist() == pytest.approx([1.0] * 4)


def test_the_method_lets_go_where_the_margin_is_larger() -> None:
    (patch,) = load_methods()[SLUG].patches({"margin": 0.25})
    assert patch.seam is Seam.ROUTER
    own, saved = torch.tensor([0.75, 0.75, 0.75]), torch.tensor([0.5, 0.25, 0.25])
    replayed = torch.tensor([True, True, False])
    assert patch(replayed, own, saved).tolist() == [True, False, False]
    with pytest.raises(PatchError, match=r"found margin=-1\.0, expected a number >= 0"):
        load_methods()[SLUG].patches({"margin": -1.0})


@pytest.mark.parametrize("given", [None, torch.ones(3), torch.ones(2, dtype=torch.bool)])
def test_what_is_no_mask_or_forces_more_is_refused(given: object) -> None:
    told = r"must return a bool tensor \[3\] \[N\] that forces no token beyond those given"
    with pytest.raises(PatchError, match=told):
        released([router_patch(lambda *_: given)], REAL[:3], torch.ones(3), torch.ones(3))
    with pytest.raises(PatchError, match=told):
        released([router_patch(lambda m, _o, _s: ~m)], REAL[1:], torch.ones(3), torch.ones(3))


@pytest.mark.xdist_group("engine-plain")
def test_without_a_margin_it_is_current_routing_and_with_a_large_one_it_is_none(
    plain: ReplaySession,
) -> None:
    names = [f"{SLUG}:margin=0.0", "disable-routing-replay", f"{SLUG}:margin=1.0", SLUG]
    baseline, all_go, current, none_goes, some_go = plain.run_many(
        [Experiment.baseline(), *map(Experiment.parse, names)]
    )
    # padding stays forced, which moves float32 sums alone
    assert all_go.grad_norm_preclip == pytest.approx(current.grad_norm_preclip, rel=1e-6)
    assert all_go.grad_norm_preclip_carried == pytest.approx(
        current.grad_norm_preclip_carried, rel=1e-6
    )
    assert none_goes.digest == baseline.digest and none_goes.touched == {Seam.ROUTER: 0}
    assert 0 < some_go.touched[Seam.ROUTER] < all_go.touched[Seam.ROUTER]
    # where sets are the same nothing is let go
    assert all_go.touched[Seam.ROUTER] <= current.touched[Seam.ROUTING]
    assert plain.run(Experiment.baseline()).digest == baseline.digest
