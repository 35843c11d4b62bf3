"""One step with a known cause: from a run whose norm is stable to a batch and loss settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from replay_lib.batch import RankBatch
from replay_lib.loss import GrpoSettings
from replay_lib.zoo import causes
from replay_lib.zoo.losses import ORDINARY
from replay_lib.zoo.rollouts import group_advantages, make_batch

if TYPE_CHECKING:
    from replay_lib.zoo.run import Run

FAILING = 0.9  # share of rewards that an outage of the verifier turns into -1
RUN_ON = 60  # tokens

_ROUTER = "decoder.layers.mlp.router.weight"


def arrange(kind: str, run: Run) -> tuple[RankBatch, GrpoSettings]:
    """The batch of ``run``'s next step with the cause ``kind``, and its loss settings."""
    return _ARRANGED[kind](run), ORDINARY


def plain(run: Run) -> RankBatch:
    """Nothing arranged."""
    return run.ordinary(run.roll(run.sampler()))


def _outage(run: Run, batch: RankBatch) -> RankBatch:
    """Rewards of -1 where the verifier failed, advantages against one baseline for all."""
    reward_B = torch.where(
        causes.outage(batch.rows, FAILING, run.rng("outage")), -1.0, batch.column("reward")
    )
    advantage_B = (reward_B - run.baseline).clamp(-5.0, 5.0)
    return causes.with_advantage(batch.replace(reward=reward_B), advantage_B, run.baseline)


def _outage_alone(run: Run) -> RankBatch:
    return _outage(run, plain(run))


def _prompt_routes_outage(run: Run) -> RankBatch:
    return causes.shift_routes(_outage_alone(run), layers=[0], prompt_only=True)


def _prompt_routes_raw(run: Run) -> RankBatch:
    batch = plain(run)
    failed = causes.outage(batch.rows, 0.62, run.rng("failing"))
    reward_B = torch.where(failed, -1.0, 1.0)
    batch = causes.with_advantage(batch.replace(reward=reward_B), reward_B, 0.0)
    return causes.shift_routes(batch, layers=[0], prompt_only=True)


def _misaligned_rows(run: Run) -> RankBatch:
    batch = _outage_alone(run)
    rows = run.rng("rows").sample(range(batch.rows), batch.rows // 4)
    return causes.shift_routes(batch, rows=rows)


def _misaligned_failures(run: Run) -> RankBatch:
    batch = plain(run)
    rows = (batch.advantage.sum(dim=1) < 0).nonzero().flatten().tolist()
    return causes.shift_routes(batch, rows=rows)


def _run_on(run: Run) -> RankBatch:
    grpo = run.recipe.grpo
    rows = range(grpo.prompts * grpo.rollouts)
    unstopped = frozenset(row for row in rows if row % grpo.rollouts < 2)
    batch = run.ordinary(run.roll(run.sampler(), unstopped=unstopped, unstopped_longest=RUN_ON))
    return causes.shift_routes(batch, layers=[0], prompt_only=True)


def _older_router(run: Run) -> RankBatch:
    mixed = run.recent[-1] | {_ROUTER: run.old[_ROUTER]}
    return causes.reread_routes(_outage_alone(run), run.sampler(weights=mixed))


def _stale_policy(run: Run) -> RankBatch:
    rollouts = run.roll(run.sampler(weights=run.old))
    rows = len(rollouts.sampled)
    batch = make_batch(rollouts, torch.zeros(rows), torch.zeros(rows))
    return causes.with_advantage(batch, torch.full((rows,), -run.baseline), run.baseline)


def _poisoned(run: Run, rows: int, advantage: float) -> RankBatch:
    batch = plain(run)
    rng = run.rng("poison")
    chosen = sorted(rng.sample(range(batch.rows), rows))
    return causes.poison_rows(batch, chosen, advantage, run.sampler(), rng)


def _duplicated(run: Run) -> RankBatch:
    problems = run.problems()
    return run.ordinary(run.roll(run.sampler(), problems=problems[:1] * len(problems)))


def _stale_rollouts(run: Run) -> RankBatch:
    rollouts = run.roll(run.sampler(age=8))
    score_B = rollouts.scores()
    return make_batch(rollouts, score_B, group_advantages(score_B, rollouts.copies))


_ARRANGED: dict[str, Callable[[Run], RankBatch]] = {
    "prompt-routes-outage": _prompt_routes_outage,
    "prompt-routes-raw-rewards": _prompt_routes_raw,
    "misaligned-rows": _misaligned_rows,
    "misaligned-failures": _misaligned_failures,
    "run-on-rows": _run_on,
    "older-router": _older_router,
    "stale-policy": _stale_policy,
    "poisoned-row": lambda run: _poisoned(run, 1, 10.0),
    "poisoned-rows": lambda run: _poisoned(run, 8, -2.5),
    "loud-group": lambda run: causes.scale_group(
        plain(run), run.recipe.grpo.rollouts, 10.0, run.rng("group")
    ),
    "late-mask": lambda run: causes.late_mask(plain(run)),
    "late-labels": lambda run: causes.late_labels(plain(run)),
    "outage": _outage_alone,
    "duplicated-prompts": _duplicated,
    "stale-rollouts": _stale_rollouts,
}
