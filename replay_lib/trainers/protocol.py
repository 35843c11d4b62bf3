"""What a trainer is: a loss of one micro-batch, and what it cannot honour.

The engine runs the model and hands a trainer what its loss reads: settings after all patches, the
rows of one micro-batch as the run split them, log-probabilities of the labels, entropies, and the
product of the token-weights patches. It asks for nothing else, so a trainer needs neither model nor
process group.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.errors import PatchError, SpikeReplayError, TrainerError, fault
from replay_lib.loss import GrpoSettings, MicroBatchLoss, micro_batch_loss
from replay_lib.patch import Patch, Seam
from replay_lib.trainers.names import GRPO

#: Seams that act inside a trainer; the others act before it or on the model.
TRAINER_SEAMS = (Seam.SETTINGS, Seam.TOKEN_WEIGHTS)


class LossFunction(Protocol):
    """The loss of one micro-batch; see :meth:`Trainer.loss`."""

    def __call__(
        self,
        settings: GrpoSettings,
        rows: RankBatch,
        log_prob_BT: Tensor,
        entropy_BT: Tensor,
        token_weight_BT: Tensor | None = None,
    ) -> MicroBatchLoss: ...


class Trainer(Protocol):
    """What ``module:factory`` returns. It may have an attribute ``refuses`` too.

    ``refuses`` names seams that this loss cannot honour, ``"settings"`` or ``"token_weights"``; a
    method that acts there is refused by name before anything is replayed.
    """

    def loss(
        self,
        settings: GrpoSettings,
        rows: RankBatch,
        log_prob_BT: Tensor,
        entropy_BT: Tensor,
        token_weight_BT: Tensor | None = None,
    ) -> MicroBatchLoss:
        """The loss of the micro-batch ``rows``.

        ``log_prob_BT`` (of the labels, nats, the current policy's) and ``entropy_BT`` (nats; zeros
        unless the settings ask for it) are float32 ``[B, T]`` on the model's device, 0 outside the
        attention mask, and are what the gradient is taken for. ``token_weight_BT`` float32
        ``[B, T]`` multiplies the policy term of each token and no denominator; None: ones.
        Columns of ``rows`` are on the same device.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LoadedTrainer:
    """A trainer ready for the engine: its name, its loss, what it refuses, notes for results."""

    name: str
    loss: LossFunction
    refuses: frozenset[Seam] = frozenset()
    notes: tuple[str, ...] = ()

    def check_patches(self, patches: Sequence[Patch]) -> None:
        """PatchError where a patch acts at a seam that this trainer cannot honour."""
        refused = [s for s in TRAINER_SEAMS if s in self.refuses and s in {p.seam for p in patches}]
        if refused:
            names = ", ".join(refused)
            raise PatchError(
                f"trainer {self.name}: it cannot honour patches at the {names} seam (its "
                f"attribute refuses says so); replay this method with another trainer"
            )


#: The built-in loss, equal to AXRL's term by term.
BUILT_IN = LoadedTrainer(name=GRPO, loss=micro_batch_loss)


def seams_from(name: str, refuses: Any) -> frozenset[Seam]:
    """Seams out of a trainer's attribute ``refuses``; TrainerError where it names no such seam."""
    known = {seam.value: seam for seam in TRAINER_SEAMS}
    listed = [refuses] if isinstance(refuses, str) else refuses
    odd = not isinstance(listed, Collection) or [r for r in listed if r not in known]
    if odd:
        expected = f"a collection of {', '.join(map(repr, known))}"
        raise TrainerError(fault(f"trainer {name}", "refuses", repr(refuses), expected))
    return frozenset(known[r] for r in listed)


def token_loss(
    loss: Tensor,
    denominator: Tensor | float,
    rows: RankBatch,
    *,
    token_weight_BT: Tensor | None = None,
    keep_BT: Tensor | None = None,
    advantage_BT: Tensor | None = None,
) -> MicroBatchLoss:
    """A MicroBatchLoss out of what any trainer has; the rest tells how much signal is kept.

    ``loss`` is 0-d and carries the gradient; ``loss * denominator`` is what backward is called on,
    and the summed gradient is divided by the summed denominators. ``keep_BT`` says which loss
    tokens this trainer's filters keep (default: all of them), ``advantage_BT`` the advantage as
    used (default: the recorded one), ``token_weight_BT`` what the policy term was multiplied by.
    """
    mask_BT = rows.loss_mask.bool()
    keep = mask_BT if keep_BT is None else keep_BT.bool() & mask_BT
    weight = torch.ones_like(rows.advantage) if token_weight_BT is None else token_weight_BT
    count = torch.as_tensor(denominator, device=loss.device)
    return MicroBatchLoss(
        loss=loss,
        denominator=count.detach(),
        scaled=loss * count.detach(),
        keep_BT=keep,
        policy_weight_BT=(weight * keep).detach(),
        advantage_BT=(rows.advantage if advantage_BT is None else advantage_BT).detach(),
        read_metrics=dict,
    )


def checked(name: str, loss: LossFunction) -> LossFunction:
    """``loss`` whose answers are checked and whose errors name the trainer."""

    def call(
        settings: GrpoSettings,
        rows: RankBatch,
        log_prob_BT: Tensor,
        entropy_BT: Tensor,
        token_weight_BT: Tensor | None = None,
    ) -> MicroBatchLoss:
        try:
            found: Any = loss(settings, rows, log_prob_BT, entropy_BT, token_weight_BT)
        except (SpikeReplayError, torch.OutOfMemoryError):
            raise
        except (Exception, SystemExit) as error:
            raise TrainerError(
                f"trainer {name}: its loss raised {type(error).__name__}: {error}"
            ) from error
        check_answer(name, found, log_prob_BT)
        return found  # type: ignore[no-any-return]

    return call


def check_answer(name: str, found: Any, log_prob_BT: Tensor) -> None:
    """TrainerError where ``found`` is not the loss of a micro-batch of ``log_prob_BT``'s shape."""
    where = f"trainer {name}: what loss returned"
    if not isinstance(found, MicroBatchLoss):
        then = "replay_lib.trainers.token_loss makes one of a loss and a denominator."
        raise TrainerError(fault(where, None, type(found).__name__, "a MicroBatchLoss", then))
    shape = log_prob_BT.shape
    for field in ("keep_BT", "policy_weight_BT", "advantage_BT"):
        value = getattr(found, field)
        if not isinstance(value, Tensor) or value.shape != shape:
            raise TrainerError(fault(where, field, _told(value), f"a tensor {list(shape)} [B, T]"))
    for field in ("loss", "denominator", "scaled"):
        value = getattr(found, field)
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise TrainerError(fault(where, field, _told(value), "a tensor of no dimension"))
    if not found.scaled.requires_grad:
        then = "Where a micro-batch has no loss token, add log_prob_BT[:0].sum()."
        raise TrainerError(
            fault(where, "scaled", "a constant", "a loss that depends on log_prob_BT", then)
        )
    if not float(found.denominator) >= 0:
        counted = str(float(found.denominator))
        raise TrainerError(fault(where, "denominator", counted, "a count, 0 or more"))


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return type(value).__name__
