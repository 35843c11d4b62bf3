"""Saved routes against the model's own: by hand, against the oracle, and planted in a snapshot."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from replay_lib import layout
from replay_lib.analysis.signals.analyzing import analyze
from replay_lib.analysis.signals.model import MismatchStage, agreement
from replay_lib.cli.signals_view import print_signals
from replay_lib.engine import route_signals
from replay_lib.engine.protocol import Experiment, LayerRoutes, RouteCounts
from replay_lib.engine.reference import _saved_experts
from replay_lib.engine.reference_model import ReferenceModel, logits, read_model, route
from replay_lib.engine.route_signals import count_routes
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import UsageError
from replay_lib.snapshot import (
    load_batch,
    load_model_fields,
    open_snapshot,
    read_content,
    read_tensors,
    write_snapshot,
)

pytestmark = pytest.mark.xdist_group("engine-plain")

LOGITS = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]])
OWN = torch.tensor([[0, 1], [3, 2], [0, 1]])


def test_counts_by_hand() -> None:
    saved = torch.tensor([[1, 0], [3, 0], [2, 3]])  # swapped; one of two; none
    found = count_routes(LOGITS, OWN, saved)
    assert (found.tokens, found.ordered, found.slots_in_set, found.disjoint) == (3, 0, 3, 1)
    assert found.gap_sum == 0.0 + (2.5 - 1.5) + (2.5 - 0.5)
    assert found.gap_max == 2.0
    layer = LayerRoutes(layer=0, topk=2, prompt=found, response=RouteCounts())
    shares = agreement(layer).every
    assert (shares.ordered, shares.overlap, shares.disjoint) == (0.0, 3 / 6, 1 / 3)
    assert shares.logit_gap == 1.0
    assert agreement(layer).response.overlap is None


def test_the_same_routes_agree_wholly() -> None:
    found = count_routes(LOGITS, OWN, OWN)
    assert (found.ordered, found.slots_in_set, found.disjoint, found.gap_sum) == (3, 6, 0, 0.0)


def test_counts_add_up() -> None:
    saved = torch.tensor([[1, 0], [3, 0], [2, 3]])
    whole = count_routes(LOGITS, OWN, saved)
    parts = [count_routes(LOGITS[s], OWN[s], saved[s]) for s in (slice(1), slice(1, 3))]
    assert parts[0].plus(parts[1]) == whole
    assert count_routes(LOGITS[:0], OWN[:0], saved[:0]).plus(whole) == whole


def test_mismatches_are_normalised_by_the_second() -> None:
    stage = MismatchStage("replayed", "own", "loss")
    stage.add(torch.tensor([-1.0, -4.0]), torch.tensor([-2.0, -2.0]))
    stage.add(torch.tensor([-1.0, float("nan")]), torch.tensor([-1.0, -9.0]))
    found = stage.result()
    assert (found.count, found.mean_absolute, found.largest) == (3, 1.0, 2.0)
    assert found.normalised == pytest.approx(1.0 / (5 / 3))
    assert found.k2 == pytest.approx((1 + 4 + 0) / 2 / 3)


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    info = SimpleNamespace(layout={"tp": 2, "pp": 1, "cp": 1, "ep": 1, "dp": 1})
    session = ReplaySession(None, info, 1.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="found a session on 2 ranks, expected one rank"):
        session.route_signals(tmp_path)


def oracle(
    path: Path, dp_rank: int
) -> Iterator[tuple[int, Tensor, Tensor, list[Tensor], Tensor, ReferenceModel]]:
    """Row by row in float64: saved experts, their positions, router logits, log-probabilities."""
    snapshot = open_snapshot(path)
    model, batch = read_model(load_model_fields(snapshot)), load_batch(snapshot, dp_rank)
    weights = {k: v.double() for k, v in read_tensors(path).items()}
    for row, length in enumerate(batch.lengths()):
        one = batch.select([row])
        ids = one.input_ids[:, :length]
        forced = torch.ones(1, length, len(model.moe_layers), dtype=torch.bool)
        saved = _saved_experts(model, one, one.attention_mask[:, :, None] & True)[:, :length]
        routers: list[Tensor] = []
        found = [
            logits(model, weights, ids, saved, forced, routers=routers),
            logits(model, weights, ids, saved, ~forced),
        ]
        picked = torch.stack([x.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]) for x in found])
        yield row, saved[0], one.loss_mask[0, :length], routers, picked[..., 0], model


def test_it_is_what_the_oracle_has_and_leaves_no_trace(
    plain: ReplaySession, plain_path: Path, tmp_path: Path
) -> None:
    before = plain.run(Experiment.baseline()).digest
    layers = plain.route_signals(tmp_path)
    assert plain.run(Experiment.baseline()).digest == before

    counts: dict[tuple[int, str], RouteCounts] = {}
    snapshot = open_snapshot(plain_path)
    for dp_rank in range(snapshot.parallel.dp):
        batch = load_batch(snapshot, dp_rank)
        told = load_file(tmp_path / layout.route_signals_file(dp_rank))
        for row, saved, loss, routers, log_probs, model in oracle(plain_path, dp_rank):
            if int(batch.index[row]) < 0:
                continue
            for name, expected in zip(("replayed", "own"), log_probs, strict=True):
                # float32 along four layers; another kind of routes is off by 1e-2 and more
                found = told[name][row, : len(expected)]
                assert torch.allclose(found.double(), expected, rtol=0, atol=2e-5), (name, row)
            other = ~loss[:-1]
            assert torch.equal(told["other"][row, : len(other)], other)
            assert not bool(told["other"][row, len(other) :].any())
            for layer, router in enumerate(routers):
                at = len(saved) - 1  # the last token has no saved route
                nowhere = torch.zeros(at, dtype=torch.bool)
                own, _ = route(model, router[0, :at], saved[:at, layer], nowhere)
                for part, mask in (("prompt", ~loss[:at]), ("response", loss[:at])):
                    one = count_routes(router[0, :at][mask], own[mask], saved[:at, layer][mask])
                    before_it = counts.get((layer, part), RouteCounts())
                    counts[layer, part] = before_it.plus(one)
    assert [layer.layer for layer in layers] == [0, 1, 2, 3]
    for layer in layers:
        for part in ("prompt", "response"):
            found_counts, expected_counts = getattr(layer, part), counts[layer.layer, part]
            sums = {"gap_sum", "gap_max"}
            assert found_counts.model_dump(exclude=sums) == expected_counts.model_dump(exclude=sums)
            assert found_counts.gap_sum == pytest.approx(expected_counts.gap_sum, abs=1e-3)
            assert found_counts.gap_max == pytest.approx(expected_counts.gap_max, abs=1e-4)


def test_a_planted_permutation_is_an_order_and_no_other_set(
    plain_path: Path, tmp_path: Path
) -> None:
    """Routes are the model's own, in the reverse order on responses: same set, another order."""
    content = read_content(open_snapshot(plain_path))
    model = read_model(load_model_fields(open_snapshot(plain_path)))
    weights = {k: v.double() for k, v in content.tensors.items()}
    batches = []
    for batch in content.batches:
        routes = []
        for row, length in enumerate(batch.lengths()):
            routers: list[Tensor] = []
            nothing = torch.zeros(1, length, model.layers, model.topk, dtype=torch.int64)
            forced = torch.zeros(1, length, model.layers, dtype=torch.bool)
            ids = batch.input_ids[row : row + 1, :length]
            logits(model, weights, ids, nothing, forced, routers=routers)
            own = torch.stack(
                [route(model, r[0], nothing[0, :, 0], forced[0, :, 0])[0] for r in routers], dim=1
            )
            loss = batch.loss_mask[row, :length, None, None]
            routes.append(torch.where(loss, own.flip(-1), own)[:-1].to(torch.int16))
        batches.append(batch.replace(routes=tuple(routes)))
    planted = dataclasses.replace(content, batches=tuple(batches))
    path = write_snapshot(tmp_path / plain_path.name, planted).path

    signals = analyze(path, session=True, device="cpu")
    assert signals.session is not None and signals.session.fidelity == "folded"
    for layer in signals.session.layers:
        assert (layer.prompt.ordered, layer.prompt.overlap) == (1.0, 1.0)
        assert (layer.response.ordered, layer.response.overlap) == (0.0, 1.0)
        assert layer.every.disjoint == 0.0 and layer.every.logit_gap == pytest.approx(0, abs=1e-5)
    apart = {(m.first, m.second, m.tokens): m for m in signals.session.mismatches}
    same = apart["replayed", "own", "loss"]
    assert same.mean_absolute == pytest.approx(0, abs=1e-5)
    assert same.count == signals.loss_tokens
    sign = signals.sign("route_disagreement")
    assert (sign.present, sign.figure) == (False, 1.0)
    assert [ratio.name for ratio in signals.session.ratios] == ["current/old", "current/rollout"]

    console = Console(file=io.StringIO(), width=160)
    print_signals(signals, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "saved routes against the model's own" in text and "normalised" in text


@pytest.mark.parametrize(("routed", "names"), [(True, {"own", "replayed"}), (False, {"own"})])
def test_where_nothing_is_forced_the_run_routed_itself(
    monkeypatch: pytest.MonkeyPatch, routed: bool, names: set[str]
) -> None:
    """A micro-batch without loss tokens in a run that forces loss tokens alone."""
    calls: list[object] = []

    def forward(_model: object, _micro: object, routes: object, _settings: object) -> object:
        calls.append(routes)
        return SimpleNamespace(log_prob=torch.ones(1, 2))

    monkeypatch.setattr(route_signals, "forward", forward)
    monkeypatch.setattr(route_signals, "packed_routes", lambda *_: None)
    rank = SimpleNamespace(routes_BTLK=torch.zeros(1) if routed else None, forced_BTL=None)
    loaded = SimpleNamespace(model=None, settings=None)
    found = route_signals._one(loaded, rank, None, None)  # type: ignore[arg-type]
    assert set(found) == names and all(bool(x.all()) for x in found.values())
    assert calls == [None]
