"""Trainers with one fault each, named ``planted:<factory>``; the rest is the built-in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from replay_lib.loss import micro_batch_loss

Change = Callable[..., Any]


def sound(_saved: Any) -> Any:
    """Without a fault."""
    return SimpleNamespace(loss=micro_batch_loss)


def _before(change: Change) -> Any:
    """The built-in loss of inputs that were changed."""
    return SimpleNamespace(
        loss=lambda settings, rows, *rest: micro_batch_loss(*change(settings, rows), *rest)
    )


def _after(change: Change) -> Any:
    """The built-in loss, changed."""
    return SimpleNamespace(loss=lambda *given: change(micro_batch_loss(*given)))


def without_clip(_saved: Any) -> Any:
    """The ratio clip was lost: nothing holds a token whose probability moved far."""
    return _before(
        lambda settings, rows: (
            settings.model_copy(update={"clip_ratio_low": 0.999, "clip_ratio_high": 1e6}),
            rows,
        )
    )


def half_the_denominator(_saved: Any) -> Any:
    """The denominator counts every second token."""
    return _after(lambda found: replace(found, denominator=found.denominator / 2))


def reversed_sign(_saved: Any) -> Any:
    """The loss is maximised."""
    return _after(lambda found: replace(found, loss=-found.loss, scaled=-found.scaled))


def without_sequence_mask(_saved: Any) -> Any:
    """Rows are masked by nothing any more; a step without such a mask is as it was."""
    none = {"mismatch_seq_masking_low": None, "mismatch_seq_masking_high": None}
    return _before(lambda settings, rows: (settings.model_copy(update=none), rows))


def zero_over_zero(_saved: Any) -> Any:
    """A mean over no token: NaN."""
    return _after(lambda found: replace(found, scaled=found.scaled * float("nan")))


def renamed_column(_saved: Any) -> Any:
    """The trainer reads a column under a name that no batch has."""
    return _before(lambda settings, rows: (settings, rows.old_log_probs and rows))


def other_advantages(_saved: Any) -> Any:
    """Each row has its neighbour's advantage."""
    return _before(
        lambda settings, rows: (settings, replace(rows, advantage=rows.advantage.roll(1, dims=0)))
    )
