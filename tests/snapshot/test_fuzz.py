"""Any damage to any file of a snapshot: the right content, or one of our errors as a finding.

Few examples by default, the same ones every time; ``pytest -m slow`` tries many more.
"""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader

from replay_lib.analysis import Examined, Severity, examine
from replay_lib.batch import ROW_COLUMNS, TOKEN_COLUMNS, RankBatch
from replay_lib.errors import SpikeReplayError
from replay_lib.routing import check_routes
from replay_lib.snapshot import (
    Content,
    load_batch,
    load_grad_info,
    open_snapshot,
    read_content,
    read_settings,
    read_tensors,
)
from replay_lib.snapshot.naming import Call, Instance, named, save_named

PLAIN = Path(__file__).parents[2] / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
FILES = sorted(p.name for p in PLAIN.iterdir())
#: Files whose content has no checksum of its own: a plausible other number cannot be noticed.
UNSEALED = {"axrl_metadata.json", "megatron_worker_config.json", "metadata.json", "run_config.yaml"}
#: The longest that one damaged snapshot may take to be told, on a machine that does other things.
LIMIT_S = 60


def profile(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A copy of the plain snapshot whose files are broken and mended in turn."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(shutil.copytree(PLAIN, Path(directory) / PLAIN.name))


@pytest.fixture(scope="module")
def good() -> Content:
    return read_content(open_snapshot(PLAIN))


def told(directory: Path, changed: dict[str, bytes]) -> Examined:
    """What the doctor says with other bytes in some files; strict JSON, in time."""
    before = {name: (directory / name).read_bytes() for name in changed}
    started = time.monotonic()
    try:
        for name, data in changed.items():
            (directory / name).write_bytes(data)
        examined = examine(directory)
    finally:
        for name, data in before.items():
            (directory / name).write_bytes(data)
    assert time.monotonic() - started < LIMIT_S
    json.dumps(examined.as_json(), allow_nan=False)
    return examined


@st.composite
def damages(draw: st.DrawFn, data: bytes) -> bytes:
    """Other bytes than ``data``: a flipped bit, a cut, a hole of zeros, a part twice, any bytes."""
    place = draw(st.integers(0, max(len(data) - 1, 0)))
    length = draw(st.integers(1, 64))
    end = min(place + length, len(data))
    bit = 1 << draw(st.integers(0, 7))
    return draw(
        st.sampled_from(
            [
                data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :],
                data[:place],
                data[:place] + bytes(end - place) + data[end:],
                data[:end] + data[place:],
                data[end:],
                b"",
                draw(st.binary(max_size=80)),
            ]
        )
    )


def everything(directory: Path) -> dict[str, Any]:
    """All numbers of a snapshot that a replay reads, tensors as dtype, shape and bytes."""
    content = read_content(open_snapshot(directory))
    found: dict[str, Any] = {"figures": content.grad_info, "settings": content.settings}
    for batch in content.batches:
        named_columns = {n: getattr(batch, n) for n in (*TOKEN_COLUMNS, *ROW_COLUMNS)}
        for name, value in {**named_columns, **dict(enumerate(batch.routes))}.items():
            found[f"{batch.dp_rank} {name}"] = value
    found |= content.tensors
    return {
        name: (v.dtype, v.shape, v.contiguous().numpy().tobytes())
        if isinstance(v, torch.Tensor)
        else v
        for name, v in found.items()
    }


def holds(scratch: Path, name: str, data: bytes) -> None:
    """Damage of one file is an error, or changes no number."""
    examined = told(scratch, {name: data})
    if examined.count(Severity.ERROR) or name in UNSEALED or "train_state" in name:
        return
    if name == "common.pt":  # never opened by a replay
        return
    before = (scratch / name).read_bytes()
    try:
        (scratch / name).write_bytes(data)
        assert everything(scratch) == everything(PLAIN)
    finally:
        (scratch / name).write_bytes(before)


