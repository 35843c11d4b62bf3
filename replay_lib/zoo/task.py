"""The task: three numbers added in two written steps, after a worked example. No torch.

    prompt     ^12+34+56=12+34=046;+56=102.07+81+25=
    response   07+81=088;+25=113.

The response is right where its last sum is. Tokens are characters; every number has its full width,
which a model of this size learns several times faster.
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


def _question(numbers: tuple[int, int, int]) -> str:
    return "+".join(f"{n:02d}" for n in numbers) + "="


def _solution(numbers: tuple[int, int, int]) -> str:
    first, second, third = numbers
    part = first + second
    return f"{first:02d}+{second:02d}={part:03d};+{third:02d}={part + third:03d}."
