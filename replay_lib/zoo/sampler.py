"""The rollout engine: the zoo's model once more, in plain torch with a key/value cache.

It shares no code with the trainer, and it rounds weights and every activation to bfloat16 (in
float32 arithmetic, so that every platform rounds alike): trainer and sampler differ by precision
and kernels as in production. Experts chosen and log-probabilities are recorded as they fell.

Legend: B rows, S new tokens, T cached width, L layers, K top-k, E experts, H hidden, D channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from replay_lib.zoo.recipe import Shape
from replay_lib.zoo.task import PAD, STOP

Weights = dict[str, Tensor]
_LAYER = "decoder.layers."


def rounded(x: Tensor) -> Tensor:
    """``x`` rounded to bfloat16, as float32."""
    return x.to(torch.bfloat16).to(torch.float32)


@dataclass(frozen=True)
class Sampled:
    """One response. ``log_probs`` belong to ``tokens``; ``routes`` int16 ``[n - 1, L, K]`` are the
    experts of every token of prompt and response but the last."""

    tokens: list[int]
    log_probs: list[float]
    routes: Tensor


class Sampler:
    """A rollout engine with frozen weights (checkpoint keys, whole tensors), on their device.

    What goes in and what comes out is on the CPU: there, draws do not depend on the device.
    """

    def __init__(self, shape: Shape, weights: Weights) -> None:
        self.shape = shape
        self.weights = {k: rounded(v.detach().float()) for k, v in weights.items()}
        self.device = next(iter(self.weights.values())).device

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        copies: int,
        longest: int,
        generator: torch.Generator,
        *,
        unstopped: frozenset[int] = frozenset(),
        unstopped_longest: int = 0,
    ) -> list[Sampled]:
        """``copies`` responses to each prompt at temperature 1, prompt after prompt.

        A response ends with the stop token or after ``longest`` tokens; rows in ``unstopped`` go on
        to ``unstopped_longest`` tokens whatever they say.
        """
        limits = torch.full((len(prompts) * copies,), longest)
        limits[sorted(unstopped)] = max(unstopped_longest, longest)
        state = _Decoding(self, prompts, copies, int(limits.max()))
        never = torch.zeros(len(limits), dtype=torch.bool)
        never[sorted(unstopped)] = bool(unstopped)
        while not bool(state.done.all()):
            state.draw(generator)
            state.done |= state.counts >= limits
            state.done |= (state.last == STOP) & ~never
            if not bool(state.done.all()):
                state.advance()
        return state.responses()

    def read(self, rows: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """What would have been recorded for given rows of n tokens, for each: experts int16
        ``[n - 1, L, K]`` and the log-probability ``[n - 1]`` of every next token."""
        cache = _Cache.empty(self.shape, len(rows), max(map(len, rows)), self.device)
        ids = torch.full((len(rows), cache.width), PAD)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        positions = torch.arange(cache.width).expand(len(rows), -1)
        logits, routes = self.forward(ids, positions, cache)
        log_p = logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
        ends = [len(tokens) - 1 for tokens in rows]
        return [(routes[r, :n].clone(), log_p[r, :n].clone()) for r, n in enumerate(ends)]

    def forward(self, ids_BS: Tensor, positions_BS: Tensor, cache: _Cache) -> tuple[Tensor, Tensor]:
        """Logits ``[B, S, V]`` and experts int16 ``[B, S, L, K]``; the cache is filled."""
        positions_BS = positions_BS.to(self.device)
        hidden = self.weights["embedding.word_embeddings.weight"][ids_BS.to(self.device)]
        routes = []
        for layer in range(self.shape.layers):
            hidden = rounded(hidden + self._attention(layer, hidden, positions_BS, cache))
            added, chosen = self._experts(layer, hidden)
            hidden = rounded(hidden + added)
            routes.append(chosen)
        hidden = self._norm(hidden, self.weights["decoder.final_layernorm.weight"])
        logits = rounded(hidden @ self.weights["output_layer.weight"].T)
        return logits.cpu(), torch.stack(routes, dim=2).to(torch.int16).cpu()

    def _of(self, layer: int, name: str) -> Tensor:
        return self.weights[_LAYER + name][layer]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rounded(F.rms_norm(x, (x.shape[-1],), weight, self.shape.epsilon))

    def _attention(self, layer: int, hidden: Tensor, positions: Tensor, cache: _Cache) -> Tensor:
        shape = self.shape
        share = shape.heads // shape.groups
        norm = self._norm(hidden, self._of(layer, "self_attention.linear_qkv.layer_norm_weight"))
        mixed = rounded(norm @ self._of(layer, "self_attention.linear_qkv.weight").T)
        mixed = mixed.view(*mixed.shape[:2], shape.groups, share + 2, shape.channels)
        query = self._norm(
            mixed[:, :, :, :share].flatten(2, 3),
            self._of(layer, "self_attention.q_layernorm.weight"),
        )
        key = self._norm(
            mixed[:, :, :, share], self._of(layer, "self_attention.k_layernorm.weight")
        )
        query, key = (rounded(_rotate(shape, x, positions)) for x in (query, key))
        keys, values = cache.put(layer, positions, key, mixed[:, :, :, share + 1])
        keys, values = (x.repeat_interleave(share, dim=2) for x in (keys, values))
        scores = torch.einsum("bshd,bthd->bhst", query, keys) * shape.channels**-0.5
        seen = torch.arange(keys.shape[1], device=self.device) <= positions[:, :, None]
        weights = rounded(scores.masked_fill(~seen[:, None], float("-inf")).softmax(dim=3))
        out = rounded(torch.einsum("bhst,bthd->bshd", weights, values)).flatten(2)
        return rounded(out @ self._of(layer, "self_attention.linear_proj.weight").T)

    def _experts(self, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        norm = self._norm(hidden, self._of(layer, "pre_mlp_layernorm.weight"))
        tokens = norm.flatten(0, 1)
        scores = rounded(tokens @ self._of(layer, "mlp.router.weight").T)
        picked, chosen = scores.topk(self.shape.topk, dim=1)
        probs = picked.softmax(dim=1)
        fc1 = self._of(layer, "mlp.experts.experts.linear_fc1.weight")
        fc2 = self._of(layer, "mlp.experts.experts.linear_fc2.weight")
        out = torch.zeros_like(tokens)
        for expert in range(self.shape.experts):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            gate, up = rounded(tokens[token] @ fc1[expert].T).chunk(2, dim=-1)
            inner = rounded(F.silu(gate) * up * probs[token, slot, None])
            out.index_add_(0, token, rounded(inner @ fc2[expert].T))
        return rounded(out).view_as(hidden), chosen.view(*hidden.shape[:2], -1)


def _rotate(shape: Shape, x: Tensor, positions_BS: Tensor) -> Tensor:
    """Rotary embedding of ``[B, S, heads, D]``; channel c is paired with c + D / 2."""
    half = shape.channels // 2
    even = torch.arange(0, shape.channels, 2, dtype=torch.float32, device=x.device)
    exponent = even / shape.channels
    angle = positions_BS[:, :, None].float() * (1.0 / shape.rotary_base**exponent)
    cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
    low, high = x.tensor_split([half], dim=3)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=3)


@dataclass
class _Cache:
    """Keys and values of every layer, ``[L, B, T, G, D]``; a row fills its own positions."""

    keys: Tensor
    values: Tensor

    @classmethod
    def empty(cls, shape: Shape, rows: int, width: int, device: torch.device) -> _Cache:
        size = (shape.layers, rows, width, shape.groups, shape.channels)
        return cls(torch.zeros(size, device=device), torch.zeros(size, device=device))

    @property
    def width(self) -> int:
        return int(self.keys.shape[2])

    def put(
        self, layer: int, positions: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
        self.keys[layer][rows, positions] = key
        self.values[layer][rows, positions] = value
        upto = int(positions.max()) + 1
        return self.keys[layer][:, :upto], self.values[layer][:, :upto]


class _Decoding:
    """Rows on their way: token by token, each at its own position."""

    def __init__(
        self, sampler: Sampler, prompts: Sequence[Sequence[int]], copies: int, longest: int
    ) -> None:
        self.sampler = sampler
        lengths = torch.tensor([len(p) for p in prompts])
        width = int(lengths.max()) + longest
        ids = torch.full((len(prompts), int(lengths.max())), PAD)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        once = _Cache.empty(sampler.shape, len(prompts), width, sampler.device)
        positions = torch.arange(ids.shape[1]).expand(len(prompts), -1)
        logits, routes = sampler.forward(ids, positions, once)
        last = logits[torch.arange(len(prompts)), lengths - 1]
        # the rollouts of a prompt share its prefill
        self.cache = _Cache(*(x.repeat_interleave(copies, dim=1) for x in (once.keys, once.values)))
        self.logits = last.repeat_interleave(copies, dim=0)
        self.lengths = lengths.repeat_interleave(copies)
        self.prompt_routes = [r[:n] for r, n in zip(routes, lengths.tolist(), strict=True)]
        self.copies = copies
        rows = len(self.lengths)
        self.counts = torch.zeros(rows, dtype=torch.int64)
        self.done = torch.zeros(rows, dtype=torch.bool)
        self.last = torch.full((rows,), PAD)
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.log_probs: list[list[float]] = [[] for _ in range(rows)]
        self.routes: list[list[Tensor]] = [[] for _ in range(rows)]

    def draw(self, generator: torch.Generator) -> None:
        """Draw a token for every row; rows that are done drop it again."""
        log_p = self.logits.log_softmax(dim=-1)
        drawn = torch.multinomial(log_p.exp(), 1, generator=generator).squeeze(1)
        picked = log_p.gather(1, drawn[:, None]).squeeze(1).tolist()
        for row, token in enumerate(drawn.tolist()):
            if not self.done[row]:
                self.tokens[row].append(token)
                self.log_probs[row].append(picked[row])
        self.counts += ~self.done
        self.last = drawn

    def advance(self) -> None:
        """Process the tokens drawn; rows that are done are left out."""
        live = (~self.done).nonzero().squeeze(1)
        there = live.to(self.sampler.device)
        cache = _Cache(self.cache.keys[:, there], self.cache.values[:, there])
        positions = (self.lengths + self.counts - 1)[live][:, None]
        logits, routes = self.sampler.forward(self.last[live][:, None], positions, cache)
        self.cache.keys[:, there], self.cache.values[:, there] = cache.keys, cache.values
        self.logits[live] = logits[:, 0]
        for at, row in enumerate(live.tolist()):
            self.routes[row].append(routes[at, 0])

    def responses(self) -> list[Sampled]:
        out = []
        for row, tokens in enumerate(self.tokens):
            prompt = self.prompt_routes[row // self.copies]
            own = torch.stack(self.routes[row]) if self.routes[row] else prompt[:0]
            out.append(Sampled(tokens, self.log_probs[row], torch.cat([prompt, own])))
        return out
