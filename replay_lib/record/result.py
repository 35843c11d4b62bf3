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

    Norms are L2 before clipping; ``change`` is quiet norm / quiet baseline norm - 1, signed,
    ``cosine`` that of both gradients (None: not measured, or one of them is zero). Those named
    ``_carried`` are with carried old log-probabilities, where the method changes the forward.
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
    budget: float | None = None  # the largest |change| that the case allows; None: any
    cosine: float | None = None
    cosine_carried: float | None = None
    cosine_budget: float | None = None  # the smallest cosine that the case allows; None: any

    @property
    def largest_change(self) -> float | None:
        """The larger one in size of both changes."""
        known = [c for c in (self.change, self.change_carried) if c is not None]
        return max(known, key=abs, default=None)

    @property
    def smallest_cosine(self) -> float | None:
        """The smaller one of both cosines."""
        known = [c for c in (self.cosine, self.cosine_carried) if c is not None]
        return min(known, default=None)

    @property
    def measured(self) -> bool:
        """Whether both norm and cosine are known."""
        return self.largest_change is not None and self.smallest_cosine is not None

    @property
    def beyond_budget(self) -> tuple[str, ...]:
        """Figures by which the method moves an ordinary step further than the case allows, told.

        A method that changes the unit of the loss has a budget of the cosine alone: there a
        change of the norm is the change of unit.
        """
        told = []
        change, cosine = self.largest_change, self.smallest_cosine
        if change is not None and self.budget is not None and not abs(change) <= self.budget:
            told.append(f"norm {change:+.1%} ({self.budget:.0%} is allowed)")
        if self.cosine_budget is not None:
            needed = f"({self.cosine_budget:g} is needed)"
            if 0.0 in (self.quiet_norm, self.quiet_norm_carried):
                told.append(f"cosine undefined, the gradient is zero {needed}")
            elif cosine is not None and not cosine >= self.cosine_budget:
                told.append(f"cosine {cosine:.3f} {needed}")
        return tuple(told)

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
        """One line: the fault, or by how much the method moves the quiet step."""
        if self.fault is not None:
            return self.fault
        told = f"{self.change:+.1%}" if self.change is not None else "not measured"
        if self.change_carried is not None:
            told += f" ({self.change_carried:+.1%} with carried old log-probabilities)"
        told += f", cosine {_cosine(self.cosine)}"
        if self.cosine_carried is not None:
            told += f" ({self.cosine_carried:.3f} with carried ones)"
        if self.beyond_budget:
            told += f"; beyond the budget: {', '.join(self.beyond_budget)}"
        return f"the quiet control's norm changes by {told}"


def _cosine(value: float | None) -> str:
    return "not known" if value is None else f"{value:.3f}"


class BaselineCheck(Frozen):
    """A result beside the figures that are kept for its case, method and ``environment``.

    ``kept``: there are some, within the noise; ``drifted``: ``drift`` has one line a figure that
    is not. Else nothing was compared: ``no document`` for this environment, one of ``another
    case`` (its files were others then), or ``no entry`` for this method. ``verdict_before`` is the
    one that came with the figures.
    """

    environment: str
    state: Literal["kept", "drifted", "no document", "another case", "no entry"]
    drift: tuple[str, ...] = ()
    verdict_before: Verdict | None = None


