"""Parameters of a portable snapshot as the table and the fragments of a checkpoint.

So everything that reads a ``torch_dist`` checkpoint (the engine's loader, whole tensors one by
one) reads these too: each parameter is one fragment, memory-mapped, and its file is hashed before
the first of its tensors is handed out.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from replay_lib import layout
from replay_lib.errors import SnapshotError, fault
from replay_lib.snapshot.dcp_metadata import Fragment, TensorEntry, is_model_key
from replay_lib.snapshot.portable.manifest import Manifest, manifest_of
from replay_lib.snapshot.portable.tensors import described, read_one, write

#: A file is closed when it holds this many bytes: as much as is in memory at a time.
SHARD = 2 << 30
WEIGHTS_ARE = "the model's parameters"


def weights_table(directory: Path) -> dict[str, TensorEntry]:
    """Parameters by checkpoint key; SnapshotError where two files hold the same one.

    Only the heads of the files are read: their digests are compared by :func:`weights_fragment`.
    """
    manifest = manifest_of(directory)
    table: dict[str, TensorEntry] = {}
    for name in _files(manifest):
        for key, (dtype, shape) in described(directory / name).items():
            if key in table or not is_model_key(key):
                found = "a second time" if key in table else "a key that is no parameter's"
                raise SnapshotError(fault(directory / name, key, found, WEIGHTS_ARE))
            whole = Fragment(
                offsets=(0,) * len(shape),
                sizes=shape,
                name=name,
                start=0,
                length=manifest.files[name].size,
            )
            table[key] = TensorEntry(key=key, dtype=dtype, shape=shape, fragments=(whole,))
    return dict(sorted(table.items()))


def weights_fragment(directory: Path, entry: TensorEntry, fragment: Fragment) -> Tensor:
    """The mapped tensor of ``entry``, its file verified (once in a process)."""
    file = manifest_of(directory).verified(fragment.name, WEIGHTS_ARE)
    found = read_one(file, entry.key)
    if found.dtype != entry.dtype or tuple(found.shape) != entry.shape:
        raise SnapshotError(fault(file, entry.key, "another tensor", "the one that was listed"))
    return found


def write_weights(directory: Path, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Write parameters by checkpoint key, one file after the other, at most SHARD each.

    A parameter larger than that gets a file of its own.
    """
    number, size, waiting = 1, 0, dict[str, Tensor]()
    for key, tensor in parameters:
        if waiting and size + tensor.nbytes > SHARD:
            write(directory / layout.portable_weights(number), waiting)
            number, size, waiting = number + 1, 0, {}
        waiting[key] = tensor
        size += tensor.nbytes
    write(directory / layout.portable_weights(number), waiting)


def _files(manifest: Manifest) -> list[str]:
    """The files of weights in order; a gap in their numbers is a file that is not listed."""
    found = manifest.matching("weights-*.safetensors")
    for number, name in enumerate(found, 1):
        if name != layout.portable_weights(number):
            where = manifest.directory / layout.PORTABLE
            raise SnapshotError(fault(where, "files", name, layout.portable_weights(number)))
    return found
