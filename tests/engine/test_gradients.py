"""Buffers, norms and the digest: every bit counts, and each parameter once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from replay_lib.engine.gradients import GradientBuffers, GradientCollector, digest, measure


def filled(**values: torch.Tensor) -> GradientBuffers:
    buffers = GradientBuffers(values)
    for name, value in values.items():
        buffers.views[name].copy_(value)
    return buffers


def test_gradients_of_several_backwards_are_summed_in_float32():
    module = nn.Linear(3, 2, dtype=torch.bfloat16)
    collector = GradientCollector(module)
    buffers = collector.new_buffers()
    collector.current = (buffers,)
    x = torch.ones(1, 3, dtype=torch.bfloat16)
    for _ in range(300):  # bfloat16 cannot count beyond 256
        module(x).sum().backward()
    assert buffers.views["weight"].tolist() == [[300.0] * 3] * 2
    assert module.weight.grad is None


def test_the_norm_counts_every_parameter_once_and_in_float64():
    tiny = torch.full((10_000,), 1e-4)
    measured = measure(filled(big=torch.tensor([1.0]), tiny=tiny), {})
    # float32 sums of squares would lose what stands behind the seventh digit
    assert measured.norm == pytest.approx(math.sqrt(1 + 1e4 * float(tiny[0]) ** 2), rel=1e-12)
    assert measured.param_norms["big"] == 1.0


def test_parameters_that_share_a_reported_name_are_one_norm():
    buffers = filled(a=torch.tensor([3.0]), b=torch.tensor([4.0]))
    assert measure(buffers, {"a": "w", "b": "w"}).param_norms == {"w": 5.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named(bad):
    measured = measure(filled(good=torch.ones(2), bad=torch.tensor([1.0, bad])), {})
    assert measured.nonfinite == ("bad",)
    assert not math.isfinite(measured.norm)


def test_the_digest_sees_one_bit_a_swap_and_a_shift():
    base = torch.arange(1, 2_000_001, dtype=torch.float32)  # more than one block
    same = digest(filled(w=base))
    assert digest(filled(w=base.clone())) == same
    flipped = base.clone()
    flipped.view(torch.int32)[1_500_000] ^= 1
    swapped = base.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    far = base.clone()
    far[[5, 5 + (1 << 20)]] = far[[5 + (1 << 20), 5]]  # the same place in two blocks
    shifted = base.roll(1)
    others = {digest(filled(w=t)) for t in (flipped, swapped, far, shifted)}
    assert len(others) == 4 and same not in others


def test_the_digest_tells_zeros_of_both_signs_names_and_shapes_apart():
    digests = {
        digest(filled(w=torch.zeros(4))),
        digest(filled(w=-torch.zeros(4))),
        digest(filled(w=torch.zeros(2, 2))),
        digest(filled(v=torch.zeros(4))),
    }
    assert len(digests) == 4
