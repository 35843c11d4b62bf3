"""Logs: what lines tell of spikes, plain and compressed, in bounded memory."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from output_trees import warning

from replay_lib.errors import UsageError
from replay_lib.finding import logs
from replay_lib.finding.logs import Mention, copy_log, logs_in, read_log

RAY = "\x1b[36m(MegatronWorker pid=123, ip=10.0.0.1)\x1b[0m "
TIME = "2026-11-01 10:00:00"


def test_lines_of_every_rank_are_one_spike(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    text = warning(85, "8.4419") + warning(85, "8.4419", f"{RAY}{TIME} - w.py:1 - WARNING - ")
    text += warning(90, "inf", "") + warning(85, "9.0000", '{"message": "')
    text += "NaN/Inf in gradients at step 91, optimizer step skipped.\n"
    log.write_text(text)
    read = read_log(log)
    assert read.mentions == [
        Mention(step=85, norm="8.4419", at=TIME, lines=2),
        Mention(step=90, norm="inf", at="", lines=1),
        Mention(step=85, norm="9.0000", at="", lines=1),
    ]
    assert (read.non_finite_steps, read.cut, read.bytes) == ([91], "", log.stat().st_size)


def test_what_is_no_warning_is_none(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(
        "Gradient spike detected at step x, grad_norm=1.0\n"
        "Gradient spike detected at step 7, grad_norm=high\n"
        "Saved 15 routing payloads for spike replay on rank 0.\n"
        "Gradient spike detected at step 8"
    )
    assert read_log(log).mentions == []


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_logs_whatever_their_name_is(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    text = (warning(85, "8.4419") + "x" * 1000 + "\n" + warning(90, "3.0000")).encode()
    packed = compress(text)
    log = tmp_path / "log-of-the-night"
    log.write_bytes(packed)
    assert [m.step for m in read_log(log).mentions] == [85, 90]
    log.write_bytes(packed[:-4])  # as one is that is still written
    cut = read_log(log)
    assert "ends or breaks after" in cut.cut


def test_zstd_where_its_library_is_there(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    log = tmp_path / "run.log.zst"
    log.write_bytes(zstandard.ZstdCompressor().compress(warning(85, "8.4419").encode()))
    assert [m.step for m in read_log(log).mentions] == [85]


def test_zstd_without_its_library_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    log = tmp_path / "run.log.zst"
    log.write_bytes(b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(UsageError, match=r"expected the package zstandard\. Install zstandard"):
        read_log(log)


@pytest.mark.parametrize("block", [300, 777, 1024])
def test_warnings_that_cross_the_borders_of_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(logs, "BLOCK", block)
    log = tmp_path / "run.log"
    log.write_text("".join("." * (step * 37 % 211) + warning(step, "8.0000") for step in range(99)))
    found = read_log(log).mentions
    assert [m.step for m in found] == list(range(99))
    assert {m.lines for m in found} == {1}
    assert {m.at for m in found} == {TIME}


def test_a_line_that_never_ends_is_read_in_bounded_memory(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    with log.open("wb") as out:
        out.write(warning(85, "8.4419").encode())
        out.seek(1 << 28)  # 256 MiB without a newline
        out.write(warning(90, "3.0000").encode())
    code = (
        "import resource, sys; from pathlib import Path; from replay_lib.finding.logs import *;"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        f"steps = [m.step for m in read_log(Path({str(log)!r})).mentions];"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before;"
        "sys.exit(0 if steps == [85, 90] and grown < 32 << 10 else f'{steps} {grown} KiB')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_a_copy_is_whole_and_takes_no_others_name(tmp_path: Path) -> None:
    log = tmp_path / "run.log.gz"
    log.write_bytes(gzip.compress(b"text"))
    (tmp_path / "out").mkdir()
    copies = [copy_log(log, tmp_path / "out") for _ in range(2)]
    assert [c.name for c in copies] == ["run.log.gz", "1-run.log.gz"]
    assert {c.read_bytes() for c in copies} == {log.read_bytes()}
    assert len(list((tmp_path / "out").iterdir())) == 2


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, found in (
        (tmp_path / "absent", "No such file or directory"),
        (tmp_path, "a directory"),
        (tmp_path / "pipe", "no regular file"),
    ):
        with pytest.raises(UsageError, match=found):
            read_log(path)


def test_logs_lie_in_the_output_directory_or_one_below(tmp_path: Path) -> None:
    for name in ("run.log", "logs/a.log.gz", "logs/deep/b.log", "checkpoints/c.log", "d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in logs_in(tmp_path)]
    assert found == ["logs/a.log.gz", "run.log"]
