"""Conditions that only a replay can show, all in one process, and two on two ranks.

Norms are those of the embedded snapshot, changed; the float64 oracle stands behind what it models.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import mutate
import mutate_files
import pytest
import torch
from many_snapshots import Answer, Ask, is_nan, replay_all

from replay_lib.engine.protocol import Experiment
from replay_lib.engine.reference import reference_step
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import SnapshotError
from replay_lib.microbatch import split_ranks
from replay_lib.snapshot import (
    Content,
    load_batch,
    load_model_fields,
    load_settings,
    open_snapshot,
    read_tensors,
    write_snapshot,
)

pytestmark = pytest.mark.xdist_group("conditions")

NAN = math.nan
#: Float32 summation order alone: parts in 1e7 were seen, 1e-5 of a norm is allowed everywhere.
FLOAT32 = 1e-5
#: What a cause moves the norm by is at least a hundred times that.
MOVED = 1e-3


def changed_contents(c: Content) -> dict[str, Content]:
    """Snapshots to replay by name."""
    nothing = mutate.masked_rows(mutate.masked_rows(c, 0, range(7)), 1, range(7))
    one_rank = mutate.masked_rows(c, 1, range(7))
    mixed = mutate.dense_and_moe_layers(c)
    capped, balanced = mutate.finite_capacity(c), mutate.balanced(c)
    return {
        "A1": mixed,
        "A1-exchanged": mutate.with_routes(mixed, 0, lambda _row, routes: routes.flip(1)),
        "A3": mutate.one_expert_twice(c),
        "A4": mutate.full_recompute(c),
        "A5": mutate.mostly_padding(c),
        "A5-zeros": mutate.mostly_padding(c, fill=(0, 0)),
        "A5-balanced": mutate.mostly_padding(balanced),
        "A7": mutate.another_model(c),
        "A10": mutate.more_or_fewer_routes(c, 1),
        "A15": mutate.tied_scores(c),
        "A18": capped,
        "A18-padding": mutate.mostly_padding(capped),
        "B7-masked": mutate.not_finite(c, "old_logprobs", NAN, masked=True),
        "B7": mutate.not_finite(c, "advantage", NAN, masked=False),
        "C1": balanced,
        "C11": one_rank,
        "C11-max": mutate.with_settings(one_rank, loss_agg_type="token-max"),
        "C11-all": nothing,
        "C13": mutate.tied_embeddings(c),
        "E6": mutate.other_parameters(c),
    }


@pytest.fixture(scope="module")
def directories(content: Content, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping:
    root = tmp_path_factory.mktemp("conditions")
    found = {
        name: write_snapshot(root / name / "iter_0000085", changed).path
        for name, changed in changed_contents(content).items()
    }
    split = Path(shutil.copytree(plain, root / "E1" / "iter_0000085"))
    mutate_files.split_checkpoint(split)
    return {"plain": plain, **found, "E1": split}


@pytest.fixture(scope="module")
def answers(directories: Mapping[str, Path]) -> Mapping[str, Answer]:
    """Every snapshot's baseline; the plain one first, after the others, and with a planted pass."""
    asks = {name: Ask(path) for name, path in directories.items()}
    asks["A15"] = Ask(directories["A15"], ("baseline", "disable-routing-replay"), "bfloat16")
    asks["plain-again"] = Ask(directories["plain"])
    asks["A13"] = Ask(directories["plain"], plant="forward-first")
    return dict(zip(asks, replay_all(list(asks.values())), strict=True))


@pytest.fixture(scope="module")
def two_ranks(directories: Mapping[str, Path]) -> Iterator[tuple[ReplaySession, float]]:
    """A session on two ranks, and the seconds that its start took."""
    started = time.monotonic()
    with ReplaySession.open(directories["C1"], device="cpu", layout="dp=2") as session:
        yield session, time.monotonic() - started


def off(one: Answer, other: Answer) -> float:
    return abs(one.norm / other.norm - 1)


def oracle_norm(path: Path) -> float:
    """The step's norm by the float64 oracle, which takes the routes of all layers."""
    snapshot = open_snapshot(path)
    batches = [load_batch(snapshot, rank) for rank in range(snapshot.parallel.dp)]
    fields, worker = load_model_fields(snapshot), snapshot.worker
    pattern = fields["moe_layer_freq"]
    if isinstance(pattern, list):
        moe = [i for i, is_moe in enumerate(pattern) if is_moe]
        batches = [
            b.replace(routes=tuple(_of_all_layers(r, moe, len(pattern)) for r in b.routes))
            for b in batches
        ]
    partition = split_ranks(
        [b.lengths() for b in batches],
        [b.width for b in batches],
        dynamic=worker.use_dynamic_batch_size,
        micro_batch_size=worker.train_micro_batch_size,
        seq_length=worker.seq_length,
        vpp=snapshot.parallel.vpp,
    )
    step = reference_step(
        read_tensors(path), fields, batches, load_settings(snapshot), partition, replayed=None
    )
    return float(sum(g.double().square().sum() for g in step.gradients.values()) ** 0.5)


def _of_all_layers(routes: torch.Tensor, moe: list[int], layers: int) -> torch.Tensor:
    full = torch.zeros(len(routes), layers, routes.shape[2], dtype=routes.dtype)
    full[:, moe] = routes
    return full


def test_a1_each_router_gets_its_own_layers_rows(answers, directories) -> None:
    assert answers["A1"].norm == pytest.approx(oracle_norm(directories["A1"]), rel=FLOAT32)
    # a control: with the routes of both layers exchanged the norm is elsewhere
    assert off(answers["A1-exchanged"], answers["A1"]) > MOVED


