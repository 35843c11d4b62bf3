"""How far a gradient norm moves between two correct replays of one step: a table with reasons.

A verdict whose threshold lies closer than this is called inconclusive, whatever else was seen.
"""

from __future__ import annotations

import re
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
        "one against two threads moved a norm by 6e-8, float32 against float64 by up to 1e-5",
    ),
    ("float32", "cuda"): Noise(
        1e-5,
        "TF32 is off; only the summation order differs from the CPU's, up to 1e-5 of a norm",
    ),
    ("bfloat16", "cpu"): Noise(
        3e-3,
        "8 bits of mantissa: one rounding is up to 2^-9 = 2e-3 of a value, a norm moves by 3e-3",
    ),
    ("bfloat16", "cuda"): Noise(
        3e-3,
        "8 bits of mantissa: one rounding is up to 2^-9 = 2e-3 of a value; attention backward "
        "without deterministic algorithms stays inside it",
    ),
}


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
