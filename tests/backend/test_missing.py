"""What is missing for the backend is told as a list, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from replay_lib.backend import missing
from replay_lib.backend.missing import is_installed, missing_for_backend, model_places
from replay_lib.backend.session import open_axrl
from replay_lib.cli import main
from replay_lib.errors import EngineError, UsageError
from replay_lib.run import ReplayOptions
from replay_lib.snapshot import export_snapshot, open_snapshot
from replay_lib.trainers.axrl_source import VARIABLE

SNAPSHOT = Path(__file__).parents[2] / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
STAGE = Path(__file__).parent / "stage"
NO_DEVICE = "2 NVIDIA device(s), one for each rank of the run (found 0)"


@pytest.fixture
def complete(monkeypatch, tmp_path: Path):
    """A machine that has everything, by what can be asked without starting it."""
    monkeypatch.setenv(VARIABLE, str(STAGE))
    monkeypatch.setenv("AXRL_MODEL_DIR", str(tmp_path))
    monkeypatch.delenv("AXRL_SHARED_MODEL_DIR", raising=False)
    (tmp_path / "axrl-oracle" / "tiny-moe").mkdir(parents=True)
    monkeypatch.setattr(missing, "cuda_devices", lambda: 2)
    monkeypatch.setattr(missing.sys, "version_info", (3, 12, 1))
    real = missing.is_installed
    there = [*missing.LATER, missing.MAGI]
    monkeypatch.setattr(missing, "is_installed", lambda name: name in there or real(name))
    return there


def test_a_complete_machine_lacks_nothing(complete) -> None:
    assert missing_for_backend() == []
    assert missing_for_backend(SNAPSHOT) == []


def test_each_thing_that_lacks_is_a_line_of_its_own(complete, monkeypatch, tmp_path) -> None:
    complete.remove("megatron.bridge")
    monkeypatch.setattr(missing, "cuda_devices", lambda: 0)
    monkeypatch.setenv("AXRL_MODEL_DIR", str(tmp_path / "empty"))
    places = f"{tmp_path}/empty/axrl-oracle/tiny-moe"
    shared = f"{tmp_path}/empty/shared_models/axrl-oracle/tiny-moe"
    assert missing_for_backend(SNAPSHOT) == [
        "package megatron.bridge: builds the model and loads the checkpoint",
        NO_DEVICE,
        "the model 'axrl-oracle/tiny-moe' as a directory (configuration, tokenizer): "
        f"{places} or {shared}",
    ]
    assert missing_for_backend()[-1] == "an NVIDIA device (found none)"


def test_what_axrl_imports_and_is_not_there_is_told_with_its_file(complete, tmp_path, monkeypatch):
    worker = tmp_path / "checkout" / "axrl" / "worker" / "megatron_worker.py"
    worker.parent.mkdir(parents=True)
    trainer = tmp_path / "checkout" / "axrl" / "trainer" / "grpo_trainer.py"
    trainer.parent.mkdir()
    trainer.touch()
    source = (STAGE / "axrl/worker/megatron_worker.py").read_text()
    worker.write_text(source.replace("import math\n", "import math\nimport absent.part\n"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "checkout"))
    assert missing_for_backend() == ["package absent: imported by axrl/worker/megatron_worker.py"]
    worker.write_text(source.replace("snapshot_dir: Path)", "snapshot_dir: Path, step: int)"))
    assert missing_for_backend() == [
        f"AXRL: {tmp_path}/checkout has another reproduce_spike: reproduce_spike is given "
        "snapshot_dir, step; expected snapshot_dir"
    ]
    worker.unlink()
    (told,) = missing_for_backend()
    assert told == f"AXRL: {tmp_path}/checkout holds no axrl.worker.megatron_worker"


def test_a_python_or_an_axrl_that_lacks_is_told(complete, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(missing.sys, "version_info", (3, 11, 7))
    assert missing_for_backend()[0].startswith("Python 3.12 or later, which AXRL's syntax needs (")
    monkeypatch.setattr(missing.sys, "version_info", (3, 12, 1))
    monkeypatch.setattr(missing, "find_axrl", lambda: None)
    assert missing_for_backend() == [
        "AXRL: no package axrl is importable, and SPIKE_REPLAY_AXRL names no checkout"
    ]


def test_packages_are_found_without_being_imported() -> None:
    for name in ("json", "sys", "xdist.scheduler", "megatron.core.models.gpt", "numpy.typing"):
        assert is_installed(name), name
    for name in ("absent", "json.absent", "megatron.absent", "numpy.absent.part"):
        assert not is_installed(name), name


def test_places_of_a_model(monkeypatch) -> None:
    assert model_places("/there/model") == [Path("/there/model")]
    monkeypatch.setenv("AXRL_MODEL_DIR", "/own")
    monkeypatch.setenv("AXRL_SHARED_MODEL_DIR", "/shared")
    assert model_places("a/b") == [Path("/own/a/b"), Path("/shared/a/b")]


def test_no_job_is_started_where_something_lacks(complete, monkeypatch) -> None:
    monkeypatch.setattr(missing, "cuda_devices", lambda: 0)
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(EngineError) as caught:
        open_axrl(SNAPSHOT)
    assert str(caught.value) == f"backend axrl cannot run here; missing:\n  - {NO_DEVICE}"


def test_the_cpu_is_refused_where_nothing_else_lacks(complete) -> None:
    with pytest.raises(UsageError, match="backend axrl: it cannot honour --device cpu: AXRL runs"):
        open_axrl(SNAPSHOT, device="cpu")


@pytest.fixture
def portable(tmp_path) -> Path:
    """Written before a test has a newer Python pretended: what is imported here asks for it."""
    export_snapshot(open_snapshot(SNAPSHOT), tmp_path / "portable")
    return tmp_path / "portable"


def test_a_portable_snapshot_has_to_be_turned_back_first(portable, complete) -> None:
    with pytest.raises(UsageError, match="is a portable snapshot, which Megatron cannot read"):
        open_axrl(portable)


def test_the_command_ends_with_that_list(complete, monkeypatch, capsys) -> None:
    monkeypatch.setattr(missing, "cuda_devices", lambda: 0)
    with pytest.raises(SystemExit) as left:
        main(["replay", str(SNAPSHOT), "--backend", "axrl", "--json"])
    assert left.value.code == 6
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "engine" and error["message"].endswith(f"\n  - {NO_DEVICE}")


def test_options_that_the_backend_cannot_honour_are_refused_by_name() -> None:
    with pytest.raises(UsageError) as caught:
        ReplayOptions(
            backend="axrl",
            trainer="grpo",
            precision="bfloat16",
            dp_ranks=(0,),
            rows="unmerged",
        )
    assert str(caught.value) == (
        "backend axrl: it cannot honour --trainer, --precision, --dp-ranks, --rows: AXRL replays "
        "the whole step with its own loss, as it was recorded"
    )
    assert ReplayOptions(backend="axrl", trainer="axrl", device="cuda").trainer == "axrl"
    with pytest.raises(UsageError, match="backend 'verl': expected one of native, axrl"):
        ReplayOptions(backend="verl")
