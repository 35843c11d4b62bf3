"""AXRL's own class behind this library's interface: every golden case, settings, token weights."""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import golden_support
import pytest
import torch
from axrl_support import importable_or_skip
from golden_support import GoldenCase

from replay_lib.errors import SettingsError, TrainerError
from replay_lib.loss import GrpoSettings, micro_batch_loss
from replay_lib.trainers.axrl import load_axrl
from replay_lib.trainers.axrl_source import VARIABLE
from replay_lib.trainers.protocol import LoadedTrainer

#: What AXRL asks of a run with a teacher, beside what the loss reads.
TEACHER: dict[str, Any] = {"opd": {"backend": "megatron", "teacher_model": {}}}
GOLDEN = Path(golden_support.__file__).parent / "data" / "golden"
CASES = [case for case in golden_support.load(GOLDEN) if case.kind == "loss"]


@lru_cache
def loaded(root: Path) -> LoadedTrainer:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # what Megatron-Core and torch give on import
        patch.setenv(VARIABLE, str(root))
        return load_axrl(TEACHER)


@pytest.fixture
def axrl() -> LoadedTrainer:
    return loaded(importable_or_skip())


@pytest.mark.golden
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_a_golden_case(case: GoldenCase, axrl: LoadedTrainer, monkeypatch) -> None:
    monkeypatch.setattr(golden_support, "micro_batch_loss", axrl.loss)
    if case.payload["config"].get("opd", {}).get("enabled"):
        # AXRL's own distillation runs in float32 alone (it assigns a float32 metric by a mask)
        single = golden_support._run(case.payload, torch.float32)
        golden_support._check_against_float32(case.payload, single)
        golden_support._check_metrics(case.payload["expected"]["metrics"], single.result)
    else:
        golden_support.check(case)


def test_there_are_all_of_them() -> None:
    assert len(CASES) == 105


def inputs_of(case: GoldenCase) -> tuple[Any, ...]:
    given = [golden_support.floats(case.payload["outputs"][n]) for n in ("log_prob", "entropy")]
    rows = golden_support._rows(case.payload)
    return rows, *(value.requires_grad_() for value in given)


USABLE = [c for c in CASES if c.payload["expected"]["status"] == "ok"]


@pytest.mark.parametrize("case", USABLE[::6], ids=[case.id for case in USABLE[::6]])
def test_token_weights_and_signals_are_those_of_the_built_in_loss(case, axrl) -> None:
    rows, log_prob, entropy = inputs_of(case)
    weights = torch.rand(log_prob.shape, generator=torch.Generator().manual_seed(7))
    settings = GrpoSettings(**case.payload["config"])
    told = []
    for loss in (micro_batch_loss, axrl.loss):
        found = loss(settings, rows, log_prob, entropy, weights)
        (grad,) = torch.autograd.grad(found.scaled, [log_prob])
        told.append((found, grad))
    (ours, own), (theirs, real) = told
    largest = float(own.abs().max())
    # float32 sums in another order
    torch.testing.assert_close(real, own, rtol=1e-5, atol=1e-6 * largest)
    torch.testing.assert_close(theirs.loss, ours.loss, rtol=1e-5, atol=1e-6)
    assert int(theirs.denominator) == int(ours.denominator)
    assert torch.equal(theirs.keep_BT, ours.keep_BT)
    mask = rows.loss_mask
    torch.testing.assert_close(theirs.policy_weight_BT, ours.policy_weight_BT * mask)
    torch.testing.assert_close(theirs.advantage_BT, ours.advantage_BT)
    unweighted = axrl.loss(settings, rows, log_prob, entropy, None)
    (without,) = torch.autograd.grad(unweighted.scaled, [log_prob])
    assert largest == 0 or not torch.equal(without, real)  # they had an effect


def test_a_setting_that_axrl_refuses_is_named(axrl) -> None:
    rows, log_prob, entropy = inputs_of(CASES[0])
    settings = GrpoSettings(loss_type="gspo", loss_agg_type="token-mean")
    with pytest.raises(SettingsError, match="loss_agg_type: found token-mean, expected seq-mean"):
        axrl.loss(settings, rows, log_prob, entropy, None)


def test_a_recorded_setting_that_axrl_has_not_is_named() -> None:
    root = importable_or_skip()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(root))
        newer = load_axrl({"a_newer_setting": 3})
    rows, log_prob, entropy = inputs_of(CASES[0])
    with pytest.raises(SettingsError) as caught:
        newer.loss(GrpoSettings(), rows, log_prob, entropy, None)
    assert str(caught.value) == (
        "trainer axrl: GrpoTrainerConfig: a_newer_setting: found 3, expected a value that AXRL "
        "takes (Extra inputs are not permitted)"
    )


def test_an_inert_setting_that_was_written_as_nothing_is_axrls_default() -> None:
    root = importable_or_skip()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(root))
        written = load_axrl(GrpoSettings().model_dump())  # as write_snapshot writes them
    rows, log_prob, entropy = inputs_of(CASES[0])
    assert written.loss(GrpoSettings(), rows, log_prob, entropy, None).scaled.requires_grad


def test_a_loss_that_asks_its_policy_loss_otherwise_is_not_guessed_at(axrl, monkeypatch) -> None:
    import axrl.trainer.grpo_trainer as module

    rows, log_prob, entropy = inputs_of(USABLE[0])

    def another(self, outputs, batch):
        return outputs["log_prob"].sum(), batch["loss_mask"].sum(), {}

    monkeypatch.setattr(module.GrpoTrainer, "loss_func", another)
    with pytest.raises(TrainerError, match="found no policy loss that was called"):
        axrl.loss(GrpoSettings(), rows, log_prob, entropy, None)


def test_megatrons_router_replay_is_left_as_it_was(axrl) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    assert RouterReplay.get_replay_topk.__module__ == RouterReplay.__module__
    assert not [name for name in vars(RouterReplay) if "axrl" in name]
