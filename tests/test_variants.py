"""Every variant of a snapshot on disk: shown, replayed to the norm it must give, and examined."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from many_snapshots import Answer, Ask, replay_all
from variant_writers import PLAIN
from variants import FLOAT32, VARIANTS, write

from replay_lib.analysis.doctor import examine
from replay_lib.engine.reference import reference_step
from replay_lib.listing import describe_snapshot
from replay_lib.microbatch import balanced_split, static_split
from replay_lib.record.judge import Recorded
from replay_lib.run import recorded_of
from replay_lib.snapshot import (
    load_batch,
    load_model_fields,
    load_settings,
    open_snapshot,
    read_tensors,
)

pytestmark = pytest.mark.xdist_group("variants")

REFUSED = [name for name, variant in VARIANTS.items() if variant.refused]
REPLAYED = [name for name in VARIANTS if name not in REFUSED]
#: What the doctor may call an error in a variant: what it lacks, by name.
ERRORS = {
    "legacy-no-trainer": {"file-incomplete"},
    "legacy-no-routes": {"file-incomplete"},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All variants, written once."""
    directory = tmp_path_factory.mktemp("variants")
    for name in VARIANTS:
        write(name, directory)
    return directory


@pytest.fixture(scope="module")
def answers(home: Path) -> Iterator[dict[str, Answer]]:
    """All variants, replayed one after the other in one process."""
    asked = [Ask(home / name / PLAIN.name) for name in VARIANTS]
    yield dict(zip(VARIANTS, replay_all(asked, timeout_s=550), strict=True))


def oracle(directory: Path, micro_batches: int) -> float:
    """The step's norm in float64, its rows split into so many micro-batches."""
    snapshot = open_snapshot(directory)
    batches = [load_batch(snapshot, rank) for rank in range(snapshot.parallel.dp)]
    if snapshot.worker.use_dynamic_batch_size:
        partition = [
            balanced_split(b.lengths(), b.width, 10**6, at_least=micro_batches) for b in batches
        ]
    else:
        size = snapshot.worker.train_micro_batch_size
        partition = [static_split(b.rows, size) for b in batches]
    assert {len(split) for split in partition} == {micro_batches}
    step = reference_step(
        read_tensors(directory),
        load_model_fields(snapshot),
        batches,
        load_settings(snapshot),
        partition,
    )
    return step.grad_norm_preclip


@pytest.mark.parametrize("name", REPLAYED)
def test_the_replayed_norm_is_the_one_it_must_be(
    home: Path, answers: dict[str, Answer], name: str
) -> None:
    variant, answer = VARIANTS[name], answers[name]
    if variant.micro_batches:
        expected = oracle(home / name / PLAIN.name, variant.micro_batches)
        # nearer than the bar: float32 against float64, the worst one seen is 3e-7
        assert abs(answer.norm / expected - 1) <= FLOAT32
        return
    other = answers[variant.like]
    if variant.bound:
        assert abs(answer.norm / other.norm - 1) <= variant.bound
    else:
        assert answer.baseline["digest"] == other.baseline["digest"]


def test_the_plain_one_gives_the_recorded_norm(answers: dict[str, Answer]) -> None:
    assert abs(answers["plain"].norm / 8.441921403762574 - 1) <= FLOAT32


def test_variants_that_must_differ_do(answers: dict[str, Answer]) -> None:
    """Else a variant that is read as the plain one would pass unnoticed."""
    kinds = [name for name in REPLAYED if VARIANTS[name].micro_batches or name == "routes-off"]
    norms = {name: answers[name].norm for name in ["plain", *kinds]}
    assert len(set(norms.values())) == len(norms), norms


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_replayed_says_what_can_be_done(
    answers: dict[str, Answer], name: str
) -> None:
    error = answers[name].error
    assert error is not None
    assert error["code"] == "snapshot_incomplete"
    assert VARIANTS[name].refused in error["message"]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_shown(home: Path, name: str) -> None:
    shown = describe_snapshot(home / name / PLAIN.name)
    json.dumps(shown, allow_nan=False)
    assert shown["step"] == 85
    assert shown["legacy"] == name.startswith("legacy")
    assert shown["portable"] == (name == "portable")
    if name == "several-ranks-a-group":
        assert shown["parallel"]["world_size"] == 16
        assert [rank["global_rank"] for rank in shown["ranks"]] == [0, 4]
    if name == "views-shared-by-rows":
        # three views a row; row 1 shares one and has one; the short row has two
        assert [rank["routing_payloads"] for rank in shown["ranks"]] == [19, 19]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_doctor_finds_no_error_in_what_is_whole(home: Path, name: str) -> None:
    found = examine(home / name / PLAIN.name).findings
    errors = {finding.code for finding in found if str(finding.severity) == "error"}
    assert errors == ERRORS.get(name, set())


@pytest.mark.parametrize(
    ("name", "norm", "median"),
    [("infinite-ratio", True, 0.0), ("null-norms", False, None), ("legacy", True, None)],
)
def test_norms_that_are_no_numbers_reach_the_verdict(
    home: Path, name: str, norm: bool, median: float | None
) -> None:
    recorded: Recorded = recorded_of(home / name / PLAIN.name)
    assert (recorded.norm is not None) == norm
    if name != "legacy":
        assert recorded.median == median
