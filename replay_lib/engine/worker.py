"""The worker process: started by torchrun, one per rank; rank 0 talks to the parent.

One JSON document a line in each direction. In: ``open`` once, then ``run``, ``gradients`` or
``close``, or a measurement (``bare``, ``memory``, ``routes``). Out: ``opened``, ``progress``,
``outcome``, what was measured, ``done`` or ``error``. Rank 0 hands every request to the other
ranks. All ranks give up an experiment together where one finds its patches or its loss at fault;
any other error that a rank meets ends it, and torchrun then ends the others.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from replay_lib.engine.channel import (
    CHANNEL,
    DEVICE,
    Channel,
    describe_error,
    die_with_parent,
    leave_word,
    tell_exits,
)


def main() -> None:
    """Entry of ``python -m replay_lib.engine.worker`` under torchrun."""
    started = time.perf_counter()
    die_with_parent()
    tell_exits()
    channel = Channel(os.environ[CHANNEL], int(os.environ.get("RANK", "0")))
    try:
        _serve(channel, started)
    except BaseException as error:
        leave_word(error)
        channel.send("error", answered=False, **describe_error(error))
        raise


def _serve(channel: Channel, started: float) -> None:
    import torch

    from replay_lib.engine import shims

    shims.install()
    comm = _join(torch)
    from replay_lib.engine.load import OpenRequest, Stopwatch, load
    from replay_lib.engine.replayer import Replayer
    from replay_lib.methods import load_methods

    watch = Stopwatch(last=started)
    watch.lap("imports")
    replayer: Replayer | None = None
    for request in channel.requests(comm):
        op = request.pop("op")
        if op == "close":
            break
        if op == "open":
            wanted = OpenRequest.model_validate(request)
            sys.path.extend(p for p in wanted.python_path if p not in sys.path)
            sys.path[:0] = wanted.trainer_path
            torch.use_deterministic_algorithms(wanted.deterministic)
            # Filling fresh memory with NaN guards against bugs in torch, at a tenth of the speed.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            loaded, info = load(wanted, comm, watch)
            replayer = Replayer(loaded, load_methods(wanted.mitigations or None))
            channel.send("opened", info=json.loads(info.model_dump_json()))
        else:
            assert replayer is not None, "the first request opens the session"
            _answer(channel, replayer, op, request)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _join(torch: Any) -> Any:
    """Join the default process group; NCCL on GPUs, gloo elsewhere."""
    from datetime import timedelta

    from replay_lib.engine.comm import Comm

    cuda = os.environ[DEVICE] == "cuda"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo",
        timeout=timedelta(seconds=600),
        device_id=device if cuda else None,
    )
    dist = torch.distributed
    return Comm(rank=dist.get_rank(), world=dist.get_world_size(), device=device)


def _answer(channel: Channel, replayer: Any, op: str, request: dict[str, Any]) -> None:
    """Answer one request; a known error leaves the session usable where all ranks stopped at it.

    One that only this rank may have met ends the job: the others may be waiting for it.
    """
    from replay_lib.engine.agreement import AbandonedError
    from replay_lib.errors import SpikeReplayError

    try:
        if op == "run":
            _run(channel, replayer, request)
        elif op == "gradients":
            _gradients(replayer, request)
        elif op == "bare":
            channel.send("bare", seconds=_bare(replayer, int(request["passes"])))
        elif op == "memory":
            channel.send("memory", peak_bytes=_peak_memory(replayer))
        elif op == "routes":
            channel.send("routes", layers=_routes(replayer, request))
        channel.send("done")
    except AbandonedError as abandoned:
        channel.send("error", answered=True, **describe_error(abandoned.error))
    except SpikeReplayError as error:
        if replayer.loaded.comm.world > 1:
            raise
        channel.send("error", answered=True, **describe_error(error))


def _run(channel: Channel, replayer: Any, request: dict[str, Any]) -> None:
    from replay_lib.engine.protocol import Experiment
    from replay_lib.engine.replayer import replay, replay_beside

    experiments = [Experiment.model_validate(e) for e in request["experiments"]]

    def progress(share: float) -> None:
        channel.send("progress", share=share)

    if "beside" in request:
        beside = Experiment.model_validate(request["beside"])
        outcomes = replay_beside(replayer, beside, experiments, progress)
    else:
        outcomes = replay(replayer, experiments, progress)
    for outcome in outcomes:
        channel.send("outcome", outcome=json.loads(outcome.model_dump_json()))


def _gradients(replayer: Any, request: dict[str, Any]) -> None:
    from replay_lib.engine.export import save_gradients
    from replay_lib.engine.protocol import Experiment

    save_gradients(replayer, Experiment.model_validate(request["experiment"]), request["path"])


def _bare(replayer: Any, passes: int) -> list[float]:
    from replay_lib.engine.step import bare_pass

    return [bare_pass(replayer.loaded) for _ in range(passes)]


def _routes(replayer: Any, request: dict[str, Any]) -> list[Any]:
    from pathlib import Path

    from replay_lib.engine.route_signals import measure_routes

    layers = measure_routes(replayer.loaded, Path(request["directory"]))
    return [json.loads(layer.model_dump_json()) for layer in layers]


def _peak_memory(replayer: Any) -> list[int]:
    from replay_lib.engine.memory import peak_bytes

    loaded = replayer.loaded
    peaks: list[int] = loaded.comm.gather(peak_bytes(loaded.model.device))
    return peaks


if __name__ == "__main__":
    main()
