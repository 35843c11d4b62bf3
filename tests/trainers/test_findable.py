"""Trainers that cannot be there are told from outside; what may be there is left to a worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from replay_lib.errors import TrainerError, UsageError
from replay_lib.trainers.findable import check_findable

RUNS = "raise AssertionError('it was imported')\n"
FOUND = {
    "def": "def make(saved):\n    return saved\n",
    "class": "class make:\n    pass\n",
    "assigned": "import functools\nmake = functools.partial(print, 1)\n",
    "imported": "from elsewhere import make\n",
    "renamed": "from elsewhere import build as make\n",
    "in a branch": "if True:\n    def make(saved):\n        return saved\n",
    "star": "from elsewhere import *\n",
    "on demand": "def __getattr__(name):\n    return print\n",
    "as it runs": "globals()['ma' + 'ke'] = print\n",
    "by itself": "import sys\nsetattr(sys.modules[__name__], 'ma' + 'ke', print)\n",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def refused(name: str) -> str:
    with pytest.raises(TrainerError) as caught:
        check_findable(name)
    return str(caught.value)


@pytest.mark.parametrize("source", FOUND.values(), ids=FOUND)
def test_a_factory_that_may_be_there_is_left_to_the_worker(here: Path, source: str) -> None:
    (here / "own_trainer.py").write_text(RUNS + source)
    assert check_findable("own_trainer:make") == "own_trainer:make"
    assert "own_trainer" not in sys.modules


def test_a_factory_that_the_source_does_not_know_is_refused(here: Path) -> None:
    file = here / "own_trainer.py"
    file.write_text(RUNS + "import sys\ndef make(saved):\n    return saved\n")
    assert refused("own_trainer:nope") == (
        f"trainer own_trainer:nope: found nothing under the name 'nope' in {file}, expected a "
        "factory that takes the recorded settings and returns a trainer"
    )


def test_source_that_does_not_parse_is_refused(here: Path) -> None:
    (here / "own_trainer.py").write_text("def make(:\n")
    assert "module 'own_trainer' cannot be imported: SyntaxError: " in refused("own_trainer:make")


def test_a_module_that_is_nowhere_is_refused(here: Path) -> None:
    assert refused("no_such_module:make") == (
        "trainer no_such_module:make: module 'no_such_module' cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_module'. It must lie where the command is "
        "called, or on PYTHONPATH"
    )
    (here / "plain.py").write_text(RUNS)
    assert "No module named 'plain.inner'" in refused("plain.inner:make")


def test_a_module_inside_a_package_is_looked_up_without_importing_the_package(here: Path) -> None:
    (here / "pack" / "deep").mkdir(parents=True)
    for inner in ("pack/__init__.py", "pack/deep/__init__.py"):
        (here / inner).write_text(RUNS)
    (here / "pack/deep/losses.py").write_text(RUNS + "def make(saved):\n    return saved\n")
    check_findable("pack.deep.losses:make")
    assert "pack" not in sys.modules
    assert "found nothing under the name 'nope'" in refused("pack.deep.losses:nope")
    assert "No module named 'pack.deep.other'" in refused("pack.deep.other:make")
    assert f"in {here / 'pack' / '__init__.py'}" in refused("pack:make")


def test_a_package_that_makes_modules_as_it_runs_is_left_to_the_worker(here: Path) -> None:
    (here / "maker").mkdir()
    (here / "maker/__init__.py").write_text(RUNS + "import sys\nsys.modules['maker.x'] = sys\n")
    check_findable("maker.x:make")


def test_directories_without_a_file_are_packages_too(here: Path) -> None:
    (here / "bare" / "deep").mkdir(parents=True)
    for inner in ("bare/losses.py", "bare/deep/losses.py"):
        (here / inner).write_text("def make(saved):\n    return saved\n")
    check_findable("bare.losses:make")
    check_findable("bare.deep.losses:make")
    assert "No module named 'bare.other'" in refused("bare.other:make")


def test_names_that_need_no_look() -> None:
    assert check_findable("grpo") == "grpo"
    with pytest.raises(UsageError, match="expected grpo"):
        check_findable("verl")


def test_axrl_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    assert refused("axrl").startswith("trainer axrl: Python: found 3.11, expected 3.12 or later")
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    monkeypatch.setattr("replay_lib.trainers.axrl_source.find_axrl", lambda: None)
    assert refused("axrl").startswith("trainer axrl: found no package axrl, expected AXRL")


def test_looking_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from replay_lib.trainers.findable import check_findable\n"
        "check_findable('torch.optim.adam:Adam')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
