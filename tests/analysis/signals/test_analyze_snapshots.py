"""Whole snapshots: the embedded spikes show their cause; what is missing is told, not made up."""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_lib.analysis.signals import collect
from replay_lib.analysis.signals.analyzing import analyze
from replay_lib.analysis.signals.summary import Signals
from replay_lib.batch import RankBatch
from replay_lib.errors import SpikeReplayError
from replay_lib.snapshot import Content, open_snapshot, read_content, write_snapshot
from replay_lib.snapshot.portable.writing import export_snapshot

ROOT = Path(__file__).parents[3]
CASES = ROOT / "spike_cases"
PLAIN = CASES / "axrl-plain-step85/snapshot/iter_0000085"
MERGED = ROOT / "tests/data/snap/merged/iter_0000085"

#: Signs that the known cause of each spike (docs/zoo.md) has to show and an ordinary step does not.
CAUSES = {
    "zoo-misaligned-rows": {"ratio_outliers", "stale_rollouts", "sign_imbalance"},
    "zoo-natural": {"ratio_outliers", "stale_rollouts"},
    "zoo-poisoned-row": {"loud_rows", "improbable_rows"},
    "zoo-prompt-routes-outage": {"ratio_outliers", "stale_rollouts", "sign_imbalance"},
    "zoo-run-on-rows": {"length_outliers", "ratio_outliers", "stale_rollouts", "sign_imbalance"},
}


def strict(signals: Signals) -> Any:
    """As a ledger keeps it: JSON without NaN that reads back as the same."""
    text = json.dumps(signals.model_dump(mode="json", by_alias=True), allow_nan=False)
    assert Signals.model_validate_json(text) == signals
    return json.loads(text)


@pytest.fixture(scope="module")
def content() -> Content:
    return read_content(open_snapshot(PLAIN))


@pytest.fixture
def analyzed(tmp_path: Path) -> Callable[[Content], Signals]:
    def write(content: Content) -> Signals:
        found = analyze(write_snapshot(tmp_path / "written" / "iter_0000085", content).path)
        strict(found)
        return found

    return write


def changed(content: Content, change: Callable[[RankBatch], dict[str, Any]]) -> Content:
    """Other columns on every rank."""
    batches = tuple(batch.replace(**change(batch)) for batch in content.batches)
    return dataclasses.replace(content, batches=batches)


@pytest.mark.parametrize("name", sorted(CAUSES))
def test_the_known_cause_of_a_spike_shows(name: str) -> None:
    found = analyze(CASES / name)
    strict(found)
    for sign in found.signs:
        if sign.name in CAUSES[name]:
            assert sign.present, sign
            over = sign.quiet is not None and sign.quiet > sign.bound
            assert not over or sign.direction == "below", f"{sign} is there on the quiet step too"
    assert found.case == name and found.norms.is_spike


def test_blame_falls_on_the_poisoned_row() -> None:
    found = analyze(CASES / "zoo-poisoned-row")
    loud, improbable = found.sign("loud_rows"), found.sign("improbable_rows")
    assert loud.rows_total == improbable.rows_total == 1
    assert loud.rows[0].row == improbable.rows[0].row
    assert found.outliers[0].row == loud.rows[0].row


def test_the_snapshot_of_the_trainer(content: Content) -> None:
    found = analyze(PLAIN)
    strict(found)
    assert (found.dp, found.lengths.padding_rows, found.rows) == (2, 1, 13)
    assert found.loss_tokens == sum(int(b.loss_mask.sum()) for b in content.batches)
    assert found.dtypes["old_logprobs"] == "float32" and found.dtypes["labels"] == "int64"
    positive = sum(float(b.advantage.double().clamp(min=0).sum()) for b in content.batches)
    assert found.advantages.total.positive == pytest.approx(positive, rel=1e-12)
    logs = torch.cat(
        [
            (b.old_logprobs.double() - b.rollout_logprobs.double())[b.loss_mask]
            for b in content.batches
        ]  # type: ignore[union-attr]
    )
    ratio = found.ratios[0]
    assert ratio.name == "old/rollout" and ratio.tokens == len(logs)
    assert ratio.k1 == pytest.approx(-float(logs.mean()))
    assert ratio.k3 == pytest.approx(float((logs.exp() - 1 - logs).mean()))
    assert ratio.ratio.maximum == pytest.approx(float(logs.exp().max()))
    assert found.routing.payloads[0] == found.routing.payloads_recorded_rank0
    assert found.grad_info is not None and [r.rank for r in found.grad_info.ranks] == [0, 1]
    assert found.norms.history == () and "norm history" in found.absent


def test_merged_rows(content: Content) -> None:
    found = analyze(MERGED)
    strict(found)
    assert found.rows == 3 and found.loss_tokens == 69
    assert found.routing.rows_without == 0
    assert sum(found.routing.per_layer[0].load) == found.routing.tokens * 2


def test_a_portable_snapshot_gives_the_same(tmp_path: Path) -> None:
    export_snapshot(open_snapshot(PLAIN), tmp_path / "portable")
    apart = {"snapshot", "seconds"}
    exported = analyze(tmp_path / "portable").model_dump(exclude=apart)
    assert exported == analyze(PLAIN).model_dump(exclude=apart)


def test_padding_rows_change_nothing_but_their_count(content: Content, analyzed: Any) -> None:
    def padded(batch: RankBatch) -> dict[str, Any]:
        chosen = batch.select([*range(batch.rows), 0])
        columns = {name: getattr(chosen, name).clone() for name in ("index", "loss_mask", "reward")}
        columns["index"][-1], columns["loss_mask"][-1], columns["reward"][-1] = -1, False, 1e9
        return {
            name: columns.get(name, getattr(chosen, name))
            for name in (f.name for f in dataclasses.fields(batch))
            if name != "dp_rank"
        }

    found = analyzed(changed(content, padded))
    apart = {"snapshot", "seconds", "lengths", "routing"}
    whole = analyze(PLAIN)
    assert found.model_dump(exclude=apart) == whole.model_dump(exclude=apart)
    assert found.lengths.padding_rows == whole.lengths.padding_rows + 2
    assert [x.load for x in found.routing.per_layer] == [x.load for x in whole.routing.per_layer]


