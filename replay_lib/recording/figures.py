"""Per-parameter figures of one rank, and what they are: told by the numbers, not by a promise.

AXRL writes its figures after clipping, from one rank's shard, partly unreduced. Here they are
taken when the loop calls ``observe``, which should be before clipping; whether they are, and
whether they are reduced over the ranks, is seen by summing their squares over the job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replay_lib.recording.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor

#: Squares are summed in float64 of float32 norms of each parameter; a gradient that is clipped or
#: not reduced is off by far more.
SAME_NORM = 1e-4


@dataclass(frozen=True)
class Figures:
    """``by_name[parameter]``: ``grad_norm``, ``grad_max`` and ``param_norm`` of this rank's shard.

    ``squares`` is the sum of squares of those gradients that this rank counts: over all ranks of
    the job each element counts once.
    """

    by_name: Mapping[str, Mapping[str, float]]
    squares: float


def measure(entries: Iterable[tuple[str, Tensor, Tensor | None, bool]]) -> Figures:
    """Figures of ``(name, parameter, gradient, whether this rank counts it)``.

    Parameters without a gradient are left out. One parameter at a time; nothing is copied whole.
    """
    by_name: dict[str, dict[str, float]] = {}
    squares = 0.0
    for name, parameter, gradient, counted in entries:
        if gradient is None or gradient.numel() == 0:
            continue
        norm = float(gradient.detach().norm())
        by_name[name] = {
            "grad_norm": norm,
            "grad_max": float(gradient.detach().abs().max()),
            "param_norm": float(parameter.detach().norm()),
        }
        squares += norm**2 if counted else 0.0
    return Figures(by_name, squares)


def judged(figures: Figures, norm: float, ranks: Ranks) -> dict[str, Any]:
    """What the figures of all ranks are, as keys of the metadata; all ranks call this.

    ``grad_info_gradients``: ``preclip`` where their L2 over the job is the recorded norm,
    ``clipped_or_partial`` where it is less, ``unreduced`` where it is more.
    """
    total = sum(ranks.gathered(figures.squares)) ** 0.5
    same = abs(total - norm) <= SAME_NORM * norm
    kind = "preclip" if same else "clipped_or_partial" if total < norm else "unreduced"
    return {"grad_info_gradients": kind, "grad_info_l2": total, "grad_info_shard": "rank"}
