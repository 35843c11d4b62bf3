"""``export`` and ``import`` of snapshots and cases, and a replay of what they wrote."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_ran import Ran
from killed_builders import killed_while_building
from many_snapshots import Ask, replay_all

from replay_lib.case import Case, discover
from replay_lib.errors import CaseError, SnapshotError, UsageError
from replay_lib.porting import export_case, import_case
from replay_lib.snapshot import open_snapshot

CASES = Path(__file__).parents[1] / "spike_cases"
PLAIN = CASES / "axrl-plain-step85" / "snapshot" / "iter_0000085"
ZOO = CASES / "zoo-natural"


def test_the_same_gradient_to_the_bit(tmp_path: Path) -> None:
    export_case(PLAIN, tmp_path / "portable")
    import_case(tmp_path / "portable", tmp_path / "iter_0000085")
    asks = [Ask(path) for path in (PLAIN, tmp_path / "portable", tmp_path / "iter_0000085")]
    recorded, *others = replay_all(asks)
    for answer in others:
        assert answer.baseline["digest"] == recorded.baseline["digest"]
        assert answer.norm == recorded.norm


def test_a_case_stays_the_case_and_is_sealed(tmp_path: Path) -> None:
    ported = export_case(ZOO, tmp_path / "cases" / "zoo-natural")
    assert [s.portable for s in ported.snapshots] == [True, True]
    before, after = Case.load(ZOO), Case.load(ported.directory)
    after.require()
    assert after.snapshot == ported.directory / "snapshot"
    assert after.quiet == ported.directory / "quiet"
    same = ("name", "note", "thresholds", "tolerance", "needs", "expected", "provenance")
    for name in same:
        assert getattr(before, name) == getattr(after, name), name
    assert len(after.sha256) == ported.files
    assert discover(tmp_path / "cases") == [after]
    (after.snapshot / "trainer.json").write_text("{}")
    with pytest.raises(CaseError, match=r"sha256\.snapshot/trainer\.json"):
        Case.load(ported.directory).require()


def test_a_case_comes_back(tmp_path: Path) -> None:
    export_case(ZOO, tmp_path / "portable")
    back = import_case(tmp_path / "portable", tmp_path / "zoo-natural")
    case = Case.load(back.directory)
    case.require()
    assert case.snapshot == back.directory / "snapshot" / "iter_0000061"
    assert case.quiet == back.directory / "quiet" / "iter_0000044"
    assert not open_snapshot(case.snapshot).portable


def test_a_case_keeps_its_name_in_another_directory(tmp_path: Path) -> None:
    out = export_case(ZOO, tmp_path / "cases" / "out").directory
    raw = yaml.safe_load((out / "case.yaml").read_text())
    assert list(raw)[:3] == ["schema", "snapshot", "name"]
    assert [case.name for case in discover(tmp_path / "cases")] == ["zoo-natural"]
    back = import_case(out, tmp_path / "back" / "zoo-natural").directory
    assert Case.load(back).name == "zoo-natural"
    assert "name" not in yaml.safe_load((back / "case.yaml").read_text())
    shutil.copytree(back, tmp_path / "cases" / "zoo-natural")
    with pytest.raises(CaseError, match=r"name: found 'zoo-natural', the name of \S+ too"):
        discover(tmp_path / "cases")


def test_what_needs_no_import_is_told_so(tmp_path: Path) -> None:
    told = "found a snapshot in the trainer's own layout, expected what export wrote"
    with pytest.raises(UsageError, match=told) as caught:
        import_case(PLAIN, tmp_path / "out")
    assert str(caught.value).endswith("It needs no import: replay it as it is")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError) as caught:
        export_case(ZOO, tmp_path / "file" / "a" / "out")
    assert str(caught.value) == (
        f"{tmp_path}/file/a/out: found a place that cannot be written (Not a directory), expected "
        "a new directory where files can be made, with room for them"
    )


def test_a_full_disk_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("replay_lib.snapshot.portable.writing.write_manifest", full)
    with pytest.raises(UsageError, match=r"cannot be written \(No space left on device\)"):
        export_case(PLAIN, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


TERMINATED = """
import sys, time
import replay_lib.snapshot.portable.writing as writing
from replay_lib.cli import main
def wait(*_):
    print("writing", flush=True)
    time.sleep(60)
