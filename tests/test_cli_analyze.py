"""``spike-replay analyze``: what a person reads, what a program reads, what the ledger keeps."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_ran import Ran

from replay_lib.analysis.signals.summary import Signals
from replay_lib.cli.signals_view import plain
from replay_lib.exit_codes import ExitCode
from replay_lib.record import ledger
from replay_lib.record.task import Task

ROOT = Path(__file__).parents[1]
CASE = ROOT / "spike_cases/zoo-poisoned-row"
PLAIN = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"


@pytest.fixture
def spike_replay(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: Ran(capsys, *arguments)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A word for each id of the small models; id 7's would clear a terminal."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(128) if i != 7} | {"\x1b[2J": 7}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_signs_of_trouble_come_first(spike_replay: Any) -> None:
    ran = spike_replay("analyze", CASE)
    assert ran.code == ExitCode.GREEN
    lines = ran.out.splitlines()
    assert lines[0].startswith("zoo-poisoned-row: step 50, 128 rows on 1 data-parallel ranks")
    first = lines.index("signs of trouble")
    assert lines[first + 2].startswith(("loud rows", "sign imbalance"))
    titles = ("signs of trouble", "rows to look at", "advantages on", "ratios on", "saved routes")
    places = [next(i for i, line in enumerate(lines) if line.startswith(t)) for t in titles]
    assert places == sorted(places)


def test_json_alone_on_stdout(spike_replay: Any) -> None:
    ran = spike_replay("analyze", CASE / "snapshot" / "iter_0000050", "--json")
    signals = Signals.model_validate(ran.document)
    assert signals.case is None and signals.sign("loud_rows").present
    assert "not kept in a ledger" in ran.err and "not kept" not in ran.out


def test_the_ledger_keeps_what_json_gives(
    spike_replay: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = spike_replay("analyze", PLAIN, "--task", "some-job", "--json")
    events = ledger.read(Task("some-job"))
    assert [event.kind for event in events] == ["started", "analyzed", "ended"]
    assert len({event.run for event in events}) == 1
    assert events[1].data == {"snapshot": str(PLAIN), "signals": ran.document}
    assert "not kept" not in ran.err


def test_the_job_of_an_output_directory_is_its_task(
    spike_replay: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    above = tmp_path / "2026~math-moe__actor" / "checkpoints" / "spike_snapshots"
    shutil.copytree(PLAIN, above / PLAIN.name)
    spike_replay("analyze", above / PLAIN.name)
    assert [event.kind for event in ledger.read(Task("math-moe"))][1] == "analyzed"


def test_a_failure_is_kept_and_named(
    spike_replay: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    broken = Path(shutil.copytree(PLAIN, tmp_path / PLAIN.name))
    (broken / "routing_payload_rank1.pt").write_bytes(b"PK\x03\x04")
    ran = spike_replay("analyze", broken, "--task", "some-job")
    assert ran.code == ExitCode.INPUT and "routing_payload_rank1.pt" in ran.err
    kinds = [event.kind for event in ledger.read(Task("some-job"))]
    assert kinds == ["started", "failure", "ended"]


def test_tokens_are_told_as_text_that_no_terminal_acts_on(
    spike_replay: Any, tokenizer: Path
) -> None:
    ran = spike_replay("analyze", ROOT / "spike_cases/zoo-run-on-rows", "--tokenizer", tokenizer)
    assert ran.code == ExitCode.GREEN
    assert "'w6'" in ran.out and "\x1b" not in ran.out
    document = spike_replay("analyze", CASE, "--tokenizer", tokenizer, "--json").document
    told = document["outliers"][0]
    assert told["text"] == ("\x1b[2J" if told["token_id"] == 7 else f"w{told['token_id']}")


def test_a_tokenizer_that_is_none(spike_replay: Any, tmp_path: Path) -> None:
    ran = spike_replay("analyze", CASE, "--tokenizer", tmp_path)
    assert ran.code == ExitCode.USAGE and "tokenizer.json: found no such file" in ran.err
    (tmp_path / "tokenizer.json").write_text("{}")
    ran = spike_replay("analyze", CASE, "--tokenizer", tmp_path)
    assert ran.code == ExitCode.USAGE and "tokenizer.json" in ran.err


def test_what_a_terminal_would_act_on_is_escaped() -> None:
    assert plain("a\x1b[31m\x00\u202e ü") == "a\\x1b[31m\\x00\\u202e ü"


def test_the_schema_reads_without_torch() -> None:
    code = (
        "import sys, replay_lib.cli, replay_lib.analysis.signals.summary; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_help_names_the_page(spike_replay: Any) -> None:
    ran = spike_replay("analyze", "--help")
    assert "docs/analyze.md" in ran.out and "--tokenizer" in ran.out
