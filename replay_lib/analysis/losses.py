"""The trainer's own loss on the stored log-probabilities: does it come out finite?

Old log-probabilities stand in for the current policy's (on the first update of a window they are
the same), so no model is needed. What is not finite here is not finite in the replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from replay_lib.analysis.columns import numbers
from replay_lib.analysis.findings import Finding, Place, finding
from replay_lib.batch import RankBatch
from replay_lib.errors import BatchError, SettingsError
from replay_lib.loss import GrpoSettings, MicroBatchLoss, micro_batch_loss


def check_losses(
    batch: RankBatch, split: Sequence[Sequence[int]], file: Path, settings: GrpoSettings
) -> Iterator[Finding]:
    """Findings about the loss of each micro-batch of one rank (rows by ``split``)."""
    if batch.old_logprobs is None:
        return  # told as an absent column
    for rows in split:
        part = batch.select(rows)
        try:
            loss, bad = _loss(part, settings)
        except SettingsError as error:
            yield finding("settings-refused", "trainer.pt", str(error))
            return
        except BatchError:
            return  # told as an absent column
        at = Place(dp_rank=batch.dp_rank, row=int(rows[0]))
        value = float(loss.loss.detach())
        if not bool(part.loss_mask.any()):
            found = f"no loss token in the micro-batch of rows {numbers(list(rows))}"
            if not bool(loss.scaled.isfinite()):
                found += f"; {settings.loss_agg_type} of nothing gives the loss {value}"
            yield finding("loss-of-nothing", file, found, at)
        elif bad is not None or not bool(loss.scaled.isfinite()):
            row, token = bad if bad is not None else (0, None)
            place = Place(dp_rank=batch.dp_rank, row=int(rows[row]), token=token)
            found = f"the loss of the micro-batch of rows {numbers(list(rows))} is {value}"
            yield finding("loss-not-finite", file, found, place)


def _loss(part: RankBatch, settings: GrpoSettings) -> tuple[MicroBatchLoss, tuple[int, int] | None]:
    """The loss, and row and token of the first gradient that is not finite."""
    old = part.column("old_logprobs")
    # the model's own log-probabilities are finite whatever the stored ones are
    log_prob = old.nan_to_num(nan=-1.0, posinf=-1.0, neginf=-1.0).float().requires_grad_()
    entropy = torch.zeros_like(log_prob).requires_grad_()
    loss = micro_batch_loss(settings, part, log_prob, entropy)
    (grad,) = torch.autograd.grad(
        loss.scaled, [log_prob], allow_unused=True, materialize_grads=True
    )
    bad = (~grad.isfinite()).nonzero()
    if not len(bad):
        return loss, None
    return loss, _cause(part) or (int(bad[0][0]), int(bad[0][1]))


def _cause(part: RankBatch) -> tuple[int, int] | None:
    """The first stored value that is not finite: a poisoned mean spoils every token's gradient."""
    for name in ("advantage", "old_logprobs", "rollout_logprobs", "ref_logprobs"):
        values = getattr(part, name)
        if values is not None and not bool(values.isfinite().all()):
            row, token = (int(i) for i in (~values.isfinite()).nonzero()[0])
            return row, token
    return None
