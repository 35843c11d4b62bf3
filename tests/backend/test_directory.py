"""The replay directory: a whole snapshot with the experiment's batch, settings and routes."""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path

import pytest
import torch

from replay_lib.backend.directory import Recorded, read_recorded, write_replay_directory
from replay_lib.backend.prepared import prepare
from replay_lib.engine.protocol import Experiment
from replay_lib.errors import PatchError, TrainerError
from replay_lib.layout import AXRL_METADATA, MEGATRON_METADATA
from replay_lib.snapshot import (
    load_batch,
    load_grad_info,
    load_handles,
    load_settings,
    open_snapshot,
    read_content,
    write_snapshot,
)
from replay_lib.snapshot.trainer import read_trainer_config
from replay_lib.snapshot.write import read_worker_config
from replay_lib.trainers.axrl import import_axrl
from replay_lib.trainers.axrl_source import VARIABLE, find_axrl

ROOT = Path(__file__).parents[2]
SNAPSHOT = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return read_recorded(open_snapshot(SNAPSHOT))


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    return prepare(SNAPSHOT, [], tmp_path)


def test_unpatched_it_is_the_snapshot_again(recorded: Recorded, tmp_path: Path) -> None:
    target = tmp_path / "iter_0000085"
    write_replay_directory(
        target,
        recorded,
        batches=recorded.batches,
        settings=recorded.settings,
        routes="all",
    )
    before, after = open_snapshot(SNAPSHOT), open_snapshot(target)
    assert after.grad_norm_preclip == before.grad_norm_preclip
    assert after.routing_payload_count_rank0 == before.routing_payload_count_rank0
    assert read_worker_config(after) == read_worker_config(before)
    assert read_trainer_config(after) == read_trainer_config(before)
    for rank in range(2):
        one, other = load_batch(before, rank), load_batch(after, rank)
        assert torch.equal(one.advantage, other.advantage)
        assert all(torch.equal(a, b) for a, b in zip(one.routes, other.routes, strict=True))
        # paths of several objects, in the same order
        assert load_handles(after, rank)[0] == load_handles(before, rank)[0]
        assert load_grad_info(after, rank) == load_grad_info(before, rank)
    linked = {f.name for f in target.iterdir() if f.is_symlink()}
    own = {f.name for f in target.iterdir() if not f.is_symlink()}
    assert linked == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "common.pt",
        "run_config.yaml",
        "train_state.pt",
    }
    assert len(own) == 10  # three files a rank and four documents


@pytest.fixture
def planned(prepared):
    """The replay directory of an experiment by name, there until the test ends."""
    with contextlib.ExitStack() as stack:

        def directory(name: str) -> Path:
            plan = prepared.plan(Experiment.parse(name))
            return stack.enter_context(prepared.directory(plan))

        yield directory


def test_a_batch_patch_is_in_the_batch_files(planned) -> None:
    after = open_snapshot(planned("seam_examples:smaller_advantage"))
    for rank in range(2):
        before = load_batch(open_snapshot(SNAPSHOT), rank)
        assert torch.equal(load_batch(after, rank).advantage, before.advantage * 0.25)


def test_a_settings_patch_is_in_the_trainer(planned) -> None:
    after = open_snapshot(planned("enable-token-mismatch-tis-max2"))
    assert load_settings(after).mismatch_token_clip_max == 2.0
    assert load_settings(open_snapshot(SNAPSHOT)).mismatch_token_clip_max is None


@pytest.mark.parametrize(
    ("name", "routes", "loss_only"),
    [
        ("baseline", True, False),
        ("disable-routing-replay", False, False),
        ("replay-r3-on-loss-tokens-only", True, True),
    ],
)
def test_routes_are_in_the_payload_or_in_the_workers_configuration(
    planned, name: str, routes: bool, loss_only: bool
) -> None:
    after = open_snapshot(planned(name))
    for rank in range(2):
        assert all((r is not None) == routes for r in load_batch(after, rank).routes)
    assert read_worker_config(after)["replay_routing_for_loss_tokens_only"] == loss_only
    assert (after.routing_payload_count_rank0 or 0) > 0 or not routes


def test_what_cannot_be_expressed_or_contradicts_is_refused_before_a_directory(
    prepared, tmp_path: Path
) -> None:
    for name in ("seam_examples:weighted_tokens", "use-current-routing-for-first-moe-layer"):
        with pytest.raises(PatchError, match=f"backend axrl: {name} "):
            prepared.plan(Experiment.parse(name))
    assert not list(tmp_path.iterdir())


def test_a_directory_vanishes_with_its_replay(prepared, tmp_path: Path) -> None:
    with prepared.directory(prepared.plan(Experiment.baseline())) as directory:
        assert directory.name == "iter_0000085" and directory.is_dir()
    assert not list(tmp_path.iterdir())


def test_settings_of_a_newer_trainer_are_kept(recorded: Recorded, tmp_path: Path) -> None:
    saved = {**recorded.saved_settings, "a_newer_setting": 3}
    saved["opd"] = {**saved["opd"], "another": "x"}
    target = tmp_path / "iter_0000085"
    newer = Recorded(**{**vars(recorded), "saved_settings": saved})
    settings = recorded.settings.replace(clip_ratio_high=0.5)
    write_replay_directory(target, newer, batches=recorded.batches, settings=settings, routes="all")
    found = read_trainer_config(open_snapshot(target))
    assert found["a_newer_setting"] == 3 and found["opd"]["another"] == "x"
    assert found["clip_ratio_high"] == 0.5


def test_megatron_gets_its_own_metadata_of_a_legacy_snapshot_back(tmp_path: Path) -> None:
    legacy = write_snapshot(
        tmp_path / "old" / "iter_0000085", read_content(open_snapshot(SNAPSHOT)), legacy=True
    )
    assert legacy.legacy and not (legacy.path / AXRL_METADATA).exists()
    recorded = read_recorded(legacy)
    target = tmp_path / "iter_0000085"
    write_replay_directory(
        target, recorded, batches=recorded.batches, settings=recorded.settings, routes="all"
    )
    megatron = json.loads((target / MEGATRON_METADATA).read_text())
    assert megatron["sharded_backend"] == "torch_dist" and "grad_norm" not in megatron
    assert open_snapshot(target).grad_norm_preclip == legacy.grad_norm_preclip


def test_axrls_own_classes_come_out_of_the_trainer_file(recorded: Recorded, tmp_path, monkeypatch):
    """AXRL loads that file without restriction; what we write has to be one of its objects."""
    root = find_axrl()
    if root is None:
        pytest.skip(f"AXRL is absent: name a checkout in the environment variable {VARIABLE}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Megatron-Core and torch give on import
        try:
            module = import_axrl()
        except TrainerError as error:
            pytest.skip(str(error))
    settings = recorded.settings.replace(mismatch_token_clip_max=2.0)
    target = tmp_path / "iter_0000085"
    write_replay_directory(
        target, recorded, batches=recorded.batches, settings=settings, routes="all"
    )
    trainer = torch.load(target / "trainer.pt", weights_only=False)
    assert type(trainer) is module.GrpoTrainer
    assert trainer.config.mismatch_token_clip_max == 2.0
    again = type(trainer.config).model_validate(trainer.config.model_dump())
    assert again == trainer.config
