"""The task file as text: sections in Markdown, rendered from a task's history."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from replay_lib.record.history import UNKNOWN, Attempt, Command, History, Said
from replay_lib.record.ledger import Event
from replay_lib.record.markdown import block, code, plain, table
from replay_lib.record.result import Result
from replay_lib.record.table import attempt_cells, reproduction_cells
from replay_lib.record.task import Task
from replay_lib.rule import Verdict

NOTHING = "Nothing yet."
_GOOD = (Verdict.REPRODUCED, Verdict.PASS, Verdict.PARTIAL)
_REPLAYS = ("replay", "sweep")


def head_of(task: Task, history: History) -> str:
    """All that stands before the notes."""
    sections = [
        f"# Spike replay: {plain(task.job)}",
        _facts(history),
        "Rendered from the ledger beside this file: what is typed between the lines `notes` and "
        "`end of notes` stays, everything else is written anew.",
        _section("Active snapshots", _active(history)),
        _section("Replay command", _replay_command(task, history)),
        _section("Fidelity", _fidelity(history)),
        _section("Experiments", _experiments(history)),
        _section("Observations", [*_analyses(history), *_dated(history.observations)]),
        _section("Failed attempts", _failed(history)),
        _section("Next steps", _dated(history.next_steps)),
        "## Notes",
    ]
    return "\n\n".join(sections) + "\n\n"


def tail_of(history: History) -> str:
    """All that stands after the notes."""
    sections = [
        _section("Methods recorded", [_recorded(one) for one in history.recorded]),
        _section("Reports", [_reported(one) for one in history.reported]),
        _section("Commands", _commands(history)),
    ]
    return "\n" + "\n\n".join(sections) + "\n\n"


def replay_command(task: Task, history: History) -> str | None:
    """The last ``replay`` that came to its end, else the last ``sweep``, else one that would do.

    None while no snapshot is known.
    """
    done = [one.command for one in history.commands if one.exit_code in (0, 1)]
    for name in _REPLAYS:
        for command in reversed(done):
            if command.split()[:2] == ["spike-replay", name]:
                return command
    places = [place for one in history.commands for place in one.snapshots]
    places += [str(event.data.get("preserved")) for event in history.active]
    if not places:
        return None
    return shlex.join(["spike-replay", "replay", places[-1], "--task", task.job])


def state_of(history: History) -> str:
    """``finished``, or ``open``."""
    return "open" if history.finished is None else "finished"


def _section(title: str, lines: str | Sequence[str]) -> str:
    text = lines if isinstance(lines, str) else "\n".join(lines)
    return f"## {title}\n\n{text or NOTHING}"


def _facts(history: History) -> str:
    end = history.finished
    told = f"finished {_when(end.at)} {plain(end.text)}".rstrip() if end else "open"
    lines = [
        f"- role: {plain(', '.join(history.roles)) or '-'}",
        *(f"- output directory: {code(one)}" for one in history.output_directories),
        f"- state: {told}",
    ]
    return "\n".join(lines)


def _active(history: History) -> list[str]:
    lines = []
    for event in history.active:
        source = event.data.get("snapshot")
        told = f", copied from {code(str(source))}" if source else ""
        lines.append(f"- {code(str(event.data.get('preserved')))}{told}, {_when(event.at)}")
    return lines


def _replay_command(task: Task, history: History) -> str:
    command = replay_command(task, history)
    return block(command) if command else ""


def _fidelity(history: History) -> str:
    """The last baseline of each case in each setting."""
    last: dict[tuple[str, ...], Result] = {}
    for result in history.results:
        if result.is_baseline:
            cells = reproduction_cells(result)
            last[(result.case, *cells[-3:], result.trainer, result.backend)] = result
    if not last:
        return ""
    titles = ("case", "recorded norm", "replayed norm", "relative difference", "fidelity")
    rows = [[*reproduction_cells(one), str(one.verdict)] for one in last.values()]
    return table([*titles, "dtype", "device", "verdict"], rows)


def _experiments(history: History) -> str:
    if not history.attempts:
        return ""
    titles = ("when", "case", "experiment", "grad norm", "ratio", "reduction", "verdict", "under")
    several = any(one.under for one in history.attempts)
    rows = [_row(one, history) for one in history.attempts]
    return table(titles[: 8 if several else 7], [row[: 8 if several else 7] for row in rows])


def _row(one: Attempt, history: History) -> list[str]:
    if one.result is not None:
        case, *cells = attempt_cells(one.result)
        return [_when(one.at), case, *cells, one.under]
    name = one.experiment or _name_of(one, history)
    word = "refused" if one.experiment else "failed"
    verdict = one.code if one.code == UNKNOWN else f"{word} ({one.code})"
    return [_when(one.at), one.case or "-", name, "-", "-", "-", verdict, one.under]


def _name_of(one: Attempt, history: History) -> str:
    """What a failed or killed command is called, and how many experiments it did not reach."""
    command = next((c for c in history.commands if c.run == one.run), None)
    if command is None:
        return "the whole command"
    words = command.command.split()
    name = words[1] if len(words) > 1 and words[0] == "spike-replay" else words[0] if words else "-"
    return f"{name}: {len(command.missing)} of {len(command.planned)} not reached"


def _failed(history: History) -> list[str]:
    """What is no better than before, each method once, and everything that gave no result."""
    last: dict[tuple[str, ...], Attempt] = {}
    for one in history.attempts:
        if one.result is not None:
            key = (one.case, one.result.experiment, one.result.against, one.under)
            last[key] = one
    lines = [
        f"- {_when(one.at)} {plain(one.result.explain())}{_under(one)}"
        for one in last.values()
        if one.result is not None and one.result.verdict not in _GOOD
    ]
    return lines + [_failure(one, history) for one in history.failures]


def _failure(one: Attempt, history: History) -> str:
    if one.experiment:
        what = " / ".join(filter(None, [one.case, one.experiment]))
        return (
            f"- {_when(one.at)} {plain(what)}: {plain(f'{one.code}: {one.message}')}{_under(one)}"
        )
    command = next((c for c in history.commands if c.run == one.run), None)
    told = f"{one.code}: {one.message}"
    line = f"- {_when(one.at)} {code(command.command) if command else '-'}: {plain(told)}"
    if command is not None and 0 < len(command.missing) < len(command.planned):
        line += f"; not reached: {plain(', '.join(command.missing))}"
    return line


def _under(one: Attempt) -> str:
    return f" (under {plain(one.under)})" if one.under else ""


def _analyses(history: History) -> list[str]:
    lines = []
    for event in history.analyzed:
        signs = [f"{one.get('name')} ({one.get('found')})" for one in signs_of(event)]
        told = plain("; ".join(signs)) or "no sign of trouble"
        place = code(str(event.data.get("snapshot")))
        lines.append(f"- {_when(event.at)} data of {place}: {told}")
    return lines


def signs_of(analyzed: Event) -> list[dict[str, Any]]:
    """The signs of trouble that ``analyze`` found present, as it wrote them."""
    signals = analyzed.data.get("signals")
    signs = signals.get("signs") if isinstance(signals, dict) else None
    listed = signs if isinstance(signs, list) else []
    return [one for one in listed if isinstance(one, dict) and one.get("present")]


def _dated(said: Sequence[Said]) -> list[str]:
    return [f"- {_when(one.at)} {plain(one.text)}" for one in said]


def _recorded(event: Event) -> str:
    method, card = event.data.get("method"), event.data.get("card")
    return f"- {plain(str(method))}: {plain(str(event.data.get('status')))}, {code(str(card))}"


def _reported(event: Event) -> str:
    places = [str(event.data[name]) for name in ("page", "report") if event.data.get(name)]
    return f"- {_when(event.at)} {', '.join(code(place) for place in places)}"


def _commands(history: History) -> list[str]:
    return [f"- {_when(one.at)} {code(one.command)}: {_ending(one)}" for one in history.commands]


def _ending(one: Command) -> str:
    told = one.state if one.exit_code is None else f"exit code {one.exit_code}"
    if one.seconds is not None:
        told += f" after {one.seconds:.0f} s"
    return f"{told}, output in {code(one.output)}" if one.output else told


def _when(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M}"