@profile(25)
@given(data=st.data())
def test_damage_of_any_file_is_told_or_harmless(scratch: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    holds(scratch, name, data.draw(damages((PLAIN / name).read_bytes())))


@pytest.mark.slow
@profile(1500)
@given(data=st.data())
def test_much_damage_of_any_file_is_told_or_harmless(scratch: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    holds(scratch, name, data.draw(damages((PLAIN / name).read_bytes())))


def test_files_in_each_others_place(scratch: Path) -> None:
    """Every file with the bytes of every other one of another kind."""
    smallest = {Path(n).suffix: n for n in FILES if not n.startswith("__")}
    for name in FILES:
        for other in smallest.values():
            kind = name.replace("rank1", "rank0")
            if kind != other.replace("rank1", "rank0"):
                examined = told(scratch, {name: (PLAIN / other).read_bytes()})
                noticed = examined.count(Severity.ERROR) or "norm-missing" in examined.codes
                assert noticed or "train_state" in name + other, (name, other)


@pytest.mark.parametrize(
    ("names", "codes"),
    [
        (["batch"], {"batch-broken"}),  # 15 payloads for 11 handles
        (["routing_payload"], {"batch-broken"}),
        (["batch", "routing_payload"], set()),  # the same step: its sum is the same
        (["grad_info"], set()),  # figures that nothing is computed from
    ],
)
def test_files_exchanged_between_ranks(scratch: Path, names: list[str], codes: set[str]) -> None:
    changed = {
        f"{name}_rank{rank}.pt": (PLAIN / f"{name}_rank{1 - rank}.pt").read_bytes()
        for name in names
        for rank in (0, 1)
    }
    assert told(scratch, changed).codes - {"rows-padding"} == codes


def test_one_ranks_files_twice(scratch: Path) -> None:
    """One rank's batch and routes in the place of the other's: the step would be another one."""
    names = ("batch", "routing_payload")
    copied = {f"{n}_rank1.pt": (PLAIN / f"{n}_rank0.pt").read_bytes() for n in names}
    assert "rows-repeated" in told(scratch, copied).codes


DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
shapes = st.lists(st.integers(0, 3), max_size=4).map(tuple) | st.sampled_from(
    [(2, 4), (2,), (4, 2)]
)


def batch_file(path: Path, **columns: Any) -> None:
    full: dict[str, Any] = {
        "index": torch.arange(2),
        "input_ids": torch.ones(2, 4, dtype=torch.int64),
        "labels": torch.full((2, 4), -100),
        "loss_mask": torch.zeros(2, 4, dtype=torch.bool),
        "attention_mask": torch.ones(2, 4, dtype=torch.bool),
        "advantage": torch.zeros(2, 4),
        **columns,
    }
    state = {"_tensordict": full}
    save_named(Instance(named("axrl.data.sample.SampleTensorDict"), state), path)


@pytest.fixture(scope="module")
def small(scratch: Path) -> Iterator[Path]:
    """A directory of its own whose rank 0 has two rows of four tokens."""
    directory = scratch.parent / "iter_0000099"
    shutil.copytree(PLAIN, directory)
    yield directory
    shutil.rmtree(directory)


@profile(30)
@given(
    name=st.sampled_from((*TOKEN_COLUMNS, *ROW_COLUMNS)),
    dtype=st.sampled_from(DTYPES),
    shape=shapes,
    fill=st.sampled_from([0, 1, -1, 3]),
)
def test_columns_of_any_dtype_and_shape(
    small: Path, name: str, dtype: torch.dtype, shape: tuple[int, ...], fill: int
) -> None:
    value = torch.full(shape, fill).to(dtype)
    batch_file(small / "batch_rank0.pt", **{name: value})
    (small / "routing_payload_rank0.pt").unlink(missing_ok=True)
    try:
        batch = load_batch(open_snapshot(small), 0)
    except SpikeReplayError as error:
        assert "batch_rank0.pt" in str(error) or "routing_payload_rank0.pt" in str(error)
        return
    read = getattr(batch, name)
    assert read.dtype == value.dtype and read.equal(value)


@profile(30)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(3, 4, 2), (4, 4, 2)]) | st.lists(st.integers(0, 4), max_size=4),
    low=st.integers(-300, 300),
    step=st.integers(0, 70),
)
def test_routes_of_any_dtype_shape_and_id(
    small: Path, dtype: torch.dtype, shape: Any, low: int, step: int
) -> None:
    """The ids that were meant come out, or an error: never others."""
    count = int(torch.tensor(tuple(shape), dtype=torch.int64).prod()) if shape else 1
    meant = (low + step * torch.arange(count)).reshape(tuple(shape))
    if dtype is torch.bfloat16:
        return  # numpy has none
    state = {"ref": Call(named("ray.ObjectRef"), (b"x" * 28,)), "row_start": 0, "row_count": None}
    handle = Instance(named("axrl.utils.tensor_store.TensorHandle"), state)
    column = Instance(named("tensordict.tensorclass.NonTensorData"), {"data": [[[handle]]] * 2})
    batch_file(small / "batch_rank0.pt", routing_handles_per_path=column)
    save_named([meant.to(dtype).numpy()], small / "routing_payload_rank0.pt")
    experts = 400
    try:
        batch = load_batch(open_snapshot(small), 0)
        check_routes(
            batch.routes, batch.lengths(), layers=4, topk=2, experts=experts, where="rank 0"
        )
    except SpikeReplayError:
        return
    for route in batch.routes:
        assert route is not None and route.long().equal(meant)


words = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-2, 2), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
JSON_FILES = ("axrl_metadata.json", "megatron_worker_config.json")


@profile(25)
@given(data=st.data())
def test_any_value_under_any_key_of_the_settings(scratch: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(JSON_FILES))
    document = json.loads((PLAIN / name).read_text())
    place = document
    key = data.draw(st.sampled_from(sorted(place)))
    while isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place)))
    place[key] = data.draw(words)
    told(scratch, {name: json.dumps(document).encode()})


MODEL = yaml.safe_load((PLAIN / "run_config.yaml").read_text())
#: Keys that shape the model; the others are noise for a reader.
KEYS = sorted(
    k
    for k in MODEL["model"]
    if k.startswith(("moe_", "num_", "hidden", "ffn", "kv_", "params", "bf16", "norm", "gated"))
)


@profile(30)
@given(data=st.data())
def test_any_value_under_any_key_of_the_model(scratch: Path, data: st.DataObject) -> None:
    document = {**MODEL, "model": dict(MODEL["model"])}
    for key in data.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)):
        document["model"][key] = data.draw(words)
    told(scratch, {"run_config.yaml": yaml.safe_dump(document).encode()})


@profile(25)
@given(data=st.data())
def test_any_value_in_the_loss_settings(small: Path, data: st.DataObject) -> None:
    known = sorted(read_settings(open_snapshot(PLAIN)).settings.model_dump())
    fields = {data.draw(st.sampled_from([*known, "new_field"])): data.draw(words)}
    config = Instance(named("axrl.configs.GrpoTrainerConfig"), {"__dict__": fields})
    name = named("axrl.trainer.grpo_trainer.GrpoTrainer")
    save_named(Instance(name, {"config": config}), small / "trainer.pt")
    try:
        read_settings(open_snapshot(small))
    except SpikeReplayError as error:
        assert "trainer.pt" in str(error)


@profile(25)
@given(data=st.data())
def test_other_sizes_in_the_checkpoints_table(
    scratch: Path, good: Content, data: st.DataObject
) -> None:
    """A table that states another shape, offset, place or length of one parameter."""
    table = FileSystemReader(PLAIN).read_metadata()
    keys = sorted(good.tensors)
    key = data.draw(st.sampled_from(keys))
    entry = table.state_dict_metadata[key]
    index = next(i for i in table.storage_data if i.fqn == key)
    stored = table.storage_data[index]
    number = data.draw(st.integers(-3, 200))
    kind = data.draw(st.sampled_from(["size", "offset", "length", "file", "dtype"]))
    if kind == "size":
        entry.size = torch.Size([max(number, 0), *entry.size[1:]])
    elif kind in ("offset", "length"):
        setattr(stored, kind, number)
    elif kind == "file":
        stored.relative_path = data.draw(st.sampled_from(["__1_0.distcp", "../x", "common.pt", ""]))
    else:
        entry.properties.dtype = data.draw(st.sampled_from([torch.float64, torch.int32]))
    changed = pickle.dumps(table)
    before = (scratch / ".metadata").read_bytes()
    try:
        (scratch / ".metadata").write_bytes(changed)
        read = read_tensors(scratch)
    except SpikeReplayError:
        return
    finally:
        (scratch / ".metadata").write_bytes(before)
    assert all(read[k].equal(good.tensors[k]) for k in keys)


def test_figures_of_any_form(small: Path) -> None:
    for value in ([], {"a": 1}, {"a": {"b": "c"}}, {1: {}}, {"a": {"b": torch.ones(1)}}):
        save_named(value, small / "grad_info_rank0.pt")
        with pytest.raises(SpikeReplayError):
            load_grad_info(open_snapshot(small), 0)


def test_what_is_compared_is_not_empty(good: Content) -> None:
    assert isinstance(good.batches[0], RankBatch) and len(everything(PLAIN)) > 50