writing.write_manifest = wait
main(sys.argv[1:])
"""


def test_an_export_that_is_terminated_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TERMINATED, "export", str(PLAIN), str(tmp_path / "out")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        assert [p.name[:5] for p in tmp_path.iterdir()] == [".out."]  # there is something to leave
        process.terminate()
        _, told = process.communicate(timeout=60)
    assert process.returncode == 143
    assert told == "error (terminated): ended by SIGTERM; nothing half-written is left\n"
    assert list(tmp_path.iterdir()) == []


def test_a_portable_snapshot_may_be_its_own_case(tmp_path: Path) -> None:
    export_case(PLAIN, tmp_path / "cases" / "mine")
    with pytest.raises(CaseError, match=r"portable\.json\) without case\.yaml"):
        discover(tmp_path / "cases")
    (tmp_path / "cases" / "mine" / "case.yaml").write_text("schema: 1\nsnapshot: .\n")
    (case,) = discover(tmp_path / "cases")
    case.require()
    assert open_snapshot(case.snapshot).step == 85


def test_what_a_killed_export_left_is_no_case(tmp_path: Path) -> None:
    shutil.copytree(ZOO, tmp_path / "zoo-natural")
    (tmp_path / ".other.x7").mkdir()
    (tmp_path / ".other.x7" / "portable.json").write_text("{")
    (tmp_path / ".other.x7" / "case.yaml").write_text("half")
    assert [case.name for case in discover(tmp_path)] == ["zoo-natural"]


def test_a_failed_export_of_a_case_leaves_nothing(tmp_path: Path) -> None:
    shutil.copytree(ZOO, tmp_path / "case")
    raw = yaml.safe_load((tmp_path / "case" / "case.yaml").read_text())
    del raw["sha256"]
    (tmp_path / "case" / "case.yaml").write_text(yaml.safe_dump(raw))
    (tmp_path / "case" / raw["quiet"] / "batch_rank0.pt").write_bytes(b"no batch")
    with pytest.raises(SnapshotError, match=r"batch_rank0\.pt"):
        export_case(tmp_path / "case", tmp_path / "out" / "case")
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_the_commands_tell_what_they_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capsys, "export", PLAIN, tmp_path / "portable", "--json")
    assert ran.code in (0, None)
    written = sorted((tmp_path / "portable").iterdir())
    assert ran.document == {
        "directory": str(tmp_path / "portable"),
        "snapshots": [str(tmp_path / "portable")],
        "portable": True,
        "files": len(written),
        "bytes": sum(path.stat().st_size for path in written),
        "cleared": [],
    }
    shown: Any = Ran(capsys, "show", tmp_path / "portable", "--json").document
    assert (shown["portable"], shown["step"]) == (True, 85)
    assert shown["ranks"][1]["routing"] == "routing_dp1.safetensors"
    assert [rank["routing_payloads"] for rank in shown["ranks"]] == [15, 11]
    back = Ran(capsys, "import", tmp_path / "portable", tmp_path / "iter_0000085")
    assert back.code in (0, None) and str(tmp_path / "iter_0000085") in back.out
    again = Ran(capsys, "export", PLAIN, tmp_path / "portable")
    assert again.code == 3 and "a directory that exists, expected a new name" in again.err
    other = Ran(capsys, "import", PLAIN, tmp_path / "more")
    assert other.code == 2 and "found a snapshot in the trainer's own layout" in other.err
    empty = Ran(capsys, "export", PLAIN, "")
    assert empty.code == 2 and "a path: found an empty text" in empty.err


def test_what_a_killed_export_left_is_removed_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = killed_while_building(tmp_path / "portable")
    ran = Ran(capsys, "export", PLAIN, tmp_path / "portable", "--json")
    assert ran.document["cleared"] == [str(part)]
    assert [p.name for p in tmp_path.iterdir()] == ["portable"]
    again = killed_while_building(tmp_path / "back")
    ran = Ran(capsys, "import", tmp_path / "portable", tmp_path / "iter_0000085")
    assert f"removed what killed commands had left: {again.name}" in ran.out
