"""The task: three numbers added in two written steps, after a worked example. No torch.

    prompt     ^21+43+65=21+43=640;+65=201.70+18+52=
    response   70+18=880;+52=311.

(12 + 34 + 56 = 102, then 7 + 81 + 25 = 113.) Numbers are written units first and at full width: a
model of this size then learns the task in a few hundred steps. The response is right where its last
sum is. Tokens are characters.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

CHARACTERS = "_^.;=+0123456789"
PAD, START, STOP = (CHARACTERS.index(c) for c in "_^.")


@dataclass(frozen=True)
class Problem:
    """A prompt and the response that solves it, as text."""

    prompt: str
    answer: str

    @property
    def total(self) -> str:
        """The last sum, digits only."""
        return total_of(self.answer)


def make_problem(rng: random.Random) -> Problem:
    """A worked example and three numbers to add."""
    example, asked = _numbers(rng), _numbers(rng)
    shown = f"^{_question(example)}{_solution(example)}"
    return Problem(prompt=shown + _question(asked), answer=_solution(asked))


def score(problem: Problem, response: str) -> float:
    """1.0 where ``response`` ends (with the stop mark) in the right total, else 0.0."""
    return 1.0 if response.endswith(".") and total_of(response) == problem.total else 0.0


def share(problem: Problem, response: str) -> float:
    """Share of the answer's characters that ``response`` has in their places, 0 to 1."""
    right = sum(a == b for a, b in zip(problem.answer, response, strict=False))
    return right / len(problem.answer)


def total_of(response: str) -> str:
    """What stands behind the last equals sign, without the stop mark."""
    return response.removesuffix(".").rpartition("=")[2]


def encode(text: str) -> list[int]:
    """Tokens of ``text``."""
    return [CHARACTERS.index(c) for c in text]


def decode(tokens: list[int]) -> str:
    """Text of ``tokens``; a token that is no character becomes ``?``."""
    return "".join(CHARACTERS[t] if t < len(CHARACTERS) else "?" for t in tokens)


def _numbers(rng: random.Random) -> tuple[int, int, int]:
    return rng.randint(1, 99), rng.randint(1, 99), rng.randint(1, 99)


def _written(number: int, width: int) -> str:
    """Units first, with zeros up to ``width``."""
    return f"{number:0{width}d}"[::-1]


def _question(numbers: tuple[int, int, int]) -> str:
    return "+".join(_written(n, 2) for n in numbers) + "="


def _solution(numbers: tuple[int, int, int]) -> str:
    first, second, third = (_written(n, 2) for n in numbers)
    part, total = numbers[0] + numbers[1], sum(numbers)
    return f"{first}+{second}={_written(part, 3)};+{third}={_written(total, 3)}."
