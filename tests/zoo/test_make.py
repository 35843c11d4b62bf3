"""From a seed to a recorded snapshot and back: the whole way, at a scale that takes seconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_zoo import TINY

from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import EngineError, UsageError
from replay_lib.snapshot import load_settings, open_snapshot
from replay_lib.zoo import make, make_spike, make_spikes
from replay_lib.zoo.losses import ORDINARY, UNCLIPPED
from replay_lib.zoo.recipe import Grpo, Recipe, find_recipe

pytestmark = pytest.mark.xdist_group("zoo-tiny")


@dataclass
class Made:
    home: Path
    reports: dict[str, dict]
    told: list[str]

    def snapshot(self, kind):
        return self.home / kind / self.reports[kind]["snapshot"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three kinds of one seed, in one process."""
    home = tmp_path_factory.mktemp("zoo")
    told = []
    kinds = {k: home / k for k in ("natural", "poisoned-row", "stale-rollouts")}
    reports = make_spikes(kinds, seed=3, cache=home / "cache", recipe=TINY, tell=told.append)
    return Made(home, {r["kind"]: r for r in reports}, told)


def test_a_recorded_spike_replays_to_its_norm(made):
    report = made.reports["poisoned-row"]
    assert (report["event"], report["snapshot"]) == ("spike", "spike_snapshots/iter_0000012")
    snapshot = open_snapshot(made.snapshot("poisoned-row"))
    assert snapshot.grad_norm_preclip == report["norm"]
    assert snapshot.spike_ratio_recorded == report["ratio"] > 2.0
    with ReplaySession.open(snapshot.path, device="cpu") as session:
        assert session.info.fidelity == "full"
        outcome = session.run(Experiment.baseline())
    # the same pieces in the same order: bit-equal here, parts in 1e7 with other threads
    assert abs(outcome.grad_norm_preclip / report["norm"] - 1) <= 1e-5


def test_the_median_is_of_the_steps_before(made):
    norms = made.reports["poisoned-row"]["norms"]
    assert len(norms) == TINY.grpo.steps
    assert made.reports["poisoned-row"]["median"] == sorted(norms)[len(norms) // 2]


def test_a_quiet_step_lies_beside(made):
    for report in made.reports.values():
        quiet = open_snapshot(made.home / report["kind"] / report["quiet"])
        assert abs(quiet.spike_ratio_recorded - 1) <= 0.1


def test_a_wrong_input_that_is_no_spike_is_written_all_the_same(made):
    report = made.reports["stale-rollouts"]
    assert report["event"] == "ordinary" and report["snapshot"].startswith("other_snapshots/")
    assert load_settings(open_snapshot(made.snapshot("stale-rollouts"))) == ORDINARY


def test_the_natural_kind_goes_on_training_without_a_clip(made):
    report = made.reports["natural"]
    assert len(report["norms"]) > TINY.grpo.steps or report["event"] == "spike"
    if report["snapshot"] is not None:
        assert load_settings(open_snapshot(made.snapshot("natural"))) == UNCLIPPED


def test_the_report_lies_beside_the_snapshots(made):
    for kind, report in made.reports.items():
        assert json.loads((made.home / kind / "zoo.json").read_text()) == report


def test_the_same_seed_gives_the_same_norm_and_another_seed_another(made, tmp_path):
    report = made.reports["poisoned-row"]
    fresh = make_spike("poisoned-row", seed=3, out=tmp_path / "a", cache=tmp_path, recipe=TINY)
    other = make_spike("poisoned-row", seed=4, out=tmp_path / "b", cache=tmp_path, recipe=TINY)
    assert fresh == report  # alone, from an empty cache, bit for bit
    assert other["norm"] != report["norm"]


@pytest.mark.slow
def test_a_base_run_is_made_once(made, tmp_path):
    told = []
    cache = made.home / "cache"
    report = make_spike(
        "poisoned-row", seed=3, out=tmp_path / "x", cache=cache, recipe=TINY, tell=told.append
    )
    assert report == made.reports["poisoned-row"]
    assert any("warm-up" in line for line in made.told)
    assert not any("warm-up" in line for line in told)


def test_recipes_and_seeds_and_versions_have_caches_of_their_own():
    keys = {
        Recipe().key(1, {}),
        Recipe().key(2, {}),
        Recipe().key(1, {"torch": "0"}),
        Recipe(grpo=Grpo(steps=49)).key(1, {}),
    }
    assert len(keys) == 4 and Recipe().key(1, {}) == Recipe().key(1, {})


def test_a_directory_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(UsageError) as error:
        make_spike("poisoned-row", seed=1, out=tmp_path)
    assert (
        str(error.value) == f"{tmp_path}: found something there already, expected a new directory"
    )


def test_what_the_process_says_last_is_told_where_it_dies(tmp_path, monkeypatch):
    monkeypatch.setattr(make, "WORKER", "replay_lib.zoo.no_such_worker")
    with pytest.raises(EngineError) as error:
        make_spike("poisoned-row", seed=1, out=tmp_path / "x", cache=tmp_path, recipe=TINY)
    first, last = str(error.value).split("End of what it said:")
    assert first == "the zoo's process ended with status 1. "
    assert "No module named replay_lib.zoo.no_such_worker" in last


def test_a_run_in_bfloat16_replays_to_its_norm(tmp_path):
    recipe = TINY.model_copy(update={"precision": "bfloat16"})
    report = make_spike("poisoned-row", seed=3, out=tmp_path / "x", cache=tmp_path, recipe=recipe)
    snapshot = open_snapshot(tmp_path / "x" / report["snapshot"])
    with ReplaySession.open(snapshot.path, device="cpu") as session:
        assert session.info.dtype == "bfloat16"
        outcome = session.run(Experiment.baseline())
    # the same pieces in the same order; sums of bfloat16 gradients move by 3e-3 elsewhere
    assert abs(outcome.grad_norm_preclip / report["norm"] - 1) <= 3e-3


def test_rollouts_older_than_what_is_kept_are_refused(tmp_path):
    short = TINY.model_copy(update={"grpo": TINY.grpo.model_copy(update={"kept": 1})})
    with pytest.raises(UsageError, match="keeps the weights of 1 steps"):
        make_spike("natural", seed=3, out=tmp_path / "x", cache=tmp_path, recipe=short)


def test_sizes_devices_and_precisions_are_known_by_name():
    large = find_recipe("half-billion", precision="bfloat16")
    assert (large.device, large.precision, large.grpo.kept) == ("cuda", "bfloat16", 1)
    assert find_recipe("tiny") == Recipe()
    for wrong in ({"size": "huge"}, {"size": "tiny", "device": "tpu"}):
        with pytest.raises(UsageError, match="expected one of"):
            find_recipe(**wrong)
