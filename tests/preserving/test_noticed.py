"""A preserved snapshot that is no longer what was preserved is noticed by whatever opens it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from replay_lib.analysis import examine_case
from replay_lib.case_files import seal
from replay_lib.digests import digests
from replay_lib.errors import IncompleteSnapshotError, SnapshotError
from replay_lib.porting import export_case
from replay_lib.preserving import preserve, verify
from replay_lib.snapshot import open_snapshot, temporary_replay_directory
from replay_lib.snapshot.preserved import check_preserved, read_manifest


def test_a_rewrite_in_place_is_noticed_by_whatever_opens_it(source: Path, tmp_path: Path) -> None:
    kept = preserve(source).path
    linked = source / "__0_0.distcp"
    data = linked.read_bytes()
    with linked.open("r+b") as file:  # as a trainer that resumed: the same file, other bytes
        file.write(b"\x00" * 64)
    told = r"found 1 of \d+ files changed: __0_0.distcp \(written since\)"
    for opens in (
        lambda: open_snapshot(kept),
        lambda: export_case(kept, tmp_path / "out"),
        lambda: preserve(kept),
        lambda: preserve(source),
    ):
        with pytest.raises(SnapshotError, match=told):
            opens()
    assert "__0_0.distcp (written since)" in examine_case(kept).findings[0].found
    linked.write_bytes(data + b"x")
    with pytest.raises(SnapshotError, match=f"{len(data) + 1} bytes instead of {len(data)}"):
        open_snapshot(kept)
    (kept / "__0_0.distcp").unlink()
    with pytest.raises(IncompleteSnapshotError, match=r"__0_0\.distcp \(gone\)"):
        open_snapshot(kept)
    (kept / "__0_0.distcp").write_bytes(data)
    stat = read_manifest(kept).files["__0_0.distcp"]  # type: ignore[union-attr]
    os.utime(kept / "__0_0.distcp", ns=(stat.mtime_ns, stat.mtime_ns))
    with pytest.raises(SnapshotError, match="another file in its place"):
        open_snapshot(kept)


def test_content_decides_where_somebody_asks(source: Path) -> None:
    kept = preserve(source, verified=True)
    assert kept.manifest.hashed == len(kept.manifest.files)
    file = kept.path / "__0_0.distcp"
    os.utime(file, (1, 1))
    with pytest.raises(SnapshotError, match="written since"):
        open_snapshot(kept.path)
    assert preserve(kept.path, verified=True).verified  # the same content: its time is noted
    open_snapshot(kept.path)
    stat = file.stat()
    with file.open("r+b") as opened:
        opened.write(b"\x01")
    os.utime(file, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    open_snapshot(kept.path)  # a forged time is seen by reading alone
    with pytest.raises(SnapshotError, match=r"files that differ: __0_0\.distcp \(another content"):
        verify(kept.path)


def test_what_was_never_read_cannot_be_vouched_for(source: Path) -> None:
    kept = preserve(source)
    os.utime(source / "__0_0.distcp", (1, 1))
    with pytest.raises(SnapshotError, match="written since, and its content was not known"):
        preserve(kept.path, verified=True)


def test_a_copy_elsewhere_is_compared_by_size_and_content(source: Path, tmp_path: Path) -> None:
    kept = preserve(source, verified=True).path
    elsewhere = tmp_path / "node" / "iter_0000085"
    shutil.copytree(kept, elsewhere, copy_function=shutil.copyfile)
    os.utime(kept, None)
    assert check_preserved(elsewhere) is not None
    before = (elsewhere / "preserved.json").read_bytes()
    verify(elsewhere)
    assert (elsewhere / "preserved.json").read_bytes() == before
    with (elsewhere / "trainer.pt").open("ab") as file:
        file.write(b"x")
    with pytest.raises(SnapshotError, match=r"trainer\.pt"):
        open_snapshot(elsewhere)


def test_the_manifest_is_no_file_of_the_snapshot(source: Path, tmp_path: Path) -> None:
    kept = preserve(source).path
    assert examine_case(kept).as_json()["findings"] == examine_case(source).as_json()["findings"]
    assert set(digests(kept.parent, [kept.name])) == {
        f"{kept.name}/{path.name}" for path in source.iterdir()
    }
    with temporary_replay_directory(kept) as replayed:
        assert not (replayed / "preserved.json").exists()
        open_snapshot(replayed)
    portable = export_case(kept, tmp_path / "portable")
    assert portable.files == export_case(source, tmp_path / "plain").files
    case = tmp_path / "case"
    shutil.copytree(kept, case / "snapshot" / "iter_0000085")
    (case / "case.yaml").write_text("schema: 1\nsnapshot: snapshot/iter_0000085\n")
    sealed = seal(case)
    assert not any("preserved.json" in name for name in sealed.sha256)
    verify(case / "snapshot" / "iter_0000085")
    sealed.require()
