"""Layouts: how they are written, what they refuse, and which one `auto` takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from replay_lib.engine import auto_layout
from replay_lib.engine.auto_layout import choose_layout, parameters_of, resolve_layout
from replay_lib.engine.fitting import (
    refuse_idle_ranks,
    refuse_other_drops,
    refuse_what_cannot_be_split,
)
from replay_lib.engine.layout import ONE_RANK, Layout, same_as_recorded
from replay_lib.engine.model_config import model_config
from replay_lib.errors import UnsupportedModelError, UsageError
from replay_lib.snapshot import load_model_fields, open_snapshot
from replay_lib.snapshot.model import Parallel

GIB = 1 << 30


@pytest.fixture(scope="module")
def fields(plain_path):
    return load_model_fields(open_snapshot(plain_path))


def recorded(**sizes: int) -> Parallel:
    return Parallel(**{"tp": 1, "pp": 1, "vpp": None, "cp": 1, "ep": 1, "etp": 1, "dp": 1} | sizes)


@pytest.mark.parametrize(
    ("text", "layout", "ranks"),
    [
        ("tp=2", Layout(tp=2), 2),
        ("ep=2", Layout(ep=2, dp=2), 2),  # experts are shared out over data-parallel ranks
        ("ep=2,dp=4", Layout(ep=2, dp=4), 4),
        ("tp=2,ep=2", Layout(tp=2, ep=2), 2),  # or over tensor-parallel ones
        ("tp=2, cp=2, pp=2, ep=8", Layout(tp=2, cp=2, pp=2, ep=8, dp=2), 16),
        ("dp=1", ONE_RANK, 1),
    ],
)
def test_what_is_written_is_read(text, layout, ranks):
    assert Layout.parse(text) == layout
    assert Layout.parse(text, ranks) == Layout.parse(str(layout))
    assert layout.ranks == ranks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "layout '': found '', expected sizes as in tp=2 or ep=2,dp=2 (tp, pp, cp, ep, dp)"),
        ("vpp=2", "found 'vpp=2', expected sizes as in"),
        ("tp=²", "found 'tp=²', expected sizes as in"),
        ("tp=2,tp=2", "found tp twice, expected it once"),
        ("pp=0", "pp=0: expected a whole number from 1 on"),
        ("ep=3,dp=2", "ep=3: expected a divisor of tp * cp * dp = 2"),
    ],
)
def test_what_is_no_layout_is_told(text, words):
    with pytest.raises(UsageError) as caught:
        Layout.parse(text)
    assert words in str(caught.value)


def test_a_layout_of_other_ranks_is_refused():
    with pytest.raises(UsageError, match=r"tp \* pp \* cp \* dp = 4 ranks, but there are 2"):
        Layout.parse("tp=2,pp=2", ranks=2)


def test_full_needs_every_size_of_the_run():
    run = recorded(tp=2, pp=2, vpp=2, ep=2)
    assert same_as_recorded(Layout(tp=2, pp=2, ep=2), run)
    assert not same_as_recorded(Layout(tp=2, pp=2), run)
    assert not same_as_recorded(ONE_RANK, replace(recorded(), etp=2))


def test_every_field_that_cannot_be_split_is_named_at_once(fields):
    with pytest.raises(UnsupportedModelError) as caught:
        refuse_what_cannot_be_split(Layout(tp=3, pp=3, ep=3), model_config(fields), vocab=128)
    assert str(caught.value) == (
        "run_config.yaml: layout tp=3,pp=3,ep=3 cannot split this model: "
        "model.num_layers is 4, which pp=3 does not divide; "
        "model.num_attention_heads is 4, which tp=3 does not divide; "
        "model.num_query_groups is 2, which tp=3 does not divide; "
        "model.rows of the embedding is 128, which tp=3 does not divide; "
        "model.num_moe_experts is 8, which ep=3 does not divide. "
        "Choose other sizes, or --layout dp=1."
    )
    refuse_what_cannot_be_split(Layout(tp=2, pp=4, ep=8, dp=4), model_config(fields), vocab=128)


def test_a_dense_model_has_no_experts_to_share_out(fields):
    dense = model_config(fields | {"num_moe_experts": None})
    with pytest.raises(UnsupportedModelError, match="num_moe_experts is 1, which ep=2 does not"):
        refuse_what_cannot_be_split(Layout(ep=2, dp=2), dense, vocab=128)


def test_more_data_parallel_ranks_than_batches_are_refused():
    where = Path("iter_0000001")
    refuse_idle_ranks(Layout(dp=2), 2, where)
    with pytest.raises(UsageError) as caught:
        refuse_idle_ranks(Layout(ep=4, dp=4), 2, where)
    assert str(caught.value) == (
        "iter_0000001: layout: found dp=4 for 2 data-parallel ranks to replay, "
        "expected dp from 1 to 2"
    )


@pytest.mark.parametrize(("layout", "run"), [(Layout(tp=2), {}), (ONE_RANK, {"cp": 2})])
def test_a_finite_capacity_drops_by_parts_of_the_tokens(fields, layout, run):
    where = Path("iter_0000001")
    config = model_config(fields | {"moe_expert_capacity_factor": 1.0})
    refuse_other_drops(Layout(pp=2, ep=2, dp=2), config, recorded(dp=2), where)
    with pytest.raises(UnsupportedModelError, match="the replay would be another step"):
        refuse_other_drops(layout, config, recorded(**run), where)
    refuse_other_drops(layout, model_config(fields), recorded(**run), where)


def test_parameters_are_counted_as_the_checkpoint_holds_them(fields):
    counted = parameters_of(model_config(fields), vocab=128)
    experts = 4 * 8 * 3 * 64 * 32
    assert counted.experts == experts
    # 264896 elements are in the checkpoint, 704 of them norms
    assert counted.dense + experts == 264896 - 704


@pytest.mark.parametrize(
    ("run", "machine", "expected"),  # machine: devices and GiB of each
    [
        ({"tp": 2, "ep": 4, "dp": 4}, (8, 1000), ONE_RANK),  # it fits one device
        ({"tp": 2, "ep": 4, "dp": 4}, (8, 1), Layout(tp=2, ep=4, dp=2)),  # and here none
        ({"tp": 2, "pp": 2, "ep": 4, "dp": 4}, (4, 1), Layout(tp=2, pp=2, ep=2)),
        ({"cp": 2, "dp": 4}, (1, 1), ONE_RANK),
        ({"pp": 3}, (8, 1), ONE_RANK),  # 4 layers
    ],
)
def test_auto_folds_the_recorded_layout_onto_the_devices(
    plain_path, fields, run, machine, expected
):
    devices, gib = machine
    snapshot = open_snapshot(plain_path)
    worker = snapshot.worker.model_copy(update={"seq_length": 1_000_000})
    snapshot = replace(snapshot, parallel=recorded(**run), worker=worker)
    config = model_config(fields)
    chosen = choose_layout(snapshot, fields, config, devices=devices, memory=gib * GIB)
    assert chosen == expected


def test_auto_takes_one_rank_on_a_cpu_and_where_the_driver_tells_no_memory(plain_path, monkeypatch):
    monkeypatch.setattr(auto_layout, "cuda_devices", lambda: 8)
    monkeypatch.setattr(auto_layout, "memory_gib", lambda _device: None)
    assert resolve_layout("auto", plain_path, "cpu") == ONE_RANK
    assert resolve_layout("auto", plain_path, "cuda") == ONE_RANK


def test_a_layout_that_needs_more_gpus_than_there_are_is_refused(plain_path, monkeypatch):
    monkeypatch.setattr(auto_layout, "cuda_devices", lambda: 2)
    assert resolve_layout("tp=2", plain_path, "cuda") == Layout(tp=2)
    with pytest.raises(UsageError) as caught:
        resolve_layout("tp=2,pp=2", plain_path, "cuda")
    assert str(caught.value) == (
        "layout tp=2,pp=2: it needs 4 NVIDIA devices, one a rank; 2 found; over 2 such machines: "
        "--nnodes 2 --rdzv-endpoint HOST:29400 here, and on each other one spike-replay join "
        "--rdzv-endpoint HOST:29400 (HOST: an address of this machine)"
    )
    assert resolve_layout("tp=2,pp=2", plain_path, "cuda", nodes=2).ranks == 4
    assert resolve_layout("tp=2,pp=2", plain_path, "cpu").ranks == 4


def test_a_layout_is_shared_out_evenly_over_nodes(plain_path, fields):
    with pytest.raises(UsageError) as caught:
        resolve_layout("auto", plain_path, "cpu", nodes=2)
    assert str(caught.value) == (
        "layout dp=1: 1 rank(s) cannot be shared out evenly over 2 nodes: name another one with "
        "--layout, or leave --nnodes out"
    )
    snapshot = replace(open_snapshot(plain_path), parallel=recorded(pp=4))
    config = model_config(fields)
    chosen = [
        choose_layout(snapshot, fields, config, devices=6, memory=1, nodes=nodes)
        for nodes in (1, 2, 3)
    ]
    assert chosen == [Layout(pp=4), Layout(pp=4), ONE_RANK]  # three nodes: told as above
