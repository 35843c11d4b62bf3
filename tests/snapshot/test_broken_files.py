"""Truncated and bit-flipped files: the right content or our error, never another traceback."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replay_lib.errors import SnapshotError
from replay_lib.snapshot import (
    Snapshot,
    load_batch,
    load_grad_info,
    load_model_fields,
    load_settings,
    open_snapshot,
    read_tensors,
)
from replay_lib.snapshot.axrl_files import read_batch
from replay_lib.snapshot.pickles import load_stream

PLAIN = Path(__file__).parents[2] / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
bounded = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
places = st.floats(0, 1, exclude_max=True)


def routes(snapshot: Snapshot) -> Any:
    return [None if r is None else r.tolist() for r in load_batch(snapshot, 0).routes]


def columns(snapshot: Snapshot) -> Any:
    found = read_batch(snapshot.path / "batch_rank0.pt")
    return {k: v.tolist() for k, v in found.columns.items()}


def parameter(snapshot: Snapshot) -> Any:
    return read_tensors(snapshot.path, ["decoder.final_layernorm.weight"])


READERS: dict[str, Callable[[Snapshot], Any]] = {
    "batch_rank0.pt": columns,
    "routing_payload_rank0.pt": routes,
    "trainer.pt": load_settings,
    "grad_info_rank0.pt": lambda snapshot: load_grad_info(snapshot, 0),
}


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A copy of the plain snapshot whose files are broken and mended in turn."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(shutil.copytree(PLAIN, Path(directory) / PLAIN.name))


def outcome(directory: Path, name: str, data: bytes, read: Callable[[Snapshot], Any]) -> Any:
    """What reading gives with ``data`` as file ``name``; None where it is our error."""
    path = directory / name
    good = path.read_bytes()
    path.write_bytes(data)
    try:
        return read(open_snapshot(directory))
    except SnapshotError as error:
        assert str(directory) in str(error)
        assert name in str(error) or ".distcp" in str(error)
        return None
    finally:
        path.write_bytes(good)


def flipped(data: bytes, place: float, bit: int) -> bytes:
    position = int(place * len(data))
    return data[:position] + bytes([data[position] ^ (1 << bit)]) + data[position + 1 :]


@pytest.mark.parametrize("name", READERS)
@bounded
@given(place=places, bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_or_harmless(
    scratch: Path, name: str, place: float, bit: int
) -> None:
    read = READERS[name]
    found = outcome(scratch, name, flipped((PLAIN / name).read_bytes(), place, bit), read)
    assert found is None or found == read(open_snapshot(PLAIN))


@pytest.mark.parametrize("name", READERS)
@bounded
@given(place=places)
def test_a_file_cut_short_is_an_error(scratch: Path, name: str, place: float) -> None:
    data = (PLAIN / name).read_bytes()
    assert outcome(scratch, name, data[: int(place * len(data))], READERS[name]) is None


@bounded
@given(place=places, bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_checkpoints_table(scratch: Path, place: float, bit: int) -> None:
    data = flipped((PLAIN / ".metadata").read_bytes(), place, bit)
    outcome(scratch, ".metadata", data, lambda snapshot: read_tensors(snapshot.path))


@bounded
@given(place=places)
def test_a_table_cut_short_is_an_error(scratch: Path, place: float) -> None:
    data = (PLAIN / ".metadata").read_bytes()
    cut = data[: int(place * len(data))]
    assert outcome(scratch, ".metadata", cut, lambda snapshot: read_tensors(snapshot.path)) is None


@pytest.mark.parametrize("name", ["axrl_metadata.json", "megatron_worker_config.json"])
@bounded
@given(place=places, byte=st.integers(0, 255), cut=st.booleans())
def test_broken_json(scratch: Path, name: str, place: float, byte: int, cut: bool) -> None:
    data = (PLAIN / name).read_bytes()
    position = int(place * len(data))
    broken = data[:position] if cut else data[:position] + bytes([byte]) + data[position + 1 :]
    path = scratch / name
    try:
        path.write_bytes(broken)
        open_snapshot(scratch)
    except SnapshotError as error:
        assert str(scratch) in str(error)
    finally:
        path.write_bytes(data)


@bounded
@given(place=places, byte=st.integers(0, 255))
def test_a_broken_run_config(scratch: Path, place: float, byte: int) -> None:
    data = (PLAIN / "run_config.yaml").read_bytes()[:3000]
    position = int(place * len(data))
    broken = data[:position] + bytes([byte]) + data[position + 1 :]
    outcome(scratch, "run_config.yaml", broken, load_model_fields)


def test_a_flipped_bit_in_a_parameter_is_named(broken_plain: Path) -> None:
    values = read_tensors(broken_plain)["output_layer.weight"].numpy().tobytes()
    path = next(p for p in broken_plain.glob("*.distcp") if values in p.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(values) + 1000] ^= 64
    path.write_bytes(data)
    with pytest.raises(SnapshotError) as caught:
        read_tensors(broken_plain)
    text = "output_layer.weight): found broken bytes (record archive/data/0 does not match its"
    assert f"{path} (bytes " in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"not a zip", b"\x80\x02}q\x00."])
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_no_archive(broken_plain: Path, name: str, data: bytes) -> None:
    assert outcome(broken_plain, name, data, READERS[name]) is None


def test_an_archive_without_checksums_is_read() -> None:
    """A trainer may switch them off."""
    buffer = io.BytesIO()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.arange(3)}, buffer)
    finally:
        torch.serialization.set_crc32_options(True)
    assert load_stream(buffer, "here", {})["x"].tolist() == [0, 1, 2]


@bounded
@given(data=st.binary(max_size=200))
def test_any_bytes_as_the_checkpoints_table(scratch: Path, data: bytes) -> None:
    found = outcome(scratch, ".metadata", data, lambda snapshot: read_tensors(snapshot.path))
    assert found is None
