"""Facts to the same report in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from replay_lib import __version__
from replay_lib.record import markdown
from replay_lib.record.history import Said
from replay_lib.record.markdown import plain as escaped
from replay_lib.report import view
from replay_lib.report.facts import Facts
from replay_lib.report.history import history_of
from replay_lib.report.plots import Shown, command_on, shown
from replay_lib.report.view import Table


def render_text(facts: Facts, plots: Sequence[Shown] | None = None) -> str:
    """The report in Markdown; ``plots`` where somebody drew them already (their tables count)."""
    drawn = shown(facts) if plots is None else plots
    parts = [
        f"# Spike report: {escaped(facts.job)}",
        escaped(view.headline(facts)),
        *_keys(facts),
        *_section("Where it lies", view.places(facts), ""),
        *_replay(facts),
        *_section("Known steps", view.history_table(history_of(facts)), "No step's norm is known."),
        *_matrix(facts),
        *_section("Attempts", view.attempts(facts), "None yet."),
        *_reasons(facts),
        *_section("Failures and crashes", view.failures(facts), "None."),
        *_signs(facts),
        *_plots(drawn),
        *_section("Methods added", view.methods(facts), "None."),
        *_notes(facts),
        *_section("Environment", view.environment(facts), "Nothing was replayed."),
        _colophon(facts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _keys(facts: Facts) -> Iterator[str]:
    lines = [
        f"- {label}: {escaped(figure)}" + (f" ({escaped(remark)})" if remark else "")
        for label, figure, remark in view.key_figures(facts)
    ]
    yield "\n".join(lines)


def _section(title: str, table: Table, otherwise: str) -> Iterator[str]:
    yield f"## {title}"
    yield _table(table) if table.rows else otherwise


def _table(table: Table) -> str:
    return markdown.table([escaped(head) for head in table.heads], table.rows)


def _replay(facts: Facts) -> Iterator[str]:
    yield "## Replay of the recorded step"
    if not facts.baselines:
        yield "The step was not replayed, so nothing is known of full fidelity. This would do it:"
        yield _command(command_on(facts, "replay"))
        return
    for one in facts.baselines:
        means = escaped(view.fidelity(one))
        yield f"**{escaped(one.case)}**: {one.verdict}, {one.fidelity}: {means}."
    yield _table(view.baselines(facts))


def _matrix(facts: Facts) -> Iterator[str]:
    cases, rows = view.matrix(facts)
    cells = [[name, *(str(v) if v else "not tried" for v in verdicts)] for name, verdicts in rows]
    table = Table("Verdicts", ["experiment", *cases], cells)
    yield from _section("Verdicts", table, "No experiment has a verdict yet.")


def _reasons(facts: Facts) -> Iterator[str]:
    lines = [
        f"- {escaped(one.name)}: {one.result.verdict}: {escaped(why)}"
        for one, why in view.reasons(facts)
    ]
    if lines:
        yield "### Why each is what it is"
        yield "\n".join(lines)


def _signs(facts: Facts) -> Iterator[str]:
    yield "## Signs of trouble in the batch"
    if facts.signals is None:
        yield "The batch was not analyzed. This would do it:"
        yield _command(command_on(facts, "analyze"))
        return
    words = {True: "**present**", False: "absent", None: "not looked for"}
    lines = [
        f"- {escaped(one.name)}: {words[one.present]}. {escaped(one.found)}"
        for one in facts.signals.signs
    ]
    yield "\n".join(lines)


def _plots(drawn: Sequence[Shown]) -> Iterator[str]:
    """What the page draws, as tables; norms by step have a section of their own."""
    for one in drawn:
        tables = [] if one.name == "history" else one.tables
        if tables:
            yield f"## {escaped(one.title)}"
            yield escaped(one.remark)
            for table in tables:
                yield f"{escaped(table.caption)}:"
                yield _table(table)


def _notes(facts: Facts) -> Iterator[str]:
    yield "## Observations"
    yield _listed(facts.observations) or "None."
    yield "## Next steps"
    if facts.finished:
        yield f"Finished: {escaped(facts.finished.text)} ({view.when(facts.finished.at)})"
    yield _listed(facts.next_steps) or ("" if facts.finished else "None is written down.")
    if facts.commands:
        yield "## Commands"
        yield "\n".join(_command(" ".join(command.split())) for command in facts.commands)


def _command(text: str) -> str:
    """A line of code, whatever is in the paths that it names."""
    return f"    {markdown.visible_command(text)}"


def _listed(notes: Sequence[Said]) -> str:
    return "\n".join(f"- {escaped(note.text)} ({view.when(note.at)})" for note in notes)


def _colophon(facts: Facts) -> str:
    last = f", the last of {view.when(facts.last)}" if facts.last else ""
    return (
        f"Rendered from {len(facts.events)} events of {escaped(str(facts.ledger))}{last}, by "
        f"spike-replay {__version__}. Norms are L2 before clipping unless they say otherwise; "
        "ratio is norm over the median norm of the steps before."
    )
