"""The command and what it tells: places, everything at once, strict JSON, exit codes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutate
import mutate_files
import pytest

from replay_lib.analysis import Examined, Severity, describe_environment, environment, examine
from replay_lib.cli import main
from replay_lib.errors import IncompleteSnapshotError, SnapshotError
from replay_lib.snapshot import Content

ROOT = Path(__file__).parents[2]
CASES = ROOT / "spike_cases"
EMBEDDED = sorted(p for p in CASES.glob("*/*/iter_*"))


def ran(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    return int(ended.value.code or 0), capsys.readouterr().out


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("path", EMBEDDED, ids=lambda p: f"{p.parts[-3]}-{p.parts[-2]}")
def test_embedded_snapshots_have_no_errors(path: Path) -> None:
    examined = examine(path)
    assert examined.count(Severity.ERROR) == 0
    assert min(examined.read.values()) > 0


def test_merged_rows_have_no_errors() -> None:
    assert examine(ROOT / "tests/data/snap/merged/iter_0000085").codes == {"rows-padding"}


def test_a_finding_names_its_place(
    content: Content, written: Callable[[Content], Examined]
) -> None:
    found = {f.code: f for f in written(mutate.one_expert_twice(content)).findings}
    twice = found["route-duplicate-expert"]
    assert (twice.file, twice.dp_rank, twice.row, twice.token, twice.layer) == (
        "routing_payload_rank0.pt",
        *(0, 0, 3, 2),
    )
    assert twice.found == "experts [3, 3] of 8 (1 such places in 1 rows)"
    assert twice.then.startswith("No router chooses so")


def test_all_missing_files_are_named_at_once(copy: Path) -> None:
    for name in ("batch_rank0.pt", "batch_rank1.pt", "run_config.yaml"):
        (copy / name).unlink()
    mutate_files.foreign_objects(copy, "argparse")
    found = [(f.code, f.file) for f in examine(copy).findings]
    assert found == [
        ("file-incomplete", "batch_rank1.pt"),
        ("file-incomplete", "run_config.yaml"),
        ("pickle-unsafe", "batch_rank0.pt"),
    ]


def test_one_broken_rank_does_not_hide_the_other(copy: Path) -> None:
    mutate_files.corrupt_rank(copy, 0)
    (copy / "grad_info_rank1.pt").write_bytes(b"PK\x03\x04")
    found = {(f.code, f.file, f.dp_rank) for f in examine(copy).findings}
    assert ("file-broken", "batch_rank0.pt", 0) in found
    assert ("file-incomplete", "grad_info_rank1.pt", None) in found
    assert ("rows-padding", "batch_rank1.pt", 1) in found


def test_what_is_no_snapshot_is_an_error_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(IncompleteSnapshotError, match="no such directory"):
        examine(tmp_path / "nowhere")
    (tmp_path / "iter_0000001").mkdir()
    with pytest.raises(SnapshotError, match="1 snapshot in it"):
        examine(tmp_path)


def test_exit_codes_and_json(
    capsys: pytest.CaptureFixture[str], content: Content, copy: Path
) -> None:
    code, text = ran(capsys, "doctor", copy, "--json")
    assert code == 0 and strict(text)["counts"] == {"error": 0, "warning": 0, "note": 1}
    mutate_files.bare_words(copy, grad_norm=math.nan, grad_norm_median=None)
    code, text = ran(capsys, "doctor", copy, "--json")
    told = strict(text)
    assert code == told["exit_code"] == 0
    assert [f["code"] for f in told["findings"]] == [
        *("norm-not-finite", "median-undefined", "rows-padding"),
    ]
    mutate_files.corrupt_rank(copy, 1)
    code, text = ran(capsys, "doctor", copy, "--json")
    assert code == strict(text)["exit_code"] == 7
    code, text = ran(capsys, "doctor", copy)
    assert code == 7 and "file-broken" in text and "batch_rank1.pt" in text
    assert text.splitlines()[-1].startswith("1 errors, 2 warnings, 0 notes; read: 12 parameters")


def test_a_case_directory_is_taken_too(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ran(capsys, "doctor", CASES / "zoo-run-on-rows")
    assert code == 0 and "sequence-weight-explodes" in text


def test_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    code, text = ran(capsys, "doctor", "--json")
    told = strict(text)
    assert code == 0 and told["backends"]["native"] == {"lacks": [], "runs": True}
    assert set(told["backends"]) == {"native", "te", "axrl"}
    assert told["packages"]["torch"] and told["memory_gib"] > 0
    monkeypatch.setattr(environment, "find_spec", lambda _name: None)
    assert describe_environment()["backends"]["native"] == {
        "lacks": ["torch", "megatron.core"],
        "runs": False,
    }
    code, text = ran(capsys, "doctor")
    assert code == 0 and "lacks torch, megatron.core" in text


def test_it_needs_no_torch_to_be_imported_and_no_megatron_to_run() -> None:
    code = (
        "import sys, replay_lib.analysis as a; assert 'torch' not in sys.modules; "
        f"a.examine({str(EMBEDDED[0])!r}); "
        "sys.exit('megatron.core' in sys.modules or 'torch' not in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
