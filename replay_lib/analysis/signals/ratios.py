"""Probability ratios between two policies on loss tokens: quantiles, histogram, k1, k2, k3.

Estimators of a Kullback-Leibler divergence from samples (http://joschu.net/blog/kl-approx.html):
with ``r = p(x) / q(x)`` and x drawn from q, ``k1 = -log r``, ``k2 = (log r)**2 / 2`` and
``k3 = r - 1 - log r`` estimate KL(q || p). Everything is computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from replay_lib.analysis.signals.figures import Ratio
from replay_lib.analysis.signals.stream import Bins, Stream
from replay_lib.analysis.signals.summary import RowPlace
from replay_lib.analysis.signals.view import View
from replay_lib.loss.ratios import LOG_RATIO_BOUND

#: A ratio beyond this, or under one over it, is an outlier: the cap of the first recorded method.
FAR = 2.0
#: Bins of equal width in the logarithm, four to a factor of two; the middle one holds ratio 1.
EDGES = tuple(2.0 ** ((2 * k + 1) / 8) for k in range(-41, 41))


@dataclass
class RatioStage:
    """``numerator / denominator``; ``sampled_from`` says which of the two x was drawn from.

    ``rows`` are those with a token outside :data:`FAR`, with the share of their tokens that are.
    """

    numerator: str
    denominator: str
    sampled_from: str
    streams: dict[str, Stream] = field(default_factory=dict)
    bins: Bins = field(default_factory=lambda: Bins(EDGES))
    clamped: int = 0
    outside: int = 0
    rows: list[RowPlace] = field(default_factory=list)
    known: bool = False  # some rank has both columns

    def add(self, view: View, numerator_N: Tensor, denominator_N: Tensor) -> None:
        """Log-probabilities of one rank's loss tokens, in the order of ``View.on_loss``."""
        self.known = True
        log_N = numerator_N.double() - denominator_N.double()
        used_N = log_N[log_N.isfinite()]
        bounded_N = used_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        self.clamped += int((bounded_N != used_N).sum())
        ratio_N = bounded_N.exp()
        self.bins.add(ratio_N)
        self._stream("log_ratio").add(log_N)  # counts what is not finite
        self._stream("absolute").add(used_N.abs())
        self._stream("ratio").add(ratio_N)
        self._estimators(used_N, bounded_N)
        self._rows(view, log_N)

    def _stream(self, name: str) -> Stream:
        return self.streams.setdefault(name, Stream())

    def _estimators(self, used_N: Tensor, bounded_N: Tensor) -> None:
        forth = 1.0 if self.sampled_from == self.denominator else -1.0
        log_r, bounded = forth * used_N, forth * bounded_N
        self._stream("k1").moments(-log_r)
        self._stream("k2").moments(log_r.square() / 2)
        self._stream("k3").moments(bounded.expm1() - bounded)

    def _rows(self, view: View, log_N: Tensor) -> None:
        row_N = view.rows_of_tokens()
        bounded_N = log_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)  # NaN stays NaN
        count_B = view.loss_BT.sum(dim=1)
        sum_B = torch.zeros(view.batch.rows, dtype=torch.float64).index_add_(0, row_N, bounded_N)
        self._stream("sequence").add((sum_B / count_B)[count_B > 0].exp())
        far_N = (log_N.abs() > torch.tensor(FAR, dtype=torch.float64).log()) & log_N.isfinite()
        self.outside += int(far_N.sum())
        far_B = torch.bincount(row_N[far_N], minlength=view.batch.rows)
        for row in far_B.nonzero().flatten().tolist():
            self.rows.append(view.place(row, int(far_B[row]) / int(count_B[row])))

    def result(self) -> Ratio:
        """All ranks so far."""
        other = self.numerator if self.sampled_from == self.denominator else self.denominator
        means = {name: self._stream(name) for name in ("k1", "k2", "k3")}
        k1, k2, k3 = (s.mean if s.count else None for s in means.values())
        log_ratio = self._stream("log_ratio").distribution()
        return Ratio(
            numerator=self.numerator,
            denominator=self.denominator,
            divergence=f"KL({self.sampled_from} || {other})",
            tokens=log_ratio.count,
            clamped=self.clamped,
            outside=self.outside,
            ratio=self._stream("ratio").distribution(),
            log_ratio=log_ratio,
            absolute=self._stream("absolute").distribution(),
            sequence=self._stream("sequence").distribution(),
            histogram=self.bins.histogram(),
            k1=k1,
            k2=k2,
            k3=k3,
        )
