"""Saved routes: how many payloads and rows have them, and how they load the experts.

A path of a row that is a prefix tree is counted by itself, shared prefixes each time. Legend: n
route rows, L layers, K top-k, E experts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from replay_lib.analysis.signals.summary import LayerLoad, Routing, RowPlace
from replay_lib.analysis.signals.view import View
from replay_lib.snapshot.model import Snapshot
from replay_lib.snapshot.routes import Handle, Paths

#: Ids that are widened to int64 at a time: 64 MB.
CHUNK = 1 << 23


@dataclass
class RoutingStage:
    """``experts`` is None until a file or the first ids say; ``moe`` are the layers to look at."""

    experts: int | None
    moe: tuple[int, ...] | None = None  # transformer layers that are MoE; None: not known
    payloads: list[int] = field(default_factory=list)
    rows_with: int = 0
    without: list[RowPlace] = field(default_factory=list)
    tokens: int = 0
    outside: int = 0
    dtype: str | None = None
    shape: tuple[int, int] | None = None  # L, K
    load_LE: Tensor | None = None
    repeated_L: Tensor | None = None

    def rows(self, view: View, paths: Sequence[Paths | None]) -> Counter[Handle]:
        """Count the rows of one rank; how often each handle is used by rows that are no padding."""
        used: Counter[Handle] = Counter()
        for row, real in enumerate(view.real_B.tolist()):
            found = paths[row]
            if not real:
                continue
            if not found:
                self.without.append(view.place(row, 0.0))
                continue
            self.rows_with += 1
            used.update(handle for path in found for handle in path)
        return used

    def payload(self, routes: Mapping[Handle, Tensor], used: Counter[Handle]) -> None:
        """Count the routes of one rank."""
        self.payloads.append(len(routes))
        for handle, route in routes.items():
            self.dtype = str(route.dtype).removeprefix("torch.")
            self.shape = int(route.shape[1]), int(route.shape[2])
            if used[handle] and len(route):
                self._count(route, used[handle])

    def _count(self, route_NLK: Tensor, times: int) -> None:
        layers, topk = (int(n) for n in route_NLK.shape[1:])
        self.tokens += len(route_NLK) * times
        step = max(CHUNK // max(layers * topk, 1), 1)
        for start in range(0, len(route_NLK), step):
            part = route_NLK[start : start + step]
            self._grow(layers, int(part.max()) + 1)
            assert self.load_LE is not None and self.repeated_L is not None
            experts = self.load_LE.shape[1]
            ids = part.long()
            known = (ids >= 0) & (ids < (self.experts or experts))
            self.outside += times * int((~known).sum())
            flat = ids + torch.arange(layers).view(1, -1, 1) * experts
            counts = torch.bincount(flat[known], minlength=layers * experts)
            self.load_LE += times * counts.view(layers, experts)
            self.repeated_L += times * _repeated(part).sum(dim=0)

    def _grow(self, layers: int, needed: int) -> None:
        """Make room for ids up to ``needed``; the model's number is never exceeded."""
        if self.load_LE is None or self.repeated_L is None:
            self.load_LE = torch.zeros(layers, self.experts or 0, dtype=torch.int64)
            self.repeated_L = torch.zeros(layers, dtype=torch.int64)
        missing = 0 if self.experts else needed - self.load_LE.shape[1]
        if missing > 0:
            self.load_LE = torch.nn.functional.pad(self.load_LE, (0, missing))

    def result(self, snapshot: Snapshot) -> Routing:
        """All ranks."""
        rows = self.rows_with + len(self.without)
        layers, topk = self.shape or (None, None)
        return Routing(
            payloads=tuple(self.payloads),
            payloads_recorded_rank0=snapshot.routing_payload_count_rank0,
            replayed=snapshot.worker.enable_routing_replay,
            loss_tokens_only=snapshot.worker.replay_routing_for_loss_tokens_only,
            rows_with=self.rows_with,
            rows_without=len(self.without),
            share_without=len(self.without) / rows if rows else None,
            tokens=self.tokens,
            dtype=self.dtype,
            layers=layers,
            topk=topk,
            experts=self.experts or (None if self.load_LE is None else self.load_LE.shape[1]),
            per_layer=tuple(self._layers()),
            outside=self.outside,
        )

    def _layers(self) -> list[LayerLoad]:
        if self.load_LE is None or self.repeated_L is None:
            return []
        count, moe = len(self.load_LE), self.moe
        numbers = list(range(count))
        shown = numbers
        if moe is not None and len(moe) == count:  # the payload has MoE layers alone
            numbers = list(moe)
        elif moe is not None and moe and max(moe) < count:  # dense layers carry dummies
            shown = list(moe)
        return [
            layer_load(numbers[i], self.load_LE[i].tolist(), int(self.repeated_L[i])) for i in shown
        ]


def layer_load(layer: int, load: Sequence[int], repeated: int = 0) -> LayerLoad:
    """Figures of one layer from how often each expert was chosen."""
    whole = sum(load)
    shares = [n / whole for n in load if n] if whole else []
    entropy = -sum(p * math.log(p) for p in shares)
    return LayerLoad(
        layer=layer,
        load=tuple(load),
        unused=sum(n == 0 for n in load),
        imbalance=max(load) * len(load) / whole if whole else None,
        entropy=entropy / math.log(len(load)) if whole and len(load) > 1 else None,
        repeated=repeated,
    )


def _repeated(route_NLK: Tensor) -> Tensor:
    """Whether a token names one expert twice in a layer, bool ``[n, L]``."""
    topk = route_NLK.shape[2]
    found = torch.zeros(route_NLK.shape[:2], dtype=torch.bool)
    for slot in range(1, topk):
        found |= (route_NLK[..., :slot] == route_NLK[..., slot : slot + 1]).any(dim=-1)
    return found


def router_of(fields: Mapping[str, Any] | None) -> tuple[int | None, tuple[int, ...] | None]:
    """Number of experts and the MoE layers that the saved model section states, if it does."""
    from replay_lib.analysis.routes import router_shape

    shape = router_shape(fields) if fields else None
    return (shape.experts, tuple(shape.moe_layers)) if shape else (None, None)