def test_without_rollout_log_probabilities(content: Content, analyzed: Any) -> None:
    found = analyzed(changed(content, lambda _: {"rollout_logprobs": None}))
    assert [ratio.name for ratio in found.ratios] == ["old/ref"]
    assert found.absent["ratio old/rollout"] == "no column rollout_logprobs"
    sign = found.sign("stale_rollouts")
    assert (sign.present, sign.found) == (None, "no column rollout_logprobs")


def test_without_optional_columns(content: Content, analyzed: Any) -> None:
    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "turn_index", "turn_reward")
    names += ("trajectory_id", "reward", "reward_baseline", "position_ids")
    found = analyzed(changed(content, lambda _: dict.fromkeys(names)))
    assert {"turns", "rewards", "trajectories"} <= set(found.absent)
    assert found.ratios == () and found.rewards.reward is None and found.lengths.turns is None
    assert found.sign("improbable_rows").found == "no column old_logprobs"
    assert all(one.trajectory_id is None for one in found.outliers)


def test_without_routes(content: Content, analyzed: Any) -> None:
    found = analyzed(changed(content, lambda b: {"routes": (None,) * b.rows}))
    assert found.absent["routes"] == "no row has routes"
    assert found.routing.per_layer == () and found.routing.payloads == (0, 0)
    assert found.sign("rows_without_routes").present is None


def test_a_row_without_routes_is_named(content: Content, analyzed: Any) -> None:
    found = analyzed(changed(content, lambda b: {"routes": (*b.routes[:-1], None)}))
    sign = found.sign("rows_without_routes")
    assert sign.present and sign.rows_total == found.routing.rows_without > 0


def test_values_that_are_no_numbers_spoil_no_figure(content: Content, analyzed: Any) -> None:
    row, token = (int(i) for i in content.batches[0].loss_mask.nonzero()[0])

    def spoiled(batch: RankBatch) -> dict[str, Any]:
        if batch.dp_rank:
            return {}
        names = ("advantage", "old_logprobs", "rollout_logprobs", "ref_logprobs")
        columns = {name: batch.column(name).clone() for name in names}
        for value, name in zip(
            (float("nan"), float("-inf"), float("inf"), 0.0), names, strict=True
        ):
            columns[name][row, token] = value
        return columns

    found = analyzed(changed(content, spoiled))
    assert [(n.column, n.dp_rank, n.row, n.position) for n in found.nonfinite] == [
        (name, 0, row, token) for name in ("advantage", "rollout_logprobs", "old_logprobs")
    ]
    assert found.sign("non_finite").figure == 3.0
    whole = analyze(PLAIN)
    assert found.ratios[0].tokens == whole.ratios[0].tokens - 1
    assert found.advantages.values.count == whole.advantages.values.count - 1
    assert found.advantages.values.nonfinite == 1


def test_a_batch_that_trains_nothing(content: Content, analyzed: Any) -> None:
    found = analyzed(changed(content, lambda b: {"loss_mask": torch.zeros_like(b.loss_mask)}))
    assert found.loss_tokens == 0 and "loss tokens" in found.absent
    assert found.lengths.rows_without_loss == 13
    unknown = {sign.name for sign in found.signs if sign.present is None}
    assert {"ratio_outliers", "sign_imbalance", "loud_rows", "length_outliers"} <= unknown
    assert not any(sign.present for sign in found.signs)


def test_a_norm_that_is_no_number_is_told(content: Content, analyzed: Any) -> None:
    spoiled = dataclasses.replace(content, grad_norm_preclip=float("nan"), grad_norm_median=None)
    found = analyzed(spoiled)
    assert found.norms.grad_norm_preclip is found.norms.ratio is found.norms.threshold is None
    assert found.absent["norm"] == "recorded as nan"
    assert found.absent["median norm"] == "not recorded"


@pytest.mark.parametrize("median", [5e-324, 1e-308, 1.7e308])
def test_figures_beyond_float64_are_not_known(
    content: Content, analyzed: Any, median: float
) -> None:
    norms = analyzed(dataclasses.replace(content, grad_norm_median=median)).norms
    known = (norms.ratio, norms.threshold, norms.target)
    assert known.count(None) == (2 if median > 1 else 1) and norms.is_spike is (median < 1)


def test_a_broken_file_is_named(tmp_path: Path, content: Content) -> None:
    snapshot = write_snapshot(tmp_path / "iter_0000085", content)
    batch = snapshot.files_of(1).batch
    batch.write_bytes(batch.read_bytes().replace(b"advantage", b"advantagf"))
    with pytest.raises(SpikeReplayError, match=r"batch_rank1\.pt"):
        analyze(snapshot.path)


def test_one_rank_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    load = collect.load_columns

    def watched(*arguments: Any) -> Any:
        assert [ref for ref in alive if ref() is not None] == []
        batch, paths = load(*arguments)
        alive.append(weakref.ref(batch.input_ids))
        return batch, paths

    monkeypatch.setattr(collect, "load_columns", watched)
    payload = collect.load_payload

    def freed(*arguments: Any) -> Any:
        assert alive[-1]() is None, "the columns are still held when the routes are read"
        return payload(*arguments)

    monkeypatch.setattr(collect, "load_payload", freed)
    analyze(PLAIN)
    assert len(alive) == 2
