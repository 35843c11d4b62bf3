"""A trainer of the user's own: loaded in the worker, held to its contract, replayed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from replay_lib.batch import RankBatch
from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import PatchError, TrainerError
from replay_lib.loss import GrpoSettings, micro_batch_loss
from replay_lib.patch import Seam, batch_patch, settings_patch, token_weights_patch
from replay_lib.trainers import token_loss
from replay_lib.trainers.loading import load_trainer
from replay_lib.trainers.protocol import BUILT_IN, LoadedTrainer

ROOT = Path(__file__).parents[2]
SNAPSHOT = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
HERE = Path(__file__).with_name("odd_trainers.py")


@pytest.fixture(autouse=True)
def importable(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(ROOT / "tests"))


@pytest.fixture
def rows() -> RankBatch:
    shape = (2, 4)
    draw = torch.Generator().manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]], dtype=torch.bool)
    floats = [torch.randn(shape, generator=draw) * mask for _ in range(4)]
    return RankBatch(
        dp_rank=0,
        index=torch.arange(2),
        input_ids=torch.ones(shape, dtype=torch.int64),
        labels=torch.ones(shape, dtype=torch.int64),
        loss_mask=mask,
        attention_mask=torch.ones(shape, dtype=torch.bool),
        advantage=floats[0],
        old_logprobs=floats[1],
        rollout_logprobs=floats[2],
        ref_logprobs=floats[3],
    )


def loss_of(trainer: LoadedTrainer, rows: RankBatch):
    log_prob = torch.full(rows.input_ids.shape, -0.5, requires_grad=True)
    entropy = torch.zeros_like(log_prob, requires_grad=True)
    return trainer.loss(GrpoSettings(), rows, log_prob, entropy, None)


def test_the_built_in_one_is_the_default() -> None:
    assert load_trainer("grpo", {}) is BUILT_IN
    assert BUILT_IN.loss is micro_batch_loss and BUILT_IN.notes == ()


def test_a_factory_gets_a_copy_of_the_recorded_settings() -> None:
    seen = []

    class Module:
        __file__ = "here.py"

        @staticmethod
        def make(saved):
            seen.append(saved)
            saved["opd"]["enabled"] = True
            return type("T", (), {"loss": staticmethod(micro_batch_loss)})()

    sys.modules["a_trainer"] = Module  # type: ignore[assignment]
    try:
        saved = {"loss_type": "tis", "opd": {"enabled": False}}
        trainer = load_trainer("a_trainer:make", saved)
    finally:
        del sys.modules["a_trainer"]
    assert seen[0]["loss_type"] == "tis" and saved["opd"] == {"enabled": False}
    assert trainer.name == "a_trainer:make"
    assert trainer.notes == ("the loss is that of a_trainer:make (here.py)",)


NOT_LOADED = {
    "no_such_module:make": (
        "trainer no_such_module:make: module 'no_such_module' cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_module'. It must lie where the command is "
        "called, or on PYTHONPATH"
    ),
    "odd_trainers:absent": (
        f"trainer odd_trainers:absent: found nothing under the name 'absent' in {HERE}, expected "
        "a factory that takes the recorded settings and returns a trainer"
    ),
    "odd_trainers:number": (
        f"trainer odd_trainers:number: found int under the name 'number' in {HERE}, expected a "
        "factory that takes the recorded settings and returns a trainer"
    ),
    "odd_trainers:raising": (
        "trainer odd_trainers:raising: factory 'raising' raised KeyError: 'no such setting'"
    ),
    "odd_trainers:nothing": (
        "trainer odd_trainers:nothing: factory 'nothing' returned a NoneType without a method "
        "loss, expected an object with loss(settings, rows, log_prob_BT, entropy_BT, "
        "token_weight_BT)"
    ),
    "odd_trainers:a_property": (
        "trainer odd_trainers:a_property: its attribute loss raised OSError: "
        "no checkpoint of the critic"
    ),
    "odd_trainers:unsure": (
        "trainer odd_trainers:unsure: its attribute refuses raised SystemExit: 4"
    ),
    "odd_trainers:of_another_seam": (
        "trainer odd_trainers:of_another_seam: refuses: found ['routing'], expected a collection "
        "of 'settings', 'token_weights'"
    ),
}


@pytest.mark.parametrize("name", NOT_LOADED)
def test_what_cannot_be_loaded_is_named(name: str) -> None:
    with pytest.raises(TrainerError) as caught:
        load_trainer(name, {})
    assert str(caught.value) == NOT_LOADED[name]


BROKEN = {
    "only_a_loss": (
        ": found Tensor, expected a MicroBatchLoss. replay_lib.trainers.token_loss makes one of a "
        "loss and a denominator."
    ),
    "a_constant": (
        ": scaled: found a constant, expected a loss that depends on log_prob_BT. Where a "
        "micro-batch has no loss token, add log_prob_BT[:0].sum()."
    ),
    "a_loss_a_row": ": loss: found a tensor [1], expected a tensor of no dimension",
    "another_shape": ": keep_BT: found a tensor [1, 4], expected a tensor [2, 4] [B, T]",
    "a_negative_count": ": denominator: found -3.0, expected a count, 0 or more",
    "no_count": ": denominator: found nan, expected a count, 0 or more",
}


@pytest.mark.parametrize("factory", BROKEN)
def test_an_answer_that_is_no_loss_is_named_by_its_field(factory: str, rows) -> None:
    trainer = load_trainer(f"odd_trainers:{factory}", {})
    with pytest.raises(TrainerError) as caught:
        loss_of(trainer, rows)
    where = f"trainer odd_trainers:{factory}: what loss returned"
    assert str(caught.value) == where + BROKEN[factory]


def test_what_a_loss_raises_names_the_trainer(rows) -> None:
    with pytest.raises(TrainerError) as caught:
        loss_of(load_trainer("odd_trainers:failing", {}), rows)
    told = "trainer odd_trainers:failing: its loss raised ZeroDivisionError: division by zero"
    assert str(caught.value) == told


def test_errors_of_the_library_pass_as_they_are(rows) -> None:
    trainer = load_trainer("odd_trainers:grpo", {})
    with pytest.raises(Exception, match="column 'ref_logprobs' is absent") as caught:
        loss_of(trainer, rows.replace(ref_logprobs=None))
    assert type(caught.value).__name__ == "BatchError"


def test_a_refused_seam_is_refused_by_name() -> None:
    trainer = load_trainer("odd_trainers:without_weights", {})
    assert trainer.refuses == {Seam.TOKEN_WEIGHTS}
    trainer.check_patches([settings_patch(), batch_patch(lambda batch: batch)])
    with pytest.raises(PatchError, match="it cannot honour patches at the token_weights seam"):
        trainer.check_patches([settings_patch(), token_weights_patch(lambda w, r, p: w)])


def test_token_loss_fills_in_what_a_plain_loss_has_not(rows) -> None:
    log_prob = torch.zeros(2, 4, requires_grad=True)
    weight = torch.full((2, 4), 0.5)
    made = token_loss(log_prob.sum(), 3, rows, token_weight_BT=weight)
    assert float(made.denominator) == 3 and made.scaled.requires_grad
    assert torch.equal(made.keep_BT, rows.loss_mask)
    assert torch.equal(made.policy_weight_BT, weight * rows.loss_mask)
    assert torch.equal(made.advantage_BT, rows.advantage)
    keep = torch.zeros(2, 4, dtype=torch.bool)
    other = token_loss(log_prob.sum(), 3, rows, keep_BT=keep, advantage_BT=rows.advantage * 2)
    assert not other.keep_BT.any() and not other.policy_weight_BT.any()
    assert torch.equal(other.advantage_BT, rows.advantage * 2)


def example(directory: Path) -> None:
    text = (ROOT / "docs/trainers.md").read_text()
    (source,) = re.findall(r"<!-- example: my_trainer.py -->\n```python\n(.*?)```", text, re.S)
    (directory / "my_trainer.py").write_text(source)


@pytest.mark.xdist_group("engine-trainers")
def test_the_documented_example_is_replayed_story(tmp_path, monkeypatch) -> None:
    example(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    calls = ["baseline", "seam_examples:weighted_tokens", "seam_examples:smaller_advantage"]
    with ReplaySession.open(SNAPSHOT, device="cpu", trainer="my_trainer:make") as session:
        assert "my_trainer" not in sys.modules  # the worker alone imports it
        assert session.info.trainer == "my_trainer:make"
        assert session.info.notes[-1].startswith("the loss is that of my_trainer:make (")
        plain, halved, quarter = session.run_many([Experiment.parse(c) for c in calls])
        with pytest.raises(PatchError, match=r"trainer my_trainer:make: .* at the settings seam"):
            session.run(Experiment.parse("enable-token-mismatch-tis-max2"))
        again = session.run(Experiment.baseline())
    # the recorded run clipped no ratio, and there this loss is the same as its own
    assert plain.grad_norm_preclip == pytest.approx(8.441921403762574, rel=1e-6)
    assert again.digest == plain.digest
    # this loss is linear in weights and advantages; halving is exact in floating point
    assert halved.grad_norm_preclip == pytest.approx(plain.grad_norm_preclip / 2, rel=1e-6)
    assert quarter.grad_norm_preclip == pytest.approx(plain.grad_norm_preclip / 4, rel=1e-6)
    assert halved.retained is not None and halved.retained.tokens == pytest.approx(0.5)
