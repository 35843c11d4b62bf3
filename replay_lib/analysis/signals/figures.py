"""How a number, a distribution, a histogram and a ratio are told: finite ones, as strict JSON."""

from __future__ import annotations

from replay_lib.engine.protocol import Frozen

#: Quantiles told of every distribution, by nearest rank: the smallest value that at least this
#: share of the values does not exceed.
QUANTILES = (0.0, 0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999, 1.0)


class Finite(Frozen):
    """As Frozen, but NaN and infinity are refused: what is kept in a ledger is strict JSON."""

    model_config = Frozen.model_config | {"allow_inf_nan": False}


class Distribution(Finite):
    """Of the finite values among ``count + nonfinite``; None and no quantiles where there is none.

    ``std`` is that of the population. ``quantiles`` go with :data:`QUANTILES`. ``error`` is the
    largest relative error of the inner quantiles; 0: they are values of the data.
    """

    count: int
    nonfinite: int = 0
    mean: float | None = None
    std: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    quantiles: tuple[float, ...] = ()
    error: float = 0.0

    def quantile(self, share: float) -> float | None:
        """The quantile of one of :data:`QUANTILES`; None where there are no values."""
        return self.quantiles[QUANTILES.index(share)] if self.quantiles else None


class Histogram(Finite):
    """``counts[i]`` values in ``[edges[i], edges[i + 1])``, the last bin with its upper edge.

    ``below`` and ``above`` are outside all bins, so counts, below and above add up to all finite
    values.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    below: int = 0
    above: int = 0


class Ratio(Finite):
    """One probability ratio on loss tokens: ``numerator / denominator``, say old / rollout.

    ``ratio`` and ``histogram`` are of ``exp(clamp(log_ratio, -20, 20))``, as the loss takes it
    (``clamped`` tokens were outside), ``log_ratio`` of the unclamped one. ``k1``, ``k2``, ``k3``
    estimate ``divergence`` in nats a token, from the unclamped log-ratio (k3 from the clamped one);
    ``outside`` counts tokens with a ratio beyond 2 or under 1/2. ``sequence`` is the geometric mean
    of a row.
    """

    numerator: str
    denominator: str
    divergence: str
    tokens: int
    clamped: int
    outside: int
    ratio: Distribution
    log_ratio: Distribution
    absolute: Distribution  # |log_ratio|
    sequence: Distribution
    histogram: Histogram
    k1: float | None
    k2: float | None
    k3: float | None

    @property
    def name(self) -> str:
        """``old/rollout``."""
        return f"{self.numerator}/{self.denominator}"
