"""Names of files and directories. No other module spells a path of a snapshot.

Source: AXRL's ``MegatronWorker._snapshot_spike_debug_info`` and Megatron-Core's ``torch_dist``
checkpoint format.
"""

from __future__ import annotations

import re
from pathlib import Path

SNAPSHOT_ROOT = "spike_snapshots"
PRESERVED_ROOT = "spike_snapshots-active"
QUIET_ROOT = "quiet_snapshots"  # this library's recorder alone writes it
OTHER_ROOT = "other_snapshots"  # and the zoo: steps with a known fault that are no spikes

AXRL_METADATA = "axrl_metadata.json"
MEGATRON_METADATA = "metadata.json"  # legacy snapshots hold AXRL's metadata under this name
WORKER_CONFIG = "megatron_worker_config.json"
RUN_CONFIG = "run_config.yaml"
TRAINER = "trainer.pt"
DCP_METADATA = ".metadata"
COMMON = "common.pt"
TRAIN_STATE = "train_state.pt"

IMPORTED = "imported.json"  # of another trainer's dump: what was taken, what is missing

PRESERVED_MANIFEST = "preserved.json"  # beside a preserved snapshot's files: what was copied

CHECKPOINTS = "checkpoints"  # in a role's output directory; the roots of snapshots lie in it

#: Where a task is kept, relative to the directory that the commands are called in.
TASKS = Path("agent-task/spike-replay")
OUTPUT = Path("tmp/spike-replay")  # what commands print, one directory a task, one below it a run

CARDS = "spike-mitigation-methods"  # one card a method

CASE_FILE = "case.yaml"
RESULTS = "results.jsonl"
BASELINES = "baselines"  # beside it: figures of earlier replays, one file an environment

#: Files of a portable snapshot: this library's own layout, without a pickle.
PORTABLE = "portable.json"  # read first: schema version, and the sha256 of every other file
PORTABLE_FACTS = "snapshot.json"
PORTABLE_WORKER = "worker_config.json"
PORTABLE_RUN_CONFIG = "run_config.json"
PORTABLE_TRAINER = "trainer.json"

_OUTPUT_DIRECTORY = re.compile(r"^.*~([^~]+)__([A-Za-z0-9.+=@-]+(?:_[A-Za-z0-9.+=@-]+)*)$")
_ITER = re.compile(r"^iter_(\d{7,18})$")  # a step fits in 64 bits
_PRESERVED = PRESERVED_ROOT.removeprefix(SNAPSHOT_ROOT)
_RANK_FILE = re.compile(r"^(batch|routing_payload|grad_info)_rank(\d+)\.pt$")


def iter_dir(step: int) -> str:
    """Name of the snapshot directory of ``step`` (a trainer's global step, >= 0)."""
    return f"iter_{step:07d}"


def step_of(directory: Path) -> int | None:
    """Step that a directory's name states, or None if it is not a snapshot's name."""
    match = _ITER.fullmatch(directory.name)
    return int(match.group(1)) if match else None


def job_and_role(directory: str) -> tuple[str, str] | None:
    """Job and role that the name of an output directory, ``*~<job>__<role>``, states; else None.

    Of several ``__`` the last one ends the job: a role has none.
    """
    match = _OUTPUT_DIRECTORY.fullmatch(directory)
    return (match.group(1), match.group(2)) if match else None


def output_directory(snapshot: Path) -> Path | None:
    """The output directory above ``<output>/checkpoints/spike_snapshots*/iter_*``; else None.

    Only the path is looked at, not the disk.
    """
    root, above = snapshot.parent, snapshot.parent.parent
    inside = root.name.startswith(SNAPSHOT_ROOT) and above.name == CHECKPOINTS
    return above.parent if inside and step_of(snapshot) is not None else None


def preserved_root(root: Path) -> Path:
    """The sibling of a snapshot root that no rotation reaches; of such a one, itself."""
    return root if is_preserved_root(root) else root.with_name(f"{root.name}{_PRESERVED}")


def is_preserved_root(root: Path) -> bool:
    """Whether a directory's name is that of a root of preserved snapshots."""
    return root.name.endswith(_PRESERVED)


def source_root(root: Path) -> Path:
    """The root that ``root`` preserves; of any other, itself."""
    return root.with_name(root.name.removesuffix(_PRESERVED))


def batch_file(rank: int) -> str:
    """Batch of global rank ``rank``."""
    return f"batch_rank{rank}.pt"


def routing_file(rank: int) -> str:
    """Routing payload of global rank ``rank``; absent where its batch has no handles."""
    return f"routing_payload_rank{rank}.pt"


def grad_info_file(rank: int) -> str:
    """Per-parameter figures of global rank ``rank``; absent if the trainer did not save them."""
    return f"grad_info_rank{rank}.pt"


def rank_file(path: Path) -> tuple[str, int] | None:
    """``(kind, global rank)`` of a per-rank file, or None for any other file."""
    match = _RANK_FILE.match(path.name)
    return (match.group(1), int(match.group(2))) if match else None


def is_portable(directory: Path) -> bool:
    """Whether ``directory`` holds a portable snapshot: its first file is there."""
    return (directory / PORTABLE).is_file()


def route_signals_file(dp_rank: int) -> str:
    """Log-probabilities of a data-parallel rank, in the temporary directory of an analysis."""
    return f"dp{dp_rank}.safetensors"


def portable_weights(number: int) -> str:
    """The ``number``-th file of parameters (from 1)."""
    return f"weights-{number:05d}.safetensors"


def portable_columns(dp_rank: int) -> str:
    """Columns of data-parallel rank ``dp_rank``, and the arrays of its prefix trees."""
    return f"batch_dp{dp_rank}.safetensors"


def portable_rows(dp_rank: int) -> str:
    """What is no tensor in that batch: handles of its routes, and prefix trees."""
    return f"batch_dp{dp_rank}.json"


def portable_routing(dp_rank: int) -> str:
    """Routes of data-parallel rank ``dp_rank``; absent where its batch has no handles."""
    return f"routing_dp{dp_rank}.safetensors"


def portable_grad_info(rank: int) -> str:
    """Per-parameter figures of GLOBAL rank ``rank``."""
    return f"grad_info_rank{rank}.json"
