"""The matrix of methods and cases: rendered from baselines, and the documents hold it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replay_lib.case import Case, builtin_cases, discover
from replay_lib.cli.commands import app
from replay_lib.errors import CaseError, UsageError
from replay_lib.methods import load_methods
from replay_lib.record.baselines import (
    Document,
    Entry,
    file_of,
    files_in,
    read_document,
    rendered,
)
from replay_lib.record.environment import Environment
from replay_lib.record.matrix import (
    END,
    beside,
    figures,
    read_matrix,
    updated,
    verdicts,
)
from replay_lib.rule import Verdict

ROOT = Path(__file__).parents[2]
METHODS = {
    slug: method
    for slug, method in load_methods().items()
    if slug in ("clip-advantages", "disable-routing-replay", "adagc")
}
HERE, THERE = "0.16.1", "0.19.2"


def entry(norm: float, ratio: float, verdict: str, **more: Any) -> Entry:
    return Entry(norm=norm, ratio=ratio, verdict=Verdict(verdict), since="2026-03-01", **more)


ENTRIES = {
    "baseline": entry(8.0, 4.0, "reproduced", quiet=2.0),
    "clip-advantages": entry(2.5, 1.25, "pass", quiet=1.5),
    "disable-routing-replay": entry(5.0, 2.5, "partial", carried=6.0, quiet=2.1, quiet_carried=2.0),
}


def make_case(root: Path, name: str, **entries: dict[str, Entry]) -> None:
    """A case that expects a pass of everything but routing; ``entries`` by Megatron-Core."""
    directory = root / name
    (directory / "iter_0000085").mkdir(parents=True)
    expected = "expected: {disable-routing-replay: partial}"
    (directory / "case.yaml").write_text(f"schema: 1\nsnapshot: iter_0000085\n{expected}\n")
    for version, methods in entries.items():
        place = Environment(
            device="cpu", precision="float32", torch="2.13.0", megatron_core=version
        )
        file = file_of(directory / "case.yaml", place)
        file.parent.mkdir(exist_ok=True)
        document = Document(
            case_digest="0" * 64, environment=place, deterministic=True, seconds=1, methods=methods
        )
        file.write_text(rendered(document))


@pytest.fixture
def cases(tmp_path: Path) -> list[Case]:
    make_case(tmp_path, "one", **{HERE: ENTRIES})
    fewer = {name: ENTRIES[name] for name in ("baseline", "clip-advantages")}
    fewer["clip-advantages"] = entry(4.0, 2.0, "fail")
    make_case(tmp_path, "two", **{HERE: fewer})
    return discover(tmp_path)


def rows(table: str) -> dict[str, list[str]]:
    lines = [[c.strip() for c in x.strip("|").split("|")] for x in table.splitlines()]
    return {line[0]: line[1:] for line in lines if len(line) > 1 and line[0].strip("-")}


def test_verdicts_stand_in_rows_of_methods_and_columns_of_cases(cases: list[Case]) -> None:
    told = verdicts(read_matrix(cases, METHODS))
    assert rows(told) == {
        "method": ["family", "one", "two"],
        "baseline": ["-", "reproduced", "reproduced"],
        "clip-advantages": ["advantage", "**pass**", "fail (expected: pass)"],
        "adagc": ["optimizer", "-", "-"],  # kept for neither case
        "disable-routing-replay": ["routing", "partial", "-"],
    }
    assert told.splitlines()[-1] == (
        "3 methods on 2 cases (float32 on cpu, torch 2.13.0, Megatron-Core 0.16.1): "
        "3 -, 1 pass, 1 fail (expected: pass), 1 partial."
    )


def test_any_verdict_of_a_set_is_as_expected(tmp_path: Path) -> None:
    make_case(tmp_path, "one", **{HERE: ENTRIES})
    file = tmp_path / "one" / "case.yaml"
    sets = "{verdicts: [pass, no_op], reason: r}"
    text = f"schema: 1\nsnapshot: iter_0000085\nexpected: {{clip-advantages: {sets}, "
    for other, told in (("{verdicts: [partial, fail], reason: r}", ""), ("fail", "fail")):
        file.write_text(f"{text}disable-routing-replay: {other}}}\n")
        shown = rows(verdicts(read_matrix(discover(tmp_path), METHODS)))
        assert shown["clip-advantages"] == ["advantage", "**pass**"]
        expected = f" (expected: {told})" if told else ""
        assert shown["disable-routing-replay"] == ["routing", f"partial{expected}"]


def test_figures_are_ratios_and_changes_of_the_quiet_control(cases: list[Case]) -> None:
    _, ratios, between, quiet, _ = figures(read_matrix(cases, METHODS)).split("\n\n")
    assert rows(ratios)["baseline"] == ["4.000", "4.000"]
    assert rows(ratios)["disable-routing-replay"] == ["2.500 / 3.000", "-"]
    assert "quiet control" in between
    assert rows(quiet)["clip-advantages"] == ["-25.0%", "-"]
    assert rows(quiet)["disable-routing-replay"] == ["+5.0% / +0.0%", "-"]


def test_another_environment_is_told_with_its_largest_difference(tmp_path: Path) -> None:
    make_case(tmp_path, "one", **{HERE: ENTRIES, THERE: ENTRIES})
    told = figures(read_matrix(discover(tmp_path), METHODS))
    assert told.endswith("Every verdict is the same there.")
    moved = ENTRIES | {"clip-advantages": entry(3.5, 1.75, "fail", quiet=1.5)}
    make_case(tmp_path, "two", **{HERE: ENTRIES, THERE: moved})
    matrix = read_matrix(discover(tmp_path), METHODS)
    assert max(one.largest for one in beside(matrix)) == pytest.approx(0.4)
    summary, changed, told = figures(matrix).split("\n\n")[-3:]
    place = "float32 on cpu, torch 2.13.0, Megatron-Core 0.19.2"
    assert rows(summary)[place] == ["6", "0.4"]
    assert rows(changed)[place] == ["two", "clip-advantages", "pass", "fail", "+0.4", "1e-05"]
    assert told == "In 1 of these the norm is apart by more than the noise band."
    moved["clip-advantages"] = entry(2.5 * (1 + 9e-6), 1.25, "fail", quiet=1.5)
    shutil.rmtree(tmp_path / "two")
    make_case(tmp_path, "two", **{HERE: ENTRIES, THERE: moved})
    told = figures(read_matrix(discover(tmp_path), METHODS)).split("\n\n")[-1]
    assert told.startswith("In each of these the norm is apart by less than the noise band: ")


def test_a_part_of_the_ranks_is_no_environment_of_the_matrix(cases: list[Case]) -> None:
    before = figures(read_matrix(cases, METHODS))
    for case in cases:
        assert case.file is not None
        (file,) = files_in(case.file)
        whole = read_document(file)
        assert whole is not None
        place = whole.environment.model_copy(update={"dp_ranks": "0 of 2"})
        part = whole.model_copy(update={"environment": place})
        file.with_name(f"{place.slug}.json").write_text(rendered(part))
        assert len(files_in(case.file)) == 2
    assert figures(read_matrix(cases, METHODS)) == before


def test_a_figure_that_cannot_be_compared_is_no_small_difference(tmp_path: Path) -> None:
    broken = ENTRIES | {"baseline": entry(8.0, 4.0, "reproduced", quiet=0.0)}
    make_case(tmp_path, "one", **{HERE: broken, THERE: ENTRIES})
    matrix = read_matrix(discover(tmp_path), METHODS)
    assert max(one.largest for one in beside(matrix)) == float("inf")


def test_cases_without_a_common_environment_are_refused(tmp_path: Path) -> None:
    make_case(tmp_path, "one", **{HERE: ENTRIES})
    make_case(tmp_path, "two", **{THERE: ENTRIES})
    with pytest.raises(CaseError) as caught:
        read_matrix(discover(tmp_path), METHODS)
    assert str(caught.value) == (
        "one, two: baselines: found no environment of which all have baselines, expected one at "
        "least. Write them with pytest --update-baselines"
    )
    with pytest.raises(CaseError, match="no case: baselines"):
        read_matrix([], METHODS)


def test_only_what_is_between_the_markers_is_replaced(cases: list[Case]) -> None:
    matrix = read_matrix(cases, METHODS)
    text = f"before\n<!-- matrix: verdicts (by a command) -->\nold\n{END}\nafter\n"
    new = updated(text, matrix, "a.md")
    head = "before\n<!-- matrix: verdicts (by a command) -->\n\n"
    assert new == f"{head}{verdicts(matrix)}\n\n{END}\nafter\n"
    assert updated(new, matrix, "a.md") == new
    for wrong, found in (("no marker", "no block"), (text.replace("verdicts", "x"), "blocks x")):
        with pytest.raises(UsageError, match=f"^a.md: matrix: found {found}, expected <!-- matrix"):
            updated(wrong, matrix, "a.md")


def test_the_command_prints_writes_and_gives_json(tmp_path: Path, cases: list[Case]) -> None:
    file, call = tmp_path / "a.md", ["matrix", str(tmp_path)]
    file.write_text(f"<!-- matrix: figures -->\n{END}\n")
    printed = CliRunner().invoke(app, call)
    assert printed.exit_code == 0
    assert rows(printed.output.split("\n\n")[0])["clip-advantages"][1:] == [
        "**pass**",
        "fail (expected: pass)",
    ]
    first, second = (CliRunner().invoke(app, [*call, "--write", str(file)]) for _ in range(2))
    assert first.output == f"{file}: written\n"
    assert second.output == f"{file}: up to date\n"
    document = json.loads(CliRunner().invoke(app, [*call, "--json"]).output)
    assert document["cases"] == ["one", "two"]
    assert document["methods"]["clip-advantages"] == {
        "one": "pass",
        "two": "fail (expected: pass)",
    }


@pytest.mark.parametrize("name", ["README.md", "docs/matrix.md"])
def test_the_documents_hold_the_matrix_of_today(name: str) -> None:
    matrix = read_matrix(discover(builtin_cases()), load_methods())
    text = (ROOT / name).read_text(encoding="utf-8")
    then = "run spike-replay matrix --write README.md --write docs/matrix.md"
    assert updated(text, matrix, name) == text, then


def test_a_baseline_that_moved_makes_the_documents_old() -> None:
    matrix = read_matrix(discover(builtin_cases()), load_methods())
    first = matrix.documents[0]
    moved = {n: e.model_copy(update={"verdict": Verdict.PARTIAL}) for n, e in first.methods.items()}
    documents = (first.model_copy(update={"methods": moved}), *matrix.documents[1:])
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert updated(text, dataclasses.replace(matrix, documents=documents), "README.md") != text
