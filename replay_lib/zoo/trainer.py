"""The training step of the zoo, made of the pieces that the replay uses: the same micro-batches,
forward, loss and gradient buffers; then clipping and Adam."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.engine.forward import Forward, forward
from replay_lib.engine.gradients import GradientBuffers, GradientCollector, measure
from replay_lib.engine.inputs import MicroBatch, RankInput, micro_batches, packed_routes, rank_input
from replay_lib.engine.model import LiveModel
from replay_lib.loss import GrpoSettings, micro_batch_loss
from replay_lib.microbatch import split_ranks
from replay_lib.zoo.recipe import Grpo

#: (rows of the micro-batch, forward) -> (loss to be differentiated, its denominator)
Loss = Callable[[MicroBatch, Forward], tuple[Tensor, float]]


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """A step's gradient, divided by the summed denominators, before clipping.

    ``batch`` holds the old and reference log-probabilities that the step was computed with.
    """

    norm: float
    buffers: GradientBuffers
    batch: RankBatch


class Trainer:
    """Model, gradient buffers and Adam's state."""

    def __init__(self, model: LiveModel, grpo: Grpo) -> None:
        self.model = model
        self.grpo = grpo
        self.collector = GradientCollector(model.module)
        self.buffers = self.collector.new_buffers()
        self.adam = Adam.new(self.buffers)

    def policy_gradient(self, batch: RankBatch, settings: GrpoSettings) -> Gradient:
        """Gradient of one GRPO step on ``batch`` with its routes replayed.

        The old log-probabilities are the trainer's own, recomputed with replay: this is the first
        and only update on the batch, so they are those of the step's own forward, bit for bit.
        The reference policy is reset to the old one every step.
        """
        old = torch.zeros_like(batch.advantage)

        def loss(micro: MicroBatch, out: Forward) -> tuple[Tensor, float]:
            rows = list(micro.rows)
            old[rows] = out.log_prob.detach().cpu()
            columns = {"old_logprobs": out.log_prob.detach(), "ref_logprobs": out.log_prob.detach()}
            chosen = batch.select(rows).to(out.log_prob.device).replace(**columns)
            made = micro_batch_loss(settings, chosen, out.log_prob, out.entropy)
            return made.scaled, float(made.denominator)

        norm = self._accumulate(batch, settings, loss, replay=True)
        told = batch.replace(old_logprobs=old, ref_logprobs=old.clone())
        return Gradient(norm=norm, buffers=self.buffers, batch=told)

    def supervised_gradient(self, batch: RankBatch) -> tuple[float, float]:
        """Gradient of the mean negative log-likelihood of the trained tokens: its norm, and the
        mean in nats. Experts are the model's own."""
        total = [0.0, 0.0]

        def loss(micro: MicroBatch, out: Forward) -> tuple[Tensor, float]:
            mask = batch.loss_mask[list(micro.rows)].to(out.log_prob.device)
            value, count = -(out.log_prob * mask).sum(), float(mask.sum())
            total[0] += float(value.detach())
            total[1] += count
            return value, count

        norm = self._accumulate(batch, GrpoSettings(), loss, replay=False)
        return norm, total[0] / total[1]

    def update(self, norm: float, learning_rate: float, betas: tuple[float, float]) -> None:
        """Clip the gradient as Megatron does and take one step of Adam."""
        self.buffers.scale(min(1.0, self.grpo.clip_grad / (norm + 1e-6)))
        self.adam.step(self.collector.parameters, self.buffers, learning_rate, betas)

    def _accumulate(
        self, batch: RankBatch, settings: GrpoSettings, loss: Loss, *, replay: bool
    ) -> float:
        self.buffers.flat.zero_()
        self.collector.current = (self.buffers,)
        rank = self._input(batch, replay=replay)
        total = 0.0
        for micro in micro_batches([rank], self.model.device):
            routes = packed_routes(rank, rank.forced_BTL, micro)
            out = forward(self.model, micro, routes, settings)
            scaled, denominator = loss(micro, out)
            scaled.backward()  # type: ignore[no-untyped-call]
            total += denominator
        self.collector.current = ()
        if total > 0:
            self.buffers.scale(1.0 / total)
        return measure(self.buffers, {}).norm

    def _input(self, batch: RankBatch, *, replay: bool) -> RankInput:
        (split,) = split_ranks(
            [batch.lengths()],
            [batch.width],
            dynamic=True,
            micro_batch_size=self.grpo.rows_at_once,
            seq_length=self.grpo.seq_length,
        )
        return rank_input(batch, split, self.model, replay=replay, loss_tokens_only=False)


@dataclass
class Adam:
    """Adam (Kingma and Ba 2015) over the flat gradient, without weight decay; epsilon 1e-8.

    ``master`` holds float32 weights by name where the model's are narrower: their updates are
    smaller than a bfloat16 step.
    """

    mean: Tensor
    square: Tensor
    steps: int = 0
    master: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def new(cls, buffers: GradientBuffers) -> Adam:
        """A fresh state for these buffers."""
        return cls(torch.zeros_like(buffers.flat), torch.zeros_like(buffers.flat))

    def step(
        self,
        parameters: Mapping[str, Tensor],
        buffers: GradientBuffers,
        learning_rate: float,
        betas: tuple[float, float],
    ) -> None:
        """Move ``parameters`` against the gradient in ``buffers``."""
        first, second = betas
        self.steps += 1
        self.mean.lerp_(buffers.flat, 1 - first)
        self.square.mul_(second).addcmul_(buffers.flat, buffers.flat, value=1 - second)
        size = (self.square / (1 - second**self.steps)).sqrt_().add_(1e-8)
        moved = self.mean / (1 - first**self.steps) / size * learning_rate
        start = 0
        with torch.no_grad():
            for name in buffers.views:
                parameter = parameters[name]
                part = moved[start : start + parameter.numel()].view(parameter.shape)
                self._own(name, parameter).sub_(part)
                if name in self.master:
                    parameter.copy_(self.master[name])
                start += parameter.numel()

    def _own(self, name: str, parameter: Tensor) -> Tensor:
        if parameter.dtype == torch.float32:
            return parameter
        return self.master.setdefault(name, parameter.detach().float())
