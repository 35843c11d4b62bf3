"""A directory for Megatron and AXRL: their own files back, everything else a link."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from test_open_snapshot import as_legacy

from replay_lib.errors import UsageError
from replay_lib.snapshot import (
    open_snapshot,
    read_tensors,
    temporary_replay_directory,
)

FOUR_KEYS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@pytest.fixture
def legacy(broken_plain: Path) -> Path:
    as_legacy(broken_plain)
    return broken_plain


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_megatron_finds_its_own_metadata_and_axrl_its_own(legacy: Path) -> None:
    before = contents(legacy)
    with temporary_replay_directory(open_snapshot(legacy)) as directory:
        assert directory.name == "iter_0000085"
        assert json.loads((directory / "metadata.json").read_text()) == FOUR_KEYS
        axrl = json.loads((directory / "axrl_metadata.json").read_text())
        assert axrl["grad_norm"] == 8.441921403762574
        restored = open_snapshot(directory)
        assert not restored.legacy
        assert restored.grad_norm_preclip == 8.441921403762574
        assert read_tensors(directory).keys() == read_tensors(legacy).keys()
    assert contents(legacy) == before


def test_everything_else_is_a_link(legacy: Path) -> None:
    with temporary_replay_directory(legacy) as directory:
        own = {path.name for path in directory.iterdir() if not path.is_symlink()}
        assert own == {"metadata.json"}
        names = {path.name for path in directory.iterdir()}
        assert names == {path.name for path in legacy.iterdir()} | {"axrl_metadata.json"}
        assert all((directory / name).resolve().parent == legacy for name in names - own)


def test_a_snapshot_of_today_is_all_links(plain: Path) -> None:
    with temporary_replay_directory(plain) as directory:
        assert all(path.is_symlink() for path in directory.iterdir())
        assert contents(directory) == contents(plain)


def test_a_checkpoint_with_its_common_state_inside_has_two_keys(legacy: Path) -> None:
    (legacy / "common.pt").unlink()
    with temporary_replay_directory(legacy) as directory:
        found = json.loads((directory / "metadata.json").read_text())
        assert found == {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_it_is_gone_afterwards_whatever_happens(legacy: Path, error: type[BaseException]) -> None:
    before = contents(legacy)
    with pytest.raises(error), temporary_replay_directory(legacy) as directory:
        (directory / "trainer.pt").unlink()
        (directory / "more").mkdir()
        (directory / "more" / "file").write_text("x")
        raise error
    assert not directory.exists() and not directory.parent.exists()
    assert contents(legacy) == before


def test_a_relative_path_and_a_link_to_the_snapshot_do(
    legacy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(legacy)
    monkeypatch.chdir(tmp_path)
    with temporary_replay_directory("link") as directory:
        assert open_snapshot(directory).step == 85


def test_a_system_without_symbolic_links_gets_hard_ones(
    legacy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no symbolic links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the same file system
    with temporary_replay_directory(legacy) as directory:
        assert (directory / "trainer.pt").samefile(legacy / "trainer.pt")
    assert (legacy / "trainer.pt").exists()


def test_a_portable_snapshot_has_to_be_imported_first(exported: Path) -> None:
    with (
        pytest.raises(UsageError, match="spike-replay import"),
        temporary_replay_directory(exported),
    ):
        pass


def test_megatron_takes_it_for_a_checkpoint(legacy: Path) -> None:
    from megatron.core.dist_checkpointing import load_common_state_dict, load_tensors_metadata
    from megatron.core.dist_checkpointing.core import (
        check_is_distributed_checkpoint,
        maybe_load_config,
    )

    with temporary_replay_directory(legacy) as directory:
        assert check_is_distributed_checkpoint(str(directory))
        config = maybe_load_config(str(directory))
        assert (config.sharded_backend, config.sharded_backend_version) == ("torch_dist", 1)
        found = load_tensors_metadata(str(directory))
        assert {k for k in found if "optimizer" not in k} >= set(read_tensors(legacy))
        assert load_common_state_dict(str(directory))["iteration"] == 85
    shutil.rmtree(legacy)
