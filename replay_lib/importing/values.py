"""Values of a dump as tensors, checked, with errors that name sample and field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replay_lib.errors import BatchError, SpikeReplayError, fault
from replay_lib.snapshot.arrays import array_from
from replay_lib.snapshot.routes import ids_from
from replay_lib.snapshot.stand_ins import StandIn, Table, stand_ins

if TYPE_CHECKING:
    from torch import Tensor

_NUMPY = [
    f"numpy.{core}.multiarray.{name}"
    for core in ("_core", "core")
    for name in ("_reconstruct", "scalar")
] + ["numpy.ndarray", "numpy.dtype"]


def numpy_table() -> Table:
    """Stand-ins for numpy's arrays and numbers."""
    return stand_ins(_NUMPY)


def floats(where: str, name: str, value: Any) -> Tensor:
    """float32, one axis."""
    import torch

    found = _tensor(where, name, value)
    if found.dim() != 1:
        raise BatchError(fault(where, name, f"shape {list(found.shape)}", "one number a token"))
    return found.to(torch.float32)


def integers(where: str, name: str, value: Any) -> Tensor:
    """int64, one axis; BatchError for fractions."""
    import torch

    found = _tensor(where, name, value)
    whole = found.to(torch.int64)
    if found.dim() != 1 or not bool((whole == found).all()):
        raise BatchError(fault(where, name, f"shape {list(found.shape)}", "integers in a list"))
    return whole


def integer(where: str, name: str, value: Any) -> int:
    """A whole number, also one in a tensor of no axis."""
    import torch

    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int):
        raise BatchError(fault(where, name, f"{value!r:.40}", "an integer"))
    return value


def number(value: Any) -> float | None:
    """A number, also one in a tensor of no axis; None for anything else."""
    import torch

    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, int | float) else None


def routes(where: str, name: str, value: Any) -> Tensor:
    """int16 ``[rows, L, K]``."""
    import torch

    if isinstance(value, StandIn):
        try:
            return torch.from_numpy(ids_from(value))
        except (ValueError, TypeError) as error:
            raise BatchError(fault(where, name, str(error), "integers [rows, L, K]")) from error
    found = _tensor(where, name, value)
    narrow = found.to(torch.int16)
    if found.dim() != 3 or found.is_floating_point() or not bool((narrow == found).all()):
        found_as = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
        raise BatchError(fault(where, name, found_as, "expert ids [rows, L, K] that fit int16"))
    return narrow


def _tensor(where: str, name: str, value: Any) -> Tensor:
    import torch

    try:
        if isinstance(value, StandIn):
            return torch.from_numpy(array_from(value))
        return torch.as_tensor(value).detach().cpu()
    except SpikeReplayError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        found = f"a {type(value).__name__} ({error})"
        raise BatchError(fault(where, name, found[:160], "numbers")) from error
