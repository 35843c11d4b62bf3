"""numpy arrays from their stand-ins: raw bytes with a stated shape and a numeric dtype."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from replay_lib.snapshot.stand_ins import StandIn, is_a

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NUMERIC = frozenset(["b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"])


def array_from(value: Any) -> NDArray[np.generic]:
    """The array that a stand-in describes; a ValueError where it is not a numeric array."""
    import numpy as np

    if not is_a(value, "_reconstruct") or not isinstance(value.state, tuple):
        raise ValueError(f"a {type(value).__name__} where an array belongs")
    if len(value.state) != 5:
        raise ValueError(f"an array state of {len(value.state)} parts, not 5")
    _version, shape, dtype, fortran, raw = value.state
    kind = _dtype_text(dtype)
    if not isinstance(raw, bytes) or not _is_shape(shape):
        raise ValueError(f"an array of shape {shape!r:.80} whose values are no bytes")
    if len(raw) != math.prod(shape) * np.dtype(kind).itemsize:
        raise ValueError(f"{len(raw)} bytes for an array of shape {shape} and dtype {kind}")
    flat = np.frombuffer(raw, dtype=kind)
    # a copy: the buffer of bytes is read-only
    ordered = flat.reshape(shape, order="F" if fortran else "C")
    return np.array(ordered, dtype=np.dtype(kind).newbyteorder("="), order="C")


def _dtype_text(value: Any) -> str:
    """Byte order and kind, e.g. ``<i2``."""
    if not is_a(value, "dtype") or not isinstance(value, StandIn) or not value.args:
        raise ValueError("an array without a dtype")
    kind = value.args[0]
    order = value.state[1] if isinstance(value.state, tuple) and len(value.state) > 1 else "|"
    if kind not in _NUMERIC or order not in ("<", ">", "|", "="):
        raise ValueError(f"an array of dtype {kind!r:.40}, not a numeric one")
    return f"{order}{kind}"


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape)
