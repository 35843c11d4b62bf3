"""What a mitigation may touch, and in which order.

A mitigation is a function with keyword parameters that returns one patch or several. A patch is
a pure function at one seam: it gets the present value and returns the next one, so there is
nothing to undo. The engine applies seams in the order of :class:`Seam`, and inside a seam in the
order written; it compares before with after and reports what was touched.

This module imports no torch: listing methods stays fast.
"""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replay_lib.errors import PatchError, SpikeReplayError

if TYPE_CHECKING:
    from torch import Tensor

    from replay_lib.batch import RankBatch
    from replay_lib.loss.settings import GrpoSettings


class Seam(enum.StrEnum):
    """Where a patch acts, in the order in which seams are applied."""

    WEIGHTS = "weights"
    MODEL = "model"
    ROWS = "rows"
    ROUTING = "routing"
    ROUTER = "router"
    BATCH = "batch"
    SETTINGS = "settings"
    TOKEN_WEIGHTS = "token_weights"


#: Seams that leave the forward pass as it is: such experiments share one kept forward.
LOSS_ONLY_SEAMS = frozenset({Seam.BATCH, Seam.SETTINGS, Seam.TOKEN_WEIGHTS})


@dataclass(frozen=True)
class Patch:
    """One change at one seam; ``apply`` has the signature of its seam (see the builders below)."""

    seam: Seam
    apply: Callable[..., Any]

    def __call__(self, *present: Any) -> Any:
        """``apply(*present)``; what a patch raises becomes a PatchError that names its seam."""
        try:
            return self.apply(*present)
        except SpikeReplayError:
            raise
        except (Exception, SystemExit) as error:
            raise PatchError(
                f"a patch at the {self.seam.value} seam raised {type(error).__name__}: {error}"
            ) from error


