"""The kinds of spikes, by name: what is arranged, and what it is known to do. No torch.

``spikes`` False: wrong inputs that the gradient norm does not show.
"""

from __future__ import annotations

from dataclasses import dataclass

from replay_lib.errors import UsageError


@dataclass(frozen=True)
class Kind:
    """One kind; ``summary`` says what is wrong, ``routes`` whether the saved routes are."""

    name: str
    summary: str
    spikes: bool = True
    routes: bool = False


NATURAL = "natural"
REPORT = "zoo.json"  # what a kind came to, beside its snapshots

_ALL = (
    Kind(
        NATURAL,
        "rollouts 8 steps old at twice the learning rate, ratio to the rollout engine's "
        "log-probabilities, no ratio clip; nothing is arranged in the data",
    ),
    Kind(
        "prompt-routes-outage",
        "prompt routes of layer 0 shifted by one token while 9 of 10 rewards are -1, "
        "advantage = reward - one baseline for all",
        routes=True,
    ),
    Kind(
        "prompt-routes-raw-rewards",
        "prompt routes of layer 0 shifted by one token, advantage = raw reward, +1 or -1, "
        "62% failing",
        routes=True,
    ),
    Kind(
        "misaligned-rows",
        "all routes shifted by one token in a quarter of the rows while 9 of 10 rewards are -1, "
        "advantage = reward - one baseline for all",
        routes=True,
    ),
    Kind(
        "misaligned-failures",
        "all routes shifted by one token in the rows with negative advantage, ordinary GRPO",
        routes=True,
    ),
    Kind(
        "run-on-rows",
        "two of eight rollouts go on to 60 tokens, prompt routes of layer 0 shifted by one token, "
        "ordinary GRPO",
        routes=True,
    ),
    Kind(
        "older-router",
        "routes of a much older router while 9 of 10 rewards are -1, "
        "advantage = reward - one baseline for all",
        routes=True,
    ),
    Kind(
        "stale-policy",
        "rollouts of a much older policy, every reward 0, advantage = reward - one baseline",
    ),
    Kind("poisoned-row", "one row of random tokens with advantage +10"),
    Kind("poisoned-rows", "eight rows of random tokens with advantage -2.5"),
    Kind("loud-group", "one group's advantages times 10 after normalisation"),
    Kind("late-mask", "the loss mask one position late", spikes=False),
    Kind("late-labels", "labels one position late: the token that was read", spikes=False),
    Kind(
        "outage",
        "9 of 10 rewards are -1, advantage = reward - one baseline for all; routes are right",
        spikes=False,
    ),
    Kind("duplicated-prompts", "one prompt sixteen times", spikes=False),
    Kind("stale-rollouts", "rollouts 8 steps old, ordinary GRPO", spikes=False),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}


def find_kind(name: str) -> Kind:
    """The kind ``name``; a UsageError that lists all kinds."""
    if name not in KINDS:
        raise UsageError(f"zoo: found kind {name!r}, expected one of {', '.join(KINDS)}")
    return KINDS[name]
