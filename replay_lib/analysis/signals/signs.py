"""Signs of trouble: a figure, a bound with its reason, and the rows that are to blame.

A sign is no verdict: some are there in ordinary steps too, which is why the quiet control's figure
stands beside it. Every bound's reason is told again, at length, in docs/analyze.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from replay_lib.analysis.signals.collect import Collected
from replay_lib.analysis.signals.summary import RowPlace, Sign

ROWS_TOLD = 10

NON_FINITE = "non_finite"
RATIO_OUTLIERS = "ratio_outliers"
STALE_ROLLOUTS = "stale_rollouts"
SIGN_IMBALANCE = "sign_imbalance"
LOUD_ROWS = "loud_rows"
IMPROBABLE_ROWS = "improbable_rows"
LENGTH_OUTLIERS = "length_outliers"
DUPLICATED_ROWS = "duplicated_rows"
ZERO_VARIANCE = "zero_variance_groups"
UNROUTED_ROWS = "rows_without_routes"
ROUTE_DISAGREEMENT = "route_disagreement"  # with a session alone

_NOTHING = "no loss token"


def sign(
    name: str,
    figure: float | None,
    *,
    unit: str,
    bound: float,
    reason: str,
    found: str,
    rows: Sequence[RowPlace] = (),
    below: bool = False,
) -> Sign:
    """A sign that is present where ``figure`` is beyond ``bound``; unknown without a figure."""
    present = None
    if figure is not None:
        present = figure < bound if below else figure > bound
    blamed = rows if present else ()
    return Sign(
        name=name,
        present=present,
        figure=figure,
        unit=unit,
        bound=bound,
        direction="below" if below else "above",
        reason=reason,
        found=found,
        rows=tuple(blamed[:ROWS_TOLD]),
        rows_total=len(blamed),
    )


def signs_of(found: Collected) -> tuple[Sign, ...]:
    """All that can be looked for without a model."""
    return tuple(look(found) for look in _LOOKS)


def _non_finite(found: Collected) -> Sign:
    bad = found.values.bad.values()
    count = sum(one.on_loss_tokens for one in bad)
    told = ", ".join(f"{one.column}: {one.on_loss_tokens} + {one.elsewhere}" for one in bad)
    return sign(
        NON_FINITE,
        float(count),
        unit="values",
        bound=0.0,
        reason="one value that is no number at a loss token makes loss and gradient no number",
        found=f"on loss tokens + elsewhere: {told}" if told else "every value is a number",
    )


def _ratio_outliers(found: Collected) -> Sign:
    stage = found.ratios["old/rollout"]
    told = stage.result()
    share = stage.outside / told.tokens if told.tokens else None
    text = found.absent.get("ratio old/rollout", _NOTHING)
    if share is not None:
        text = (
            f"{stage.outside} of {told.tokens} tokens, the ratio from {told.ratio.minimum:.4g} to "
            f"{told.ratio.maximum:.4g}"
        )
    return sign(
        RATIO_OUTLIERS,
        share,
        unit="of loss tokens with old/rollout over 2 or under 1/2",
        bound=1e-4,
        reason="engines that agree have none: 0 of 148,349 tokens of a published step",
        found=text,
        rows=sorted(stage.rows, key=lambda place: -place.value),
    )


def _stale_rollouts(found: Collected) -> Sign:
    told = found.ratios["old/rollout"].result()
    text = found.absent.get("ratio old/rollout", _NOTHING)
    if told.k3 is not None:
        text = (
            f"k1 {told.k1:.3g}, k2 {told.k2:.3g}, |log-ratio| median "
            f"{told.absolute.quantile(0.5):.3g}, p99 {told.absolute.quantile(0.99):.3g}; a sampler "
            "with older weights and routes that the trainer cannot follow look alike here"
        )
    return sign(
        STALE_ROLLOUTS,
        told.k3,
        unit="nats a token, k3 of KL(rollout || old)",
        bound=1e-3,
        reason="two engines on the same weights are apart by 1.7e-4 with the sampler's routes and "
        "5.8e-4 without (published k2)",
        found=text,
    )


def _sign_imbalance(found: Collected) -> Sign:
    total = found.advantages.result().total
    whole = total.positive + total.negative
    figure = abs(total.positive - total.negative) / whole if whole > 0 else None
    text = f"positive {total.positive:.6g}, negative {total.negative:.6g}"
    return sign(
        SIGN_IMBALANCE,
        figure,
        unit="|positive - negative| / (positive + negative) of the advantage sums",
        bound=0.2,
        reason="one sign is 1.5 times the other; a group baseline makes them equal but for "
        "differing lengths, and the published spike had 1.76 times",
        found=text if figure is not None else "no advantage that is not zero",
    )


def _loud_rows(found: Collected) -> Sign:
    stage, size = found.advantages, found.rewards.result().groups.largest
    figure = stage.rows[0].value if stage.rows else None
    bound = math.sqrt(size - 1) * 1.001 if size > 2 else 5.0
    share = stage.result().largest_row_share
    return sign(
        LOUD_ROWS,
        figure,
        unit="largest |advantage|",
        bound=bound,
        reason=f"of {size} rewards of one group divided by their deviation none is further than "
        f"sqrt({size} - 1) from the mean; 0.1% for rounding"
        if size > 2
        else "no groups to go by; trainers that clamp advantages do so at 5",
        found="no advantage that is not zero"
        if share is None
        else f"one row holds up to {share:.1%} of all |advantage|",
        rows=[place for place in stage.rows if place.value > bound],
    )


def _improbable_rows(found: Collected) -> Sign:
    stage = found.improbable
    rows = sorted(stage.rows, key=lambda place: place.value)
    return sign(
        IMPROBABLE_ROWS,
        rows[0].value if rows else None,
        unit="nats, a row's lowest mean old log-probability",
        bound=-2.0,
        below=True,
        reason="what a policy samples it gives -1 nat a token or more on average; "
        "mask-improbable-rows drops rows under -2",
        found=_NOTHING if stage.known else "no column old_logprobs",
        rows=[place for place in rows if place.value < -2.0],
    ).model_copy(update={"found": f"lowest of {len(rows)} rows"} if rows else {})


def _length_outliers(found: Collected) -> Sign:
    rows = sorted(found.lengths.loss_rows, key=lambda place: -place.value)
    median = rows[len(rows) // 2].value if rows else None  # descending: of an even number the lower
    long = [place for place in rows if median is not None and place.value > 2 * median]
    whole = sum(place.value for place in rows)
    text = _NOTHING
    if median is not None:
        share = sum(place.value for place in long) / whole
        text = (
            f"longest {rows[0].value:g}, median {median:g}; rows over twice that hold {share:.1%}"
        )
    return sign(
        LENGTH_OUTLIERS,
        rows[0].value / median if median else None,
        unit="loss tokens of the longest row over the median",
        bound=2.0,
        reason="mask-long-rows drops rows over twice the median; with token means they outweigh "
        "the others by their length",
        found=text,
        rows=long,
    )


def _duplicated_rows(found: Collected) -> Sign:
    stage = found.rewards
    figure = len(stage.repeated) / stage.trained if stage.trained else None
    text = (
        f"{len(stage.repeated)} of {stage.trained} rows; {stage.repeated_indexes} have another "
        f"row's number; the largest of {len(stage.groups)} groups has "
        f"{stage.result().groups.largest} trajectories"
    )
    return sign(
        DUPLICATED_ROWS,
        figure,
        unit="of rows that train have the tokens of an earlier row",
        bound=0.5,
        reason="half of the batch adds no text of its own; rollouts of one easy prompt are often "
        "equal, so compare it with a quiet step",
        found=text if stage.trained else _NOTHING,
        rows=sorted(stage.repeated, key=lambda place: -place.value),
    )


def _zero_variance(found: Collected) -> Sign:
    stage = found.rewards
    groups = stage.result().groups
    figure = groups.zero_variance / groups.judged if groups.judged else None
    loud = [row for group in stage.flat() for row in group.rows]
    return sign(
        ZERO_VARIANCE,
        figure,
        unit="of groups with two trajectories or more have one reward",
        bound=0.5,
        reason="most of the batch has no signal, so few groups make the gradient and the "
        "denominator counts tokens of the others",
        found=f"{groups.zero_variance} of {groups.judged} groups"
        if groups.judged
        else "no group of two with known rewards",
        rows=loud,
    )


def _unrouted_rows(found: Collected) -> Sign:
    stage = found.routing
    figure = (
        len(stage.without) / (stage.rows_with + len(stage.without)) if stage.rows_with else None
    )
    return sign(
        UNROUTED_ROWS,
        figure,
        unit="of rows have no routes beside others that have them",
        bound=0.0,
        reason="the trainer refuses such a batch",
        found="no row has routes" if figure is None else f"{len(stage.without)} rows",
        rows=stage.without,
    )


_LOOKS: tuple[Callable[[Collected], Sign], ...] = (
    _non_finite,
    _ratio_outliers,
    _stale_rollouts,
    _sign_imbalance,
    _loud_rows,
    _improbable_rows,
    _length_outliers,
    _duplicated_rows,
    _zero_variance,
    _unrouted_rows,
)
