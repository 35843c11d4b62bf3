"""From responses to the batch that the trainer reads: rewards, advantages, label-aligned columns.

Legend: B rows, T padded width, G prompts (groups), R rollouts a prompt; B = G * R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.zoo.sampler import Sampled
from replay_lib.zoo.task import PAD, Problem, decode, encode, score, share

IGNORE = -100  # the label of a position that does not train


@dataclass(frozen=True)
class Rollouts:
    """``copies`` responses to each problem, problem after problem, with the verifier's scores."""

    problems: tuple[Problem, ...]
    copies: int
    sampled: tuple[Sampled, ...]
    graded: bool = False

    @property
    def prompts(self) -> list[list[int]]:
        """The prompt of every row."""
        return [encode(p.prompt) for p in self.problems for _ in range(self.copies)]

    def scores(self) -> Tensor:
        """float32 ``[B]``: 1 where the last sum is right, else 0; the share of right characters
        where ``graded``."""
        rows = [p for p in self.problems for _ in range(self.copies)]
        judge = share if self.graded else score
        told = [judge(p, decode(s.tokens)) for p, s in zip(rows, self.sampled, strict=True)]
        return torch.tensor(told)


def group_advantages(score_B: Tensor, copies: int) -> Tensor:
    """``(score - group mean) / (group deviation + 1e-6)``, within 5 on both sides; float32 ``[B]``.

    The deviation is the sample's (n - 1); a group whose deviation is under 1e-8 gets zeros.
    Source: AXRL's controller (``scalar_advantage``).
    """
    group_GR = score_B.double().view(-1, copies)
    mean_G1 = group_GR.mean(dim=1, keepdim=True)
    deviation_G1 = group_GR.std(dim=1, keepdim=True)
    scaled_GR = ((group_GR - mean_G1) / (deviation_G1 + 1e-6)).clamp(-5.0, 5.0)
    return torch.where(deviation_G1 < 1e-8, 0.0, scaled_GR).float().flatten()


def make_batch(rollouts: Rollouts, reward_B: Tensor, advantage_B: Tensor) -> RankBatch:
    """The batch of one data-parallel rank, without old log-probabilities.

    ``rollout_logprobs`` and ``routes`` are what the rollout engine recorded; ``reward_baseline``
    is the mean reward of a row's group.
    """
    rows = [p + s.tokens for p, s in zip(rollouts.prompts, rollouts.sampled, strict=True)]
    starts = torch.tensor([len(p) for p in rollouts.prompts])
    batch = token_batch(rows, starts, advantage_B)
    rollout = torch.zeros(batch.rows, batch.width)
    for row, sampled in enumerate(rollouts.sampled):
        first = int(starts[row]) - 1  # the last prompt position predicts the first response token
        rollout[row, first : first + len(sampled.tokens)] = torch.tensor(sampled.log_probs)
    mean_B = reward_B.view(-1, rollouts.copies).mean(dim=1).repeat_interleave(rollouts.copies)
    return batch.replace(
        rollout_logprobs=rollout,
        reward=reward_B.float(),
        reward_baseline=mean_B.float(),
        trajectory_id=torch.arange(batch.rows),
        routes=tuple(s.routes for s in rollouts.sampled),
    )


def token_batch(rows: Sequence[Sequence[int]], starts_B: Tensor, advantage_B: Tensor) -> RankBatch:
    """Token columns of ``rows`` whose tokens from ``starts_B[b]`` on train, one advantage a row."""
    lengths = torch.tensor([len(r) for r in rows])
    width = int(lengths.max())
    ids = torch.full((len(rows), width), PAD)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    at = torch.arange(width)
    real = at < lengths[:, None]
    mask = (at >= starts_B[:, None] - 1) & (at < lengths[:, None] - 1)
    following = torch.cat([ids[:, 1:], torch.full((len(rows), 1), PAD)], dim=1)
    return RankBatch(
        dp_rank=0,
        index=torch.arange(len(rows)),
        input_ids=ids,
        labels=torch.where(mask, following, IGNORE),
        loss_mask=mask,
        attention_mask=real,
        position_ids=at.expand(len(rows), -1).contiguous(),
        advantage=torch.where(mask, advantage_B[:, None].float(), 0.0),
    )
