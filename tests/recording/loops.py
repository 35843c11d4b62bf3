"""Run the documented loops for real, on one and on two gloo ranks, and replay what they recorded.

``python loops.py HOME``: Megatron is imported once; every job and every replay is a fork of this
process. Each job writes its snapshots under ``HOME/<name>`` and ``told.json`` beside them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch
import torch.distributed as dist

from replay_lib.zoo.native import shims

shims.install()

from megatron.core import dist_checkpointing
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from plain_moe import FIELDS, SHAPE, PlainMoe, place_names
from steps import SETTINGS, SPIKE, backward, batches
from torch.nn.parallel import DistributedDataParallel

import replay_lib.recorder
from replay_lib.engine.comm import Comm
from replay_lib.engine.load import OpenRequest, Stopwatch, load
from replay_lib.engine.model_config import model_config
from replay_lib.engine.protocol import Experiment
from replay_lib.engine.replayer import Replayer, replay
from replay_lib.methods import load_methods
from replay_lib.microbatch import static_split
from replay_lib.recording.columns import rank_batch
from replay_lib.snapshot.model import Parallel
from replay_lib.zoo.native.model import build_chunks, join_groups
from replay_lib.zoo.native.parallel import parse_parallel
from replay_lib.zoo.native.step import Step, run_step

DOCUMENT = Path(__file__).parents[2] / "docs/recorder.md"
JOBS = {
    "torch-1": "dp=1",
    "torch-2": "dp=2",
    "megatron-dp1": "dp=1",
    "megatron-dp2-ep2": "ep=2,dp=2",
    "megatron-tp2": "tp=2",
    "megatron-pp2": "pp=2",
}


def example(name: str) -> str:
    """The user's lines of the document."""
    pattern = rf"<!-- example: {name} -->\n```python\n(.*?)```"
    (found,) = re.findall(pattern, DOCUMENT.read_text(), re.DOTALL)
    return found


def torch_loop(rank: int, parallel: Parallel, home: Path) -> None:
    torch.manual_seed(3)
    bare = PlainMoe()
    model = bare if parallel.dp == 1 else DistributedDataParallel(bare)
    run(
        "torch",
        rank,
        home,
        model=model,
        optimizer=torch.optim.Adam(bare.parameters(), lr=1e-3),
        names=place_names(),
        fields=FIELDS,
        batches=batches(rank, SHAPE.vocabulary, None),
        forward_backward=lambda m, batch: backward(m, batch, 8, parallel.dp),
        torch=torch,
    )


def megatron_loop(rank: int, parallel: Parallel, home: Path) -> None:
    join_groups(parallel)
    torch.manual_seed(3)
    config = model_config(FIELDS)
    options = {"vocab": SHAPE.vocabulary, "replay": True, "device": torch.device("cpu")}
    chunks = build_chunks(config, parallel, **options)
    initialise(chunks)
    optimizer = new_optimizer(chunks, learning_rate=1e-3, clip=1.0)
    unclipped = new_optimizer(chunks, learning_rate=0.0, clip=0.0)

    def forward_backward(chunks: list[Any], given: dict[str, Any]) -> None:
        batch = rank_batch(given, parallel.dp_rank(rank))
        step = Step(
            batch=batch,
            split=static_split(batch.rows, 8),
            settings=SETTINGS,
            moe_layers=config.moe_layers,
            routes=True,
            device=torch.device("cpu"),
        )
        run_step(chunks, unclipped, step)

    run(
        "megatron",
        rank,
        home,
        model=chunks,
        optimizer=optimizer,
        batches=batches(
            parallel.dp_rank(rank), SHAPE.vocabulary, (SHAPE.layers, SHAPE.topk, SHAPE.experts)
        ),
        forward_backward=forward_backward,
    )


def initialise(chunks: list[Any]) -> None:
    """Replicas alike, whichever ranks hold them: drawn from the parameter's name."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            drawn = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            with torch.no_grad():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(std=0.2, generator=drawn)


def new_optimizer(chunks: list[Any], *, learning_rate: float, clip: float) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=learning_rate,
        weight_decay=0.0,
        params_dtype=torch.float32,
        clip_grad=clip,
        use_distributed_optimizer=False,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)


def run(name: str, rank: int, home: Path, **given: Any) -> None:
    """Execute the document's lines; what the recorder saw is told by rank 0."""
    seen: list[Any] = []

    class Recorder(replay_lib.recorder.SpikeRecorder):
        def observe(self, *arguments: Any) -> Any:
            seen.append(super().observe(*arguments))
            return seen[-1]

    space = {"output_dir": home, "settings": SETTINGS, **given}
    code = example(name).replace("SpikeRecorder(", "Recorder(", 1)
    exec(compile(code, str(DOCUMENT), "exec"), {**space, "Recorder": Recorder})
    told = [json.loads(json.dumps(dataclasses.asdict(one), default=str)) for one in seen]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, told)
    if rank == 0:
        (home / "told.json").write_text(json.dumps(everyone))


def replayed(rank: int, _parallel: Parallel, home: Path) -> None:
    """The norm of every recorded snapshot, by the engine, on one rank."""
    path = home / "spike_snapshots" / f"iter_{SPIKE:07d}"
    request = OpenRequest(snapshot=str(path))
    comm = Comm(rank=rank, world=1, device=torch.device("cpu"))
    loaded, info = load(request, comm, Stopwatch())
    (outcome,) = replay(Replayer(loaded, load_methods(None)), [Experiment.baseline()])
    told = {
        "norm": outcome.grad_norm_preclip,
        "fidelity": str(info.fidelity),
        "same_by_megatron": home.name.startswith("megatron")
        and megatron_reads_the_same(loaded.model.module, path),
    }
    (home / "replayed.json").write_text(json.dumps(told))


def megatron_reads_the_same(module: torch.nn.Module, path: Path) -> bool:
    """Whether Megatron's own loader finds in the checkpoint what our reader found."""
    ours = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    state = module.sharded_state_dict(metadata={"singleton_local_shards": False})
    read = dist_checkpointing.load({"model": state}, str(path))["model"]
    module.load_state_dict(read, strict=False)
    return all(value.equal(ours[name]) for name, value in module.named_parameters())


def forked(work: Callable[[int, Parallel, Path], None], parallel: Parallel, home: Path) -> None:
    """``work`` on as many gloo ranks as the layout has, each a fork."""
    meeting = home / f".meeting-{work.__name__}"
    children = []
    for rank in range(parallel.world_size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{meeting}",
                    rank=rank,
                    world_size=parallel.world_size,
                )
                work(rank, parallel, home)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit(f"{home.name}: {work.__name__} failed")


def main(home: Path, chosen: list[str]) -> None:
    torch.set_num_threads(1)
    for name in chosen or JOBS:
        place = home / name
        place.mkdir(parents=True)
        loop = torch_loop if name.startswith("torch") else megatron_loop
        forked(loop, parse_parallel(JOBS[name]), place)
        forked(replayed, parse_parallel("dp=1"), place)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
