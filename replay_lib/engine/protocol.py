"""What crosses the process boundary: experiments go in, outcomes come out, all plain data.

The parent (pytest, command line) never holds a model; the worker never judges. Numbers that are
not finite travel as the strings "NaN", "Infinity" and "-Infinity", so every line is strict JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

from replay_lib.errors import PatchError
from replay_lib.patch import LOSS_ONLY_SEAMS, Seam

Fidelity = Literal["full", "folded", "reduced"]
OldLogprobs = Literal["stored", "carried"]


class Frozen(BaseModel):
    """Strict, frozen, keyword-only: an unknown key is an error that names it."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class MitigationCall(Frozen):
    """A mitigation by slug, or a user's own by ``module:function``, with its parameters."""

    slug: str
    params: dict[str, Any] = Field(default_factory=dict)

    def __hash__(self) -> int:
        # params is a dict; equal calls have equal labels
        return hash(self.label())

    def label(self) -> str:
        """``slug`` or ``slug:name=value,...``, as it is written on a command line."""
        inside = ",".join(f"{k}={_written(v)}" for k, v in sorted(self.params.items()))
        return f"{self.slug}:{inside}" if inside else self.slug


class Experiment(Frozen):
    """One replay under a list of mitigations; the empty list is the baseline.

    ``against`` names another list of mitigations that this one is compared with, where the
    comparison is a controlled one; by default that is the baseline.
    """

    mitigations: tuple[MitigationCall, ...] = ()
    against: tuple[MitigationCall, ...] = ()

    @property
    def name(self) -> str:
        """``baseline`` or the mitigations' labels joined by ``+``."""
        return "+".join(m.label() for m in self.mitigations) or "baseline"

    @classmethod
    def baseline(cls) -> Experiment:
        """The replay with nothing changed."""
        return cls()

    @classmethod
    def parse(cls, text: str, against: str = "baseline") -> Experiment:
        """From ``a``, ``a+b``, ``a:name=value,name=value+b`` or ``baseline``."""
        return cls(mitigations=parse_calls(text), against=parse_calls(against))


def parse_calls(text: str) -> tuple[MitigationCall, ...]:
    """Mitigation calls from the way they are written on a command line."""
    if text.strip() in ("", "baseline"):
        return ()
    return tuple(_parse_call(part.strip()) for part in text.split("+"))


def _parse_call(text: str) -> MitigationCall:
    head, *rest = text.split(":")
    # module:function needs a name that Python could import; slugs have hyphens
    if rest and "=" not in rest[0] and all(part.isidentifier() for part in head.split(".")):
        head, rest = f"{head}:{rest[0]}", rest[1:]
    params: dict[str, Any] = {}
    for item in filter(None, ":".join(rest).split(",")):
        name, equals, value = item.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise PatchError(
                f"mitigation {text}: found {item!r}, expected name=value; parameters are written "
                "slug:name=value,name=value"
            )
        if name.strip() in params:
            raise PatchError(
                f"mitigation {text}: found {name.strip()} twice, expected every parameter once"
            )
        params[name.strip()] = _scalar(value.strip())
    return MitigationCall(slug=head, params=params)


def _written(value: Any) -> str:
    """``value`` so that it is read back as itself: text that looks like a number is quoted."""
    text = str(value)
    read = _scalar(text)
    return text if type(read) is type(value) and read == value else repr(value)


