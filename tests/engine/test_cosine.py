"""The cosine to the unpatched gradient, against plain torch, by hand and through the engine."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cosine_similarity

from replay_lib.engine import cosine, memory
from replay_lib.engine.comm import Comm
from replay_lib.engine.cosine import Unpatched, cosine_to
from replay_lib.engine.gradients import GradientBuffers, measure
from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession

CPU = torch.device("cpu")
ALONE = Comm(rank=0, world=1, device=CPU)


def filled(**values: torch.Tensor) -> GradientBuffers:
    buffers = GradientBuffers(values)
    for name, value in values.items():
        buffers.views[name].copy_(value)
    return buffers


def cosine_of(
    one: GradientBuffers, other: GradientBuffers, counted: list[str] | None = None
) -> float | None:
    before = Unpatched.keep(other, measure(other, {}, counted=counted).norm, CPU)
    return cosine_to(before, one, measure(one, {}, counted=counted), ALONE, counted)


def test_it_is_that_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cosine, "_BLOCK", 100)  # several blocks, the last one smaller
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(2, 1030, generator=generator)
    found = cosine_of(filled(m=a[:30].view(5, 6), v=a[30:]), filled(m=b[:30].view(5, 6), v=b[30:]))
    expected = float(cosine_similarity(a.double(), b.double(), dim=0))
    assert found == pytest.approx(expected, rel=1e-12)  # two orders of float64 sums


def test_it_is_summed_in_float64() -> None:
    # in float32 the small products would be lost beside the large one
    a = torch.cat([torch.tensor([1.0]), torch.full((10_000,), 1e-5)])
    b = torch.cat([torch.tensor([1.0]), torch.full((10_000,), -1e-5)])
    small = 1e4 * float(a[1]) ** 2
    assert cosine_of(filled(w=a), filled(w=b)) == pytest.approx(
        (1 - small) / (1 + small), rel=1e-14
    )


@pytest.mark.parametrize(
    ("other", "expected"),
    [([3.0, 4.0], 1.0), ([-6.0, -8.0], -1.0), ([4.0, -3.0], 0.0), ([0.0, 2.0], 0.8)],
)
def test_angles_known_by_hand(other: list[float], expected: float) -> None:
    found = cosine_of(filled(w=torch.tensor([3.0, 4.0])), filled(w=torch.tensor(other)))
    assert found == pytest.approx(expected, abs=1e-15) and -1.0 <= found <= 1.0


@pytest.mark.parametrize("bad", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_without_a_direction_there_is_none(bad: list[float]) -> None:
    good, other = filled(w=torch.tensor([3.0, 4.0])), filled(w=torch.tensor(bad))
    assert cosine_of(good, other) is None and cosine_of(other, good) is None


def test_a_parameter_that_another_rank_counts_is_left_out() -> None:
    one = filled(w=torch.tensor([1.0]), copy=torch.tensor([5.0]))
    other = filled(w=torch.tensor([1.0]), copy=torch.tensor([-5.0]))
    assert cosine_of(one, other, ["w"]) == 1.0
    assert cosine_of(one, other) == pytest.approx(-24 / 26)


@pytest.mark.parametrize(
    ("free_on_device", "free_on_host", "place"),
    [(100, 100, "meta"), (99, 100, "cpu"), (99, 99, None)],
)
def test_it_is_kept_where_it_fits(
    monkeypatch: pytest.MonkeyPatch,
    free_on_device: int,
    free_on_host: int,
    place: str | None,
) -> None:
    free = {"meta": free_on_device, "cpu": free_on_host}
    monkeypatch.setattr(memory, "free_bytes", lambda device: free[device.type])
    loaded = SimpleNamespace(
        model=SimpleNamespace(device=torch.device("meta")),
        collector=SimpleNamespace(parameters={"w": torch.zeros(10)}),  # 40 bytes of 100
        comm=ALONE,
    )
    found = memory.place_to_keep(loaded)
    assert (found.type if found else None) == place


@pytest.mark.xdist_group("engine-plain")
def test_the_engine_tells_what_its_whole_gradients_give(
    plain: ReplaySession, tmp_path: Path
) -> None:
    def gradient(name: str) -> torch.Tensor:
        plain.save_gradients(Experiment.parse(name), tmp_path / "one.pt")
        saved = torch.load(tmp_path / "one.pt", weights_only=True)
        return torch.cat([saved[key].flatten() for key in sorted(saved)]).double()

    before = gradient("baseline")
    names = ["disable-routing-replay", "balance-negative-advantages"]
    # compared with another experiment, its cosine is still that to the unpatched gradient
    asked = [Experiment.parse(names[0]), Experiment.parse(names[1], against=names[0])]
    for outcome in list(plain.run_many(asked)):
        expected = float(cosine_similarity(gradient(outcome.experiment.name), before, dim=0))
        assert outcome.cosine == pytest.approx(expected, rel=1e-12)
        assert (outcome.cosine_carried is None) == (outcome.grad_norm_preclip_carried is None)
    baseline, routed, nothing = plain.run_many(
        [Experiment.baseline(), asked[0], Experiment.parse("seam_examples:keeps_nothing")]
    )
    assert baseline.cosine is None
    assert routed.cosine_carried not in (None, routed.cosine)
    assert nothing.grad_norm_preclip == 0.0 and nothing.cosine is None


@pytest.mark.xdist_group("engine-plain")
def test_beside_another_experiment_the_cosine_is_to_that_one(
    plain: ReplaySession, tmp_path: Path
) -> None:
    def gradient(experiment: Experiment) -> torch.Tensor:
        plain.save_gradients(experiment, tmp_path / "one.pt")
        saved = torch.load(tmp_path / "one.pt", weights_only=True)
        return torch.cat([saved[key].flatten() for key in sorted(saved)]).double()

    names = ["balance-negative-advantages", "clip-advantages", "disable-routing-replay"]
    first, *others = (Experiment.parse(name) for name in names)
    (plainly,) = plain.run_many([others[0]])
    asked = [first, *others, Experiment.parse("seam_examples:keeps_nothing")]
    itself, *beside, nothing = plain.run_beside(first, asked)
    own = gradient(first)
    for outcome in beside:
        expected = float(cosine_similarity(gradient(outcome.experiment), own, dim=0))
        assert outcome.cosine == pytest.approx(expected, rel=1e-12)
    assert itself.cosine == pytest.approx(1.0, abs=1e-12) and nothing.cosine is None
    # norms are what they always are, and the next cosine is to the unpatched gradient again
    (again,) = plain.run_many([others[0]])
    assert beside[0].grad_norm_preclip == plainly.grad_norm_preclip
    assert again.cosine == plainly.cosine != beside[0].cosine
