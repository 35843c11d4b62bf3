"""What a machine lacks to run ``--backend axrl``; tells, starts nothing. No torch.

Source: AXRL ``MegatronWorker.__init__`` and ``initialize``, and ``configs.ModelConfig``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from replay_lib.backend.contract import METHOD, MODULE, read_contract
from replay_lib.engine.machine import cuda_devices
from replay_lib.errors import SpikeReplayError
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.opening import open_snapshot
from replay_lib.trainers.axrl_source import (
    NEEDS_PYTHON,
    VARIABLE,
    file_of,
    find_axrl,
    outside_imports,
)

#: What AXRL's worker imports only while it starts, and for what.
LATER = {
    "megatron.bridge": "builds the model and loads the checkpoint",
    "transformer_engine": "attention over packed rows",
}
MAGI = "magi_attention"


def missing_for_backend(snapshot: Path | str | None = None) -> list[str]:
    """What is missing here for ``--backend axrl``, one line each; empty where it would start.

    With a ``snapshot`` what its run needs is asked too: devices, the model's directory. Nothing
    is imported but parents of packages that are looked for. Errors of opening the snapshot pass.
    """
    return list(_missing(None if snapshot is None else open_snapshot(snapshot)))


def _missing(snapshot: Snapshot | None) -> Iterator[str]:
    if sys.version_info < NEEDS_PYTHON:
        found = sys.version.split()[0]
        yield (
            f"Python 3.12 or later, which AXRL's syntax needs (found {found}; such a one can also "
            "tell what AXRL imports)"
        )
    yield from _of_axrl()
    yield from (f"package {name}: {why}" for name, why in LATER.items() if not is_installed(name))
    if snapshot is not None:
        yield from _of_run(snapshot)
    elif cuda_devices() < 1:
        yield "an NVIDIA device (found none)"


def _of_axrl() -> Iterator[str]:
    """AXRL itself, what it imports, and whether its worker is what is known here."""
    try:
        root = find_axrl()
    except SpikeReplayError as error:
        yield f"AXRL: {error}"
        return
    if root is None:
        yield f"AXRL: no package axrl is importable, and {VARIABLE} names no checkout"
        return
    if file_of(root, MODULE) is None:
        yield f"AXRL: {root} holds no {MODULE}"
        return
    if sys.version_info < NEEDS_PYTHON:  # its source cannot be parsed
        return
    packages: dict[str, str] = {}
    for name, file in outside_imports(root, MODULE).items():
        top = name.partition(".")[0]
        if not is_installed(name):
            lacking = name if is_installed(top) else top  # another version of it, or none at all
            packages.setdefault(lacking, f"package {lacking}: imported by {file}")
    yield from packages.values()
    contract = read_contract(root)
    faults = ["no such method"] if contract is None else contract.faults()
    yield from (f"AXRL: {root} has another {METHOD}: {fault}" for fault in faults)


def _of_run(snapshot: Snapshot) -> Iterator[str]:
    ranks, found = snapshot.parallel.world_size, cuda_devices()
    if found < ranks:
        yield f"{ranks} NVIDIA device(s), one for each rank of the run (found {found})"
    worker = snapshot.worker
    magi = worker.use_magi_merged_forward or worker.use_magi_flat_forward
    if magi and not is_installed(MAGI):
        yield f"package {MAGI}: the run's own forward pass"
    places = model_places(worker.model_name)
    if not any(place.is_dir() for place in places):
        named = " or ".join(str(place) for place in places)
        yield f"the model {worker.model_name!r} as a directory (configuration, tokenizer): {named}"


def model_places(name: str) -> list[Path]:
    """Where AXRL looks for the model ``name`` (a directory in Hugging Face's layout)."""
    if Path(name).is_absolute():
        return [Path(name)]
    default = Path.home() / "axrl-data" / "models"
    own = Path(os.environ.get("AXRL_MODEL_DIR", str(default)))
    shared = Path(os.environ.get("AXRL_SHARED_MODEL_DIR", str(own / "shared_models")))
    return [own / name, shared / name]


def is_installed(module: str) -> bool:
    """Whether ``module`` could be imported; its top-level package is found, none is run."""
    top, *rest = module.split(".")
    if top in sys.builtin_module_names:
        return True
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a specification, put there by hand
        return top in sys.modules
    if spec is None:
        return False
    places = [Path(p) for p in spec.submodule_search_locations or ()]
    for name in rest:
        inside = [place / name for place in places if (place / name).is_dir()]
        if not inside and not any(list(place.glob(f"{name}.*")) for place in places):
            return False
        places = inside
    return True
