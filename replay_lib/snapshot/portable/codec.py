"""Python values as strict JSON and back, nothing lost and nothing executed.

JSON has no NaN, no bytes, no tuples and no tensors, and its objects have text keys only. Each of
these becomes an object with one key that starts with ``$``; tensors are put aside by name, to be
stored in a tensor file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_lib.errors import SnapshotError, fault

if TYPE_CHECKING:
    from torch import Tensor

_FLOAT, _BYTES, _TUPLE, _TENSOR, _PAIRS = "$float", "$bytes", "$tuple", "$tensor", "$pairs"
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Put = Callable[["Tensor"], str]
Get = Callable[[str], "Tensor"]


def encode(value: Any, put: Put | None = None) -> Any:
    """``value`` as what strict JSON can hold; ``put`` stores a tensor and returns its name.

    A ValueError for anything else: an object, or a tensor where none can be put.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: _name_of(value)}
    if isinstance(value, bytes):
        return {_BYTES: value.hex()}
    if isinstance(value, list | tuple):
        items = [encode(item, put) for item in value]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, put)
    if put is not None and _is_tensor(value):
        return {_TENSOR: put(value)}
    raise ValueError(f"a {type(value).__name__}, which has no place in JSON")


def decode(value: Any, get: Get | None = None) -> Any:
    """What :func:`encode` made of a value, back; a ValueError where it makes no sense."""
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(item, get) for key, item in value.items()}
    ((kind, inner),) = value.items()
    return _decode_marked(kind, inner, get)


def _decode_marked(kind: str, inner: Any, get: Get | None) -> Any:
    if kind == _FLOAT and isinstance(inner, str) and inner in _NON_FINITE:
        return _NON_FINITE[inner]
    if kind == _BYTES and isinstance(inner, str):
        return bytes.fromhex(inner)
    if kind == _TUPLE and isinstance(inner, list):
        return tuple(decode(item, get) for item in inner)
    if kind == _TENSOR and isinstance(inner, str) and get is not None:
        return get(inner)
    if kind == _PAIRS and isinstance(inner, list):
        return {decode(key, get): decode(item, get) for key, item in inner}
    raise ValueError(f"an object {{{kind!r}: ...}}, which says nothing here")


def _encode_mapping(value: Mapping[Any, Any], put: Put | None) -> Any:
    plain = all(isinstance(key, str) for key in value)
    # one key that starts with $ would be read as a mark
    if plain and not (len(value) == 1 and next(iter(value)).startswith("$")):
        return {key: encode(item, put) for key, item in value.items()}
    return {_PAIRS: [[encode(key, put), encode(item, put)] for key, item in value.items()]}


def _name_of(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def to_bytes(value: Any) -> bytes:
    """Encoded ``value`` as a JSON file; the same value gives the same bytes."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, indent=1, sort_keys=True)
    return (text + "\n").encode(errors="surrogatepass")


def plain_from_bytes(content: bytes, where: Path) -> Any:
    """The value of a JSON file as it stands, marks and all; SnapshotError where it is none."""
    try:
        return json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _broken(where, error) from error


def from_bytes(content: bytes, where: Path, get: Get | None = None) -> Any:
    """The value of a JSON file; SnapshotError where it is none."""
    try:
        return decode(json.loads(content, parse_constant=_no_constant), get)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise _broken(where, error) from error


def _broken(where: Path, error: Exception) -> SnapshotError:
    return SnapshotError(fault(where, None, f"broken JSON ({error})", "strict JSON"))


def _no_constant(name: str) -> None:
    raise ValueError(f"the bare word {name}")
