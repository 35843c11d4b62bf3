"""A job of a small torch module: enough to be written, nothing to be replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from steps import SETTINGS, batches

from replay_lib.recorder import Observation, SpikeRecorder, StepSettings, torch_job
from replay_lib.zoo.model import model_fields
from replay_lib.zoo.recipe import Shape

FIELDS = model_fields(Shape())
HOW = StepSettings(micro_batch_size=8, seq_length=64)
NAMES = {"first": "output_layer.weight", "second": "decoder.layers.mlp.router.weight[0]"}
QUIET = [1.0, 1.1, 0.9, 1.2, 1.1]


class Small(torch.nn.Module):
    def __init__(self, rows: int = 40) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(rows, 16))
        self.second = torch.nn.Parameter(torch.ones(8, 16))
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)


def new_recorder(home: Path, rows: int = 40, **options: Any) -> SpikeRecorder:
    """Its window is filled: a norm above 2.2 is a spike at any step from 10 on."""
    job = torch_job(Small(rows), names=NAMES, fields=FIELDS, settings=SETTINGS, step=HOW)
    return SpikeRecorder(home, job=job, history=QUIET, quiet_every=0, **options)


def batch_of(rank: int = 0) -> dict[str, Any]:
    return batches(rank, 24, None)[0]


def spike(recorder: SpikeRecorder, step: int, norm: float = 9.0, rank: int = 0) -> Observation:
    return recorder.observe(step, norm, batch_of(rank))
