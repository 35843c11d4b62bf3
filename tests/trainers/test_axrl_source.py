"""Where AXRL is found, what it imports beside itself, and what stands in for that."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from axrl_support import source_or_skip

from replay_lib.errors import TrainerError
from replay_lib.trainers import axrl_source, stand_ins
from replay_lib.trainers.axrl import import_axrl
from replay_lib.trainers.axrl_source import (
    TRAINER_MODULE,
    VARIABLE,
    file_of,
    find_axrl,
    fingerprint,
    outside_imports,
)
from replay_lib.trainers.stand_ins import STAND_INS, missing_packages, standing_in


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of AXRL's name with the shape of its trainer module."""
    for name in ("axrl", "axrl/trainer", "axrl/utils"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "axrl/utils/drawing.py").write_text("import pandas.plotting\nimport json\n")
    (tmp_path / "axrl/trainer/grpo_trainer.py").write_text(
        "from __future__ import annotations\n"
        "import torch\n"
        "from typing import TYPE_CHECKING\n"
        "from axrl.utils import drawing\n"
        "if TYPE_CHECKING:\n    import wandb\n"
        "def later():\n    import requests\n"
        "class GrpoTrainer:\n    import zstandard\n"
    )
    return tmp_path


def test_the_variable_names_a_checkout(package: Path, monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, str(package))
    assert find_axrl() == package.resolve()
    file = file_of(package, TRAINER_MODULE)
    assert file == package / "axrl/trainer/grpo_trainer.py"
    assert file_of(package, "axrl.utils") == package / "axrl/utils/__init__.py"
    assert file_of(package, "axrl.absent") is None
    before = fingerprint(file)
    file.write_text(file.read_text() + "\n")
    assert len(before) == 12 and fingerprint(file) != before


def test_a_variable_that_names_no_checkout_is_an_error(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(TrainerError) as caught:
        find_axrl()
    assert str(caught.value) == (
        f"environment variable SPIKE_REPLAY_AXRL: found {tmp_path}, expected a checkout with "
        "axrl/trainer/grpo_trainer.py"
    )


def test_without_the_variable_the_installed_package_is_found(package: Path, monkeypatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delitem(sys.modules, "axrl", raising=False)
    monkeypatch.syspath_prepend(str(package))
    assert find_axrl() == package.resolve()


def test_only_what_runs_at_import_counts(package: Path) -> None:
    found = outside_imports(package, TRAINER_MODULE)
    assert set(found) - {"__future__"} == {
        "torch",
        "typing",
        "pandas.plotting",
        "json",
        "zstandard",
    }
    assert found["pandas.plotting"] == "axrl/utils/drawing.py"


def test_stand_ins_are_there_only_inside_and_only_for_what_is_missing(monkeypatch) -> None:
    real = sys.modules["json"]
    monkeypatch.setitem(STAND_INS, "json", stand_ins.StandIn((), "never needed"))
    missing = missing_packages()
    assert "json" not in missing
    with standing_in() as packages:
        assert packages == missing
        for name in STAND_INS:
            assert importlib.import_module(name) is sys.modules[name]
        assert sys.modules["json"] is real
    assert not [name for name in STAND_INS if name.split(".")[0] in missing and name in sys.modules]


def test_a_stand_in_can_be_derived_from_but_makes_no_object() -> None:
    module = stand_ins._module("tensordict")

    class Batch(module.TensorDict):  # type: ignore[name-defined, misc]
        pass

    for kind in (module.TensorDict, Batch):
        with pytest.raises(TrainerError) as caught:
            kind({}, batch_size=1)
        assert str(caught.value) == (
            "trainer axrl: it uses tensordict.TensorDict, but tensordict is not installed here; "
            "install tensordict"
        )
    assert all(stand_in.reason for stand_in in STAND_INS.values())


def test_every_stand_in_is_for_something_that_axrl_imports() -> None:
    found = outside_imports(source_or_skip(), TRAINER_MODULE)
    wanted = {
        ".".join(name.split(".")[:n]) for name in found for n in range(1, name.count(".") + 2)
    }
    assert set(STAND_INS) <= wanted


def test_axrl_that_is_absent_or_too_new_for_this_python_is_named(monkeypatch) -> None:
    monkeypatch.setattr("replay_lib.trainers.axrl.sys.version_info", (3, 11, 7))
    with pytest.raises(TrainerError) as caught:
        import_axrl()
    assert str(caught.value) == (
        "trainer axrl: Python: found 3.11, expected 3.12 or later, which AXRL's syntax needs. "
        "Install this package for such a Python and call it there; grpo, the built-in loss, runs "
        "here"
    )
    monkeypatch.setattr("replay_lib.trainers.axrl.sys.version_info", (3, 12, 1))
    monkeypatch.setattr("replay_lib.trainers.axrl_source.find_axrl", lambda: None)
    with pytest.raises(TrainerError) as caught:
        import_axrl()
    assert str(caught.value) == (
        "trainer axrl: found no package axrl, expected AXRL to be importable. Install AXRL, or "
        "name a checkout of it in the environment variable SPIKE_REPLAY_AXRL."
    )
    assert axrl_source.NEEDS_PYTHON == (3, 12)