class Result(Frozen):
    """One experiment of one case, judged.

    ``side_effect`` is what the method does to the case's quiet control, None without one.
    ``cosine`` is that of the gradient to the baseline's, whatever ``against`` is, with stored old
    log-probabilities, ``cosine_carried`` with carried ones (None: see ``Outcome``). ``idle`` are
    methods of a combination that changed nothing; the reason says so.

    Norms are L2 over all parameters before clipping. ``grad_norm_preclip``, ``ratio``,
    ``compared_norm`` and ``reduction`` are those with stored old log-probabilities; ``old`` has
    both treatments where they may differ, the one whose verdict counted first. ``seconds`` is the
    replay's own time. ``repeats`` is how often the session replayed the baseline, and
    ``repeat_spread`` (largest - smallest) / median of those norms (both None in results of older
    versions). ``case_digest`` tells which files were replayed (empty where nobody asked), and
    ``baseline`` how the figures compare with those kept of earlier replays (None: not compared).
    ``expected`` is what the case states, several verdicts where arithmetic decides between them.
    ``differences`` are those between the model that ran and the replayed one that may
    change the step. ``layer_norms`` are norms before clipping of each layer's parts
    (:mod:`replay_lib.record.layer_norms`), ``target_ratio`` is the case's, ``detector_ratio`` that
    of the run's own spike detector, ``denominator`` the sum that the summed gradients were divided
    by: tokens, rows or turns (empty or None in results of older versions).
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
    cosine: float | None = None
    cosine_carried: float | None = None
    idle: tuple[str, ...] = ()
    side_effect: SideEffect | None = None
    postclip_norm: float | None = None
    clip_coefficient: float | None = None
    nonfinite: tuple[str, ...] = ()
    diagnostic: bool = False
    evidence: Literal["measured", "mechanism"] = "measured"
    expected: Verdict | tuple[Verdict, ...] | None = None
    dp_ranks: tuple[int, ...] = ()
    dp_recorded: int = 1
    layout: dict[str, int] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    trainer: str = "grpo"
    backend: str = "native"
    case_digest: str = ""
    baseline: BaselineCheck | None = None
    layer_norms: dict[str, float] = Field(default_factory=dict)
    target_ratio: float | None = None
    detector_ratio: float | None = None
    denominator: float | None = None
    timestamp: str

    @property
    def is_baseline(self) -> bool:
        """Whether nothing was patched."""
        return not self.mitigations

    @property
    def wanted(self) -> tuple[Verdict, ...]:
        """The verdicts that are as expected; where a case states none, a mitigation has to pass.

        A reduced replay is a diagnostic: without a baseline of its own any verdict is as good.
        """
        if isinstance(self.expected, tuple):
            return self.expected
        if self.expected is None and self.fidelity == "reduced" and not self.is_baseline:
            return (self.verdict,)
        unstated = Verdict.REPRODUCED if self.is_baseline else Verdict.PASS
        return (self.expected or unstated,)

    @property
    def told_wanted(self) -> str:
        """The wanted verdicts in words, as in ``fail or no_op``."""
        return " or ".join(self.wanted)

    @property
    def comparison(self) -> str:
        """``better``, ``as expected`` or ``worse`` than what was wanted."""
        return compare(self.verdict, *self.wanted)

    @property
    def red(self) -> bool:
        """Worse than wanted, or away from its baseline: what fails a test and a command."""
        return self.comparison == "worse" or bool(self.drift)

    @property
    def drift(self) -> tuple[str, ...]:
        """Figures that left their baseline by more than noise, one line each."""
        return self.baseline.drift if self.baseline else ()

    @property
    def quiet_fault(self) -> str | None:
        """What is wrong on the quiet control, with the case or the method it concerns; or None."""
        if self.side_effect is None or self.side_effect.fault is None:
            return None
        by_method = self.side_effect.verdict in (None, Verdict.NON_FINITE)
        who = f"{self.case} / {self.experiment}" if by_method else self.case
        return f"{who}: {self.side_effect.fault}"

    @property
    def side_effects_measured(self) -> bool:
        """Whether norm and cosine on a quiet control are known."""
        return self.side_effect is not None and self.side_effect.measured

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
            quiet_fault=self.side_effect is not None and self.side_effect.red,
        )

    def explain(self) -> str:
        """Verdict and reason in one line, with what was wanted where that differs."""
        line = f"{self.case} / {self.experiment}: {self.verdict}: {self.reason}"
        if self.cosine is not None and self.rule is not None:  # behind a gate it tells nothing
            line += f"; cosine to the unpatched gradient {self.cosine:.3f}"
            if self.cosine_carried is not None:
                line += f" ({self.cosine_carried:.3f} with carried old log-probabilities)"
        if self.comparison != "as expected":
            line += f" ({self.comparison} than expected: {self.told_wanted})"
        return "; ".join([line, *self.drift])

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
