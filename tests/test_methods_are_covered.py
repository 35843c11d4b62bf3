"""Methods, cards, unit tests, embedded cases, baselines and engine counts are the same list."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay_lib.case import builtin_cases, discover
from replay_lib.methods import callable_alone, load_methods
from replay_lib.record.baselines import files_in, read_document
from replay_lib.record.cards import read_cards

TESTS = Path(__file__).parent
METHODS = set(load_methods())
#: What is tried on every case; the others have no row, and a test of their own in the engine.
ALONE = set(callable_alone(load_methods()))
CASES = discover(builtin_cases())
#: Where methods are tried on values written by hand; a helper of theirs is in hand_made.
BY_HAND = [*sorted((TESTS / "mitigations").glob("*.py")), TESTS / "engine/test_routes.py"]
#: Calls that make a method act.
ACTS = {"patches", "answer", "apply", "only_patch", "on_batch"}


def tried(sources: list[str]) -> set[str]:
    """Slugs that a test makes act and asserts something about.

    A test's words are the texts in it, in its decorators and in what it names of its module.
    Naming a method is not enough (a list of diagnostic ones does), nor is seeing it refuse.
    """
    return {word for source in sources for word in _tried(ast.parse(source))}


def _tried(module: ast.Module) -> Iterator[str]:
    top: dict[str, ast.stmt] = {n.name: n for n in module.body if isinstance(n, ast.FunctionDef)}
    for node in module.body:
        for target in getattr(node, "targets", None) or [getattr(node, "target", None)]:
            if isinstance(target, ast.Name):
                top[target.id] = node
    for name, function in top.items():
        asserts = any(isinstance(n, ast.Assert) for n in ast.walk(function))
        if name.startswith("test_") and asserts:
            nodes = list(_with_named(function, top, set()))
            called = {getattr(n.func, "attr", getattr(n.func, "id", None)) for n in _calls(nodes)}
            if called & ACTS:
                words = (n.value for n in nodes if isinstance(n, ast.Constant))
                yield from (w.partition(":")[0] for w in words if isinstance(w, str))


def _with_named(node: ast.AST, top: dict[str, ast.stmt], seen: set[str]) -> Iterator[ast.AST]:
    """All nodes of ``node`` and of what it names at the top of its module."""
    for inner in ast.walk(node):
        yield inner
        if isinstance(inner, ast.Name) and inner.id in top and inner.id not in seen:
            seen.add(inner.id)
            yield from _with_named(top[inner.id], top, seen)


def _calls(nodes: list[ast.AST]) -> list[ast.Call]:
    return [n for n in nodes if isinstance(n, ast.Call)]


def test_every_method_is_tried_on_values_written_by_hand() -> None:
    found = tried([file.read_text(encoding="utf-8") for file in BY_HAND])
    assert sorted(METHODS - found) == []


def test_naming_a_method_or_seeing_it_refuse_is_no_trial() -> None:
    listed = "def test_a():\n    assert {m for m in METHODS} == {'a-method'}\n"
    refused = "def test_a():\n    with raises(E):\n        METHODS['a-method'].patches({})\n"
    used = "SLUG = 'a-method:x=1'\n" + refused + "    assert only_patch(SLUG)(1) == 2\n"
    assert "a-method" not in tried([listed, refused])
    assert "a-method" in tried([listed, used])


def test_every_method_has_a_card_and_every_card_a_method() -> None:
    assert set(read_cards()) == METHODS  # that its code runs: record/test_cards.py


def test_every_method_has_a_known_count_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS / "engine"))
    from test_every_method import TOUCHED

    after_norm = {slug for slug, method in load_methods().items() if method.after_norm}
    assert set(TOUCHED) | after_norm == ALONE and not set(TOUCHED) & after_norm


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_method_has_a_row_in_every_embedded_case(case) -> None:
    assert {label for label in case.expected if ":" not in label} == ALONE
    for file in files_in(case.file):
        document = read_document(file)
        assert document is not None
        kept, known = set(document.methods), {*case.expected, "baseline"}
        assert kept <= known and kept >= ALONE, file
        assert document.environment.device != "cpu" or kept == known, file


def test_a_method_that_needs_a_parameter_has_a_row_in_some_embedded_case() -> None:
    given = {label.partition(":")[0] for case in CASES for label in case.expected}
    assert given == set(load_methods())


def test_there_are_enough_methods_and_cases_for_this_to_say_something() -> None:
    assert len(METHODS) >= 30 and len(CASES) >= 6
