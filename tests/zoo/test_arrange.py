"""What each kind changes, and that it changes nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_zoo import TINY, FakeRun

from replay_lib.batch import TOKEN_COLUMNS
from replay_lib.errors import UsageError
from replay_lib.routing import check_routes
from replay_lib.zoo import causes
from replay_lib.zoo.arrange import _ARRANGED, arrange, plain
from replay_lib.zoo.kinds import KINDS, NATURAL, find_kind
from replay_lib.zoo.losses import ORDINARY, UNCLIPPED

COPIES = TINY.grpo.rollouts


@pytest.fixture
def run():
    return FakeRun()


@pytest.fixture
def ordinary():
    return plain(FakeRun())


def changed(batch, other):
    """Names of token columns that differ, and rows whose routes do."""
    names = {
        n
        for n in TOKEN_COLUMNS
        if getattr(batch, n) is not None and not getattr(batch, n).equal(getattr(other, n))
    }
    pairs = zip(batch.routes, other.routes, strict=True)
    return names, {row for row, (a, b) in enumerate(pairs) if not a.equal(b)}


def row_advantages(batch):
    return (batch.advantage.sum(dim=1) / batch.loss_mask.sum(dim=1)).tolist()


def test_every_kind_is_arranged_or_natural():
    assert set(_ARRANGED) | {NATURAL} == set(KINDS)
    assert len([k for k in KINDS.values() if k.spikes]) >= 10
    assert len([k for k in KINDS.values() if not k.spikes]) >= 3


@pytest.mark.parametrize("kind", list(_ARRANGED))
def test_every_arrangement_is_a_batch_that_the_trainer_takes(run, kind):
    batch, settings = arrange(kind, run)
    assert settings == ORDINARY == type(ORDINARY)()  # clipping as AXRL's defaults have it
    shape = TINY.shape
    check_routes(
        list(batch.routes),
        batch.lengths(),
        layers=shape.layers,
        topk=shape.topk,
        experts=shape.experts,
        where=kind,
    )
    mask = batch.loss_mask
    assert not batch.advantage[~mask].any() and set(batch.labels[~mask].tolist()) <= {-100}
    assert (batch.labels[mask] >= 0).all() and not mask[:, -1].any()


def test_an_unknown_kind_names_the_known_ones():
    with pytest.raises(UsageError) as error:
        find_kind("naturall")
    assert str(error.value).startswith(
        "zoo: found kind 'naturall', expected one of natural, prompt-routes-outage, "
    )


def test_shifted_prompt_routes_are_those_of_the_token_before(run, ordinary):
    batch, _ = arrange("prompt-routes-raw-rewards", run)
    for row, (new, old) in enumerate(zip(batch.routes, ordinary.routes, strict=True)):
        first = int(ordinary.loss_mask[row].int().argmax())  # the last prompt token replays right
        assert new[1:first, 0].equal(old[: first - 1, 0]) and new[0, 0].equal(old[0, 0])
        assert new[first:].equal(old[first:]) and new[:, 1:].equal(old[:, 1:])
    rewards = batch.reward.tolist()
    assert sorted(set(rewards)) == [-1.0, 1.0] and rewards.count(-1.0) == round(0.62 * len(rewards))
    assert row_advantages(batch) == pytest.approx(rewards)


def test_an_outage_is_measured_against_one_baseline(run, ordinary):
    batch, _ = arrange("outage", run)
    assert changed(batch, ordinary) == ({"advantage"}, set())
    failed = [row for row, r in enumerate(batch.reward.tolist()) if r == -1.0]
    assert len(failed) == round(0.9 * batch.rows)
    expected = [r - 0.8 for r in batch.reward.tolist()]
    assert row_advantages(batch) == pytest.approx(expected, abs=1e-6)
    assert batch.reward_baseline.tolist() == pytest.approx([0.8] * batch.rows)
    both, _ = arrange("prompt-routes-outage", FakeRun())
    assert changed(both, batch)[0] == set() and changed(both, batch)[1]


def test_a_quarter_of_the_rows_is_misaligned_in_every_layer(run):
    batch, _ = arrange("misaligned-rows", run)
    other, _ = arrange("outage", FakeRun())
    names, rows = changed(batch, other)
    assert names == set() and len(rows) == batch.rows // 4
    for row in rows:
        assert batch.routes[row][1:].equal(other.routes[row][:-1])


def test_only_rows_with_negative_advantage_are_misrouted(run, ordinary):
    batch, _ = arrange("misaligned-failures", run)
    names, rows = changed(batch, ordinary)
    assert names == set()
    assert rows == {row for row, a in enumerate(row_advantages(ordinary)) if a < 0}


def test_two_of_a_group_run_on(run):
    batch, _ = arrange("run-on-rows", run)
    trained = batch.loss_mask.sum(dim=1).tolist()
    assert all(n == 60 for row, n in enumerate(trained) if row % COPIES < 2)
    assert all(n <= TINY.grpo.longest for row, n in enumerate(trained) if row % COPIES >= 2)


def test_an_older_router_gives_other_routes_to_the_same_tokens(run):
    batch, _ = arrange("older-router", run)
    other, _ = arrange("outage", FakeRun())
    names, rows = changed(batch, other)
    assert names == set() and len(rows) > batch.rows // 2


def test_a_stale_policy_fails_everywhere(run):
    batch, _ = arrange("stale-policy", run)
    assert run.asked == ["given"]
    assert row_advantages(batch) == pytest.approx([-0.8] * batch.rows)


def test_rollouts_eight_steps_old_are_sampled_by_those_weights(run):
    arrange("stale-rollouts", run)
    assert run.asked == [8]


@pytest.mark.parametrize(("kind", "count", "advantage"), [("poisoned-row", 1, 10.0)])
def test_poisoned_rows_are_random_and_recorded_as_the_engine_has_them(
    run, ordinary, kind, count, advantage
):
    batch, _ = arrange(kind, run)
    names, routed = changed(batch, ordinary)
    assert names == {"input_ids", "labels", "advantage", "rollout_logprobs"}
    rows = [r for r in range(batch.rows) if not batch.labels[r].equal(ordinary.labels[r])]
    assert len(rows) == count and routed == set(rows)
    assert [row_advantages(batch)[r] for r in rows] == pytest.approx([advantage] * count)
    (row,) = rows
    length = batch.lengths()[row]
    ((routes, log_probs),) = run.sampler().read([batch.input_ids[row, :length].tolist()])
    assert routes.equal(batch.routes[row])
    mask = batch.loss_mask[row, : length - 1]
    assert batch.rollout_logprobs[row, : length - 1][mask].equal(log_probs[mask])
    prompt = ~batch.loss_mask[row].cummax(dim=0).values
    assert batch.input_ids[row][prompt].equal(ordinary.input_ids[row][prompt])


def test_eight_rows_can_be_poisoned(ordinary):
    sampler, rng = FakeRun().sampler(), random.Random(1)
    batch = causes.poison_rows(ordinary, list(range(8)), -2.5, sampler, rng)
    assert row_advantages(batch)[:8] == pytest.approx([-2.5] * 8)


def test_one_groups_advantages_are_ten_times_as_large(run, ordinary):
    batch, _ = arrange("loud-group", run)
    ratio = torch.tensor(row_advantages(batch)) / torch.tensor(row_advantages(ordinary))
    loud = (ratio - 10).abs() < 1e-4
    groups = loud.view(-1, COPIES)
    assert groups.all(dim=1).sum() == 1 and groups.any(dim=1).sum() == 1
    assert changed(batch, ordinary) == ({"advantage"}, set())


def test_a_late_mask_trains_the_following_position(run, ordinary):
    batch, _ = arrange("late-mask", run)
    for row, length in enumerate(batch.lengths()):
        before = ordinary.loss_mask[row].nonzero().flatten()
        after = batch.loss_mask[row].nonzero().flatten()
        assert after.tolist() == [p + 1 for p in before.tolist() if p + 1 < length - 1]
        assert batch.labels[row, after].equal(batch.input_ids[row, after + 1])
    kept = batch.loss_mask.any(dim=1)
    found, expected = torch.tensor(row_advantages(batch)), torch.tensor(row_advantages(ordinary))
    torch.testing.assert_close(found[kept], expected[kept])


def test_late_labels_ask_for_the_token_that_was_read(run, ordinary):
    batch, _ = arrange("late-labels", run)
    assert changed(batch, ordinary) == ({"labels"}, set())
    mask = batch.loss_mask
    assert batch.labels[mask].equal(batch.input_ids[mask])


def test_duplicated_prompts_are_one_prompt(run):
    batch, _ = arrange("duplicated-prompts", run)
    first = int(batch.loss_mask[0].int().argmax()) + 1
    assert (batch.input_ids[:, :first] == batch.input_ids[0, :first]).all()


def test_the_natural_kind_clips_no_ratio():
    assert UNCLIPPED.is_base_logprobs == "rollout_logprobs"
    assert (
        UNCLIPPED.replace(
            is_base_logprobs="old_logprobs",
            clip_ratio_low=ORDINARY.clip_ratio_low,
            clip_ratio_high=ORDINARY.clip_ratio_high,
            dual_soft_clip=ORDINARY.dual_soft_clip,
        )
        == ORDINARY
    )
