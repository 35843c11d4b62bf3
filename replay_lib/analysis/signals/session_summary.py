"""What ``analyze --session`` adds: saved routes and log-probabilities against a model's own."""

from __future__ import annotations

from replay_lib.analysis.signals.figures import Finite, Ratio


class Agreement(Finite):
    """Saved routes against the model's own choice, over ``tokens``.

    ``ordered`` share of tokens with the same experts in the same order, ``overlap`` share of saved
    slots in the model's set, ``disjoint`` share of tokens without a common expert, ``logit_gap``
    mean of (mean logit of the model's own top-k - mean logit of the saved experts).
    """

    tokens: int
    ordered: float | None
    overlap: float | None
    disjoint: float | None
    logit_gap: float | None
    largest_gap: float | None


class LayerAgreement(Finite):
    """One MoE layer; ``response`` are loss positions, ``prompt`` all other real ones.

    A row's last token has no saved route and is left out.
    """

    layer: int  # number of the MoE layer
    every: Agreement
    prompt: Agreement
    response: Agreement


class Mismatch(Finite):
    """Two sets of log-probabilities of the same tokens.

    ``normalised`` is ``mean_absolute`` over the mean ``|log-probability|`` of ``second``.
    """

    first: str
    second: str
    tokens: str  # loss or non-loss
    count: int
    mean_absolute: float | None
    largest: float | None
    normalised: float | None
    k2: float | None


class SessionSignals(Finite):
    """What the model adds. ``replayed`` are log-probabilities with the recorded routes forced,
    ``own`` those of the model's own routing; the weights are the step's, before its update."""

    fidelity: str
    device: str
    dtype: str
    ratios: tuple[Ratio, ...]  # current/old and current/rollout, current = replayed
    layers: tuple[LayerAgreement, ...]
    mismatches: tuple[Mismatch, ...]
