"""Tensors of a safetensors file, memory-mapped, with faults that name the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from replay_lib.errors import SnapshotError, UsageError, fault

#: Names of the format's dtypes that a snapshot can hold.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def read_all(path: Path) -> dict[str, Tensor]:
    """All tensors of ``path`` by name, mapped: pages are read when they are used.

    Writing into one does not reach the file. SnapshotError where the file is no such file.
    """
    with opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_one(path: Path, name: str) -> Tensor:
    """The tensor ``name`` of ``path``, as by :func:`read_all`."""
    with opened(path) as file:
        return file.get_tensor(name)  # type: ignore[no-any-return]


def described(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of each tensor of ``path``; no values are read."""
    with opened(path) as file:
        found = {}
        for name in file.keys():  # noqa: SIM118
            stated = file.get_slice(name)
            kind = str(stated.get_dtype())
            if kind not in DTYPES:
                raise SnapshotError(fault(path, name, f"dtype {kind}", f"one of {list(DTYPES)}"))
            found[name] = (DTYPES[kind], tuple(int(n) for n in stated.get_shape()))
        return found


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The open file; whatever a damaged one provokes is a SnapshotError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        first = (str(error).splitlines() or [""])[0][:120]
        found = f"broken bytes ({type(error).__name__}: {first})"
        raise SnapshotError(fault(path, None, found, "a safetensors file")) from error


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` (on the CPU) to ``path``; equal tensors give equal bytes.

    A tensor that is a view of a larger storage is written as if it were alone.
    """
    try:
        save_file({name: _alone(tensor) for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # a full disk, say
        raise UsageError(
            fault(
                path, None, f"a file that cannot be written ({error})", "a place with room for it"
            )
        ) from error
    path.chmod(0o644)  # the package makes private files


def _alone(tensor: Tensor) -> Tensor:
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor.detach() if whole else tensor.detach().contiguous().clone()
