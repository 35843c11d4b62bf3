"""The one schema of a result: whatever is shown or written anywhere is rendered from it."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from replay_lib.engine.protocol import Fidelity, Frozen, MitigationCall, Retained
from replay_lib.rule import Flag, Status, Verdict, compare, status_of


class OldResult(Frozen):
    """Norm and verdict under one treatment (``stored`` or ``carried``) of old log-probabilities."""

    old: Literal["stored", "carried"]
    grad_norm_preclip: float
    ratio: float
    reduction: float | None
    verdict: Verdict


class Result(Frozen):
    """One experiment of one case, judged.

    Norms are L2 over all parameters before clipping. ``grad_norm_preclip``, ``ratio``,
    ``compared_norm`` and ``reduction`` are those with stored old log-probabilities; ``old`` has
    both treatments where they may differ, the one whose verdict counted first. ``seconds`` is the
    replay's own time.
    """

    case: str
    experiment: str
    mitigations: tuple[MitigationCall, ...]
    against: str
    fidelity: Fidelity
    grad_norm_preclip: float
    median_norm: float | None
    ratio: float | None
    compared_norm: float | None
    reduction: float | None
    verdict: Verdict
    reason: str
    below_detector: bool | None
    retained: Retained | None
    touched: dict[str, int]
    noise_band: float | None
    deterministic: bool
    device: str
    versions: dict[str, str]
    seconds: float
    dtype: str
    digest: str
    rule: Verdict | None = None
    flags: tuple[Flag, ...] = ()
    old: tuple[OldResult, ...] = ()
    recorded_norm: float | None
    relative_difference: float | None
    repeat_spread: float | None = None
    ratio_scaled: float | None = None
    postclip_norm: float | None = None
    nonfinite: tuple[str, ...] = ()
    diagnostic: bool = False
    evidence: Literal["measured", "mechanism"] = "measured"
    expected: Verdict | None = None
    dp_ranks: tuple[int, ...] = ()
    dp_recorded: int = 1
    layout: dict[str, int] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    timestamp: str

    @property
    def is_baseline(self) -> bool:
        """Whether nothing was patched."""
        return not self.mitigations

    @property
    def wanted(self) -> Verdict:
        """The expected verdict; where a case states none, a mitigation has to pass."""
        if self.expected is not None:
            return self.expected
        return Verdict.REPRODUCED if self.is_baseline else Verdict.PASS

    @property
    def comparison(self) -> str:
        """``better``, ``as expected`` or ``worse`` than what was wanted."""
        return compare(self.verdict, self.wanted)

    @property
    def red(self) -> bool:
        """Worse than wanted: what fails a test and a command."""
        return self.comparison == "worse"

    @property
    def status(self) -> Status | None:
        """What this result makes of its method; None for a baseline.

        None too where the median was invented: such a case shows that replay and patches work,
        and tells nothing of a method's worth, good or bad. What is diagnostic stays diagnostic.
        """
        if self.is_baseline or (self.evidence == "mechanism" and not self.diagnostic):
            return None
        return status_of(
            self.verdict,
            flags=self.flags,
            reduction=self.old[0].reduction if self.old else self.reduction,
            fidelity=self.fidelity,
            diagnostic=self.diagnostic,
        )

    def explain(self) -> str:
        """Verdict and reason in one line, with what was wanted where that differs."""
        line = f"{self.case} / {self.experiment}: {self.verdict}: {self.reason}"
        if self.comparison == "as expected":
            return line
        return f"{line} ({self.comparison} than expected: {self.wanted})"

    def as_json(self) -> dict[str, Any]:
        """Plain data of strict JSON, keys in the order of the schema, then what follows from it.

        Numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity".
        """
        plain: dict[str, Any] = json.loads(self.model_dump_json())
        return plain | {"comparison": self.comparison, "status": self.status, "red": self.red}
