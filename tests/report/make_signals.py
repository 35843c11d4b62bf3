"""What ``analyze`` would tell of a small batch, for tests of what is rendered from it."""

from __future__ import annotations

import itertools
import math
from typing import Any

from replay_lib.analysis.signals.figures import QUANTILES, Distribution, Histogram, Ratio
from replay_lib.analysis.signals.summary import (
    Advantages,
    GradInfo,
    Groups,
    Lengths,
    Norms,
    Outlier,
    Parameter,
    RankAdvantages,
    RankParameters,
    Rewards,
    Routing,
    Sign,
    Signals,
    Trajectories,
)


def distribution(low: float, high: float, count: int = 400) -> Distribution:
    """Evenly spread."""
    return Distribution(
        count=count,
        mean=(low + high) / 2,
        std=(high - low) / 3.46,
        minimum=low,
        maximum=high,
        quantiles=tuple(low + q * (high - low) for q in QUANTILES),
    )


def ratio(numerator: str, denominator: str) -> Ratio:
    """Bell-shaped around 1 on a logarithmic axis, with a far tail."""
    edges = tuple(2.0 ** (i / 8 - 5) for i in range(81))
    centres = [math.log2(a * b) / 2 for a, b in itertools.pairwise(edges)]
    counts = tuple(int(4000 * math.exp(-((c / 0.35) ** 2) / 2)) for c in centres)
    return Ratio(
        numerator=numerator,
        denominator=denominator,
        divergence=f"KL({denominator} || {numerator})",
        tokens=sum(counts) + 3,
        clamped=0,
        outside=21,
        ratio=distribution(0.02, 28.0),
        log_ratio=distribution(-3.9, 3.3),
        absolute=distribution(0.0, 3.9),
        sequence=distribution(0.8, 1.2, 8),
        histogram=Histogram(edges=edges, counts=counts),
        k1=0.001,
        k2=0.002,
        k3=0.0021,
    )


def outlier(row: int, value: float, text: str | None = None) -> Outlier:
    return Outlier(
        kind="old/rollout",
        dp_rank=row % 2,
        row=row,
        position=40 + row,
        index=row,
        trajectory_id=row,
        token_id=17 + row,
        text=text,
        value=value,
        advantage=-1.5,
        logprobs={"old": -0.2, "rollout": -3.5},
    )


def rank_advantages(dp_rank: int | None, positive: float, negative: float) -> RankAdvantages:
    return RankAdvantages(
        dp_rank=dp_rank,
        tokens=200,
        positive=positive,
        negative=negative,
        positive_tokens=80,
        negative_tokens=110,
        near_zero=10,
    )


def make_signals(**changes: Any) -> Signals:
    """Two ranks, one ratio with three outliers, one sign of trouble, figures of parameters."""
    layers = {"embedding": 2.1, "layer 0": 4.0, "layer 1": 3.2, "layer 2": 1.1, "layer 3": 0.6}
    layers |= {"final_layernorm": 0.1, "output_layer": 1.5}
    ranks = tuple(
        RankParameters(
            rank=r,
            parameters=95,
            nonfinite=0,
            top=(Parameter(name="w", grad_norm=3.5, grad_max=0.2, param_norm=1.0),),
            layers={k: v * (1 - 0.3 * r) for k, v in layers.items()},
        )
        for r in (0, 1)
    )
    given: dict[str, Any] = {
        "snapshot": "/data/out/run~job__actor/checkpoints/spike_snapshots/iter_0000085",
        "case": None,
        "dp": 2,
        "rows": 16,
        "tokens": 900,
        "loss_tokens": 400,
        "dtypes": {"advantage": "float32"},
        "norms": Norms(
            step=85,
            grad_norm_preclip=8.44,
            median=2.106,
            ratio=4.009,
            spike_ratio=2.0,
            threshold=4.21,
            target_ratio=1.5,
            target=3.16,
            is_spike=True,
            warmup_steps=10,
            history_window=100,
        ),
        "signs": (
            Sign(
                name="sign imbalance",
                present=True,
                figure=2.4,
                unit="x",
                bound=1.5,
                reason="twice as much one way turns the step",
                found="negative advantages weigh 2.4 times the positive ones",
                quiet=1.05,
            ),
            Sign(
                name="duplicated rows",
                present=False,
                figure=0.0,
                unit="rows",
                bound=0.0,
                reason="a row twice counts twice",
                found="no row twice",
            ),
            Sign(
                name="stale rollouts",
                present=None,
                figure=None,
                unit="nats",
                bound=0.1,
                reason="an old policy",
                found="the batch has no rollout log-probabilities",
            ),
        ),
        "advantages": Advantages(
            eps=1e-6,
            total=rank_advantages(None, 61.0, 147.0),
            ranks=(rank_advantages(0, 31.0, 60.0), rank_advantages(1, 30.0, 87.0)),
            balance=61.0 / 147.0,
            largest_row_share=0.2,
            values=distribution(-3, 2),
        ),
        "ratios": (ratio("old", "rollout"),),
        "columns": (),
        "lengths": Lengths(
            rows=16,
            padding_rows=1,
            rows_without_loss=0,
            tokens=distribution(20, 100, 16),
            loss_tokens=distribution(10, 60, 16),
            prompt_tokens=distribution(5, 20, 16),
            histogram=Histogram(edges=(0.0, 50.0, 100.0), counts=(9, 7)),
            spans=distribution(1, 2, 16),
            turns=None,
        ),
        "rewards": Rewards(
            reward=None,
            baseline=None,
            difference=None,
            groups=Groups(
                groups=4, judged=0, zero_variance=0, sizes=distribution(4, 4, 4), largest=4
            ),
        ),
        "trajectories": Trajectories(trajectories=16, unknown=0, rows_a_trajectory=None),
        "routing": Routing(
            payloads=(16, 16),
            payloads_recorded_rank0=16,
            replayed=True,
            loss_tokens_only=False,
            rows_with=16,
            rows_without=0,
            share_without=0.0,
            tokens=900,
            dtype="int16",
            layers=4,
            topk=2,
            experts=8,
            per_layer=(),
        ),
        "grad_info": GradInfo(ranks=ranks, layers=layers),
        "outliers": (outlier(3, 3.3, " the"), outlier(6, -3.9), outlier(9, 2.7, "<b>")),
        "nonfinite": (),
    }
    return Signals(**(given | changes))
