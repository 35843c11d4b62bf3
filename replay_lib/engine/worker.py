"""The worker process: started by torchrun, one per rank; rank 0 talks to the parent.

One JSON document a line in each direction. In: ``open`` once, then ``run``, ``gradients`` or
``close``. Out: ``opened``, ``progress``, ``outcome``, ``done`` or ``error``. Rank 0 hands every
request to the other ranks; an error that only one rank meets ends that rank, and torchrun then
ends the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHANNEL = "SPIKE_REPLAY_CHANNEL"  # path of the parent's socket
DEVICE = "SPIKE_REPLAY_DEVICE"  # cpu or cuda


class Channel:
    """Lines of JSON to and from the parent; on ranks other than 0 writing does nothing."""

    def __init__(self, path: str, rank: int) -> None:
        self.stream = None
        if rank == 0:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            self.stream = connection.makefile("rw", encoding="utf-8")

    def send(self, event: str, **values: Any) -> None:
        """Write one event."""
        if self.stream is not None:
            self.stream.write(json.dumps({"event": event, **values}, allow_nan=False) + "\n")
            self.stream.flush()

    def requests(self, comm: Any) -> Iterator[dict[str, Any]]:
        """Requests until the parent closes, the same on every rank."""
        while True:
            line = self.stream.readline() if self.stream is not None else ""
            text: str = comm.broadcast(line)
            if not text:
                return
            yield json.loads(text)


def main() -> None:
    """Entry of ``python -m replay_lib.engine.worker`` under torchrun."""
    started = time.perf_counter()
    _die_with_parent()
    channel = Channel(os.environ[CHANNEL], int(os.environ.get("RANK", "0")))
    try:
        _serve(channel, started)
    except BaseException as error:
        _leave_word(error)
        channel.send("error", answered=False, **_describe(error))
        raise


def _die_with_parent() -> None:
    """Ask Linux to end this process when torchrun ends, however that happens.

    A torchrun that is killed takes no leave of its ranks, and a rank that hangs would stay behind.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _leave_word(error: BaseException) -> None:
    """Write what this rank met beside the channel: the parent shows the first rank's error."""
    rank = os.environ.get("RANK", "0")
    path = Path(os.environ[CHANNEL]).with_name(f"error_rank{rank}.json")
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(_describe(error)))


def _serve(channel: Channel, started: float) -> None:
    import torch

    from replay_lib.engine import shims

    shims.install()
    comm = _join(torch)
    from replay_lib.engine.layout import Layout
    from replay_lib.engine.load import OpenRequest, Stopwatch, load
    from replay_lib.engine.model import init_groups
    from replay_lib.engine.replayer import Replayer
    from replay_lib.methods import load_methods

    init_groups(Layout(dp=comm.world))
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
    """Answer one request; a known error in it leaves a session of one rank usable.

    With several ranks it ends the job: the others may be waiting in a reduction for this one.
    """
    from replay_lib.errors import SpikeReplayError

    try:
        if op == "run":
            _run(channel, replayer, request)
        elif op == "gradients":
            _gradients(replayer, request)
        elif op == "bare":
            channel.send("bare", seconds=_bare(replayer, int(request["passes"])))
        channel.send("done")
    except SpikeReplayError as error:
        if replayer.loaded.comm.world > 1:
            raise
        channel.send("error", answered=True, **_describe(error))


def _run(channel: Channel, replayer: Any, request: dict[str, Any]) -> None:
    from replay_lib.engine.protocol import Experiment
    from replay_lib.engine.replayer import replay

    experiments = [Experiment.model_validate(e) for e in request["experiments"]]

    def progress(share: float) -> None:
        channel.send("progress", share=share)

    for outcome in replay(replayer, experiments, progress):
        channel.send("outcome", outcome=json.loads(outcome.model_dump_json()))


def _gradients(replayer: Any, request: dict[str, Any]) -> None:
    from replay_lib.engine.export import save_gradients
    from replay_lib.engine.protocol import Experiment

    save_gradients(replayer, Experiment.model_validate(request["experiment"]), request["path"])


def _bare(replayer: Any, passes: int) -> list[float]:
    from replay_lib.engine.step import bare_pass

    return [bare_pass(replayer.loaded) for _ in range(passes)]


def _describe(error: BaseException) -> dict[str, str]:
    from replay_lib.errors import SpikeReplayError

    if isinstance(error, SpikeReplayError):
        return {"code": error.code, "message": str(error)}
    last = traceback.format_exception(error)
    return {"code": "engine", "message": f"{_reason(error)}\n{''.join(last)}"}


def _reason(error: BaseException) -> str:
    name = type(error).__name__
    if name == "OutOfMemoryError":
        return "out of memory on the device: replay fewer ranks, or use a larger device"
    return f"the worker met an unexpected {name}: {error}"


if __name__ == "__main__":
    main()
