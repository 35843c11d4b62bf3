"""What is done to a step's data, routes or rewards. Nothing here touches the loss or the norm.

Every function takes and returns plain batches or tensors, so that each can be looked at alone.
Legend: B rows, T width, L layers, K top-k.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.zoo.rollouts import IGNORE
from replay_lib.zoo.sampler import Sampler
from replay_lib.zoo.task import STOP


def shift_routes(
    batch: RankBatch,
    *,
    rows: Iterable[int] | None = None,
    layers: Sequence[int] | None = None,
    prompt_only: bool = False,
) -> RankBatch:
    """Each token gets the experts of the token before it, in ``rows`` and ``layers`` (None: all).

    The first token keeps its own. ``prompt_only``: positions in front of the first that trains.
    """
    wanted = set(range(batch.rows)) if rows is None else set(rows)
    first = batch.loss_mask.int().argmax(dim=1).tolist()

    def shifted(row: int, routes: Tensor) -> Tensor:
        end = first[row] if prompt_only else routes.shape[0]
        chosen = list(range(routes.shape[1])) if layers is None else list(layers)
        new = routes.clone()
        for layer in chosen:
            new[1:end, layer] = routes[: end - 1, layer]
        return new

    routes = tuple(
        shifted(row, r) if r is not None and row in wanted else r
        for row, r in enumerate(batch.routes)
    )
    return batch.replace(routes=routes)


def with_advantage(batch: RankBatch, advantage_B: Tensor, baseline: float) -> RankBatch:
    """Advantages ``advantage_B`` on loss tokens, against one baseline for all rows."""
    advantage_BT = torch.where(batch.loss_mask, advantage_B[:, None].float(), 0.0)
    baseline_B = torch.full((batch.rows,), baseline)
    return batch.replace(advantage=advantage_BT, reward_baseline=baseline_B)


def outage(rows: int, share: float, rng: random.Random) -> Tensor:
    """bool ``[B]``: rows whose verification failed, ``share`` of all, drawn without repeats."""
    failed = torch.zeros(rows, dtype=torch.bool)
    failed[rng.sample(range(rows), round(share * rows))] = True
    return failed


def poison_rows(
    batch: RankBatch, rows: Sequence[int], advantage: float, sampler: Sampler, rng: random.Random
) -> RankBatch:
    """The responses of ``rows`` become random tokens with one ``advantage``.

    Routes and rollout log-probabilities are those that the rollout engine has for these tokens.
    """
    ids = batch.input_ids.clone()
    known = [t for t in range(1, sampler.shape.vocabulary) if t != STOP]
    lengths = batch.lengths()
    starts = {row: int(batch.loss_mask[row].int().argmax()) + 1 for row in rows}
    for row in rows:
        for at in range(starts[row], lengths[row]):
            ids[row, at] = rng.choice(known)
    read = sampler.read([ids[row, : lengths[row]].tolist() for row in rows])
    routes = list(batch.routes)
    rollout = batch.column("rollout_logprobs").clone()
    new_advantage = batch.advantage.clone()
    for row, (experts, log_probs) in zip(rows, read, strict=True):
        routes[row] = experts
        rollout[row, starts[row] - 1 : lengths[row] - 1] = log_probs[starts[row] - 1 :]
        new_advantage[row] = torch.where(batch.loss_mask[row], advantage, 0.0)
    return batch.replace(
        input_ids=ids,
        labels=_labels(ids, batch.loss_mask),
        rollout_logprobs=rollout,
        advantage=new_advantage,
        routes=tuple(routes),
    )


def reread_routes(batch: RankBatch, sampler: Sampler) -> RankBatch:
    """The routes of the same tokens as ``sampler`` has them."""
    lengths = batch.lengths()
    rows = [batch.input_ids[row, :n].tolist() for row, n in enumerate(lengths)]
    return batch.replace(routes=tuple(experts for experts, _ in sampler.read(rows)))


def scale_group(batch: RankBatch, copies: int, factor: float, rng: random.Random) -> RankBatch:
    """Advantages of one group, drawn among those that have any, times ``factor``."""
    groups = batch.advantage.abs().sum(dim=1).view(-1, copies).sum(dim=1)
    group = rng.choice(groups.nonzero().flatten().tolist())
    advantage = batch.advantage.clone()
    advantage[group * copies : (group + 1) * copies] *= factor
    return batch.replace(advantage=advantage)


def late_mask(batch: RankBatch) -> RankBatch:
    """The loss mask one position late: the first response token does not train, and the position
    behind the last one is left out, for it has no label."""
    mask = torch.zeros_like(batch.loss_mask)
    mask[:, 1:] = batch.loss_mask[:, :-1]
    has_next = torch.zeros_like(mask)
    has_next[:, :-1] = batch.attention_mask[:, 1:]
    mask &= has_next
    row_B = batch.advantage.gather(1, batch.loss_mask.int().argmax(dim=1, keepdim=True))
    return batch.replace(
        loss_mask=mask,
        labels=_labels(batch.input_ids, mask),
        advantage=torch.where(mask, row_B, 0.0),
    )


def late_labels(batch: RankBatch) -> RankBatch:
    """Labels one position late: each position is asked for the token that it reads."""
    return batch.replace(labels=torch.where(batch.loss_mask, batch.input_ids, IGNORE))


def _labels(ids: Tensor, mask: Tensor) -> Tensor:
    following = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)
    return torch.where(mask, following, IGNORE)
