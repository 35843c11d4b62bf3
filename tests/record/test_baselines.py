"""Baselines of figures: what is kept, what counts as a change, what is dropped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from make_results import BASELINE, KEPT, outcome, result
from syrupy.assertion import SnapshotAssertion

from replay_lib.case import Case
from replay_lib.errors import CaseError
from replay_lib.record.baseline_update import Updated, orphans, update
from replay_lib.record.baselines import Figures, file_of, read_document, rendered
from replay_lib.record.drift import (
    allowed,
    compared,
    drift_of,
    environment_of,
    figures_of,
    signed_difference,
)
from replay_lib.record.environment import Environment
from replay_lib.record.result import Result, SideEffect
from replay_lib.record.summary import summary_lines
from replay_lib.rule import Verdict

METHODS = {"halve", "cap"}
CPU = {"torch": "2.13.0", "megatron-core": "0.16.1"}
FILE = "cpu-float32-torch2.13.0-megatron0.16.1.json"


@pytest.fixture
def case(tmp_path: Path) -> Case:
    directory = tmp_path / "tiny-step85"
    (directory / "iter_0000085").mkdir(parents=True)
    (directory / "iter_0000085" / "batch").write_text("one")
    (directory / "case.yaml").write_text("schema: 1\nsnapshot: iter_0000085\n")
    return Case.load(directory)


def one(name: str = "halve", norm: float = 2.5, **fields: Any) -> Result:
    made = BASELINE if name == "baseline" else outcome(name, norm, retained=KEPT)
    given = {"versions": CPU, "timestamp": "2026-03-01T00:00:00+00:00"}
    return result(made).model_copy(update=given | fields)


def written(case: Case, *results: Result) -> Updated:
    return update([case], results, lambda _: METHODS)


def document(case: Case) -> dict[str, Any]:
    assert case.file is not None
    read: dict[str, Any] = json.loads((case.file.parent / "baselines" / FILE).read_text())
    return read


def test_a_document_is_one_line_a_method(case: Case, snapshot: SnapshotAssertion) -> None:
    effect = SideEffect(quiet_norm=2.1, reason="", verdict=Verdict.NOT_A_SPIKE)
    told = written(case, one("baseline"), one("halve", 2.5, side_effect=effect), one("cap", 2.0))
    (file,) = told.written
    assert file.name == FILE
    digest = case.digest()
    assert file.read_text().replace(digest, "<digest>") == snapshot
    read = read_document(file)
    assert read is not None and rendered(read) == file.read_text()
    assert [line.split(": ", 1)[1].split(" ")[0] for line in told.lines] == ["wrote", "3"]


def test_the_environment_of_a_gpu_is_its_name_and_the_whole_version() -> None:
    gpu = Environment.of("cuda (NVIDIA H200)", "bfloat16", {"torch": "2.11.0+cu130"})
    assert gpu.slug == "cuda-nvidia-h200-bfloat16-torch2.11.0-cu130-megatronunknown"
    cpu = Environment.of("cpu", "float32", {"torch": "2.13.0+cpu"})
    assert cpu == Environment.of("cpu", "float32", {"torch": "2.13.0"})


REDUCED = {"fidelity": "reduced", "dp_ranks": (0, 2), "dp_recorded": 4}


def test_a_part_of_the_ranks_has_baselines_of_its_own(case: Case) -> None:
    """And no expectation: case.yaml states what all ranks give."""
    part = [one("baseline", **REDUCED), one("halve", 9.0, verdict=Verdict.FAIL, **REDUCED)]
    told = written(case, one("halve", 2.5), *part)
    assert sorted(file.name for file in told.written) == [
        FILE.replace(".json", "-ranks0.2-of-4.json"),
        FILE,
    ]
    assert document(case)["methods"].keys() == {"halve"}  # of all ranks, as it was
    assert case.file is not None
    file = file_of(case.file, environment_of(part[1]))
    own, digest = read_document(file), case.digest()
    assert own is not None and own.methods["halve"].norm == 9.0
    assert own.environment.told().endswith(", data-parallel ranks 0,2 of 4 alone")
    assert not part[1].red  # nothing says what it should be
    assert not any("not listed in case.yaml" in line for line in summary_lines(part))
    assert not compared(part[1], own, digest).red
    drifted = compared(one("halve", 9.1, verdict=Verdict.FAIL, **REDUCED), own, digest)
    assert drifted.red and "its baseline 9 (+0.011" in drifted.explain()
    better = compared(one("halve", 9.0, verdict=Verdict.PARTIAL, **REDUCED), own, digest)
    assert (better.comparison, better.told_wanted) == ("better", "fail")
    worse = compared(one("halve", 9.0, verdict=Verdict.DEGENERATE, **REDUCED), own, digest)
    assert worse.red == (worse.comparison == "worse")
    other = one("halve", 2.5, **REDUCED | {"dp_ranks": (1,)})
    assert environment_of(other) != environment_of(part[1])


def test_a_part_of_the_ranks_that_does_not_reproduce_the_step_is_red(case: Case) -> None:
    off = one("baseline", verdict=Verdict.NOT_REPRODUCED, **REDUCED)
    assert off.red and written(case, off).written == ()


def test_what_is_the_same_up_to_noise_stays_as_it_is(case: Case) -> None:
    written(case, one("halve", 2.5))
    before = document(case)
    assert written(case, one("halve", 2.5 * (1 + 1.9e-5))).written == ()
    assert document(case) == before
    told = written(case, one("halve", 2.5 * (1 - 2.1e-5), timestamp="2026-04-01T00:00:00"))
    assert told.lines[1:] == ("tiny-step85: halve: norm 2.5 -> 2.499947 (-2.1e-05)",)
    entry = document(case)["methods"]["halve"]
    assert (entry["since"], entry["history"][0]["until"]) == ("2026-04-01", "2026-04-01")
    assert entry["history"][0]["norm"] == 2.5


def test_figures_that_an_older_document_lacks_are_added_without_a_history(case: Case) -> None:
    written(case, one("halve"), one("cap", 2.0))
    file, whole = file_of(case.file, environment_of(one())), document(case)  # type: ignore[arg-type]
    older = document(case)
    for entry in older["methods"].values():
        for name in ("kept_tokens", "kept_advantage", "kept_dloss_dlogprob"):
            del entry[name]
    file.write_text(json.dumps(older))
    read = read_document(file)
    assert compared(one(), read, case.digest()).baseline.state == "kept"  # type: ignore[union-attr]
    told = written(case, one("halve", timestamp="2026-04-01T00:00:00"))
    assert told.lines[1:] == ("tiny-step85: 1 with figures that were not kept before: halve",)
    older["methods"]["halve"] = whole["methods"]["halve"]
    assert document(case) == older  # since is what it was, and there is no history


def test_history_keeps_everything(case: Case) -> None:
    for norm in (2.5, 2.6, 2.7):
        written(case, one("halve", norm))
    past = document(case)["methods"]["halve"]["history"]
    assert [entry["norm"] for entry in past] == [2.5, 2.6]


def test_a_verdict_that_changed_alone_is_written_too(case: Case) -> None:
    written(case, one())
    told = written(case, one(verdict=Verdict.INCONCLUSIVE, expected=Verdict.INCONCLUSIVE))
    assert told.lines[1:] == ("tiny-step85: halve: verdict pass -> inconclusive",)


def test_part_of_a_run_updates_its_part_and_a_full_one_drops_the_rest(case: Case) -> None:
    update([case], [one("halve"), one("old", 2.0)], lambda _: {"halve", "old", "cap"})
    assert set(document(case)["methods"]) == {"halve", "old"}
    assert orphans([case], [one("halve")], lambda _: METHODS) == []  # cap did not run
    full = [one("halve"), one("cap", 2.0)]
    (told,) = orphans([case], full, lambda _: METHODS)
    assert told.endswith(f"{FILE}: old: a baseline without a method: neither registered nor in "
                         "case.yaml")  # fmt: skip
    written(case, one("halve", 2.6))
    assert set(document(case)["methods"]) == {"halve", "old"}
    assert "tiny-step85: old: removed, there is no such method" in written(case, *full).lines
    assert set(document(case)["methods"]) == METHODS


@pytest.mark.parametrize(
    "bad",
    [
        one("halve", 9.0),  # fails, and has to pass
        one("halve", against="cap"),
        one("unknown"),
        one(side_effect=SideEffect(reason="it cannot")),
    ],
    ids=["red", "against another", "unknown method", "quiet fault"],
)
def test_what_makes_no_baseline(case: Case, bad: Result) -> None:
    assert written(case, bad).written == ()
    assert written(case, one("cap", 2.0), bad).written != ()
    assert set(document(case)["methods"]) == {"cap"}


def test_files_of_another_case_start_anew(case: Case) -> None:
    written(case, one("halve"), one("cap", 2.0))
    old = case.digest()
    (case.snapshot / "batch").write_text("another")
    digest = case.digest()
    assert digest != old
    read = read_document(file_of(case.file, environment_of(one())))  # type: ignore[arg-type]
    assert compared(one(), read, digest).baseline.state == "another case"  # type: ignore[union-attr]
    (told,) = orphans([case], [one("halve"), one("cap", 2.0)], lambda _: METHODS)
    assert told.endswith("baselines of other files than the case has now")
    written(case, one("halve"))
    assert document(case)["case_digest"] == digest
    assert set(document(case)["methods"]) == {"halve"}  # cap's was of the other files
    (past,) = document(case)["methods"]["halve"]["history"]
    assert past["case_digest"] == old


def test_the_digest_of_a_case_is_that_of_its_files_wherever_they_are(case: Case) -> None:
    before = case.digest()
    (case.snapshot / "batch").rename(case.snapshot / "batch2")
    renamed = case.digest()
    (case.snapshot / "batch2").rename(case.snapshot / "batch")
    sealed = case.model_copy(update={"sha256": {"iter_0000085/batch": "0" * 64}})
    assert len({before, renamed, sealed.digest()}) == 3  # what is stated is believed
    moved = case.snapshot.parent.rename(case.snapshot.parents[1] / "moved")
    assert Case.load(moved).digest() == before


FIGURES = Figures(norm=2.0, carried=3.0, quiet=1.0, kept_advantage=0.75, verdict=Verdict.PASS)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"norm": 2.0 + 1e-5}, None),
        ({"norm": 1.9}, "the norm is 1.9, its baseline 2 (-0.05, 1e-05 is R)"),
        ({"norm": math.nan}, "the norm is nan, its baseline 2 (not comparable)"),
        ({"carried": 3.3}, "the norm with carried old log-probabilities is 3.3, *(+0.1, 1e-05*"),
        ({"quiet": None}, "the quiet control's norm is not measured, its baseline is 1"),
        ({"quiet_carried": 7.0}, None),  # nothing was kept
        (
            {"kept_advantage": 0.78},
            "the share of |advantage x policy weight| kept is 0.78, its baseline 0.75 "
            "(+0.04, 1e-05 is R)",
        ),
        ({"verdict": Verdict.FAIL}, None),  # case.yaml holds verdicts
    ],
)
def test_drift_is_signed_and_names_its_figure(change: dict[str, Any], told: str | None) -> None:
    lines = drift_of(FIGURES.model_copy(update=change), FIGURES, 1e-5, "R")
    if told is None:
        assert lines == ()
    else:
        (line,) = lines
        assert Path(line).match(told) or line == told


@pytest.mark.parametrize(
    ("now", "before", "off"),
    [(0.0, 0.0, 0.0), (math.nan, math.nan, 0.0), (math.inf, math.inf, 0.0), (-3.0, -2.0, -0.5)],
)
def test_signed_difference(now: float, before: float, off: float) -> None:
    assert signed_difference(now, before) == off
    assert math.isnan(signed_difference(1.0, 0.0))
    assert math.isnan(signed_difference(math.inf, -math.inf))


def test_repeats_that_spread_widen_the_bound_and_a_bad_reproduction_does_not() -> None:
    assert allowed(one(repeat_spread=2e-4)) == (2e-4, "the spread of this session's baselines")
    bound, why = allowed(one(relative_difference=0.1, noise_band=0.1))
    assert (bound, why) == (2e-5, "the noise of float32 on CPUs")
    assert allowed(one(device="cuda (NVIDIA H200)")) == (1e-5, "the noise of float32 on cuda")


def test_replays_that_no_longer_repeat_are_a_drift(case: Case) -> None:
    written(case, one())
    read = read_document(file_of(case.file, environment_of(one())))  # type: ignore[arg-type]
    loose = compared(one(deterministic=False), read, case.digest())
    assert loose.red and loose.explain().endswith(
        "; replays do not repeat bit for bit, those of its baseline did"
    )
    told = written(case, one(deterministic=False))
    assert told.lines[1:] == ("tiny-step85: replays no longer repeat bit for bit",)
    assert document(case)["deterministic"] is False


def test_a_figure_that_is_not_finite_is_kept(case: Case) -> None:
    bad = one(grad_norm_preclip=math.nan, verdict="non_finite", expected=Verdict.NON_FINITE)
    bad = bad.model_copy(update={"verdict": Verdict.NON_FINITE})
    written(case, bad)
    assert document(case)["methods"]["halve"]["norm"] == "NaN"
    assert written(case, bad).written == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "found Expecting property name"),
        ("[]", "found 1 faults, the first: Input should be a valid dictionary"),
        (None, "environment: found the environment of cpu-float32-torch2.13.0"),
    ],
)
def test_a_file_that_is_no_document(case: Case, text: str | None, told: str) -> None:
    (file,) = written(case, one()).written
    other = file.with_name("cpu-float32-torch9.json")
    other.write_text(file.read_text() if text is None else text)
    with pytest.raises(CaseError) as error:
        read_document(other)
    assert str(other) in str(error.value) and told in str(error.value)


def test_the_summary_tells_what_is_not_as_stated(case: Case, snapshot: SnapshotAssertion) -> None:
    written(case, one("baseline"), one("halve", 2.5), one("cap", 2.9))
    read = read_document(file_of(case.file, environment_of(one())))  # type: ignore[arg-type]
    digest = case.digest()
    results = [
        compared(one("baseline"), read, digest),
        compared(one("halve", 2.6), read, digest),  # drifted
        compared(one("cap", 2.9, expected=Verdict.FAIL), read, digest),  # better
        compared(
            one("cap", 2.9, verdict=Verdict.INCONCLUSIVE, expected=Verdict.INCONCLUSIVE),
            read,
            digest,
        ),
        compared(one("zero", 9.0), read, digest),  # worse, and without an entry
        compared(one("cap+halve", 2.0, case="other"), read, "another"),
        compared(one("halve", 2.0, case="third", versions={"torch": "3"}), None, digest),
        compared(one("halve", 2.0, case="third", versions={"torch": "4"}), None, digest),
    ]
    assert summary_lines(results) == snapshot


def test_figures_of_a_result_with_both_treatments() -> None:
    both = result(
        outcome("cap", 2.5, grad_norm_preclip_carried=4.0, retained=KEPT, retained_carried=KEPT)
    )
    kept = figures_of(both)
    assert (kept.norm, kept.carried, kept.ratio, kept.verdict) == (2.5, 4.0, 1.25, "partial")
    assert kept.kept_tokens == KEPT.tokens
    assert kept.kept_advantage == KEPT.advantage
    assert kept.kept_dloss_dlogprob == KEPT.dloss_dlogprob
