"""The model section of Megatron-Bridge's ``run_config.yaml`` as plain values.

Bridge writes Python objects as mappings with ``_target_``. Nothing is ever imported or called
here: a target is only a name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from replay_lib.errors import SnapshotError, fault
from replay_lib.snapshot.documents import COPY_AGAIN, read_text
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.reader import reader_of

_WHY = "a mapping with the model's fields under 'model'"
_MARKS = ("_target_", "_call_", "_partial_", "_args_", "_name_")


def load_model_fields(snapshot: Snapshot) -> dict[str, Any]:
    """The model's fields of ``snapshot``; see :func:`read_model_fields`."""
    return model_fields(reader_of(snapshot).run_config(snapshot), snapshot.run_config_file)


def read_model_fields(path: Path) -> dict[str, Any]:
    """The model's fields in a ``run_config.yaml`` as plain values; see :func:`model_fields`."""
    return model_fields(read_text(path, _WHY), path)


def model_fields(text: str, path: Path) -> dict[str, Any]:
    """The model's fields in the text of a ``run_config.yaml`` as plain values.

    A dtype becomes its name ("float32", "bfloat16"), a function or class its dotted name, an
    enum its member's name ("flash"), a partial ``{"function", "args", "kwargs"}``, any other
    object a mapping of its fields that keeps ``_target_``. The provider's class stays as the
    string ``_target_``. Raises SnapshotError, naming ``path``, where it is no such document.
    """
    try:
        document = yaml.safe_load(text)
        model = document.get("model") if isinstance(document, dict) else None
        if not isinstance(model, dict):
            raise SnapshotError(fault(path, "model", type(model).__name__, _WHY))
        return {str(key): _plain(value, {}) for key, value in model.items()}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        found = f"a document that is not plain YAML ({str(error).splitlines()[0]})"
        raise SnapshotError(fault(path, None, found, _WHY, f"{COPY_AGAIN}.")) from error


def _plain(value: Any, seen: dict[int, Any]) -> Any:
    """``seen`` holds converted aliases, so a shared node is converted once."""
    if isinstance(value, list | dict):
        if id(value) not in seen:
            seen[id(value)] = _plain_container(value, seen)
        return seen[id(value)]
    return value


def _plain_container(value: list[Any] | dict[Any, Any], seen: dict[int, Any]) -> Any:
    if isinstance(value, list):
        return [_plain(item, seen) for item in value]
    target = value.get("_target_")
    if isinstance(target, str):
        return _plain_object(target, value, seen)
    return {str(key): _plain(item, seen) for key, item in value.items()}


def _plain_object(target: str, value: dict[Any, Any], seen: dict[int, Any]) -> Any:
    arguments = _plain(value.get("_args_") or [], seen)
    fields = {str(k): _plain(v, seen) for k, v in value.items() if k not in _MARKS}
    if value.get("_partial_"):
        return {"function": target, "args": arguments, "kwargs": fields}
    if value.get("_call_") is False and not fields:
        return _named(target)
    if "_name_" in value:
        return value["_name_"]
    if target == "torch.dtype" or (len(arguments) == 1 and not fields and "." in target):
        return _enum_or_dtype(target, arguments)
    return {"_target_": target, **fields} | ({"_args_": arguments} if arguments else {})


def _named(target: str) -> str:
    """A dtype's short name, any other object's dotted name."""
    module, _, name = target.rpartition(".")
    is_dtype = module == "torch" and (name.rstrip("0123456789") in _DTYPE_STEMS or "float" in name)
    return name if is_dtype else target


_DTYPE_STEMS = frozenset({"float", "bfloat", "int", "uint", "bool", "half", "double", "long"})


def _enum_or_dtype(target: str, arguments: list[Any]) -> Any:
    """An enum written without its member's name: ``Class(value)``, or the known member."""
    if not arguments:
        return target
    text = str(arguments[0])
    if target == "torch.dtype":
        return text.removeprefix("torch.")
    name = target.rpartition(".")[2]
    return _KNOWN_MEMBERS.get((name, arguments[0]), f"{name}({arguments[0]!r})")


#: Megatron-Core's ``transformer.enums.AttnBackend``, for documents that give only the value.
_KNOWN_MEMBERS = {
    ("AttnBackend", 1): "flash",
    ("AttnBackend", 2): "fused",
    ("AttnBackend", 3): "unfused",
    ("AttnBackend", 4): "local",
    ("AttnBackend", 5): "auto",
}
