"""Replay the step on the weights of another checkpoint, the initial model's for one."""

from __future__ import annotations

from replay_lib.patch import Patch, checkpoint_patch, mitigation


@mitigation(
    slug="use-initial-model",
    family="weights",
    summary="The step on the weights of another checkpoint, such as the initial model's.",
    source="this project",
    diagnostic=True,
    needs=("checkpoint",),
)
def use_initial_model(checkpoint: str) -> Patch:
    """w' = w of ``checkpoint``, a directory; batch, saved routes and loss stay the step's own.

    A relative path starts at the case's directory, for a bare snapshot at the current one.
    """
    return checkpoint_patch(checkpoint)
