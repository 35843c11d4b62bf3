"""What the exit code of a command means: the one table, which the README shows."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit codes of ``spike-replay``; those of errors are the ``exit_code`` of their class."""

    GREEN = 0
    RED = 1
    USAGE = 2
    INPUT = 3
    MODEL = 4
    PATCH = 5
    ENGINE = 6
    FINDINGS = 7
    INTERNAL = 70
    INTERRUPTED = 130
    TERMINATED = 143

    @property
    def meaning(self) -> str:
        """One line for a reader."""
        return MEANINGS[self]


MEANINGS: dict[ExitCode, str] = {
    ExitCode.GREEN: "every verdict is as expected or better",
    ExitCode.RED: (
        "a verdict is worse than expected (where a case expects nothing: than pass), "
        "a quiet control is at fault, a merged run is not green, or pin kept a verdict that is "
        "right elsewhere"
    ),
    ExitCode.USAGE: "the command was called with something it cannot take",
    ExitCode.INPUT: "a snapshot or a case cannot be used as it is",
    ExitCode.MODEL: "model, weights, batch or loss settings are unsupported or contradict",
    ExitCode.PATCH: (
        "a mitigation is unknown, has wrong parameters or broke its seam, "
        "or a trainer cannot be loaded or broke its contract"
    ),
    ExitCode.ENGINE: (
        "the worker process failed, died, hung or ran out of memory, or a GPU node cannot be used "
        "or was lost"
    ),
    ExitCode.FINDINGS: "doctor found an error in a snapshot",
    ExitCode.INTERNAL: "a fault of this program",
    ExitCode.INTERRUPTED: "interrupted from the keyboard",
    ExitCode.TERMINATED: "ended by SIGTERM",
}
