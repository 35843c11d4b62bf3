"""The worker with one planted fault, named by PLANTED_FAULT: a test for the tests."""

from __future__ import annotations

import itertools
import os
import time

from replay_lib.engine import worker

FAULT = os.environ["PLANTED_FAULT"]


def plant() -> None:
    """Replace one piece of the engine by a broken one."""
    import torch

    from replay_lib.engine import gradients, memory, routes, shims, step

    shims.install()
    forward, measure, backward = step.forward, step.measure, step.backward
    if FAULT == "hang":
        step.forward = lambda *a: time.sleep(3600)
    elif FAULT == "raise-on-rank-1" and os.environ["RANK"] == "1":

        def fail(*_arguments):
            raise RuntimeError("planted fault on rank 1")

        step.forward = fail
    elif FAULT == "out-of-memory":

        def full(*_arguments):
            raise torch.OutOfMemoryError("planted")

        step.forward = full
    elif FAULT == "no-memory":
        memory.free_bytes = lambda _device: 0
    elif FAULT == "zero-gradient":

        def without_one(buffers: gradients.GradientBuffers, *rest):
            buffers.views["decoder.layers.0.self_attention.linear_proj.weight"].zero_()
            return measure(buffers, *rest)

        step.measure = without_one
    elif FAULT == "drifting-backward":
        count = itertools.count()

        def drifting(model, micro, out, grads, *, keep):
            factor = 1 + next(count) / 64
            grads = tuple(None if g is None else g * factor for g in grads)
            backward(model, micro, out, grads, keep=keep)

        step.backward = drifting
    elif FAULT == "deaf-router":
        replay = routes.TokenRouterReplay
        replay.get_replay_topk = lambda self, scores, k, groups, group_k, topk: topk(scores, k)
    assert callable(forward)


if __name__ == "__main__":
    plant()
    worker.main()
