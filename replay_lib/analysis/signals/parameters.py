"""Per-parameter figures of ``grad_info``: post-clip, rank-local, partly unreduced."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from replay_lib.analysis.signals.summary import GradInfo, Parameter, RankParameters
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.reader import reader_of
from replay_lib.snapshot.trainer import load_grad_info

TOP = 10
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_Figures = Mapping[str, Mapping[str, float]]


def grad_info(snapshot: Snapshot) -> GradInfo | None:
    """The figures of every rank that saved them; None where none did."""
    ranks = reader_of(snapshot).grad_info_ranks(snapshot)
    if not ranks:
        return None
    told = tuple(rank_parameters(rank, load_grad_info(snapshot, rank)) for rank in ranks)
    names = dict.fromkeys(name for one in told for name in one.layers)
    largest = {n: max(one.layers[n] for one in told if n in one.layers) for n in names}
    return GradInfo(ranks=told, layers=largest)


def rank_parameters(rank: int, figures: _Figures) -> RankParameters:
    """The largest by ``grad_norm``, and the L2 of each layer's; what is not finite is counted."""
    norms = {name: one.get("grad_norm", math.nan) for name, one in figures.items()}
    finite = {name: norm for name, norm in norms.items() if math.isfinite(norm)}
    top = sorted(finite, key=lambda name: -finite[name])[:TOP]
    squares: dict[str, list[float]] = {}
    for name, norm in finite.items():
        squares.setdefault(layer_of(name), []).append(norm * norm)
    return RankParameters(
        rank=rank,
        parameters=len(figures),
        nonfinite=len(figures) - len(finite),
        top=tuple(_parameter(name, figures[name]) for name in top),
        layers={name: math.sqrt(math.fsum(values)) for name, values in squares.items()},
    )


def layer_of(name: str) -> str:
    """``layer 3`` for a parameter of a layer, else the part of the model it is in."""
    match = _LAYER.search(name)
    if match:
        return f"layer {match.group(1)}"
    parts = [part for part in name.split(".") if part not in ("module", "decoder")]
    return parts[0] if parts else name


def _parameter(name: str, figures: Mapping[str, float]) -> Parameter:
    def figure(kind: str) -> float | None:
        value = figures.get(kind)
        return value if value is not None and math.isfinite(value) else None

    return Parameter(
        name=name.removeprefix("module.").removeprefix("module."),
        grad_norm=figure("grad_norm"),
        grad_max=figure("grad_max"),
        param_norm=figure("param_norm"),
    )
