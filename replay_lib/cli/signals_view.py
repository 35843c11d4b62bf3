"""The signals of a snapshot as a person reads them at night: signs of trouble first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from replay_lib.analysis.signals.figures import Distribution
from replay_lib.analysis.signals.session_summary import Agreement
from replay_lib.analysis.signals.summary import RankAdvantages, Sign, Signals

RANKS_TOLD = 8
ROWS_TOLD = 5
LAYERS_TOLD = 12


def print_signals(signals: Signals, console: Console) -> None:
    """Signs, then balance, ratios, values, lengths, routing, parameters, outliers."""
    console.print(_head(signals), soft_wrap=True)
    for title, table in _tables(signals):
        if table.row_count:
            console.print(f"\n{title}", style="bold", soft_wrap=True)
            console.print(table)
    if signals.absent:
        console.print("\nnot known", style="bold")
        for name, why in signals.absent.items():
            console.print(f"- {plain(name)}: {plain(why)}", soft_wrap=True)
    for note in signals.notes:
        console.print(f"note: {plain(note)}", soft_wrap=True)


def plain(text: str) -> str:
    """``text`` without anything that a terminal would act on: it may come from a snapshot."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def figure(value: float | None, digits: int = 4) -> str:
    """A number, or a dash."""
    return "-" if value is None else f"{value:.{digits}g}"


def share(value: float | None) -> str:
    """A share in per cent, or a dash."""
    return "-" if value is None else f"{value:.2%}"


def _head(signals: Signals) -> str:
    norms = signals.norms
    told = [
        f"{plain(signals.case or signals.snapshot)}: step {norms.step}, {signals.rows} rows on "
        f"{signals.dp} data-parallel ranks, {signals.tokens} tokens, {signals.loss_tokens} of "
        "them train",
        f"gradient norm before clipping {figure(norms.grad_norm_preclip, 7)}, median "
        f"{figure(norms.median, 7)}, ratio {figure(norms.ratio)}: "
        f"{'a spike' if norms.is_spike else 'no spike'} by the run's own detector (over "
        f"{norms.spike_ratio:g} times the median); a replay passes at "
        f"{figure(norms.target, 7)}",
    ]
    return "\n".join(told)


def _tables(signals: Signals) -> Iterator[tuple[str, Table]]:
    yield "signs of trouble", _signs(signals.signs)
    yield "rows to look at", _rows(signals.signs)
    yield "not finite", _nonfinite(signals)
    yield "advantages on loss tokens", _advantages(signals)
    yield "ratios on loss tokens (nats a token; ratio clamped at 20 nats)", _ratios(signals)
    yield "tokens that stand out", _outliers(signals)
    yield "values", _values(signals)
    yield "groups and trajectories", _groups(signals)
    yield f"saved routes ({_routes_head(signals)})", _routing(signals)
    if signals.session is not None:
        yield "saved routes against the model's own, a MoE layer", _agreement(signals)
        yield "log-probabilities apart, before the update", _mismatches(signals)
    if signals.grad_info is not None:
        yield f"largest parameters ({signals.grad_info.caution})", _parameters(signals)
        yield "each layer's largest L2 among ranks (the same caution)", _layers(signals)


def _table(*titles: str) -> Table:
    return Table(*titles, box=None, pad_edge=False)


def _add(table: Table, *cells: str) -> None:
    table.add_row(*(Text(plain(cell)) for cell in cells))


_ORDER = {True: 0, None: 1, False: 2}


def _signs(signs: Sequence[Sign]) -> Table:
    table = _table("sign", "", "figure", "bound", "quiet step", "what is counted", "found")
    words = {True: ("PRESENT", "bold red"), False: ("no", ""), None: ("unknown", "yellow")}
    for one in sorted(signs, key=lambda one: _ORDER[one.present]):
        word, style = words[one.present]
        bound = f"{'<' if one.direction == 'below' else '>'} {one.bound:.4g}"
        cells = (figure(one.figure), bound, figure(one.quiet), one.unit, one.found)
        table.add_row(
            Text(one.name.replace("_", " ")),
            Text(word, style=style),
            *(Text(plain(c)) for c in cells),
        )
    return table


