"""Conditions of files: foreign objects, other versions, one bad rank, options that nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutate
import mutate_files
import pytest
import torch
import yaml

from replay_lib.analysis import examine
from replay_lib.case import Case, CaseFile
from replay_lib.errors import CaseError, PatchError, SnapshotError, UnsafePickleError
from replay_lib.methods import find, load_methods
from replay_lib.snapshot import (
    Content,
    Snapshot,
    load_batch,
    open_snapshot,
    read_settings,
    read_tensors,
)
from replay_lib.snapshot.axrl_files import read_batch

Write = Callable[[Content], Snapshot]
ROOT = Path(__file__).parents[2]


def test_e1_chunks_are_put_together_and_the_optimizer_is_never_asked_for(copy: Path) -> None:
    before = read_tensors(copy)
    mutate_files.split_checkpoint(copy)
    files = sorted(p.name for p in copy.glob("*.distcp"))
    assert files == [f"__{n}_0.distcp" for n in range(4)]
    after = read_tensors(copy)
    assert before.keys() == after.keys()
    assert all(before[key].equal(after[key]) for key in before)
    assert examine(copy).codes == {"rows-padding"}


def test_e6_the_doctor_names_all_three(write: Write, content: Content) -> None:
    found = {
        f.code: f.found for f in examine(write(mutate.other_parameters(content)).path).findings
    }
    routers = ", ".join(f"decoder.layers.{n}.mlp.router.weight" for n in range(4))
    extras = ", ".join(f"decoder.layers.{n}.mlp.extra.weight" for n in range(4))
    assert found["weights-missing"] == routers
    assert found["weights-unknown"] == extras
    assert found["weights-shape"] == "decoder.final_layernorm.weight has [63], not [64]"


@pytest.mark.parametrize("kind", ["argparse", "numpy-scalar", "function"])
def test_e8_foreign_objects_are_refused_by_name(copy: Path, kind: str) -> None:
    name = mutate_files.foreign_objects(copy, kind)
    with pytest.raises(UnsafePickleError) as caught:
        read_batch(copy / "batch_rank0.pt")
    assert name and name in str(caught.value)
    (found,) = [f for f in examine(copy).findings if f.code == "pickle-unsafe"]
    assert (found.file, found.dp_rank) == ("batch_rank0.pt", 0) and name in found.found


@pytest.mark.parametrize("kind", ["ray", "ray-old"])
def test_e8_dead_object_references_are_read_through_stand_ins(copy: Path, kind: str) -> None:
    mutate_files.foreign_objects(copy, kind)
    assert read_batch(copy / "batch_rank0.pt").columns["input_ids"].shape == (1, 4)


@pytest.mark.parametrize("form", ["data", "nested", "stack"])
def test_e9_handles_of_other_tensordict_versions(copy: Path, form: str) -> None:
    mutate_files.other_tensordict(copy, form)
    (route,) = load_batch(open_snapshot(copy), 0).routes
    assert route is not None and route.tolist() == [[[0, 1]] * 4] * 3


@pytest.mark.parametrize("name", ["numpy._core.multiarray", "numpy.core.multiarray"])
def test_e10_both_names_of_numpys_module(copy: Path, name: str) -> None:
    before = load_batch(open_snapshot(copy), 0).routes
    mutate_files.other_numpy(copy, name)
    assert name.encode() in (copy / "routing_payload_rank0.pt").read_bytes()
    after = load_batch(open_snapshot(copy), 0).routes
    assert all(
        a is not None and b is not None and a.equal(b) for a, b in zip(before, after, strict=True)
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_e11_one_corrupt_rank_is_named(copy: Path, rank: int) -> None:
    mutate_files.corrupt_rank(copy, rank)
    with pytest.raises(SnapshotError, match=rf"batch_rank{rank}\.pt: found broken bytes"):
        load_batch(open_snapshot(copy), rank)
    load_batch(open_snapshot(copy), 1 - rank)
    broken = [(f.file, f.dp_rank) for f in examine(copy).findings if f.code == "file-broken"]
    assert broken == [(f"batch_rank{rank}.pt", rank)]


def test_e15_one_embedded_snapshot_is_the_trainers_own(plain: Path) -> None:
    """Two ranks' real training steps: optimizer state, extra state and RNG are in it."""
    keys = mutate_files.real_writer(plain).state_dict_metadata
    for part in ("optimizer.distributed.", "rng_state", "_extra_state"):
        assert any(part in key for key in keys), part
    provenance = Case.load(ROOT / "spike_cases/axrl-plain-step85").provenance
    assert provenance.trainer.startswith("AXRL at commit")


@pytest.mark.parametrize(("value", "code"), [(0.5, "setting-unread"), (None, "setting-unknown")])
def test_e18_options_of_the_run_that_nothing_reads(
    write: Write, content: Content, value: Any, code: str
) -> None:
    found = {
        f.code: f for f in examine(write(mutate.unread_settings(content, value)).path).findings
    }
    assert found[code].found == f"brand_new_option={value!r}"
    assert found[code].file == "megatron_worker_config.json"


@pytest.mark.parametrize(("value", "code"), [(0.5, "setting-unread"), (0.0, "setting-unknown")])
def test_e18_loss_settings_that_nothing_reads(copy: Path, value: Any, code: str) -> None:
    mutate_files.unread_loss_setting(copy, value)
    found = {f.code: f for f in examine(copy).findings}
    assert found[code].found == f"brand_new_term={value!r}"
    assert read_settings(open_snapshot(copy)).unknown == ("brand_new_term",)


def test_e18_options_of_a_method_and_fields_of_a_case(copy: Path, tmp_path: Path) -> None:
    methods = load_methods()
    with pytest.raises(PatchError, match="unknown parameter cap; known: clip_max"):
        find("enable-token-mismatch-tis-max2", methods).patches({"cap": 3.0})
    fields = {"schema": 1, "snapshot": f"copy/{copy.name}", "targets": 3}
    assert "targets" not in CaseFile.model_fields
    (tmp_path / "case.yaml").write_text(yaml.safe_dump(fields))
    with pytest.raises(CaseError, match="targets"):
        Case.load(tmp_path)


def test_chunks_of_one_tensor_may_lie_in_any_file(copy: Path) -> None:
    mutate_files.split_checkpoint(copy, layers=4, experts=4)
    assert len(list(copy.glob("*.distcp"))) == 16
    assert torch.isfinite(read_tensors(copy)["output_layer.weight"]).all()
