"""Saved routes against the routers' own choice, and log-probabilities under both. No backward.

Every micro-batch goes forward twice: with the recorded routes forced, where each router is asked
for its own top-k on the same hidden states, and once routing itself. One rank alone: on several
the tokens and layers of a micro-batch are spread over them.

Legend: B rows of a micro-batch, T padded width, N packed tokens, K top-k, E experts.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from replay_lib import layout
from replay_lib.engine.forward import forward
from replay_lib.engine.inputs import MicroBatch, RankInput, packed_routes
from replay_lib.engine.model import LiveModel
from replay_lib.engine.protocol import LayerRoutes, RouteCounts
from replay_lib.engine.routes import PackedRoutes
from replay_lib.engine.step import Loaded
from replay_lib.engine.trees import PADDING
from replay_lib.packing import pack

PARTS = ("prompt", "response")


@torch.no_grad()
def measure_routes(loaded: Loaded, directory: Path) -> list[LayerRoutes]:
    """Counts of every MoE layer; empty where the run did not replay routes.

    Writes for each recorded data-parallel rank a file of ``[B, T]`` tensors, whose name is
    ``layout.route_signals_file``'s: ``replayed`` (float32, with the recorded routes forced; absent
    where the run replayed none), ``own`` (float32, with the model's own) and ``other`` (bool:
    positions that do not train and whose next token is known). Labels are the recorded ones at loss
    positions and the next token elsewhere; rows that are prefix trees have no next token and keep
    the recorded ones.
    """
    tally = _Tally()
    micros = loaded.micro_batches(loaded.rows)
    for number, rank in enumerate(loaded.ranks):
        labels_BT, other_BT = _labels(rank)
        found: dict[str, Tensor] = {"other": other_BT}
        for micro in micros:
            if micro.rank == number:
                outputs = _one(loaded, rank, _asking(micro, rank, labels_BT), tally)
                for name, value in outputs.items():
                    whole = found.setdefault(name, torch.zeros(other_BT.shape))
                    whole[list(micro.rows)] = value.float().cpu()
        save_file(found, directory / layout.route_signals_file(rank.batch.dp_rank))
    return tally.layers()


def _labels(rank: RankInput) -> tuple[Tensor, Tensor]:
    """Labels ``[B, T]`` to ask for, and where they are next tokens of positions off the loss."""
    batch = rank.batch
    next_BT = batch.input_ids.roll(-1, dims=1)
    known_BT = torch.zeros_like(batch.attention_mask)
    known_BT[:, :-1] = batch.attention_mask[:, 1:]
    flat_B = torch.tensor([row is None for row in batch.merge_info or (None,) * batch.rows])
    other_BT = known_BT & ~batch.loss_mask & (flat_B & (batch.index >= 0)).unsqueeze(1)
    return torch.where(other_BT, next_BT, batch.labels), other_BT


def _asking(micro: MicroBatch, rank: RankInput, labels_BT: Tensor) -> MicroBatch:
    labels = _packed(rank, micro, labels_BT)
    return dataclasses.replace(micro, labels=labels.to(micro.labels.device))


def _packed(rank: RankInput, micro: MicroBatch, values_BT: Tensor) -> Tensor:
    """``[N]`` of a column, 0 on padding."""
    rows = values_BT[list(micro.rows)]
    if micro.origin is not None:
        taken = rows.flatten()[micro.origin.clamp(min=0)]
        return torch.where(micro.origin == PADDING, torch.zeros_like(taken), taken)
    mask = rank.batch.attention_mask[list(micro.rows)]
    return pack(rows, mask, align=micro.part.align).values


def _one(loaded: Loaded, rank: RankInput, micro: MicroBatch, tally: _Tally) -> dict[str, Tensor]:
    model, settings = loaded.model, loaded.settings
    own = forward(model, micro, None, settings).log_prob
    if rank.routes_BTLK is None:
        return {"own": own}
    routes: PackedRoutes | None = packed_routes(rank, rank.forced_BTL, micro)
    if routes is None:  # forced on loss tokens alone, and here is none: the run routed itself
        return {"own": own, "replayed": own}
    with _watched(model, routes, _parts(rank, micro), tally):
        return {"own": own, "replayed": forward(model, micro, routes, settings).log_prob}


def _parts(rank: RankInput, micro: MicroBatch) -> dict[str, Tensor]:
    """Which packed tokens are of the prompt and of the response, bool ``[N]``.

    A row's last token has no saved route, padding rows have made-up ones.
    """
    batch = rank.batch
    routed_BT = batch.attention_mask & (batch.index >= 0).unsqueeze(1)
    last_B = batch.attention_mask.sum(dim=1).clamp(min=1) - 1
    routed_BT = routed_BT.scatter(1, last_B.unsqueeze(1), False)
    masks = (routed_BT & ~batch.loss_mask, routed_BT & batch.loss_mask)
    device = micro.tokens.device
    return {
        part: _packed(rank, micro, mask).to(device) for part, mask in zip(PARTS, masks, strict=True)
    }


@contextlib.contextmanager
def _watched(
    model: LiveModel, routes: PackedRoutes, parts: dict[str, Tensor], tally: _Tally
) -> Iterator[None]:
    """Ask every router for its own choice and its logits while the block runs."""
    handles = []
    own: dict[int, Tensor] = {}

    def hook(layer: int) -> Callable[..., None]:
        def count(router: Any, inputs: tuple[Tensor, ...], _output: Any) -> None:
            logits = router.gating(inputs[0]).float().flatten(0, -2)
            for part, mask in parts.items():
                saved = routes.experts[layer].long()[mask]
                tally.add(layer, part, logits[mask], own[layer][mask], saved)

        return count

    try:
        for layer, router in enumerate(model.routers):
            router.router_replay.seen = lambda chosen, layer=layer: own.update({layer: chosen})
            handles.append(router.register_forward_hook(hook(layer)))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for router in model.routers:
            router.router_replay.seen = None


@dataclass
class _Tally:
    """Counts by layer and part; ``topk`` is K."""

    counts: dict[tuple[int, str], RouteCounts] = field(default_factory=dict)
    topk: int = 0

    def add(self, layer: int, part: str, logits: Tensor, own: Tensor, saved: Tensor) -> None:
        self.topk = int(saved.shape[1])
        before = self.counts.get((layer, part), RouteCounts())
        self.counts[layer, part] = before.plus(count_routes(logits, own, saved))

    def layers(self) -> list[LayerRoutes]:
        return [
            LayerRoutes(
                layer=layer,
                topk=self.topk,
                prompt=self.counts[layer, "prompt"],
                response=self.counts[layer, "response"],
            )
            for layer in sorted({layer for layer, _ in self.counts})
        ]


def count_routes(logits_NE: Tensor, own_NK: Tensor, saved_NK: Tensor) -> RouteCounts:
    """Counts over N tokens; ``own_NK`` best first, ``saved_NK`` in the order of the rollout."""
    if not len(saved_NK):
        return RouteCounts()
    in_set_NK = (saved_NK.unsqueeze(2) == own_NK.unsqueeze(1)).any(dim=2)
    wide = logits_NE.double()
    gap_N = wide.gather(1, own_NK).mean(dim=1) - wide.gather(1, saved_NK).mean(dim=1)
    return RouteCounts(
        tokens=len(saved_NK),
        ordered=int((saved_NK == own_NK).all(dim=1).sum()),
        slots_in_set=int(in_set_NK.sum()),
        disjoint=int((~in_set_NK.any(dim=1)).sum()),
        gap_sum=float(gap_N.sum()),
        gap_max=float(gap_N.max()),
    )