def _rows(signs: Sequence[Sign]) -> Table:
    table = _table("sign", "rows", "dp rank / row (index, trajectory): figure")
    for one in signs:
        if one.rows:
            places = [
                f"{r.dp_rank}/{r.row} ({r.index}, {_or_dash(r.trajectory_id)}): {r.value:.4g}"
                for r in one.rows[:ROWS_TOLD]
            ]
            more = ", ..." if one.rows_total > len(places) else ""
            _add(table, one.name.replace("_", " "), str(one.rows_total), ", ".join(places) + more)
    return table


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _nonfinite(signals: Signals) -> Table:
    table = _table("column", "on loss tokens", "elsewhere", "first at")
    for one in signals.nonfinite:
        position = "" if one.position is None else f" token {one.position}"
        place = f"dp rank {one.dp_rank} row {one.row}{position}"
        _add(table, one.column, str(one.on_loss_tokens), str(one.elsewhere), place)
    return table


def _advantages(signals: Signals) -> Table:
    table = _table("dp rank", "tokens", "sum +", "sum -", "tokens +", "tokens -", "near zero")
    total = signals.advantages.total
    ranks = signals.advantages.ranks
    ordered = sorted(ranks, key=_imbalance, reverse=True)[:RANKS_TOLD] if len(ranks) > 1 else []
    for one in (total, *ordered):
        _add(
            table,
            "all" if one.dp_rank is None else str(one.dp_rank),
            str(one.tokens),
            figure(one.positive, 6),
            figure(one.negative, 6),
            str(one.positive_tokens),
            str(one.negative_tokens),
            share(one.near_zero_share),
        )
    return table


def _imbalance(one: RankAdvantages) -> float:
    whole = one.positive + one.negative
    return abs(one.positive - one.negative) / whole if whole else 0.0


def _ratios(signals: Signals) -> Table:
    titles = ("ratio", "tokens", "min", "1%", "median", "99%", "99.9%", "max", "beyond 2")
    table = _table(*titles, "clamped", "k1", "k2", "k3", "rows: min", "rows: max")
    for one in (*signals.ratios, *(signals.session.ratios if signals.session else ())):
        values = [figure(one.ratio.quantile(q)) for q in (0.01, 0.5, 0.99, 0.999)]
        _add(
            table,
            one.name,
            str(one.tokens),
            figure(one.ratio.minimum),
            *values,
            figure(one.ratio.maximum),
            str(one.outside),
            str(one.clamped),
            figure(one.k1, 3),
            figure(one.k2, 3),
            figure(one.k3, 3),
            figure(one.sequence.minimum),
            figure(one.sequence.maximum),
        )
    return table


def _outliers(signals: Signals) -> Table:
    decoded = any(one.text is not None for one in signals.outliers)
    text = ("text", "behind") if decoded else ()
    titles = ("by", "value", "dp rank", "row", "token", "id", *text, "advantage")
    table = _table(*titles, "old", "rollout", "ref")
    for one in signals.outliers:
        _add(
            table,
            one.kind,
            figure(one.value),
            str(one.dp_rank),
            str(one.row),
            str(one.position),
            str(one.token_id),
            *((repr(one.text), repr(one.context)) if decoded else ()),
            figure(one.advantage),
            *(figure(one.logprobs.get(name)) for name in ("old", "rollout", "ref")),
        )
    return table


def _values(signals: Signals) -> Table:
    table = _table("of", "count", "mean", "std", "min", "5%", "median", "95%", "max")
    lengths, rewards = signals.lengths, signals.rewards
    told: list[tuple[str, Distribution | None]] = [
        ("advantage", signals.advantages.values),
        *((one.name, one.values) for one in signals.columns),
        ("reward of a row", rewards.reward),
        ("its baseline", rewards.baseline),
        ("reward - baseline", rewards.difference),
        ("tokens of a row", lengths.tokens),
        ("its prompt", lengths.prompt_tokens),
        ("its loss tokens", lengths.loss_tokens),
        ("its runs of loss tokens", lengths.spans),
        ("its turn indexes", lengths.turns),
        ("rows of a trajectory", signals.trajectories.rows_a_trajectory),
    ]
    for name, one in told:
        if one is not None:
            quantiles = [figure(one.quantile(q)) for q in (0.05, 0.5, 0.95)]
            ends = figure(one.minimum), figure(one.maximum)
            moments = figure(one.mean), figure(one.std)
            _add(table, name, str(one.count), *moments, ends[0], *quantiles, ends[1])
    return table


