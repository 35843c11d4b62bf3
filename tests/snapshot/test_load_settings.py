"""Loss settings out of trainer.pt, across versions of the trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from replay_lib.errors import SettingsError, SnapshotError, UnsupportedModelError
from replay_lib.snapshot import load_settings, open_snapshot, read_settings
from replay_lib.snapshot.naming import Instance, named, save_named


def pydantic(name: str, fields: dict[str, Any], extra: dict[str, Any] | None = None) -> Instance:
    state = {"__dict__": fields, "__pydantic_extra__": extra, "__pydantic_private__": None}
    return Instance(named(f"axrl.configs.{name}"), state)


def write_trainer(
    directory: Path, config: Any, trainer: str = "axrl.trainer.grpo_trainer.GrpoTrainer"
) -> None:
    save_named(Instance(named(trainer), {"config": config}), directory / "trainer.pt")


def test_settings_of_the_plain_snapshot(plain: Path) -> None:
    saved = read_settings(open_snapshot(plain))
    settings = saved.settings
    assert (settings.loss_type, settings.loss_agg_type) == ("grpo2", "token-mean")
    assert (settings.clip_ratio_high, settings.dual_soft_clip) == (0.28, 3)
    assert (settings.entropy_control.target_entropy, settings.opd.enabled) == (0.1, False)
    assert settings.mismatch_token_clip_max is None
    assert (saved.unknown, saved.defaulted) == ((), ())


def test_unknown_keys_are_reported_and_absent_ones_take_defaults(
    broken_plain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entropy = pydantic("EntropyControlConfig", {"alpha": 0.5, "warmup": 3})
    fields = {"loss_type": "topr", "entropy_control": entropy, "new_option": 1}
    write_trainer(broken_plain, pydantic("GrpoTrainerConfig", fields, {"extra": 2}))
    snapshot = open_snapshot(broken_plain)
    saved = read_settings(snapshot)
    assert saved.unknown == ("extra", "new_option", "entropy_control.warmup")
    assert (saved.settings.loss_type, saved.settings.entropy_control.alpha) == ("topr", 0.5)
    assert saved.settings.clip_ratio_low == 0.2
    assert {"clip_ratio_low", "entropy_control.target_entropy", "opd"} <= set(saved.defaulted)
    with caplog.at_level(logging.WARNING):
        load_settings(snapshot)
    assert caplog.messages == [
        f"{broken_plain / 'trainer.pt'}: settings unknown to this version are not modelled: "
        "extra, new_option, entropy_control.warmup"
    ]


@pytest.mark.parametrize(
    "trainer", ["axrl.trainer.value_trainer.ValueTrainer", "axrl.trainer.sft_trainer.SftTrainer"]
)
def test_another_trainer_is_refused_by_name(broken_plain: Path, trainer: str) -> None:
    write_trainer(broken_plain, pydantic("SftTrainerConfig", {}), trainer)
    with pytest.raises(UnsupportedModelError) as caught:
        load_settings(open_snapshot(broken_plain))
    assert str(caught.value) == (
        f"{broken_plain / 'trainer.pt'}: found a {trainer}, expected a "
        "axrl.trainer.grpo_trainer.GrpoTrainer. Snapshots of critics and of supervised "
        "fine-tuning are not modelled."
    )


def test_a_wrong_value_names_file_and_field(broken_plain: Path) -> None:
    write_trainer(broken_plain, pydantic("GrpoTrainerConfig", {"loss_type": "reinforce"}))
    with pytest.raises(SettingsError, match=r"trainer\.pt: .*loss_type.*'reinforce'"):
        load_settings(open_snapshot(broken_plain))


@pytest.mark.parametrize("config", [None, 3, [1]])
def test_a_trainer_without_settings_is_refused(broken_plain: Path, config: Any) -> None:
    write_trainer(broken_plain, config)
    with pytest.raises(SnapshotError, match=r"trainer\.pt: config: found"):
        load_settings(open_snapshot(broken_plain))
