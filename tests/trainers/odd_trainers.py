"""Trainers that break the contract one way each, named ``odd_trainers:<factory>``."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from replay_lib.loss import micro_batch_loss

number = 7


def grpo(saved):
    """The built-in loss as one of the user's own."""
    return SimpleNamespace(loss=micro_batch_loss)


def without_weights(saved):
    """One that says that it cannot take token weights."""
    return SimpleNamespace(loss=micro_batch_loss, refuses=["token_weights"])


def of_another_seam(saved):
    """Refuses what does not act inside a trainer."""
    return SimpleNamespace(loss=micro_batch_loss, refuses=["routing"])


def nothing(saved):
    """Forgets to return."""


def raising(saved):
    """Has a mistake in it."""
    return saved["no such setting"]


class _NoLoss:
    @property
    def loss(self):
        raise OSError("no checkpoint of the critic")


def a_property(saved):
    """Has a loss that cannot be had."""
    return _NoLoss()


class _Unsure(SimpleNamespace):
    @property
    def refuses(self):
        raise SystemExit(4)


def unsure(saved):
    """Ends the program when asked what it refuses."""
    return _Unsure(loss=micro_batch_loss)


def _returning(change):
    def loss(*given):
        return change(micro_batch_loss(*given))

    return SimpleNamespace(loss=loss)


def only_a_loss(saved):
    """Returns a tensor."""
    return _returning(lambda found: found.loss)


def a_constant(saved):
    """Returns a loss that has no gradient."""
    return _returning(lambda found: replace(found, scaled=found.scaled.detach()))


def a_loss_a_row(saved):
    """Returns a loss of one dimension."""
    return _returning(lambda found: replace(found, loss=found.loss[None]))


def another_shape(saved):
    """Keeps the tokens of one row."""
    return _returning(lambda found: replace(found, keep_BT=found.keep_BT[:1]))


def a_negative_count(saved):
    """Counts backwards."""
    return _returning(lambda found: replace(found, denominator=-found.denominator))


def no_count(saved):
    """Counts NaN tokens."""
    return _returning(lambda found: replace(found, denominator=found.denominator * float("nan")))


def failing(saved):
    """Fails while a loss is computed."""
    return _returning(lambda found: 1 / 0)
