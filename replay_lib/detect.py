"""When a gradient norm is a spike: one rule for detector, recorder and verdict alike.

Source: AXRL ``MegatronWorker._detect_spike``. Imports no torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from replay_lib.errors import SettingsError, fault


def is_spike(norm: float | None, median: float | None, spike_ratio: float) -> bool:
    """Whether ``norm > spike_ratio * median`` (strict), with both finite and the median positive.

    A norm that is missing or not finite is no spike: that is a verdict of its own.
    """
    if norm is None or median is None or not (math.isfinite(norm) and math.isfinite(median)):
        return False
    return median > 0.0 and norm > spike_ratio * median


def upper_median(values: Iterable[float | None]) -> float | None:
    """The value at ``n // 2`` of the sorted finite values; None where there is none.

    Values that are missing or not finite are left out: sorted among the others a NaN would make
    the median depend on where it stood.
    """
    finite = sorted(v for v in values if v is not None and math.isfinite(v))
    return finite[len(finite) // 2] if finite else None


class SpikeDetector:
    """Norms of a run, step by step, against the median of the steps before.

    A finite norm is recorded first, during warm-up too, and the window holds it: the median is
    taken over at most ``history_window - 1`` earlier norms, so a window of 1 detects nothing.
    Spikes stay in the window. Missing and non-finite norms never enter it.
    """

    def __init__(
        self,
        *,
        warmup_steps: int = 10,
        spike_ratio: float = 2.0,
        history_window: int = 100,
        history: Iterable[float | None] = (),
    ) -> None:
        """``history`` are norms before the first step; a trainer starts without, restarted too.

        Raises SettingsError for a window below 1 and a ratio that is not a positive number.
        """
        if history_window < 1:
            found = str(history_window)
            raise SettingsError(fault("spike detector", "history_window", found, "1 or more"))
        if not (math.isfinite(spike_ratio) and spike_ratio > 0.0):
            found = f"{spike_ratio}"
            raise SettingsError(fault("spike detector", "spike_ratio", found, "more than 0"))
        self.warmup_steps = warmup_steps
        self.spike_ratio = spike_ratio
        self._window: deque[float] = deque(maxlen=history_window)
        self._window.extend(v for v in history if v is not None and math.isfinite(v))
        self._median: float | None = None

    @property
    def median(self) -> float | None:
        """The median last computed, None before; steps that compute none leave it as it is."""
        return self._median

    @property
    def history(self) -> tuple[float, ...]:
        """Norms in the window, oldest first."""
        return tuple(self._window)

    def observe(self, step: int, norm: float | None) -> bool:
        """Record the norm of a (global) step, before clipping; whether it is a spike."""
        if norm is None or not math.isfinite(norm):
            return False
        self._window.append(norm)
        if step < self.warmup_steps or len(self._window) < 2:
            return False
        self._median = upper_median(self.history[:-1])
        return is_spike(norm, self._median, self.spike_ratio)
