"""The trainer's own layout: pickles read through stand-ins, JSON and YAML.

A :class:`~replay_lib.snapshot.reader.Reader`, written as the functions of a module.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_lib import layout
from replay_lib.errors import SnapshotError, UnsupportedModelError, fault
from replay_lib.snapshot.columns import checked_columns
from replay_lib.snapshot.documents import NO_TRAINER, missing, read_json, read_text
from replay_lib.snapshot.imported import absent_from
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.pickles import file_names, load_untrusted
from replay_lib.snapshot.reader import StoredBatch
from replay_lib.snapshot.routes import handle_paths, plain_tree, read_payload, unwrap
from replay_lib.snapshot.stand_ins import GRPO_TRAINER, StandIn, batch_table, is_a, trainer_table

if TYPE_CHECKING:
    from torch import Tensor

_HANDLES, _MERGE = "routing_handles_per_path", "merge_info"
_TRAINER_IS = "the trainer, which holds the loss settings"


def stored_batch(snapshot: Snapshot, dp_rank: int) -> StoredBatch:
    """Columns, handles and prefix trees of the rank's batch file."""
    path = snapshot.files_of(dp_rank).batch
    return read_batch(path)


def read_batch(path: Path) -> StoredBatch:
    """As :func:`stored_batch`, from the file ``path``."""
    found = load_untrusted(path, batch_table(), "the batch of one rank")
    try:
        raw = _column_table(found)
    except ValueError as error:
        raise SnapshotError(fault(path, None, str(error), "a saved batch")) from error
    columns = checked_columns(path, raw)
    rows = int(columns["input_ids"].shape[0])
    try:
        paths = handle_paths(raw.get(_HANDLES), rows)
        trees = _trees(raw.get(_MERGE), rows)
    except (ValueError, TypeError, AttributeError) as error:
        raise SnapshotError(
            fault(path, _HANDLES, str(error), "handles or trees for each row")
        ) from error
    return StoredBatch(columns=columns, paths=paths, trees=trees, where=path)


def may_hold_trees(snapshot: Snapshot, dp_rank: int) -> bool:
    """Whether the batch's pickle names the column of trees; a pickle stores names as they are."""
    return file_names(snapshot.files_of(dp_rank).batch, _MERGE)


def stored_payload(snapshot: Snapshot, dp_rank: int) -> list[Tensor] | None:
    """Arrays of the rank's routing payload; None where it has no such file."""
    path = snapshot.files_of(dp_rank).routing
    return None if path is None else read_payload(path)


def trainer_config(snapshot: Snapshot) -> dict[str, Any]:
    """The saved GrpoTrainerConfig as nested plain dictionaries."""
    path = snapshot.trainer_file
    if snapshot.imported is not None:
        raise absent_from(path, snapshot.imported, "loss settings")
    if snapshot.legacy and not path.is_file():
        raise missing(path, _TRAINER_IS, NO_TRAINER)
    trainer = load_untrusted(path, trainer_table(), _TRAINER_IS)
    if not isinstance(trainer, StandIn):
        raise SnapshotError(fault(path, None, type(trainer).__name__, "a trainer"))
    if trainer.pickled_as != GRPO_TRAINER:
        raise UnsupportedModelError(
            fault(
                path,
                None,
                f"a {trainer.pickled_as}",
                f"a {GRPO_TRAINER}",
                "Snapshots of critics and of supervised fine-tuning are not modelled.",
            )
        )
    state = trainer.state
    config = _as_plain(state.get("config")) if isinstance(state, dict) else None
    if not isinstance(config, dict):
        raise SnapshotError(fault(path, "config", type(config).__name__, "the loss settings"))
    return config


def grad_info(snapshot: Snapshot, rank: int) -> Any:
    """The object in the figures file of global rank ``rank``."""
    path = snapshot.path / layout.grad_info_file(rank)
    return load_untrusted(path, {}, "per-parameter figures (if the trainer saved them)")


def grad_info_ranks(snapshot: Snapshot) -> list[int]:
    """Global ranks whose figures were saved."""
    ranks = range(snapshot.parallel.world_size)
    return [r for r in ranks if (snapshot.path / layout.grad_info_file(r)).is_file()]


def run_config(snapshot: Snapshot) -> str:
    """Text of Megatron-Bridge's ``run_config.yaml``."""
    if snapshot.imported is not None:
        raise absent_from(snapshot.run_config_file, snapshot.imported, "architecture")
    return read_text(snapshot.run_config_file, "a mapping with the model's fields under 'model'")


def worker_config(snapshot: Snapshot) -> dict[str, Any]:
    """The worker's whole configuration as saved."""
    own = snapshot.path / layout.WORKER_CONFIG
    if own.exists():
        return read_json(own, "the worker's settings")
    name = layout.MEGATRON_METADATA if snapshot.legacy else layout.AXRL_METADATA
    config: dict[str, Any] = read_json(snapshot.path / name, "AXRL's metadata")["config"]
    return config


def _column_table(found: Any) -> dict[str, Any]:
    state = None
    if is_a(found, "SampleTensorDict", "TensorDict"):
        state = found.state
    elif is_a(found, "_make_td") and len(found.args) == 2:  # a plain TensorDict: class and state
        state = found.args[1]
    if not isinstance(state, dict):
        raise ValueError(f"a {type(found).__name__}")
    table = state.get("_tensordict")
    if not isinstance(table, dict):
        raise ValueError(f"a batch whose columns are a {type(table).__name__}")
    return table


def _trees(column: Any, rows: int) -> list[dict[str, Any] | None]:
    column = unwrap(column)
    if column is None:
        return [None] * rows
    if not isinstance(column, list) or len(column) != rows:
        raise ValueError(f"prefix trees of a {type(column).__name__} for {rows} rows")
    return [plain_tree(item) for item in column]


def _as_plain(value: Any) -> Any:
    """Pydantic objects as dictionaries, their extra keys included."""
    if isinstance(value, StandIn):
        state = value.state if isinstance(value.state, dict) else {}
        fields = state.get("__dict__")
        extra = state.get("__pydantic_extra__")
        merged = {**(extra if isinstance(extra, dict) else {}), **(fields or {})}
        return {str(key): _as_plain(item) for key, item in merged.items()}
    if isinstance(value, dict):
        return {str(key): _as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_plain(item) for item in value]
    return value
