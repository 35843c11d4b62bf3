"""How far a gradient norm moves between two correct replays of one step: a table with reasons.

A verdict whose threshold lies closer than this is called inconclusive, whatever else was seen. The
table is what other machines, layouts and summation orders may add; the spread of the baselines of
one session (:func:`spread`) and their distance from the recorded norm count beside it.

Figures in the reasons: ``benchmarks/results/devices-*.json`` (one step under six experiments) and
``repeats-*.json`` (twelve baselines a session: all of them bit-equal there). A test holds every
entry to them. The tolerance within which a baseline must reproduce the recorded norm is another
thing and belongs to the case.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Noise:
    """``relative`` is the share of a norm that may differ by arithmetic alone, >= 0."""

    relative: float
    reason: str


#: Keyed by (dtype of the replay, kind of device).
NOISE: dict[tuple[str, str], Noise] = {
    ("float32", "cpu"): Noise(
        1e-5,
        "24 bits of mantissa: one rounding is 6e-8 of a value; one against two threads moved a "
        "norm by 6e-8, other ranks than recorded by 1.3e-7, and float32 is up to 3.4e-6 away from "
        "float64 on the embedded cases: three times that",
    ),
    ("float32", "cuda"): Noise(
        1e-5,
        "TF32 is off, so only the summation order differs from the CPU's: an H200 was up to "
        "1.5e-6 away from it and 2.3e-8 from the recorded norm. Rounding itself is the CPU's, up "
        "to 3.4e-6 against float64",
    ),
    ("bfloat16", "cpu"): Noise(
        2e-2,
        "8 bits of mantissa: one rounding is up to 2^-9 = 2e-3 of a value; a CPU and an H200 were "
        "up to 6.7e-3 apart on the same step, and the embedded float32 step is 5.8e-4 from its "
        "recorded norm. Summed in another order (tensor parallelism on GPUs) a spike moved by "
        "2.0e-2",
    ),
    ("bfloat16", "cuda"): Noise(
        2e-2,
        "8 bits of mantissa: one rounding is up to 2^-9 = 2e-3 of a value; an H200 was up to "
        "6.7e-3 away from the CPU and 7.2e-4 from the recorded norm of the embedded float32 step; "
        "with and without deterministic algorithms it was up to 1.5e-3 apart from itself, with "
        "tensor parallelism, whose sums have another order, up to 2.0e-2 on a spike",
    ),
}


def spread(norms: Sequence[float]) -> float:
    """(largest - smallest) / median of ``norms`` of repeated replays; 0 where all are equal.

    NaN without a norm, or where one is not finite, or for norms around a median of zero: nothing
    can be said then, and nothing is hidden.
    """
    if not norms or not all(map(math.isfinite, norms)):
        return math.nan
    width, median = max(norms) - min(norms), statistics.median(norms)
    if width == 0:
        return 0.0
    return width / median if median > 0 else math.nan


def device_kind(device: str) -> str:
    """``cuda`` for "cuda:0" or "cuda (NVIDIA H200)", ``cpu`` for "cpu"."""
    return re.split(r"[^a-z]", device.lower(), maxsplit=1)[0]


def noise_of(dtype: str, device: str) -> Noise:
    """The entry for ``dtype`` on ``device`` ("cpu", "cuda", "cuda:0", ...).

    A pair that nobody measured gets the largest entry, and says so.
    """
    kind = device_kind(device)
    known = NOISE.get((dtype, kind))
    if known is not None:
        return known
    widest = max(entry.relative for entry in NOISE.values())
    return Noise(widest, f"{dtype} on {kind} was not measured: the widest entry of the table")
