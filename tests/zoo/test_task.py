"""The task as text, and what the verifier says of a response."""

from __future__ import annotations

import random

import pytest

from replay_lib.zoo.task import CHARACTERS, Problem, decode, encode, make_problem, score, share

PROBLEM = Problem("^21+43+65=21+43=640;+65=201.70+18+52=", "70+18=880;+52=311.")


def test_a_problem_is_an_example_and_a_question_whose_sums_are_right():
    problem = make_problem(random.Random(1))
    example, asked = problem.prompt[1:].split(".")
    for question, solution in (example.split("=", 1), (asked[:-1], problem.answer[:-1])):
        numbers = [int(n[::-1]) for n in question.split("+")]
        first, last = solution.split(";")
        shown, part = first.split("=")
        assert [int(n[::-1]) for n in shown.split("+")] == numbers[:2]
        assert int(part[::-1]) == sum(numbers[:2])
        added, total = last[1:].split("=")
        assert (int(added[::-1]), int(total[::-1])) == (numbers[2], sum(numbers))


def test_lengths_are_those_the_causes_were_found_with():
    problem = make_problem(random.Random(2))
    assert (len(problem.prompt), len(problem.answer)) == (37, 18)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("70+18=880;+52=311.", 1.0),
        ("70+18=111;+52=311.", 1.0),  # the last sum alone counts
        ("70+18=880;+52=311", 0.0),  # never stopped
        ("70+18=880;+52=411.", 0.0),
        (".", 0.0),
        ("", 0.0),
    ],
)
def test_the_verifier_reads_the_last_sum(response, expected):
    assert score(PROBLEM, response) == expected


def test_the_graded_verifier_gives_the_share_of_right_characters():
    assert share(PROBLEM, "70+18=880;+52=411.") == pytest.approx(17 / 18)
    assert share(PROBLEM, PROBLEM.answer + "9") == 1.0 and share(PROBLEM, "") == 0.0


def test_tokens_and_text():
    assert decode(encode(PROBLEM.prompt)) == PROBLEM.prompt
    assert decode([31]) == "?" and len(set(CHARACTERS)) == len(CHARACTERS) <= 32
