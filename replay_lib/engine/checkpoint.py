"""The weights of another checkpoint in the place of the model's, for one experiment.

They are read through the same safe reader as the snapshot's own and compared the same way, into
the live model, since only that knows which slice of which tensor is whose; what was there is put
back at once. What comes out are plain tensors by name, as from any other weights patch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from replay_lib.engine.comm import Comm
from replay_lib.engine.model import LiveModel
from replay_lib.engine.weights import Slice, load_weights, model_slices
from replay_lib.errors import PatchError, SpikeReplayError, fault
from replay_lib.snapshot.checkpoint import stored_table

Elsewhere = Callable[[str], dict[str, Tensor]]
THEN = "It has to be a checkpoint of the same model"


class Weights(dict[str, Tensor]):
    """What a weights patch gets: copies of this rank's parameters by name, and a way to others."""

    def __init__(self, own: Mapping[str, Tensor], elsewhere: Elsewhere) -> None:
        super().__init__(own)
        self._elsewhere = elsewhere

    def of_checkpoint(self, checkpoint: str) -> dict[str, Tensor]:
        """The same parameters, and buffers that are saved, as ``checkpoint`` has them."""
        return self._elsewhere(checkpoint)


def nowhere(checkpoint: str) -> dict[str, Tensor]:
    """For what has no live model: no checkpoint can be read."""
    raise PatchError(f"{checkpoint}: there is no model here to read a checkpoint for")


def read_checkpoint(
    model: LiveModel, comm: Comm, paths_from: Path, checkpoint: str
) -> dict[str, Tensor]:
    """This rank's tensors as the checkpoint in directory ``checkpoint`` has them, by name.

    All ranks call it together. Raises PatchError, naming the path, where there is no checkpoint,
    one that cannot be read, or one of another model; the live model is as it was in any case.
    """
    path = paths_from / checkpoint
    error = _unreadable(path, paths_from)
    everybody = comm.gather(error is None)
    if error is not None:
        raise error
    if not all(everybody):
        found, expected = "not readable on another rank", "a checkpoint that all ranks can read"
        raise PatchError(fault(path, None, found, expected))
    pieces = model_slices(model.module)
    before = [(piece.view, piece.view.to("cpu", copy=True)) for piece in pieces]
    try:
        load_weights(model.module, path, comm.gather, THEN)
        return {name: tensor.detach().clone() for name, tensor in _saved(model, pieces).items()}
    except SpikeReplayError as wrong:
        raise PatchError(f"weights of another checkpoint: {wrong}") from wrong
    finally:
        for view, value in before:
            view.copy_(value)


def _unreadable(path: Path, paths_from: Path) -> PatchError | None:
    """Why there is nothing to read at ``path``; found before ranks wait for each other."""
    if not path.is_dir():
        then = f"A relative path starts at {paths_from}"
        expected = "a checkpoint (a snapshot, or an iter_* of the trainer)"
        return PatchError(fault(path, None, "no such directory", expected, then))
    try:
        stored_table(path)
    except SpikeReplayError as error:
        return PatchError(f"weights of another checkpoint: {error}")
    return None


def _saved(model: LiveModel, pieces: list[Slice]) -> dict[str, Tensor]:
    """What a checkpoint holds of this rank: its parameters, and the buffers among ``pieces``."""
    owners = {model.whole_name(piece.owner) for piece in pieces}
    buffers = {name: b for name, b in model.buffers().items() if name in owners}
    return model.parameters() | buffers
