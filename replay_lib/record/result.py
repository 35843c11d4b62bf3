"""The one schema of a result: whatever is shown or written anywhere is rendered from it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from replay_lib.engine.protocol import Difference, Fidelity, Frozen, MitigationCall, Retained
from replay_lib.rule import Flag, Status, Verdict, compare, status_of


class OldResult(Frozen):
    """Norm and verdict under one treatment (``stored`` or ``carried``) of old log-probabilities."""

    old: Literal["stored", "carried"]
    grad_norm_preclip: float
    ratio: float
    reduction: float | None
    retained: Retained | None = None
    verdict: Verdict


class SideEffect(Frozen):
    """What a method does to the quiet control, an ordinary step of the same run.

    Norms are L2 before clipping; ``change`` is quiet norm / quiet baseline norm - 1, signed. The
    ``_carried`` pair is with carried old log-probabilities, where the method changes the forward.
    ``verdict`` is the one on the quiet step: everything but ``not_a_spike`` is a fault, and so is
    None, where the method could not be replayed there; ``reason`` tells either.
    """

    quiet_norm: float | None = None
    quiet_baseline_norm: float | None = None
    change: float | None = None
    verdict: Verdict | None = None
    reason: str
    quiet_norm_carried: float | None = None
    change_carried: float | None = None
    budget: float | None = None  # the largest change that goes unmentioned, from the case

    @property
    def largest_change(self) -> float | None:
        """The larger one in size of both changes."""
        known = [c for c in (self.change, self.change_carried) if c is not None]
        return max(known, key=abs, default=None)

    @property
    def beyond_budget(self) -> bool:
        """Whether the method moves an ordinary step further than the case allows."""
        change = self.largest_change
        return not (change is None or self.budget is None or abs(change) <= self.budget)

    @property
    def fault(self) -> str | None:
        """What is wrong with the quiet control, or with the method on it; None if nothing is."""
        if self.verdict is Verdict.NOT_A_SPIKE:
            return None
        if self.verdict is None:
            return f"it could not be replayed on the quiet control: {self.reason}"
        if self.verdict is Verdict.NOT_REPRODUCED:
            return f"the quiet control is not reproduced: {self.reason}"
        if self.verdict.rank < Verdict.NOT_A_SPIKE.rank:
            return f"the quiet control is itself a spike: {self.reason}"
        return f"the quiet control is {self.verdict}: {self.reason}"

    @property
    def red(self) -> bool:
        """What fails a test and a command."""
        return self.fault is not None

    def scale(self, old: Literal["stored", "carried"]) -> float | None:
        """Quiet norm / quiet baseline norm; None where the quiet control tells nothing."""
        change = self.change_carried if old == "carried" else self.change
        change = self.change if change is None else change
        return None if change is None or self.red else 1.0 + change

    def explain(self) -> str:
        """One line: the fault, or by how much the method moves the quiet step's norm."""
        if self.fault is not None:
            return self.fault
        told = f"{self.change:+.1%}" if self.change is not None else "not measured"
        if self.change_carried is not None:
            told += f" ({self.change_carried:+.1%} with carried old log-probabilities)"
        if self.beyond_budget:
            told += f", beyond the budget of {self.budget:.0%}"
        return f"the quiet control's norm changes by {told}"


class Result(Frozen):
    """One experiment of one case, judged.

    ``side_effect`` is what the method does to the case's quiet control, None without one.

    Norms are L2 over all parameters before clipping. ``grad_norm_preclip``, ``ratio``,
    ``compared_norm`` and ``reduction`` are those with stored old log-probabilities; ``old`` has
    both treatments where they may differ, the one whose verdict counted first. ``seconds`` is the
    replay's own time. ``repeats`` is how often the session replayed the baseline, and
    ``repeat_spread`` (largest - smallest) / median of those norms (both None in results of older
    versions). ``differences`` are those between the model that ran and the replayed one that may
    change the step.
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
    repeats: int | None = None
    repeat_spread: float | None = None
    ratio_scaled: float | None = None
    side_effect: SideEffect | None = None
    postclip_norm: float | None = None
    clip_coefficient: float | None = None
    nonfinite: tuple[str, ...] = ()
    diagnostic: bool = False
    evidence: Literal["measured", "mechanism"] = "measured"
    expected: Verdict | None = None
    dp_ranks: tuple[int, ...] = ()
    dp_recorded: int = 1
    layout: dict[str, int] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    trainer: str = "grpo"
    backend: str = "native"
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
    def quiet_fault(self) -> str | None:
        """What is wrong on the quiet control, with the case or the method it concerns; or None."""
        if self.side_effect is None or self.side_effect.fault is None:
            return None
        by_method = self.side_effect.verdict in (None, Verdict.NON_FINITE)
        who = f"{self.case} / {self.experiment}" if by_method else self.case
        return f"{who}: {self.side_effect.fault}"

    @property
    def status(self) -> Status | None:
        """What this result makes of its method; None for a baseline.

        None too where the median was invented: such a case shows that replay and patches work,
        and tells nothing of a method's worth, good or bad. None where another backend than the
        native one replayed: nobody measured what is kept of the signal. What is diagnostic stays
        diagnostic.
        """
        untold = self.evidence == "mechanism" or self.backend != "native"
        if self.is_baseline or (untold and not self.diagnostic):
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
        derived = {"comparison": self.comparison, "status": self.status, "red": self.red}
        return plain | derived | {"quiet_fault": self.quiet_fault}


def quiet_faults(results: Iterable[Result]) -> list[str]:
    """Every fault of a quiet control, each once."""
    return list(dict.fromkeys(r.quiet_fault for r in results if r.quiet_fault is not None))
