"""Write baselines from the results of a run, and find those that nobody needs any more."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from filelock import FileLock

from replay_lib.case import Case
from replay_lib.record.baselines import (
    Document,
    Entry,
    Figures,
    Past,
    directory_of,
    file_of,
    read_document,
    rendered,
)
from replay_lib.record.drift import (
    FIGURES,
    allowed,
    drift_of,
    environment_of,
    figures_of,
    signed_difference,
)
from replay_lib.record.environment import Environment
from replay_lib.record.result import Result
from replay_lib.writing import replace_file

#: The methods that a case may have baselines of: the registered ones and those it lists.
Known = Callable[[Case], Collection[str]]


@dataclass(frozen=True)
class Updated:
    """Files that were written, and what changed in them, one line each."""

    written: tuple[Path, ...] = ()
    lines: tuple[str, ...] = ()


@dataclass
class _Change:
    """What an update does to one document."""

    methods: dict[str, Entry]
    new: list[str] = field(default_factory=list)
    more: list[str] = field(default_factory=list)  # same figures as before, and some beside them
    lines: list[str] = field(default_factory=list)

    @property
    def any(self) -> bool:
        return bool(self.new or self.more or self.lines)


def grouped(
    cases: Iterable[Case], results: Iterable[Result]
) -> list[tuple[Case, Environment, list[Result]]]:
    """Results by case and environment, for cases that have a file."""
    by_name = {case.name: case for case in cases if case.file is not None}
    mine = [r for r in results if r.case in by_name]

    def key(result: Result) -> tuple[str, str]:
        return result.case, environment_of(result).slug

    groups = groupby(sorted(mine, key=key), key)
    return [
        (by_name[name], environment_of(group[0]), group)
        for (name, _), found in groups
        if (group := list(found))
    ]


def is_full(results: Sequence[Result], known: Collection[str]) -> bool:
    """Whether a run gave a result for every method that its case may have baselines of."""
    return {r.experiment for r in results} >= set(known) - {"baseline"}


def orphans(cases: Sequence[Case], results: Sequence[Result], known: Known) -> list[str]:
    """Baselines that a full run of their case and environment did not use, one line each.

    Of a case that ran in part, or in another environment, nothing is said.
    """
    lines = []
    for case, environment, found in grouped(cases, results):
        assert case.file is not None
        file = file_of(case.file, environment)
        document = read_document(file)
        if document is None or not is_full(found, known(case)):
            continue
        if document.case_digest != _digest(case, found):
            lines.append(f"{file}: baselines of other files than the case has now")
            continue
        gone = sorted(set(document.methods) - {"baseline", *known(case)})
        lines += [
            f"{file}: {name}: a baseline without a method: neither registered nor in case.yaml"
            for name in gone
        ]
    return lines


def abandoned(directory: Path) -> list[str]:
    """Documents of baselines under ``directory`` that lie beside no ``case.yaml``."""
    files = sorted(directory.glob("*/baselines/*.json"))
    homes = {case_file.parent for case_file in directory.glob("*/case.yaml")}
    return [f"{f}: baselines without a case" for f in files if f.parents[1] not in homes]


def update(cases: Sequence[Case], results: Sequence[Result], known: Known) -> Updated:
    """Write the baselines of ``results``; what is the same up to noise stays as it is.

    Left out are results that are worse than expected, that were compared with another method than
    the baseline, and those of methods that are neither registered nor in the case. Where the run
    was full, entries that no method has any more are dropped.
    """
    written: list[Path] = []
    lines: list[str] = []
    for case, environment, found in grouped(cases, results):
        assert case.file is not None
        file = file_of(case.file, environment)
        directory_of(case.file).mkdir(exist_ok=True)
        with FileLock(file.with_name(f".{file.name}.lock")):
            told = _update(case, file, environment, found, known(case))
        if told.lines:
            lines += [f"{case.name}: {line}" for line in told.lines]
        written += told.written
    return Updated(tuple(written), tuple(lines))


def _update(
    case: Case, file: Path, environment: Environment, found: list[Result], known: Collection[str]
) -> Updated:
    digest, old = _digest(case, found), read_document(file)
    usable = {r.experiment: r for r in found if _usable(r, known)}
    left = [
        f"{r.experiment}: not written: {r.explain()}"
        for r in found
        if r.red and r.against == "baseline"
    ]
    if not usable:
        return Updated((), tuple(left))
    change = _changed(usable, old, digest)
    if old is not None and is_full(found, known):
        for name in sorted(set(change.methods) - {"baseline", *known}):
            del change.methods[name]
            change.lines.append(f"{name}: removed, there is no such method")
    deterministic = all(r.deterministic for r in usable.values())
    if old is not None and old.deterministic != deterministic:
        word = "again" if deterministic else "no longer"
        change.lines.append(f"replays {word} repeat bit for bit")
    if not change.any and old is not None and old.case_digest == digest:
        return Updated((), tuple(left))
    seconds = round(sum(r.seconds for r in usable.values()), 2)
    document = Document(
        case_digest=digest,
        environment=environment,
        deterministic=deterministic,
        seconds=seconds if old is None else max(seconds, old.seconds),
        methods=change.methods,
    )
    replace_file(file, rendered(document).encode("utf-8"))
    return Updated((file,), (f"wrote {file}", *_added(change), *change.lines, *left))


def _added(change: _Change) -> list[str]:
    told = {"new": change.new, "with figures that were not kept before": change.more}
    return [f"{len(names)} {what}: {_few(names)}" for what, names in told.items() if names]


def _few(names: Sequence[str]) -> str:
    """Of many names the first ones."""
    return ", ".join([*names[:6], f"{len(names) - 6} more"] if len(names) > 7 else names)


def _usable(result: Result, known: Collection[str]) -> bool:
    named = result.is_baseline or result.experiment in known
    return named and result.against == "baseline" and not result.red and not result.quiet_fault


def _changed(usable: Mapping[str, Result], old: Document | None, digest: str) -> _Change:
    same_case = old is not None and old.case_digest == digest
    before = old.methods if old is not None else {}
    change = _Change(dict(before) if same_case else {})
    for name, result in sorted(usable.items()):
        entry, now = before.get(name), figures_of(result)
        if entry is None:
            change.new.append(name)
            change.methods[name] = _entry(now, result)
        elif same_case and not _differs(now, entry, result):
            if _more(now, entry):  # of what an older version did not keep
                change.more.append(name)
                change.methods[name] = entry.model_copy(update=_more(now, entry))
        else:
            assert old is not None
            past = Past(
                **_plain(entry),
                until=result.timestamp[:10],
                case_digest=None if same_case else old.case_digest,
            )
            change.lines.append(_told(name, now, entry))
            change.methods[name] = _entry(now, result, (*entry.history, past))
    if old is not None and not same_case:
        change.lines.insert(0, "the case has other files than before: all figures are new")
    return change


def _entry(now: Figures, result: Result, history: tuple[Past, ...] = ()) -> Entry:
    return Entry(**_plain(now), since=result.timestamp[:10], history=history)


def _plain(figures: Figures) -> dict[str, Any]:
    return {name: getattr(figures, name) for name in Figures.model_fields}


def _differs(now: Figures, entry: Figures, result: Result) -> bool:
    """Beyond noise, by verdict, or by a figure that is measured no longer."""
    moved = drift_of(now, entry, *allowed(result))
    return bool(moved) or now.verdict is not entry.verdict


def _more(now: Figures, entry: Figures) -> dict[str, float]:
    """Figures that the entry lacks."""
    return {f: getattr(now, f) for f in FIGURES if getattr(entry, f) is None is not getattr(now, f)}


def _told(name: str, now: Figures, before: Figures) -> str:
    """Every figure that changed, with its signed relative difference."""
    parts = []
    for label in FIGURES:
        new, old = getattr(now, label), getattr(before, label)
        if new is None and old is None:
            continue
        if new is None or old is None:
            parts.append(f"{label} {_number(old)} -> {_number(new)}")
        elif (off := signed_difference(new, old)) != 0:
            size = f"{off:+.2g}" if math.isfinite(off) else "not comparable"
            parts.append(f"{label} {_number(old)} -> {_number(new)} ({size})")
    if now.verdict is not before.verdict:
        parts.append(f"verdict {before.verdict} -> {now.verdict}")
    return f"{name}: {', '.join(parts) or 'the same figures'}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.7g}"


def _digest(case: Case, found: Sequence[Result]) -> str:
    """That of the files which were replayed; a result knows it unless it was not asked for."""
    return next((r.case_digest for r in found if r.case_digest), "") or case.digest()
