"""What travels to a node, and under which names."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import fake_engine
import pytest

from replay_lib import layout, run
from replay_lib.case import Case
from replay_lib.engine.protocol import Experiment
from replay_lib.errors import EngineError, UsageError
from replay_lib.guard.compare import Pair
from replay_lib.guard.gradients import Difference
from replay_lib.guard.guarding import Guarded
from replay_lib.methods import builtin_dir
from replay_lib.record.refusal import Refusal
from replay_lib.remote import job as told
from replay_lib.remote import parcels
from replay_lib.run import Replayed, ReplayOptions, replay_case
from replay_lib.sweep.sweeping import sweep

EMBEDDED = Path(__file__).parents[2] / "spike_cases" / "axrl-plain-step85"
QUIET = Path(__file__).parents[2] / "spike_cases" / "zoo-run-on-rows"


def test_a_case_there_is_the_case_here(tmp_path: Path) -> None:
    case = Case.open(QUIET)
    parcel = parcels.case_parcel(case)
    for home, inside, names in parcel.parts:
        for name in names:
            (tmp_path / inside / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(home / name, tmp_path / inside / name)
    moved = parcels.there(case, str(tmp_path))
    moved.require()  # sealed there as it is here
    assert len(moved.sha256) == len(case.sha256) > 20
    assert moved.digest() == case.digest()
    assert (moved.name, moved.expected) == (case.name, case.expected)
    again = Case.model_validate_json(moved.model_dump_json())
    assert again == moved
    (moved.snapshot / "trainer.pt").write_bytes(b"torn")
    with pytest.raises(Exception, match=r"trainer\.pt"):
        again.require()


def test_a_manifest_of_preserving_stays_here(tmp_path: Path) -> None:
    snapshot = tmp_path / "iter_0000085"
    shutil.copytree(EMBEDDED / "snapshot" / "iter_0000085", snapshot)
    before = parcels.case_parcel(Case.open(snapshot))
    (snapshot / layout.PRESERVED_MANIFEST).write_text("{}")
    assert parcels.case_parcel(Case.open(snapshot)) == before
    (snapshot / "trainer.pt").write_bytes(b"another")
    assert parcels.case_parcel(Case.open(snapshot)).place != before.place


def test_the_library_travels_with_methods_cards_and_version(tmp_path: Path) -> None:
    parcel = parcels.library_parcel(tmp_path)
    names = {f"{inside}/{name}" for _, inside, files in parcel.parts for name in files}
    assert "replay_lib/engine/worker.py" in names
    assert {f"mitigations/{file.name}" for file in builtin_dir().glob("*.py")} <= names
    assert "spike-mitigation-methods/clip-advantages.md" in names
    assert any(name.endswith(".dist-info/METADATA") for name in names)
    assert not any("__pycache__" in name or ".egg-info" in name for name in names)
    assert parcels.library_parcel(tmp_path).place == parcel.place


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trainer in a package, what it imports from beside it, and what it does not."""
    files = {
        "losses/__init__.py": "",
        "losses/mine.py": "import numpy\nfrom helpers import scale\nfrom . import other\n",
        "losses/other.py": "def f():\n    import namespace.deep\n",
        "losses/table.json": "{}",
        "losses/.hidden": "",
        "losses/weights.bin": "x" * (2 << 20),
        "helpers.py": "import os, json, replay_lib\n",
        "namespace/deep.py": "",
        "unrelated.py": "",
        "methods/halve.py": "import shared_by_methods\n",
        "shared_by_methods.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def _names(own: parcels.Own) -> set[str]:
    assert own.parcel is not None
    return {f"{inside}/{name}" for _, inside, files in own.parcel.parts for name in files}


def test_ones_own_code_travels_with_what_it_imports_beside_it(own_code: Path) -> None:
    own = parcels.own_parcel({"losses.mine"}, [own_code / "methods"], [], "")
    assert _names(own) == {
        "path/0/losses/__init__.py",
        "path/0/losses/mine.py",
        "path/0/losses/other.py",
        "path/0/losses/table.json",
        "path/0/helpers.py",
        "path/0/namespace/deep.py",
        "path/0/shared_by_methods.py",
        "mitigations/0/halve.py",
    }
    place = own.parcel.place if own.parcel else ""
    assert (own.path, own.mitigations) == ((f"{place}/path/0",), (f"{place}/mitigations/0",))


def test_a_reference_travels_from_its_own_places(own_code: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "before"
    theirs.mkdir()
    (theirs / "helpers.py").write_text("")
    own = parcels.own_parcel({"helpers"}, [], [theirs], "helpers:make")
    assert _names(own) == {"path/0/helpers.py", "reference/0/helpers.py"}
    assert own.reference[0].endswith("/reference/0")


def test_what_is_installed_or_built_in_does_not_travel() -> None:
    assert parcels.own_parcel({"numpy", "json", "replay_lib"}, [], [], "").parcel is None


def test_a_tree_of_code_that_is_too_large_is_refused(
    own_code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcels, "_MOST", 10)
    with pytest.raises(UsageError, match="of code of your own around"):
        parcels.own_parcel({"losses"}, [], [], "")


def test_answers_survive_the_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "open_engine", fake_engine.FakeEngine)
    monkeypatch.setitem(fake_engine.NORMS, "use-tis-loss", float("nan"))
    case, options = Case.open(EMBEDDED), ReplayOptions()
    labels = ["disable-routing-replay", "balance-negative-advantages", "use-tis-loss"]
    experiments = [Experiment.parse(label) for label in labels]
    replayed = replay_case(case, experiments, options)
    refusal = Refusal(case.name, "x", EngineError("gone:\n'it'"))
    both = Replayed(replayed.results, (refusal,))
    swept = sweep(case, experiments, options, budget=4)
    first, second = replayed.results[:2]
    apart = Difference(cosine=None, scale=float("inf"), distance=0.5)
    pairs = (
        Pair(case.name, "baseline", first, second, apart),
        Pair(case.name, "x", first, EngineError("gone")),
    )
    guarded = Guarded("a:b", "grpo", pairs, (first, second))
    for answer in (both, swept, guarded):
        way = json.loads(json.dumps(told.answer_document(answer)))
        assert repr(told.answer_from(way)) == repr(answer)
    assert swept.pairs


def test_options_survive_the_way() -> None:
    options = ReplayOptions(
        device="cuda",
        dp_ranks=(0, 1),
        layout="tp=2",
        mitigations=(Path("a b"),),
        trainer="a:b",
        repeats=3,
    )
    assert told.options_from(json.loads(json.dumps(told.options_document(options)))) == options


@pytest.mark.parametrize("code", ["internal", "terminated", "engine", "batch"])
def test_errors_survive_the_way(code: str) -> None:
    error = told.error_from({"code": code, "message": "why"})
    assert "why" in str(error)
    kinds = {"engine": "EngineError", "batch": "BatchError", "terminated": "NodeError"}
    assert type(error).__name__ == kinds.get(code, "RuntimeError")


def test_a_run_is_named_by_what_decides_its_results() -> None:
    base = {
        "operation": "replay",
        "python": "python3",
        "cases": (Case.open(EMBEDDED),),
        "options": told.options_document(ReplayOptions()),
        "path": ("/there/code/1",),
        "experiments": (Experiment.parse("use-tis-loss"),),
    }
    name = told.Job.model_validate(base).name
    assert told.Job.model_validate(base | {"earlier": ({"a": 1},)}).name == name
    for other in (
        {"experiments": ()},
        {"path": ("/there/code/2",)},
        {"options": told.options_document(ReplayOptions(repeats=3))},
        {"cases": (Case.open(QUIET),)},
    ):
        assert told.Job.model_validate(base | other).name != name
