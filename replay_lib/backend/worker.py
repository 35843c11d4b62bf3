"""A rank of the job behind ``--backend axrl``: AXRL's worker, one replay directory after the other.

Started by torchrun, as many ranks as the run had, on one machine. Rank 0 talks to the parent, reads
the snapshot, applies the patches and writes a directory for each experiment; then every rank calls
``reproduce_spike`` on it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from replay_lib.backend.board import Board
from replay_lib.backend.contract import CLASS, METHOD, MODULE
from replay_lib.engine.channel import (
    CHANNEL,
    Channel,
    describe_error,
    die_with_parent,
    leave_word,
)

#: Where AXRL would write its logs and checkpoints: nothing of a replay is to reach the run's own.
_OUTPUT = ("AXRL_OUTPUT_DIR", "AXRL_LOG_DIR")


def main() -> None:
    """Entry of ``python -m replay_lib.backend.worker`` under torchrun."""
    die_with_parent()
    home = Path(os.environ[CHANNEL]).parent
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    board = Board(home, rank, world)
    channel = Channel(os.environ[CHANNEL], rank)
    try:
        if rank == 0:
            _lead(channel, board)
        else:
            _follow(board)
    except BaseException as error:
        leave_word(error)
        channel.send("error", answered=False, **describe_error(error))
        raise


class _Alone:
    """Requests are rank 0's alone; the others get what it makes of them."""

    def broadcast(self, value: Any) -> Any:
        return value


def _lead(channel: Channel, board: Board) -> None:
    """Rank 0: the parent's requests."""
    from replay_lib.backend.prepared import Prepared, prepare

    requests = channel.requests(_Alone())
    opening = next(requests, None)
    if opening is None:
        return
    sys.path.extend(p for p in opening["python_path"] if p not in sys.path)
    started = time.perf_counter()
    prepared: Prepared = prepare(Path(opening["snapshot"]), opening["mitigations"], board.home)
    board.broadcast({"config": prepared.recorded.worker_config, "path": opening["python_path"]})
    worker = start_axrl(prepared.recorded.worker_config, board)
    info = prepared.info(round(time.perf_counter() - started, 3))
    channel.send("opened", info=json.loads(info.model_dump_json()))
    for request in requests:
        if request["op"] == "close":
            break
        _answer(channel, board, worker, prepared, request)
    board.broadcast({"close": True})
    worker.shutdown()


def _follow(board: Board) -> None:
    """Every other rank: what rank 0 posts, until it says that it is over."""
    opening = board.broadcast(None)
    sys.path.extend(p for p in opening["path"] if p not in sys.path)
    worker = start_axrl(opening["config"], board)
    while "close" not in (notice := board.broadcast(None)):
        board.gather(reproduce(worker, notice))
    worker.shutdown()


def start_axrl(config: Mapping[str, Any], board: Board) -> Any:
    """AXRL's worker of this rank, initialized; its output goes into the job's own directory."""
    from replay_lib.trainers.axrl_source import find_axrl

    for name in _OUTPUT:
        os.environ[name] = str(board.home / "axrl")
    root = find_axrl()
    assert root is not None, "what is missing was asked before"
    sys.path.insert(0, str(root))
    try:
        made = getattr(importlib.import_module(MODULE), CLASS)
        fields = dict(config)
        # a run's own logger would open a run of wandb, or write beside its figures
        fields["metric_logger_config"] = {"logger_type": "console"}
        configs = importlib.import_module("axrl.configs")
        worker = made(
            config=configs.MegatronWorkerConfig.model_validate(fields),
            rank=board.rank,
            world_size=board.world,
            local_rank=int(os.environ["LOCAL_RANK"]),
            master_ip=os.environ["MASTER_ADDR"],
            master_port=int(os.environ["MASTER_PORT"]),
        )
        _start_store()
        worker.initialize()
    finally:
        sys.path.remove(str(root))
    return worker


def _start_store() -> None:
    """A ray of this rank's own: AXRL puts restored routes there, and no cluster is to get them."""
    ray: Any = importlib.import_module("ray")
    if not ray.is_initialized():
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)


def reproduce(worker: Any, notice: Mapping[str, Any]) -> dict[str, Any]:
    """AXRL's answer for the replay directory of ``notice``, as plain data with a digest."""
    core: Any = importlib.import_module("megatron.core.utils")
    for chunk in worker.model:  # AXRL sets this field from its configuration, once, at the start
        config = core.get_model_config(chunk)
        config.moe_replay_routing_for_loss_tokens_only = notice["loss_tokens_only"]
    answer = getattr(worker, METHOD)(snapshot_dir=Path(notice["directory"]))
    figures = answer.get("per_param_diff") or {}
    replayed = {name: float(f["replayed"]).hex() for name, f in sorted(figures.items())}
    norm = float(answer["replayed_grad_norm"])
    told = json.dumps([norm.hex(), replayed]).encode()
    return {
        "norm": norm if math.isfinite(norm) else str(norm),
        "reason": answer.get("reason"),
        "digest": hashlib.sha256(told).hexdigest(),
    }


def _answer(
    channel: Channel, board: Board, worker: Any, prepared: Any, request: dict[str, Any]
) -> None:
    """Answer one request; what a directory cannot express is refused before any rank is asked."""
    from replay_lib.engine.protocol import Experiment
    from replay_lib.errors import SpikeReplayError, UsageError

    try:
        if request["op"] != "run":
            raise UsageError(f"backend axrl: it cannot do {request['op']!r}; replay natively")
        experiments = [Experiment.model_validate(e) for e in request["experiments"]]
        plans = [prepared.plan(experiment) for experiment in experiments]
    except SpikeReplayError as error:
        channel.send("error", answered=True, **describe_error(error))
        return
    for number, outcome in enumerate(_outcomes(board, worker, prepared, plans)):
        channel.send("outcome", outcome=json.loads(outcome.model_dump_json()))
        channel.send("progress", share=(number + 1) / len(plans))
    channel.send("done")


def _outcomes(board: Board, worker: Any, prepared: Any, plans: Sequence[Any]) -> Iterator[Any]:
    for plan in plans:
        started = time.perf_counter()
        with prepared.directory(plan) as directory:
            notice = board.broadcast(
                {"directory": str(directory), "loss_tokens_only": plan.routes == "loss tokens"}
            )
            answers = board.gather(reproduce(worker, notice))
        yield prepared.outcome(plan, answers, time.perf_counter() - started)


if __name__ == "__main__":
    main()
