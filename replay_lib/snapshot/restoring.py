"""A directory in which Megatron or AXRL finds a snapshot's checkpoint, old or new.

The first version of AXRL's snapshots wrote its metadata over Megatron's ``metadata.json``, and
Megatron does not take such a directory for a checkpoint. Here Megatron's file is given back and
AXRL's metadata has the name that it has today; every other file is a link to the original.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from replay_lib import layout
from replay_lib.errors import UsageError, fault
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.opening import open_snapshot

_SHARDED = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON = {"common_backend": "torch", "common_backend_version": 1}


@contextmanager
def temporary_replay_directory(snapshot: Snapshot | str | Path) -> Iterator[Path]:
    """A directory ``iter_<step>`` that Megatron and AXRL can load ``snapshot`` from.

    It holds links, so nothing is copied, and it is removed when the block ends, whatever happens
    in it; the snapshot is never written to. To put another file in the place of one, unlink it
    first: writing through a link changes the original. Raises UsageError for a portable snapshot,
    which neither can read.
    """
    opened = snapshot if isinstance(snapshot, Snapshot) else open_snapshot(snapshot)
    if opened.portable:
        then = "Write it in the trainer's layout first: spike-replay import."
        found, expected = "a portable snapshot", "one in the trainer's own layout"
        raise UsageError(fault(opened.path, None, found, expected, then))
    home = Path(tempfile.mkdtemp(prefix="spike-replay-"))
    try:
        directory = home / layout.iter_dir(opened.step)
        directory.mkdir()
        _fill(directory, opened)
        yield directory
    finally:
        shutil.rmtree(home, ignore_errors=True)  # links are removed, not what they point to


def megatron_metadata(snapshot: Snapshot) -> dict[str, object]:
    """What Megatron's ``metadata.json`` says for this checkpoint.

    Megatron-Core up to 0.18 or so keeps common state in ``common.pt`` and says so in two more
    keys; later ones keep it inside the checkpoint.
    """
    return {**_SHARDED, **(_COMMON if layout.COMMON in snapshot.sizes else {})}


def _fill(directory: Path, snapshot: Snapshot) -> None:
    names = {path.name: path.name for path in snapshot.path.iterdir()}
    names.pop(layout.PRESERVED_MANIFEST, None)  # it speaks of the directory that it lies in
    if snapshot.legacy:
        names[layout.MEGATRON_METADATA] = layout.AXRL_METADATA
    for name, linked_as in names.items():
        _link((snapshot.path / name).resolve(), directory / linked_as)
    if snapshot.legacy:
        text = json.dumps(megatron_metadata(snapshot))
        (directory / layout.MEGATRON_METADATA).write_text(text, encoding="utf-8")


def _link(original: Path, place: Path) -> None:
    try:
        place.symlink_to(original)
    except OSError:  # a system without symbolic links
        place.hardlink_to(original)