def weights_patch(apply: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> Patch:
    """Replace parameters: gets all by name, returns the changed ones (same shape and dtype)."""
    return Patch(Seam.WEIGHTS, apply)


def model_patch(**fields: Any) -> Patch:
    """Set fields of the model's Megatron configuration, e.g. ``moe_router_dtype="fp64"``."""
    return Patch(Seam.MODEL, lambda _present: dict(fields))


def rows_patch(rows: str) -> Patch:
    """How rows that are prefix trees go through the model: ``merged`` or ``unmerged``.

    Unmerged, each path is a row of its own. The loss stays that of the recorded rows: each token's
    log-probability is taken from the one path in which it is trained.
    """
    return Patch(Seam.ROWS, lambda _present: rows)


def routing_patch(apply: Callable[[Tensor, RankBatch], Tensor]) -> Patch:
    """Choose where saved routes are forced.

    ``apply(replayed_BTL, batch)`` gets a bool tensor ``[B, T, L]`` (true: the saved experts are
    forced for this token in this MoE layer, L counting MoE layers only) and returns the next one.
    """
    return Patch(Seam.ROUTING, apply)


def router_patch(apply: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Patch:
    """Choose where saved routes are forced by what the router says, while the model runs.

    ``apply(replayed_N, own_N, saved_N)`` is called for each MoE layer and micro-batch with its N
    packed tokens: where saved experts are forced (bool, after all routing patches), and the summed
    scores (float32) of the experts that the model would choose and of the saved ones. Scores are
    what the router ranks experts by, as probabilities over all experts (softmax), or as it has them
    (sigmoid, with its expert bias). It returns the next bool tensor ``[N]`` and may only release.
    """
    return Patch(Seam.ROUTER, apply)


def batch_patch(apply: Callable[[RankBatch], RankBatch]) -> Patch:
    """Change loss columns of one recorded data-parallel rank's batch.

    It may change what the loss reads (advantage, loss_mask, log-probabilities, turns), never the
    tokens that the model reads: that would be another step, and the engine refuses it.
    """
    return Patch(Seam.BATCH, apply)


def loss_mask_patch(drop: Callable[[RankBatch], Tensor]) -> Patch:
    """Stop tokens from training, as if the trainer had masked them.

    ``drop(batch)`` gets one recorded data-parallel rank's batch and returns a bool tensor,
    ``[B, T]`` for tokens or ``[B]`` for whole rows, true where nothing trains any more. They
    leave the denominators too; to drop the policy term alone use :func:`token_weights_patch`.
    """

    def apply(batch: RankBatch) -> RankBatch:
        dropped = drop(batch)
        dropped_BT = dropped.unsqueeze(1) if dropped.dim() == 1 else dropped
        return batch.replace(loss_mask=batch.loss_mask & ~dropped_BT)

    return Patch(Seam.BATCH, apply)


def settings_patch(**fields: Any) -> Patch:
    """Set loss settings by AXRL's field names, e.g. ``mismatch_token_clip_max=2.0``."""

    def apply(settings: GrpoSettings) -> GrpoSettings:
        return settings.replace(**fields)

    return Patch(Seam.SETTINGS, apply)


def token_weights_patch(apply: Callable[[Tensor, RankBatch, Tensor], Tensor]) -> Patch:
    """Multiply the policy loss by a weight a token.

    ``apply(weight_BT, rows, logprob_BT)`` gets the weights so far (float32, ones at first), the
    rows of one micro-batch as the trainer split them, and the current log-probabilities
    (detached), and returns the next weights. Denominators are not touched.
    """
    return Patch(Seam.TOKEN_WEIGHTS, apply)


@dataclass(frozen=True, kw_only=True)
class Norms:
    """What an answer that acts after the norm knows of a step; all L2, before clipping.

    ``clip_grad`` is the run's own clip (None or 0: none), ``param_norms`` those of each parameter
    by name, ``quiet_param_norms`` the same of the case's quiet control, None without one.
    """

    norm: float
    median: float | None
    clip_grad: float | None
    param_norms: Mapping[str, float]
    quiet_param_norms: Mapping[str, float] | None


def clipped(norm: float, bound: float | None) -> float:
    """Megatron's clipping: norm * min(1, bound / (norm + 1e-6)); no bound, no clip."""
    return norm * clip_coefficient(norm, bound)


def clip_coefficient(norm: float, bound: float | None) -> float:
    """What Megatron's clipping multiplies a gradient of norm ``norm`` by."""
    return min(1.0, bound / (norm + 1e-6)) if bound else 1.0


@dataclass(frozen=True)
class AfterNorm:
    """An answer on the optimizer's side: the norm of what it lets through (``postclip_norm``).

    None where the step does not tell: no median, no quiet control to compare with.
    """

    answer: Callable[[Norms], float | None]

    def __call__(self, norms: Norms) -> float | None:
        """``answer(norms)``; what it raises becomes a PatchError."""
        try:
            told = self.answer(norms)
            return None if told is None else float(told)
        except SpikeReplayError:
            raise
        except (Exception, SystemExit) as error:
            raise PatchError(
                f"an answer after the norm raised {type(error).__name__}: {error}"
            ) from error


Built = Patch | AfterNorm | Sequence[Patch]


@dataclass(frozen=True, kw_only=True)
class Mitigation:
    """A named, parametrized method. ``build(**params)`` gives its patches."""

    slug: str
    family: str
    summary: str
    source: str
    diagnostic: bool
    changes_unit: bool
    build: Callable[..., Built]
    after_norm: bool = False

    @property
    def defaults(self) -> dict[str, Any]:
        """Parameters with their default values."""
        return {p.name: p.default for p in inspect.signature(self.build).parameters.values()}

    def patches(self, params: Mapping[str, Any] | None = None) -> tuple[Patch, ...]:
        """Patches for ``params``; an unknown parameter is an error that lists the known ones."""
        built = self._built(self._checked(params))
        if isinstance(built, AfterNorm) and self.after_norm:
            return ()  # what acts after the norm has nothing to patch before it
        if isinstance(built, Patch):
            return (built,)
        listed = isinstance(built, Sequence) and (len(built) > 0 or self.after_norm)
        if not listed or isinstance(built, AfterNorm) or not all(_is_patch(p) for p in built):
            raise PatchError(
                f"mitigation {self.slug}: found {built!r}, expected a patch or several"
            )
        return tuple(built)

    def answer(self, params: Mapping[str, Any] | None = None) -> AfterNorm | None:
        """What it does to the norm afterwards; None for a method that acts before it."""
        built = self._built(self._checked(params))
        return built if isinstance(built, AfterNorm) else None

    def _checked(self, params: Mapping[str, Any] | None) -> dict[str, Any]:
        given = dict(params or {})
        unknown = sorted(set(given) - set(self.defaults))
        if unknown:
            known = ", ".join(f"{k}={v!r}" for k, v in self.defaults.items()) or "none"
            raise PatchError(
                f"mitigation {self.slug}: unknown parameter {', '.join(unknown)}; known: {known}"
            )
        for name, value in given.items():
            wanted = _kind(self.defaults[name])
            if wanted is not None and not _fits(value, self.defaults[name]):
                raise PatchError(
                    f"mitigation {self.slug}: {name}: found {value!r}, expected {wanted}"
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise PatchError(
                    f"mitigation {self.slug}: {name}: found {value!r}, expected a finite number"
                )
        return given

    def _built(self, given: Mapping[str, Any]) -> Built:
        """What ``build`` returns; what it raises becomes a PatchError that names the slug."""
        try:
            return self.build(**given)
        except PatchError:
            raise
        except (Exception, SystemExit) as error:
            raise PatchError(
                f"mitigation {self.slug}: its function raised {type(error).__name__}: {error}"
            ) from error

    @property
    def seams(self) -> tuple[Seam, ...]:
        """Seams that the default patches touch, in the order of application."""
        present = {p.seam for p in self.patches()}
        return tuple(s for s in Seam if s in present)


def _is_patch(value: object) -> bool:
    return isinstance(value, Patch)


def _kind(default: Any) -> str | None:
    """What a parameter takes, told by its default; None: anything."""
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return kinds.get(type(default))


def _fits(value: Any, default: Any) -> bool:
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)


def mitigation(
    *,
    slug: str,
    family: str,
    summary: str,
    source: str,
    diagnostic: bool = False,
    changes_unit: bool = False,
    after_norm: bool = False,
) -> Callable[[Callable[..., Built]], Mitigation]:
    """Declare a mitigation; every parameter of the decorated function needs a default.

    ``diagnostic``: it changes what the training means, so it is never called proven.
    ``changes_unit``: it changes the unit of the loss (denominator, aggregation, global scale), so
    it is also judged by ``ratio_scaled``. ``after_norm``: it acts after the norm (clipping,
    skipping), returns an :class:`AfterNorm` (or nothing: the run's own clip) instead of patches,
    and is judged ``not_applicable``.
    """

    def wrap(build: Callable[..., Built]) -> Mitigation:
        for parameter in inspect.signature(build).parameters.values():
            if parameter.default is inspect.Parameter.empty:
                raise PatchError(f"mitigation {slug}: parameter {parameter.name} has no default")
        return Mitigation(
            slug=slug,
            family=family,
            summary=summary,
            source=source,
            diagnostic=diagnostic,
            changes_unit=changes_unit,
            build=build,
            after_norm=after_norm,
        )

    return wrap
