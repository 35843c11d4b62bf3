"""A guard that compared nothing is not green."""

from __future__ import annotations

import pytest

from replay_lib.errors import EngineError, SpikeReplayError, TrainerError
from replay_lib.guard.compare import Pair
from replay_lib.guard.guarding import Guarded
from replay_lib.record.result import Result
from tests.record.make_results import BASELINE, result

GOOD = result(BASELINE)
BROKEN, GONE = TrainerError("it raised"), EngineError("it died")


@pytest.mark.parametrize(
    ("reference", "tested", "status"),
    [
        ((GOOD, GOOD), (GOOD, GOOD), 0),
        (
            (BROKEN, BROKEN),
            (GOOD, GOOD),
            TrainerError.exit_code,
        ),  # there is nothing to compare with
        ((BROKEN, GOOD), (GOOD, GOOD), 0),  # one case was compared, the other is told
        ((BROKEN, BROKEN), (GONE, GONE), EngineError.exit_code),
        ((GOOD, GOOD), (GOOD, BROKEN), 1),  # worse than the reference
    ],
)
def test_the_status_is_that_of_what_was_compared(
    reference: tuple[Result | SpikeReplayError, ...],
    tested: tuple[Result | SpikeReplayError, ...],
    status: int,
) -> None:
    both = zip("ab", reference, tested, strict=True)
    pairs = tuple(Pair(case, "baseline", ref, mine) for case, ref, mine in both)
    assert Guarded("mine", "main", pairs, ()).exit_code("worse") == status
