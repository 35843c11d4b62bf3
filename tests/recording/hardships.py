"""Recorders that are killed, or whose ranks do not agree: forks of one process, told as JSON.

``python hardships.py HOME``
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_job import FIELDS, KEYS, batch_of, new_recorder, spike

from replay_lib import errors
from replay_lib.recorder import Event
from replay_lib.recording import job as job_module
from replay_lib.recording.checkpoint import save_pieces
from replay_lib.recording.plain import live_pieces
from replay_lib.recording.ranks import Ranks
from replay_lib.snapshot import load_batch, open_snapshot, read_tensors

POINTS = 50
NEW = "iter_0000014"


def child(work: Callable[[], None]) -> int:
    """A fork that does ``work`` and ends."""
    number = os.fork()
    if number:
        return number
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def killed(home: Path) -> list[dict[str, Any]]:
    """The write of a fourth snapshot, and the rotation after it, ended at random points."""
    base = home / "base"
    recorder = new_recorder(base)
    for step in (11, 12, 13):
        spike(recorder, step)
    before = content(base)
    draw = random.Random(7)
    took = max(attempt(home / f"whole{n}", base, None) for n in range(2))
    return [trial(home / str(n), base, before, draw, took) for n in range(POINTS)]


def trial(
    home: Path, base: Path, before: dict[str, Any], draw: random.Random, took: float
) -> dict[str, Any]:
    attempt(home, base, draw.uniform(0, 1.4 * took))
    root = home / "spike_snapshots"
    left = sorted(p.name for p in root.iterdir())
    wrong = check(home, before)
    cleared = new_recorder(home)  # the next start
    kept = [p.name for p in cleared.snapshots(Event.SPIKE)]
    hidden = [p.name for p in root.iterdir() if p.name.startswith(".")]
    wrong += check(home, before) + [f"{n} is left" for n in hidden]
    shutil.rmtree(home)
    return {"left": left, "kept": kept, "wrong": wrong}


def attempt(home: Path, base: Path, delay: float | None) -> float:
    """Seconds that a write took, or that it was let live."""
    shutil.copytree(base, home)
    ready, told = os.pipe()

    def work() -> None:
        recorder = new_recorder(home)
        os.write(told, b"x")
        spike(recorder, 14)

    number = child(work)
    os.read(ready, 1)
    start = time.perf_counter()
    if delay is not None:
        time.sleep(delay)
        os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
    os.close(ready)
    os.close(told)
    return time.perf_counter() - start


def content(home: Path) -> dict[str, Any]:
    return {
        str(p.relative_to(home)): p.read_bytes()
        for p in sorted((home / "spike_snapshots").glob("iter_*/*"))
    }


def check(home: Path, before: dict[str, Any]) -> list[str]:
    """What is half written among the snapshots that a reader sees."""
    wrong = []
    now = content(home)
    for path in sorted((home / "spike_snapshots").glob("iter_*")):
        try:
            snapshot = open_snapshot(path)
            load_batch(snapshot, 0)
            assert len(read_tensors(path)) == len(KEYS)
        except errors.SpikeReplayError as error:
            wrong.append(str(error))
        prefix = f"spike_snapshots/{path.name}/"
        if path.name != NEW:
            same = {k: v for k, v in before.items() if k.startswith(prefix)} == {
                k: v for k, v in now.items() if k.startswith(prefix)
            }
            wrong += [] if same else [f"{path.name} changed"]
    return wrong


def ranks(home: Path) -> list[list[str]]:
    """What each of two ranks was told about steps that go wrong on one of them."""

    def work(rank: int) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{home}/.meeting", rank=rank, world_size=2
        )
        told = [str(part) for part in hardships_of(rank, home)]
        (home / f"rank{rank}.json").write_text(json.dumps(told))

    numbers = [child(lambda rank=rank: work(rank)) for rank in range(2)]
    ended = [os.waitpid(number, 0)[1] for number in numbers]
    assert ended == [0, 0]
    return [json.loads((home / f"rank{r}.json").read_text()) for r in range(2)]


def hardships_of(rank: int, home: Path) -> list[Any]:
    told: list[Any] = []
    try:
        short = dict(batch_of()) if rank == 0 else {"input_ids": torch.zeros(1, 2)}
        new_recorder(home).observe(0, 1.0, short)
    except errors.UsageError as error:
        told.append(error)
    recorder = new_recorder(home)
    told.append(recorder.observe(11, 9.0 + rank, batch_of(rank)).note)
    told.append(recorder.observe(12 + rank, 9.0, batch_of(rank)).event)
    real = job_module.write_rank_files
    if rank == 1:
        job_module.write_rank_files = full  # type: ignore[assignment]
    told.append(spike(recorder, 13, rank=rank).note)
    job_module.write_rank_files = real
    dist.barrier()  # rank 0 clears away after all know
    told.append(list(recorder.roots[Event.SPIKE].iterdir()))
    told.append(recorder.observe(14, float("nan"), batch_of(rank)).event)
    told.append(spike(recorder, 15, 9.0 * (1 + 1e-7 * rank), rank).path)
    told.append(spike(recorder, 15, rank=rank).note)
    told.append(recorder.detector.history[-1])
    ungated = {k: v for k, v in FIELDS.items() if k != "gated_linear_unit" or rank == 1}
    try:  # what rank 0 says of the network is what a snapshot holds
        new_recorder(home, fields=ungated).observe(0, 1.0, batch_of(rank))
    except errors.UsageError as error:
        told.append(error)
    return told


def full(*_: Any) -> int:
    raise OSError(28, "No space left on device")


def memory(home: Path) -> float:
    """Growth of a process's largest size, in MiB, when it writes 128 MiB of weights."""
    ready, told = os.pipe()

    def work() -> None:
        recorder = new_recorder(home, rows=40)
        spike(recorder, 11)  # so that what any write needs is loaded
        model = torch.nn.ParameterList(torch.ones(1, 1024, 1024) for _ in range(32))
        names = {f"{n}": f"output_layer.weight[{n}]" for n in range(32)}
        pieces = list(live_pieces(model, names))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (home / "weights").mkdir()
        save_pieces(home / "weights", "weights", 1, pieces, Ranks())
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        os.write(told, str((after - before) / 1024).encode())

    assert os.waitpid(child(work), 0)[1] == 0
    return float(os.read(ready, 64))


def main(home: Path) -> dict[str, Any]:
    told = {}
    for work in (killed, ranks, memory):
        place = home / work.__name__
        place.mkdir()
        told[work.__name__] = work(place)
    return told


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(Path(sys.argv[1]))))
