"""The engine's gradients against the float64 oracle, parameter by parameter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from replay_lib.engine.protocol import Experiment
from replay_lib.engine.reference import ReferenceStep, reference_step
from replay_lib.microbatch import split_ranks
from replay_lib.snapshot import load_batch, load_model_fields, load_settings, open_snapshot
from replay_lib.snapshot.checkpoint import read_tensors

pytestmark = pytest.mark.xdist_group("engine-plain")

#: Float32 rounding along four layers, relative to the largest entry of a parameter's gradient.
#: The worst one seen is 1.2e-6; another kind of routes is off by 1e-3 and more.
FLOAT32 = 1e-5


def oracle(path: Path, *, replayed: bool) -> ReferenceStep:
    snapshot = open_snapshot(path)
    batches = [load_batch(snapshot, rank) for rank in range(snapshot.parallel.dp)]
    worker = snapshot.worker
    partition = split_ranks(
        [b.lengths() for b in batches],
        [b.width for b in batches],
        dynamic=worker.use_dynamic_batch_size,
        micro_batch_size=worker.train_micro_batch_size,
        seq_length=worker.seq_length,
    )
    fields = load_model_fields(snapshot)
    nowhere = [torch.zeros(*b.input_ids.shape, fields["num_layers"]).bool() for b in batches]
    return reference_step(
        read_tensors(path),
        fields,
        batches,
        load_settings(snapshot),
        partition,
        replayed=None if replayed else nowhere,
    )


def unstacked(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Checkpoint names (stacked layers) to the names that runs print."""
    out: dict[str, Tensor] = {}
    for key, value in gradients.items():
        name = key.replace("experts.experts.", "experts.")
        if name.startswith("decoder.layers."):
            inner = name.removeprefix("decoder.layers.")
            out |= {f"decoder.layers.{i}.{inner}": layer for i, layer in enumerate(value)}
        else:
            out[name] = value
    return out


@pytest.mark.parametrize(
    ("experiment", "replayed"),
    [("baseline", True), ("disable-routing-replay", False)],
    ids=["replayed-routes", "current-routes"],
)
def test_every_parameter_has_the_gradient_of_the_oracle(
    plain, plain_path, tmp_path, experiment, replayed
):
    file = tmp_path / "gradients.pt"
    plain.save_gradients(Experiment.parse(experiment), file)
    engine = torch.load(file, weights_only=True)
    reference = unstacked(oracle(plain_path, replayed=replayed).gradients)
    assert set(engine) == set(reference)
    worst = 0.0
    for name, expected in reference.items():
        assert engine[name].shape == expected.shape, name
        off = float((engine[name].double() - expected).abs().max() / expected.abs().max())
        worst = max(worst, off)
        assert off <= FLOAT32, name
    print(f"worst relative difference, {experiment}: {worst:.2g} over {len(reference)} parameters")


def test_the_two_kinds_of_routes_are_told_apart(plain_path):
    """A control: the tolerance above would not hide one kind of routes behind the other."""
    forced, own = (unstacked(oracle(plain_path, replayed=r).gradients) for r in (True, False))
    off = [
        float((forced[n] - own[n]).abs().max() / forced[n].abs().max())
        for n in forced
        if "router" in n
    ]
    assert min(off) > 100 * FLOAT32