def test_a3_one_expert_twice_is_refused_with_its_place(answers) -> None:
    text = "row 0: token 3, layer 2: found experts [3, 3], expected different experts"
    assert text in answers["A3"].error["message"] and answers["A3"].error["code"] == "batch"


def test_a4_recompute_in_the_run_leaves_the_routes_as_they_are(answers) -> None:
    assert answers["A4"].baseline["digest"] == answers["plain"].baseline["digest"]


def test_a5_padding_moves_nothing_unless_routers_balance(answers) -> None:
    assert off(answers["A5"], answers["plain"]) <= FLOAT32
    # zeros in padding rows are the trainer's placeholder, bit for bit
    assert answers["A5-zeros"].baseline["digest"] == answers["A5"].baseline["digest"]
    assert answers["A5"].baseline["denominator"] == answers["plain"].baseline["denominator"]
    # with auxiliary and z-loss nine padding rows for each row move the norm by 2.4 %
    assert answers["A5-balanced"].norm / answers["C1"].norm == pytest.approx(1.0237, abs=1e-3)


def test_a7_a_second_model_in_the_process_gets_its_own_routes(answers) -> None:
    assert answers["plain-again"].baseline["digest"] == answers["plain"].baseline["digest"]
    assert off(answers["A7"], answers["plain"]) > MOVED


def test_a10_a_route_too_many_is_not_used(answers) -> None:
    assert answers["A10"].baseline["digest"] == answers["plain"].baseline["digest"]


def test_a13_a_forward_only_pass_leaves_no_routes_behind(answers) -> None:
    assert answers["A13"].baseline["digest"] == answers["plain"].baseline["digest"]


def test_a15_routes_stay_pinned_where_all_scores_tie(answers) -> None:
    tied = answers["A15"]  # the engine compares every router's map with what was asked for
    free = tied.outcomes["disable-routing-replay"]
    assert math.isfinite(tied.norm) and not tied.baseline["nonfinite"]
    assert free["digest"] != tied.baseline["digest"] and free["touched"] == {"routing": 1052}


def test_a18_capacity_and_the_tail_move_the_norm(answers) -> None:
    assert off(answers["A18"], answers["plain"]) > MOVED
    # the same real tokens with nine padding rows each: 0.06 % of the norm
    moved = answers["A18-padding"].norm / answers["A18"].norm - 1
    assert moved == pytest.approx(6.5e-4, abs=1e-4)


def test_b7_the_verdict_names_row_and_token(answers, content) -> None:
    for name, masked in (("B7", False), ("B7-masked", True)):
        row, token = mutate.loss_token(content.batches[0], masked=masked)
        told = answers[name].baseline
        assert is_nan(told["grad_norm_preclip"])
        assert told["nonfinite"][0] == (
            f"dLoss/dlogprob of dp rank 0 row {row} token {token} (1 tokens of that rank)"
        )


def test_c1_balancing_losses_give_the_same_gradient_on_two_ranks(answers, two_ranks) -> None:
    both = two_ranks[0].run(Experiment.baseline())
    one = answers["C1"].baseline
    assert off(answers["C1"], answers["plain"]) > MOVED  # they are on
    assert both.grad_norm_preclip == pytest.approx(one["grad_norm_preclip"], rel=FLOAT32)
    for name, norm in one["param_norms"].items():
        # a small parameter's norm is a smaller sum of the same rounding
        assert both.param_norms[name] == pytest.approx(norm, rel=1e-4, abs=1e-6), name


def test_c11_a_rank_without_loss_tokens_adds_nothing(answers) -> None:
    told = answers["C11"].baseline
    assert told["denominator"] == 75 and not told["nonfinite"] and not told["notes"]
    assert (answers["C11-all"].norm, answers["C11-all"].baseline["denominator"]) == (0.0, 0.0)


def test_c11_token_max_of_nothing_is_told(answers) -> None:
    told = answers["C11-max"].baseline
    assert is_nan(told["loss"]) and math.isfinite(told["grad_norm_preclip"])
    assert told["nonfinite"] == []
    first, second = told["notes"]
    assert first.startswith("the loss of dp rank 1, rows [") and "token-max of nothing" in second


def test_c13_a_tied_embedding_counts_once(answers, directories) -> None:
    told = answers["C13"].baseline
    assert answers["C13"].norm == pytest.approx(oracle_norm(directories["C13"]), rel=FLOAT32)
    assert "output_layer.weight" not in told["param_norms"]
    total = math.sqrt(sum(norm**2 for norm in told["param_norms"].values()))
    assert total == pytest.approx(answers["C13"].norm, rel=1e-12)


def test_e1_a_checkpoint_in_parts_is_the_same_model(answers) -> None:
    """Its optimizer entries lie in a file that does not exist: they were never asked for."""
    assert answers["E1"].baseline["digest"] == answers["plain"].baseline["digest"]


def test_e6_all_that_differs_is_named_before_any_norm(answers) -> None:
    error = answers["E6"].error
    assert error["code"] == "weights" and answers["E6"].outcomes == {}
    for text in (
        "missing in the checkpoint: decoder.layers.mlp.router.weight",
        "unknown to the model: decoder.layers.mlp.extra.weight",
        "decoder.final_layernorm.weight has shape [63], the model wants [64]",
    ):
        assert text in error["message"]


def test_e11_every_rank_stops_with_one_error_in_time(copy: Path, two_ranks) -> None:
    start_s = two_ranks[1]  # of a good one: imports, on a machine that may be busy
    mutate_files.corrupt_rank(copy, 0)
    started = time.monotonic()
    with pytest.raises(SnapshotError, match=r"batch_rank0\.pt: found broken bytes"):
        ReplaySession.open(copy, device="cpu", layout="dp=2")
    assert time.monotonic() - started < start_s + 60
