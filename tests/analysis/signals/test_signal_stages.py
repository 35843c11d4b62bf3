"""Every stage on rows whose figures are reckoned by hand, in one rank and in two."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from signal_rows import Row, batch_of, view_of_rows

from replay_lib.analysis.signals.advantages import AdvantageStage
from replay_lib.analysis.signals.improbable import ImprobableStage
from replay_lib.analysis.signals.lengths import LengthStage
from replay_lib.analysis.signals.outliers import OutlierStage
from replay_lib.analysis.signals.parameters import layer_of, rank_parameters
from replay_lib.analysis.signals.ratios import EDGES, RatioStage
from replay_lib.analysis.signals.rewards import RewardStage
from replay_lib.analysis.signals.routing import RoutingStage, layer_load
from replay_lib.analysis.signals.values import ValueStage
from replay_lib.analysis.signals.view import View, view_of

NAN = float("nan")
FIRST = [
    Row(tokens=[1, 2, 3, 4], trained=2, advantage=[1.5, -0.5], index=0, trajectory=7, reward=1.0),
    Row(tokens=[1, 2, 5, 6, 7], trained=3, advantage=[0.0, 0.0, -2.0], index=1, trajectory=8),
]
SECOND = [
    Row(tokens=[0, 0, 0, 0], trained=0, index=-1, trajectory=-1),
    Row(tokens=[9, 2], trained=1, advantage=4.0, index=2, trajectory=8, reward=1.0),
]


def run(stage: Any, *ranks: list[Row]) -> Any:
    for number, rows in enumerate(ranks):
        stage.add(view_of_rows(rows, number))
    return stage


def test_advantages_are_summed_by_sign_on_loss_tokens() -> None:
    stage = run(AdvantageStage(), FIRST, SECOND)
    found = stage.result()
    total = found.total
    assert (total.tokens, total.positive, total.negative) == (6, 5.5, 2.5)
    assert (total.positive_tokens, total.negative_tokens, total.near_zero) == (2, 2, 2)
    assert [r.positive for r in found.ranks] == [1.5, 4.0]
    assert found.balance == 5.5 / 2.5
    assert found.largest_row_share == 4.0 / 8.0
    assert [(p.dp_rank, p.row, p.value) for p in stage.rows] == [
        (1, 1, 4.0),
        (0, 1, 2.0),
        (0, 0, 1.5),
    ]


def test_an_advantage_that_is_no_number_spoils_no_sum() -> None:
    rows = [Row(tokens=[1, 2, 3, 4], trained=3, advantage=[1.0, NAN, -1.0])]
    found = run(AdvantageStage(), rows).result()
    assert (found.total.tokens, found.total.positive, found.total.negative) == (2, 1.0, 1.0)
    assert found.values.nonfinite == 1


def _ratio(old: list[float], rollout: list[float], sampled: str = "rollout") -> Any:
    view = view_of_rows(
        [Row(tokens=range(len(old) + 1), trained=len(old), old=old, rollout=rollout)]
    )
    stage = RatioStage("old", "rollout", sampled)
    first, second = view.on_loss("old_logprobs"), view.on_loss("rollout_logprobs")
    assert first is not None and second is not None
    stage.add(view, first, second)
    return stage


def test_ratios_and_estimators_by_hand() -> None:
    # log-ratios 1, -1, 0, 2: exact in float32
    stage = _ratio([-1.0, -2.0, -3.0, -0.5], [-2.0, -1.0, -3.0, -2.5])
    found = stage.result()
    assert found.name == "old/rollout" and found.divergence == "KL(rollout || old)"
    assert found.k1 == pytest.approx(-0.5)  # mean of -log r
    assert found.k2 == pytest.approx((1 + 1 + 0 + 4) / 2 / 4)
    e = math.e
    k3 = (e - 1 - 1) + (1 / e - 1 + 1) + 0 + (e * e - 1 - 2)
    assert found.k3 == pytest.approx(k3 / 4)
    assert found.ratio.maximum == pytest.approx(e * e)
    assert found.outside == 3 and found.clamped == 0  # e, 1/e and e**2 are beyond 2 or under 1/2
    assert found.sequence.mean == pytest.approx(math.exp(0.5))
    assert sum(found.histogram.counts) == 4
    middle = len(EDGES) // 2 - 1
    assert found.histogram.counts[middle] == 1 and EDGES[middle] < 1 < EDGES[middle + 1]
    assert [place.value for place in stage.rows] == [0.75]


def test_the_policy_that_sampled_decides_the_direction() -> None:
    found = _ratio([-1.0, -2.0], [-2.0, -2.0], sampled="old").result()
    assert found.divergence == "KL(old || rollout)"
    assert found.k1 == pytest.approx(0.5)  # log old - log rollout
    assert found.k3 == pytest.approx((math.exp(-1.0) - 1 + 1) / 2)


def test_ratios_are_clamped_as_the_loss_does_and_keep_no_infinity() -> None:
    found = _ratio([-1.0, -1.0, -1.0], [-101.0, float("-inf"), NAN]).result()
    assert (found.tokens, found.clamped, found.outside) == (1, 1, 1)
    assert found.ratio.maximum == pytest.approx(math.exp(20.0))
    assert found.log_ratio.maximum == 100.0 and found.log_ratio.nonfinite == 2
    assert found.histogram.above == 1
    assert found.sequence.nonfinite == 1  # the row's mean is no number


def test_lengths_prompts_and_turns() -> None:
    turns = [Row(tokens=range(10), trained=4, turns=[0, 0, 2, 2], index=3)]
    found = run(LengthStage(), FIRST, SECOND, turns).result()
    assert (found.rows, found.padding_rows, found.rows_without_loss) == (4, 1, 0)
    assert found.tokens.mean == (4 + 5 + 2 + 10) / 4
    assert (found.loss_tokens.minimum, found.loss_tokens.maximum) == (1.0, 4.0)
    assert (found.prompt_tokens.minimum, found.prompt_tokens.maximum) == (1.0, 6.0)
    assert found.spans.maximum == 1.0
    assert found.turns is not None and found.turns.maximum == 2.0
    assert found.turn_tokens == {"0": 8, "2": 2}


def test_runs_of_loss_tokens_are_counted() -> None:
    view = view_of_rows([Row(tokens=range(12), trained=7, index=0)])
    mask = view.batch.loss_mask.clone()
    mask[0, 6] = mask[0, 8] = False
    stage = LengthStage()
    stage.add(view_of(view.batch.replace(loss_mask=mask)))
    assert stage.result().spans.maximum == 3.0
    assert stage.result().loss_tokens.maximum == 5.0


def test_groups_share_a_prompt_and_span_ranks() -> None:
    flat = [Row(tokens=[1, 2, 8], trained=1, index=i, trajectory=i, reward=0.5) for i in range(2)]
    mixed = [
        Row(tokens=[1, 3, 8], trained=1, index=5, trajectory=5, reward=0.0),
        Row(tokens=[1, 3, 9], trained=1, index=6, trajectory=6, reward=1.0),
        Row(tokens=[4, 4, 4], trained=1, index=7, trajectory=7, reward=1.0),
    ]
    stage = run(RewardStage(), [flat[0], mixed[0]], [flat[1], *mixed[1:]])
    found = stage.result().groups
    assert (found.groups, found.judged, found.zero_variance, found.largest) == (3, 2, 1, 2)
    assert [(p.dp_rank, p.row) for g in stage.flat() for p in g.rows] == [(0, 0), (1, 0)]
    assert [(p.dp_rank, p.row, p.value) for p in stage.repeated] == [(1, 0, 1.0)]
    assert stage.repeated_indexes == 0 and stage.trained == 5


def test_rows_of_one_trajectory_are_one_member_of_a_group() -> None:
    rows = [Row(tokens=[1, 2, i], trained=1, index=i, trajectory=4, reward=1.0) for i in range(3)]
    stage = run(RewardStage(), rows)
    assert stage.result().groups.judged == 0
    told = stage.trajectory_result()
    assert (told.trajectories, told.most) == (1, ((4, 3),))


def test_a_reward_that_is_no_number_judges_no_group() -> None:
    rows = [Row(tokens=[1, 2, 3], trained=1, index=i, trajectory=i, reward=NAN) for i in range(2)]
    found = run(RewardStage(), rows).result()
    assert found.groups.judged == 0
    assert found.reward is not None and found.reward.nonfinite == 2


def test_rewards_and_baselines() -> None:
    rows = [
        Row(tokens=[1, 2], trained=1, index=0, reward=1.0, baseline=0.25),
        Row(tokens=[1, 2], trained=1, index=0, reward=0.0, baseline=0.25),
        Row(tokens=[0], trained=0, index=-1, reward=9.0, baseline=9.0),
    ]
    stage = run(RewardStage(), rows)
    found = stage.result()
    assert found.reward is not None and found.reward.mean == 0.5
    assert found.difference is not None and found.difference.maximum == 0.75
    assert stage.repeated_indexes == 1


def test_values_that_are_no_numbers_are_named() -> None:
    rows = [Row(tokens=[1, 2, 3, 4], trained=2, index=0), Row(tokens=[1, 2, 3], trained=1, index=1)]
    batch = batch_of(rows)
    old, ref = batch.column("old_logprobs").clone(), batch.column("ref_logprobs").clone()
    old[0, 0] = NAN  # a prompt's: it comes first and reaches no loss
    old[1, 1] = float("-inf")
    ref[0, 15] = NAN
    stage = ValueStage()
    stage.add(view_of(batch.replace(old_logprobs=old, ref_logprobs=ref)))
    named = {one.column: one for one in stage.bad.values()}
    assert set(named) == {"old_logprobs", "ref_logprobs"}
    assert (named["old_logprobs"].row, named["old_logprobs"].position) == (1, 1)
    assert (named["old_logprobs"].on_loss_tokens, named["old_logprobs"].elsewhere) == (1, 1)
    assert (named["ref_logprobs"].on_loss_tokens, named["ref_logprobs"].elsewhere) == (0, 1)
    described = {one.name: one for one in stage.result()}
    assert described["old_logprobs"].values.mean == -1.0
    assert stage.dtypes["old_logprobs"] == "float32" and stage.dtypes["input_ids"] == "int64"


def test_improbable_rows() -> None:
    rows = [Row(tokens=[1, 2, 3], trained=2, old=[-1.0, -8.0], index=0), *SECOND]
    stage = run(ImprobableStage(), rows)
    assert [(p.row, p.value) for p in stage.rows] == [(0, -4.5), (2, -1.0)]


def test_outliers_are_named_with_what_is_known_of_them() -> None:
    rows = [
        Row(
            tokens=[1, 2, 3, 4], trained=2, advantage=-1.0, old=[-1.0, -9.0], index=4, trajectory=6
        ),
        Row(tokens=[1, 2, 5], trained=1, advantage=3.0, old=-2.0, index=5, trajectory=7),
    ]
    view = view_of_rows(rows)
    stage = OutlierStage("old/rollout", lambda ids: "".join(chr(96 + i) for i in ids))
    old, rollout = view.on_loss("old_logprobs"), view.on_loss("rollout_logprobs")
    assert old is not None and rollout is not None
    stage.add(view, old - rollout)
    first = stage.found[0]
    assert (first.dp_rank, first.row, first.position, first.token_id) == (0, 0, 2, 4)
    assert (first.index, first.trajectory_id, first.value) == (4, 6, -8.0)
    assert (first.text, first.context, first.advantage) == ("d", "abc", -1.0)
    assert first.logprobs == {"old": -9.0, "rollout": -1.0, "ref": -1.0}
    assert [one.value for one in stage.found] == [-8.0, -1.0]


def test_one_outlier_a_row_where_a_row_has_one_value() -> None:
    view = view_of_rows(FIRST)
    stage = OutlierStage("advantage")
    advantage = view.on_loss("advantage")
    assert advantage is not None
    stage.add(view, advantage, one_a_row=True)
    assert [(one.row, one.value) for one in stage.found] == [(1, -2.0), (0, 1.5)]


def _routed(view: View, routes: dict[Any, torch.Tensor], **fields: Any) -> RoutingStage:
    stage = RoutingStage(**{"experts": 4, **fields})
    paths: list[Any] = [[[handle]] for handle in routes]
    paths += [None] * (view.batch.rows - len(paths))
    stage.payload(routes, stage.rows(view, paths))
    return stage


def test_expert_loads_leave_padding_out() -> None:
    # the padding row's handle is one of the payloads and loads no expert
    view = view_of_rows([FIRST[0], SECOND[0], FIRST[1]])
    a, b, c = ("a", 0, None), ("b", 0, None), ("c", 0, None)
    routes = {
        a: torch.tensor([[[0, 1]], [[0, 2]], [[1, 1]]], dtype=torch.int16),
        b: torch.tensor([[[3, 3]]], dtype=torch.int16),
        c: torch.tensor([[[0, 9]]], dtype=torch.int16),
    }
    stage = _routed(view, routes)
    assert (stage.tokens, stage.rows_with, stage.outside) == (4, 2, 1)
    (layer,) = stage._layers()
    assert layer.load == (3, 3, 1, 0)
    assert (layer.unused, layer.repeated) == (1, 1)
    assert layer.imbalance == pytest.approx(3 / (7 / 4))


def test_rows_without_routes_are_named() -> None:
    view = view_of_rows([*FIRST, SECOND[0]])
    stage = _routed(view, {("a", 0, None): torch.zeros(3, 1, 2, dtype=torch.int16)})
    assert [place.row for place in stage.without] == [1]  # the padding row is no such row


def test_experts_are_counted_where_no_file_states_their_number() -> None:
    routes = {("a", 0, None): torch.tensor([[[0, 5]]], dtype=torch.int16)}
    stage = _routed(view_of_rows(FIRST), routes, experts=None)
    assert stage._layers()[0].load == (1, 0, 0, 0, 0, 1)


def test_dense_layers_with_dummies_are_left_out() -> None:
    routes = {("a", 0, None): torch.tensor([[[0, 1], [2, 3]]], dtype=torch.int16)}
    assert [x.layer for x in _routed(view_of_rows(FIRST), routes, moe=(1,))._layers()] == [1]
    alone = {("a", 0, None): torch.tensor([[[2, 3]]], dtype=torch.int16)}
    assert [x.layer for x in _routed(view_of_rows(FIRST), alone, moe=(1,))._layers()] == [1]


def test_entropy_of_loads() -> None:
    assert layer_load(0, [5, 5, 5, 5]).entropy == pytest.approx(1.0)
    assert layer_load(0, [7, 0, 0, 0]).entropy == pytest.approx(0.0)
    assert layer_load(0, [0, 0]).imbalance is None


def test_parameters_by_layer() -> None:
    names = {
        "module.module.decoder.layers.0.mlp.router.weight": 3.0,
        "module.module.decoder.layers.0.self_attention.linear_qkv.weight": 4.0,
        "module.module.embedding.word_embeddings.weight": 1.0,
        "module.module.output_layer.weight": NAN,
    }
    figures = {n: {"grad_norm": v, "grad_max": v, "param_norm": 1.0} for n, v in names.items()}
    found = rank_parameters(5, figures)
    assert (found.rank, found.parameters, found.nonfinite) == (5, 4, 1)
    assert found.top[0].name == "decoder.layers.0.self_attention.linear_qkv.weight"
    assert found.layers == {"layer 0": 5.0, "embedding": 1.0}
    assert layer_of("decoder.final_layernorm.weight") == "final_layernorm"


def test_of_several_ranks_the_first_value_on_a_loss_token_is_named() -> None:
    clean = batch_of([Row(tokens=[1, 2, 3], trained=1, index=0)])
    off, on = clean.column("old_logprobs").clone(), clean.column("old_logprobs").clone()
    off[0, 0], on[0, 1] = NAN, NAN
    stage = ValueStage()
    for dp_rank, values in enumerate([off, on, off, on]):
        stage.add(view_of(clean.replace(dp_rank=dp_rank, old_logprobs=values)))
    (named,) = stage.bad.values()
    assert (named.on_loss_tokens, named.elsewhere) == (2, 2)
    assert (named.dp_rank, named.row, named.position) == (1, 0, 1)
