"""The checkpoint against the model section: names, shapes, and whether all of it is finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from replay_lib.analysis.findings import Finding, finding
from replay_lib.engine.parameters import EMBEDDING, compare
from replay_lib.errors import UnsupportedModelError
from replay_lib.snapshot.checkpoint import iter_tensors, stored_table


def embedding_rows(path: Path) -> int | None:
    """V as the checkpoint has it (the saved vocabulary may be unpadded); None where it is absent.

    Raises the errors of reading the checkpoint's table.
    """
    entry = stored_table(path).get(EMBEDDING)
    return entry.shape[0] if entry is not None and len(entry.shape) == 2 else None


def check_names(path: Path, fields: Mapping[str, Any]) -> Iterator[Finding]:
    """Parameters that are missing, unknown or misshapen, each kind in one finding that names all.

    Raises the errors of reading the checkpoint's table.
    """
    table = {key: entry.shape for key, entry in stored_table(path).items()}
    try:
        unlike = compare(fields, table)
    except UnsupportedModelError as error:
        yield finding("weights-not-compared", ".metadata", str(error))
        return
    for code, names in (
        ("weights-missing", unlike.missing),
        ("weights-unknown", unlike.unknown),
        ("weights-shape", [f"{one.name} {one.told}" for one in unlike.misshapen]),
    ):
        if names:
            yield finding(code, ".metadata", ", ".join(names))


def check_values(path: Path) -> Iterator[Finding]:
    """Parameters that are not finite, or no floating point at all, read one at a time.

    Raises the errors of reading the checkpoint.
    """
    for key, tensor in iter_tensors(path):
        if tensor.is_floating_point():
            # float8 has no isfinite of its own
            wide = tensor.float() if tensor.element_size() == 1 else tensor
            bad = ~wide.isfinite()
            if bool(bad.any()):
                place = bad.nonzero()[0].tolist()
                found = f"{key}: {int(bad.sum())} of {tensor.numel()} values, the first at {place}"
                yield finding("weights-not-finite", ".metadata", found)
        else:
            found = f"{key} is {str(tensor.dtype).removeprefix('torch.')}, no floating point"
            yield finding("weights-shape", ".metadata", found)
