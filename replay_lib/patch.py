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


def checkpoint_patch(checkpoint: str) -> Patch:
    """Replay with the weights of another checkpoint of the same model.

    ``checkpoint`` is a directory that holds one: a snapshot in either layout, or an ``iter_*`` of
    the trainer's own. A relative path starts at the case's directory, for a snapshot without a
    case at the current one. Tensors of the model alone are read; their names and shapes have to be
    the model's, else it is a PatchError that names all that are not.
    """
    return Patch(Seam.WEIGHTS, lambda weights: weights.of_checkpoint(checkpoint))


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
    """A named, parametrized method. ``build(**params)`` gives its patches.

    ``needs`` are the parameters without a default: the method is tried only where somebody gives
    them, never as one of all registered methods.
    """

    slug: str
    family: str
    summary: str
    source: str
    diagnostic: bool
    changes_unit: bool
    build: Callable[..., Built]
    after_norm: bool = False
    needs: tuple[str, ...] = ()

    @property
    def defaults(self) -> dict[str, Any]:
        """Parameters with their default values; those that it needs have none."""
        parameters = inspect.signature(self.build).parameters.values()
        return {p.name: p.default for p in parameters if p.name not in self.needs}

    @property
    def usage(self) -> str:
        """How it is written with the parameters that it needs."""
        needed = ",".join(f"{name}={name.upper()}" for name in self.needs)
        return f"{self.slug}:{needed}" if needed else self.slug

    @property
    def _examples(self) -> dict[str, Any]:
        """A value of the right kind for each parameter."""
        parameters = inspect.signature(self.build).parameters
        return self.defaults | {n: _EXAMPLES[_annotated(parameters[n])] for n in self.needs}

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
        examples = self._examples
        unknown = sorted(set(given) - set(examples))
        if unknown:
            known = [*self.needs, *(f"{k}={v!r}" for k, v in self.defaults.items())]
            raise PatchError(
                f"mitigation {self.slug}: unknown parameter {', '.join(unknown)}; "
                f"known: {', '.join(known) or 'none'}"
            )
        absent = [name for name in self.needs if name not in given]
        if absent:
            raise PatchError(
                f"mitigation {self.slug}: found no {', '.join(absent)}, which it needs; write "
                f"{self.usage}"
            )
        for name, value in given.items():
            wanted = _kind(examples[name])
            if wanted is not None and not _fits(value, examples[name]):
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
        present = {p.seam for p in self.patches({n: self._examples[n] for n in self.needs})}
        return tuple(s for s in Seam if s in present)


def _is_patch(value: object) -> bool:
    return isinstance(value, Patch)


def _kind(default: Any) -> str | None:
    """What a parameter takes, told by its default; None: anything."""
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return kinds.get(type(default))


#: By annotation: values of parameters that have no default, to check and to build by.
_EXAMPLES: dict[str, Any] = {"str": "text", "int": 1, "float": 1.0, "bool": True}


def _annotated(parameter: inspect.Parameter) -> str:
    """The annotation's name, written as text or not."""
    annotation = parameter.annotation
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")


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
    needs: Sequence[str] = (),
) -> Callable[[Callable[..., Built]], Mitigation]:
    """Declare a mitigation; every parameter of the decorated function needs a default.

    ``diagnostic``: it changes what the training means, so it is never called proven.
    ``changes_unit``: it changes the unit of the loss (denominator, aggregation, global scale), so
    it is also judged by ``ratio_scaled``. ``after_norm``: it acts after the norm (clipping,
    skipping), returns an :class:`AfterNorm` (or nothing: the run's own clip) instead of patches,
    and is judged ``not_applicable``. ``needs`` names the parameters that have no default (text,
    numbers, true or false, by their annotation), since no value suits every case.
    """

    def wrap(build: Callable[..., Built]) -> Mitigation:
        parameters = inspect.signature(build).parameters
        for parameter in parameters.values():
            if (parameter.default is inspect.Parameter.empty) != (parameter.name in needs):
                has = "a default, though" if parameter.name in needs else "no default, and"
                named = "names it" if parameter.name in needs else "does not name it"
                told = f"parameter {parameter.name} has {has} needs {named}"
                raise PatchError(f"mitigation {slug}: {told}")
        for name in needs:
            if name not in parameters or _annotated(parameters[name]) not in _EXAMPLES:
                kinds = ", ".join(_EXAMPLES)
                raise PatchError(
                    f"mitigation {slug}: needs: found {name!r}, expected a parameter annotated as "
                    f"one of {kinds}"
                )
        return Mitigation(
            slug=slug,
            family=family,
            summary=summary,
            source=source,
            diagnostic=diagnostic,
            changes_unit=changes_unit,
            build=build,
            after_norm=after_norm,
            needs=tuple(needs),
        )

    return wrap
