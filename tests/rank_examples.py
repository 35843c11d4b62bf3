"""Methods whose patches do another thing on rank 1 than on rank 0, named ``rank_examples:<name>``.

On a session of one rank they are ordinary methods.
"""

from __future__ import annotations

import os

from replay_lib.patch import (
    Patch,
    Seam,
    batch_patch,
    model_patch,
    routing_patch,
    settings_patch,
    token_weights_patch,
    weights_patch,
)


def here():
    """The number of this process in its job: what no patch may look at."""
    return int(os.environ.get("RANK", "0"))


def impure_batch():
    """Scales the advantage by a number of this process's own."""
    return batch_patch(lambda batch: batch.replace(advantage=batch.advantage * (2 + here())))


def impure_routing():
    """Lets the rows of one parity route themselves."""
    return routing_patch(lambda mask, batch: mask & (batch.index % 2 == here())[:, None, None])


def impure_settings():
    """Another clip on each rank."""
    return settings_patch(mismatch_token_clip_max=2.0 + here())


def impure_model():
    """Another scaling of the experts' probabilities on each rank."""
    return model_patch(moe_router_topk_scaling_factor=2.0 + here())


def impure_token_weights():
    """Another weight on each rank."""
    return token_weights_patch(lambda weights, rows, logprob: weights / (2 + here()))


def impure_weights():
    """Scales every router by a number of this process's own."""
    return weights_patch(
        lambda ws: {k: w * (2 + here()) for k, w in ws.items() if k.endswith("router.weight")}
    )


def impure_rows():
    """Unmerges on rank 1 only."""
    return Patch(Seam.ROWS, lambda _rows: ("merged", "unmerged")[here()])


def impure_seams():
    """A method that acts at another seam on each rank."""
    return impure_batch() if here() == 0 else impure_settings()


def fails_to_build_on_rank_1():
    """Cannot be built there."""
    return [settings_patch()][here()]


def _failing(value, rank=1):
    if here() == rank:
        raise LookupError("not on this rank")
    return value


def failing_batch(rank=1):
    """Raises on one rank."""
    return batch_patch(lambda batch: _failing(batch, rank))


def failing_weights():
    """Raises on rank 1 while weights are replaced."""
    return weights_patch(lambda weights: _failing({}))


def failing_token_weights():
    """Raises on rank 1 between the forward and the backward pass."""
    return token_weights_patch(lambda weights, rows, logprob: _failing(weights * 0.5))


def token_mask():
    """A token-weights patch that returns a mask, which is no weight."""
    return token_weights_patch(lambda weights, rows, logprob: weights > 0)


def no_routes():
    """A batch patch that drops the routes altogether."""
    return batch_patch(lambda batch: batch.replace(routes=None))


def leaves(code=7, rank=1):
    """Ends the process of one rank without a word."""

    def apply(batch):
        if here() == rank:
            os._exit(code)
        return batch

    return batch_patch(apply)