def _scalar(text: str) -> Any:
    """A number, true, false or none as such, anything else as text."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class Retained(Frozen):
    """Share of the signal that a mitigation keeps: sum of min(|c'|, |c|) over sum of |c|.

    Taken over loss tokens for c = 1 (``tokens``), |advantage x policy weight| (``advantage``) and
    |dLoss/dlogprob| (``dloss_dlogprob``); a share is NaN where its baseline sum is zero.
    """

    tokens: float
    advantage: float
    dloss_dlogprob: float

    @property
    def smallest(self) -> float:
        """The share that counts; NaN if any is NaN."""
        shares = (self.tokens, self.advantage, self.dloss_dlogprob)
        return float("nan") if any(math.isnan(s) for s in shares) else min(shares)


class Outcome(Frozen):
    """What one replay gave. Norms are L2 over all parameters, each once, before clipping.

    ``grad_norm_preclip_carried`` is the norm with carried old log-probabilities (stored + current
    patched - current baseline), measured only where a patch changes the forward pass.
    ``param_norms`` are per-parameter norms by Megatron's names. ``touched`` counts, for each seam
    used, how many elements, fields or (token, layer) pairs the patches changed.
    ``cosine`` is that of the gradient to the session's baseline's, whatever the experiment is
    compared with, ``cosine_carried`` the same with carried old log-probabilities. None: the
    baseline itself, a gradient that is zero or not finite, or no memory for the baseline's (a note
    says so).
    ``idle`` are the labels of those methods of a combination whose patches changed nothing of what
    they were given.
    ``nonfinite`` names what was not finite, first things first (empty: everything was finite).
    ``notes`` tell of a loss that is not finite although its gradient is.
    """

    experiment: Experiment
    grad_norm_preclip: float
    grad_norm_preclip_carried: float | None = None
    digest: str
    loss: float
    denominator: float
    param_norms: dict[str, float]
    touched: dict[Seam, int]
    retained: Retained | None = None
    retained_carried: Retained | None = None
    cosine: float | None = None
    cosine_carried: float | None = None
    idle: tuple[str, ...] = ()
    nonfinite: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    shared_forward: bool = False
    seconds: float


class RouteCounts(Frozen):
    """Saved experts against a router's own top-k, counted over ``tokens``.

    ``ordered``: tokens with the same experts in the same order; ``slots_in_set``: saved slots that
    are in the own top-k; ``disjoint``: tokens without a common expert. ``gap`` is, summed over
    tokens and at its largest, the mean logit of the own top-k minus that of the saved experts.
    """

    tokens: int = 0
    ordered: int = 0
    slots_in_set: int = 0
    disjoint: int = 0
    gap_sum: float = 0.0
    gap_max: float | None = None  # None: no token

    def plus(self, other: RouteCounts) -> RouteCounts:
        """Both together."""
        largest = [gap for gap in (self.gap_max, other.gap_max) if gap is not None]
        return RouteCounts(
            tokens=self.tokens + other.tokens,
            ordered=self.ordered + other.ordered,
            slots_in_set=self.slots_in_set + other.slots_in_set,
            disjoint=self.disjoint + other.disjoint,
            gap_sum=self.gap_sum + other.gap_sum,
            gap_max=max(largest) if largest else None,
        )


class LayerRoutes(Frozen):
    """One MoE layer (its number among them): ``response`` are loss positions, ``prompt`` others."""

    layer: int
    topk: int
    prompt: RouteCounts
    response: RouteCounts


def json_value(value: Any) -> Any:
    """``value`` as strict JSON can hold it: dates, bytes, sets and NaN of YAML become text."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    plain = value is None or isinstance(value, bool | int | str)
    finite = isinstance(value, float) and math.isfinite(value)
    return value if plain or finite else str(value)


class Difference(Frozen):
    """A field of the saved model that the replay's model has otherwise, or that two files dispute.

    ``saved`` is what ``source`` states, ``effective`` what the replay runs with (plain values).
    ``kind``: contradiction (two files disagree; ``effective`` is what ran), replaced (the replay's
    model has another value than ran), unknown (nobody here knows the field; it is not taken over),
    assumed (no file states it).
    ``meaning`` says whether the step is another one, ``reason`` why.
    """

    field: str
    kind: Literal["contradiction", "replaced", "unknown", "assumed"]
    saved: Any
    source: str
    effective: Any
    meaning: Literal["changes the step", "does not", "unknown"]
    reason: str

    @field_validator("saved", "effective", mode="before")
    @classmethod
    def _as_json(cls, value: Any) -> Any:
        return json_value(value)

    @property
    def matters(self) -> bool:
        """Whether a reader of a result has to know: all but what leaves the step alone."""
        return self.meaning != "does not"

    def told(self) -> str:
        """One line."""
        means = {"changes the step": "which changes the step", "does not": "same step"}
        says = "does not state it" if self.kind == "assumed" else f"says {self.saved!r}"
        return (
            f"model.{self.field}: {self.source} {says}, replayed is "
            f"{self.effective!r} ({means.get(self.meaning, 'effect unknown')}; {self.reason})"
        )


class SessionInfo(Frozen):
    """What a session runs on, told once when it is open.

    ``dp_ranks`` are the recorded data-parallel ranks that are replayed, ``dp_recorded`` their
    number in the run. ``layout`` is how many ranks replay. ``seconds`` splits the start
    (imports, model, weights). ``deterministic`` says that deterministic algorithms are on.
    ``differences`` are those between the model that ran and the one here, harmless ones too.
    ``trainer`` is whose loss is replayed, ``backend`` what replays it (native or axrl).
    """

    snapshot: str
    step: int
    fidelity: Fidelity
    dp_ranks: tuple[int, ...]
    dp_recorded: int
    layout: dict[str, int]
    device: str
    dtype: str
    deterministic: bool
    parameters: int
    versions: dict[str, str]
    seconds: dict[str, float]
    notes: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    trainer: str = "grpo"
    backend: str = "native"


def is_loss_only(seams: Sequence[Seam]) -> bool:
    """Whether patches at these seams leave the forward pass as it is."""
    return all(s in LOSS_ONLY_SEAMS for s in seams)


class Engine(Protocol):
    """What replays experiments; ``ReplaySession`` is the built-in one."""

    info: SessionInfo

    def run_many(self, experiments: Sequence[Experiment]) -> Iterator[Outcome]:
        """Outcomes in the order of ``experiments``, each as soon as it is known."""
        ...

    def close(self) -> None:
        """End the worker; safe to call twice."""
        ...
