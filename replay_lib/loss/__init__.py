"""The trainer's loss in plain torch, equal to AXRL's term by term.

In the order in which data moves::

    settings       AXRL's options, strict and frozen
    logits         logits -> log-probabilities and entropies
    inputs         a micro-batch's columns, checked
    distillation   a teacher's share of the advantages
    ratios         probability ratios of tokens and sequences
    filters        which tokens keep their policy term, with which weight
    policy         seven policy losses
    control        KL and entropy
    aggregate      token values -> one number, eight ways
    denominator    what a micro-batch counts
    total          all of it

Masks and NaNs behave as in the trainer, on purpose: see ``tests/data/golden/README.md``.
"""

from __future__ import annotations

from replay_lib.loss.logits import log_prob_and_entropy
from replay_lib.loss.settings import EntropySettings, GrpoSettings, OpdSettings
from replay_lib.loss.total import MicroBatchLoss, micro_batch_loss

__all__ = [
    "EntropySettings",
    "GrpoSettings",
    "MicroBatchLoss",
    "OpdSettings",
    "log_prob_and_entropy",
    "micro_batch_loss",
]