def _groups(signals: Signals) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    groups, lengths = signals.rewards.groups, signals.lengths
    _add(
        table,
        "groups (one prompt)",
        f"{groups.groups}, the largest of {groups.largest} trajectories; {groups.judged} of two or "
        f"more with known rewards, {groups.zero_variance} of these with one reward alone",
    )
    told = signals.trajectories
    if told.trajectories is not None:
        most = ", ".join(f"{number} ({rows} rows)" for number, rows in told.most if rows > 1)
        _add(
            table, "trajectories", f"{told.trajectories}" + (f"; most rows: {most}" if most else "")
        )
    _add(
        table,
        "rows",
        f"{lengths.rows}, {lengths.rows_without_loss} of them without a loss token; "
        f"{lengths.padding_rows} padding rows beside them",
    )
    if lengths.turn_tokens:
        turns = ", ".join(f"{turn}: {count}" for turn, count in lengths.turn_tokens.items())
        _add(table, "loss tokens by turn index", turns)
    return table


def _routes_head(signals: Signals) -> str:
    routing = signals.routing
    switched = "replayed" if routing.replayed else "not replayed by the run"
    if routing.loss_tokens_only:
        switched += ", on loss tokens only"
    return (
        f"{switched}; payloads a rank {', '.join(map(str, routing.payloads)) or '-'}, recorded of "
        f"rank 0 {_or_dash(routing.payloads_recorded_rank0)}; {routing.rows_without} of "
        f"{routing.rows_with + routing.rows_without} rows without; {_or_dash(routing.layers)} "
        f"layers, top {_or_dash(routing.topk)} of {_or_dash(routing.experts)} experts"
    )


def _routing(signals: Signals) -> Table:
    titles = ("layer", "largest load / mean", "entropy", "unused experts", "an expert twice")
    table = _table(*titles, "busiest experts")
    worst = sorted(signals.routing.per_layer, key=lambda one: -(one.imbalance or 0.0))[:LAYERS_TOLD]
    for one in sorted(worst, key=lambda one: one.layer):
        whole = sum(one.load) or 1
        busiest = sorted(range(len(one.load)), key=lambda e: -one.load[e])[:4]
        _add(
            table,
            str(one.layer),
            figure(one.imbalance),
            figure(one.entropy),
            str(one.unused),
            str(one.repeated),
            ", ".join(f"{e} ({one.load[e] / whole:.1%})" for e in busiest),
        )
    return table


def _agreement(signals: Signals) -> Table:
    table = _table(
        "layer", "of", "tokens", "same order", "in set", "none in set", "logit gap", "max"
    )
    assert signals.session is not None
    for layer in signals.session.layers:
        parts: tuple[tuple[str, Agreement], ...] = (
            ("prompt", layer.prompt),
            ("response", layer.response),
        )
        for name, one in parts:
            rates = [share(value) for value in (one.ordered, one.overlap, one.disjoint)]
            gaps = figure(one.logit_gap), figure(one.largest_gap)
            _add(table, str(layer.layer), name, str(one.tokens), *rates, *gaps)
    return table


def _mismatches(signals: Signals) -> Table:
    table = _table(
        "first", "second", "tokens", "count", "mean |apart|", "largest", "normalised", "k2"
    )
    assert signals.session is not None
    for one in signals.session.mismatches:
        _add(
            table,
            one.first,
            one.second,
            one.tokens,
            str(one.count),
            figure(one.mean_absolute),
            figure(one.largest),
            figure(one.normalised),
            figure(one.k2, 3),
        )
    return table


def _parameters(signals: Signals) -> Table:
    table = _table("global rank", "parameter", "grad norm", "grad max", "param norm")
    assert signals.grad_info is not None
    ranks = signals.grad_info.ranks[:RANKS_TOLD]
    for rank in ranks:
        for one in rank.top[:ROWS_TOLD]:
            figures = [figure(v) for v in (one.grad_norm, one.grad_max, one.param_norm)]
            _add(table, str(rank.rank), one.name, *figures)
    return table


def _layers(signals: Signals) -> Table:
    table = _table("part", "grad norm")
    assert signals.grad_info is not None
    largest = sorted(signals.grad_info.layers.items(), key=lambda item: -item[1])[:LAYERS_TOLD]
    for name, norm in largest:
        _add(table, name, figure(norm))
    return table
