"""Whole replays with AXRL's own class as the loss: green, and red on a copy with a broken line."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from axrl_support import broken_copy, importable_or_skip

from replay_lib.case import Case, discover
from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession
from replay_lib.layout import AXRL_METADATA
from replay_lib.loss import micro_batch_loss
from replay_lib.methods import load_methods
from replay_lib.microbatch import split_ranks
from replay_lib.rule import Verdict
from replay_lib.run import Replayed, ReplayOptions, parse_experiments, replay_case
from replay_lib.snapshot import load_batch, open_snapshot, read_content, write_snapshot
from replay_lib.trainers.axrl_source import VARIABLE

ROOT = Path(__file__).parents[2]
CASES = discover(ROOT / "spike_cases")
PLAIN = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
METHODS = ("enable-token-mismatch-tis-max2", "disable-routing-replay")


@pytest.fixture(autouse=True)
def importable(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests"))


def replayed(case: Case, trainer: str, methods=()) -> Replayed:
    experiments = parse_experiments(["baseline", *methods], "baseline", load_methods())
    return replay_case(case, experiments, ReplayOptions(device="cpu", trainer=trainer))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_an_embedded_case_is_green_on_the_real_class(case: Case, monkeypatch) -> None:
    root = importable_or_skip()
    monkeypatch.setenv(VARIABLE, str(root))
    done = replayed(case, "axrl", case.expected)
    assert done.exit_code == 0, [r.explain() for r in done.results] + list(done.refused)
    stated = set(case.expected) | {"baseline"}
    assert {r.experiment for r in done.results} == stated and len(stated) > 3
    for result in done.results:
        assert result.trainer == "axrl" and str(root) in result.notes[-1]


SEAMS = (
    "baseline",
    "seam_examples:smaller_advantage",
    "seam_examples:sequence_mean",
    "seam_examples:weighted_tokens",
    "seam_examples:even_rows_replay",
    "seam_examples:scaled_router",
    "seam_examples:scaled_topk",
    "seam_examples:entropy_bonus",
)


def test_a_patch_of_each_seam_does_what_it_does_under_the_built_in_loss(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, str(importable_or_skip()))
    asked = [Experiment.parse(name) for name in SEAMS]
    told = {}
    for trainer in ("grpo", "axrl"):
        with ReplaySession.open(PLAIN, device="cpu", trainer=trainer) as session:
            told[trainer] = list(session.run_many(asked))
    norms = {outcome.grad_norm_preclip for outcome in told["grpo"]}
    assert len(norms) == len(SEAMS)  # each has an effect of its own
    for ours, real in zip(told["grpo"], told["axrl"], strict=True):
        name = ours.experiment.name
        # float32 sums in another order
        assert real.grad_norm_preclip == pytest.approx(ours.grad_norm_preclip, rel=1e-6), name
        assert real.touched == ours.touched, name
        if ours.retained is not None and real.retained is not None:
            shares = real.retained.model_dump()
            assert shares == pytest.approx(ours.retained.model_dump(), rel=1e-5), name


# ---- planted faults ----------------------------------------------------------------------------

#: So that pytest-xdist makes the step once.
one_worker = pytest.mark.xdist_group("axrl-faults")


@pytest.fixture(scope="module")
def active(tmp_path_factory) -> Case:
    """A step in which ratio clip, sequence mask and sequence denominators all decide something.

    The embedded step with the old log-probabilities moved (ratios beyond the clip), the rollout's
    moved for whole rows (some rows beyond the sequence mask) and sequence denominators; its
    recorded norm is that of the built-in loss.
    """
    importable_or_skip()
    home = tmp_path_factory.mktemp("active")
    content = read_content(open_snapshot(PLAIN))
    draw = torch.Generator().manual_seed(5)
    batches = []
    for batch in content.batches:
        noise = torch.randn(batch.input_ids.shape, generator=draw) * 0.4 * batch.loss_mask
        shift = torch.randn(batch.rows, 1, generator=draw) * 0.1 * batch.loss_mask
        old, rollout = batch.column("old_logprobs"), batch.column("rollout_logprobs")
        batches.append(batch.replace(old_logprobs=old + noise, rollout_logprobs=rollout + shift))
    settings = content.settings.replace(
        micro_batch_denominator_type="sequence",
        mismatch_seq_masking_low=0.85,
        mismatch_seq_masking_high=1.15,
    )
    changed = dataclasses.replace(content, batches=tuple(batches), settings=settings)
    path = home / "iter_0000085"
    write_snapshot(path, changed)
    with ReplaySession.open(path, device="cpu") as session:
        norm = session.run(Experiment.baseline()).grad_norm_preclip
    metadata = path / AXRL_METADATA
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"grad_norm": norm}))
    return Case.from_snapshot(path)


@one_worker
def test_the_planted_lines_are_active_in_that_step(active: Case) -> None:
    snapshot = open_snapshot(active.snapshot)
    batches = [load_batch(snapshot, r) for r in range(snapshot.parallel.dp)]
    worker = snapshot.worker
    splits = split_ranks(
        [b.lengths() for b in batches],
        [b.width for b in batches],
        dynamic=worker.use_dynamic_batch_size,
        micro_batch_size=worker.train_micro_batch_size,
        seq_length=worker.seq_length,
        vpp=snapshot.parallel.vpp,
    )
    settings = read_content(snapshot).settings
    assert settings.loss_type == "grpo2"
    counted, clipped, kept = [], 0.0, set()
    for batch, split in zip(batches, splits, strict=True):
        for part in split:
            rows = batch.select(part)
            # the policy moved little since: the recorded reference stands for the current one
            log_prob = rows.column("ref_logprobs").clone().requires_grad_()
            found = micro_batch_loss(settings, rows, log_prob, torch.zeros_like(log_prob))
            counted.append((int(rows.loss_mask.sum()), int(found.denominator)))
            clipped = max(clipped, found.metrics["clip_frac__all"])
            kept |= {bool(row.any()) for row in found.keep_BT[rows.loss_mask.any(dim=1)]}
    assert len(set(counted)) > 1  # micro-batches of unequal size
    assert clipped > 0.1
    assert kept == {True, False}  # the sequence mask drops some rows and keeps others


@one_worker
def test_that_step_is_reproduced_by_the_real_class(active: Case, monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, str(importable_or_skip()))
    (baseline, *_) = replayed(active, "axrl", METHODS).results
    assert baseline.verdict is Verdict.REPRODUCED, baseline.explain()


def clamp_nothing(node: ast.AST) -> bool:
    """Ratio clip: the value that torch.clamp would bound is taken as it is."""
    calls = [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.Call)]
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "clamp":
            for name, value in ast.iter_fields(node):
                if value is call:
                    setattr(node, name, call.args[0])
                    return True
    return False


def count_tokens(node: ast.AST) -> bool:
    """Denominator: where sequences are counted, tokens are."""
    if not isinstance(node, ast.Return):
        return False
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == "valid_seq"]
    for name in names:
        name.id = "mask"
    return bool(names)


def ignore_the_upper_bound(node: ast.AST) -> bool:
    """Sequence mask: one of its two bounds is asked twice, the other never."""
    if not isinstance(node, ast.Assign) or ast.unparse(node.targets[0]) != "seq_mask":
        return False
    names = [n for n in ast.walk(node.value) if isinstance(n, ast.Name)]
    high = [name for name in names if name.id == "seq_mask_high"]
    for name in high:
        name.id = "seq_mask_low"
    return bool(high)


FAULTS = {
    "ratio clip": ("calculate_pg_loss_and_clip_ratio", clamp_nothing),
    "denominator": ("compute_micro_batch_denominator", count_tokens),
    "sequence mask": ("get_mismatch_sequence_mask", ignore_the_upper_bound),
}


@one_worker
@pytest.mark.parametrize("fault", FAULTS)
def test_one_broken_line_of_the_class_is_red(fault, active: Case, tmp_path, monkeypatch) -> None:
    function, change = FAULTS[fault]
    copy = broken_copy(importable_or_skip(), tmp_path, function, change)
    monkeypatch.setenv(VARIABLE, str(copy))
    done = replayed(active, "axrl")
    (baseline,) = done.results
    assert baseline.verdict is Verdict.NOT_REPRODUCED, baseline.explain()
    assert done.exit_code == 1 and str(copy) in baseline.notes[-1]
    assert baseline.relative_difference is not None
    assert abs(baseline.relative_difference) > 1e-3  # not a matter of rounding
