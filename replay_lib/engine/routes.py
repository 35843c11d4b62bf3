"""Force saved experts through Megatron's RouterReplay, and check that they were used.

Legend: N packed tokens, L MoE layers, K top-k, E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from replay_lib.engine.model import LiveModel
from replay_lib.errors import EngineError, PatchError
from replay_lib.patch import Patch

TopK = Callable[..., tuple[Tensor, Tensor]]
#: ``(replayed_N, own_N, saved_N)`` to the next ``replayed_N``, see ``patch.router_patch``.
Release = Callable[[Tensor, Tensor, Tensor], Tensor]


class TokenRouterReplay(RouterReplay):
    """Megatron's RouterReplay with a mask that says for which tokens saved experts are forced.

    Where the mask is false the model's own top-k is used. The probabilities are those of the
    current scores at the chosen experts either way, so the router keeps its gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.token_mask: Tensor | None = None
        self.release: Release | None = None
        self.real: Tensor | None = None
        self.logits = False  # whether scores come before the softmax
        self.seen: Callable[[Tensor], None] | None = None  # gets the own choice, best first

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Values and indices ``[N, K]`` for ``scores [N, E]``."""
        replaying = self.router_replay_action == RouterReplayAction.REPLAY_FORWARD
        if not replaying or self.token_mask is None:
            values, indices = super().get_replay_topk(
                scores, topk, num_groups, group_topk, default_compute_topk
            )
            return values, indices
        assert self.target_topk_idx is not None and default_compute_topk is not None
        _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.seen is not None:
            # Megatron-Core 0.19 does not sort where there are no gradients
            best_first = scores.gather(1, own).argsort(dim=1, descending=True, stable=True)
            self.seen(own.gather(1, best_first))
        if self.release is not None:
            self.token_mask = self._released(scores.detach(), own)
        chosen = torch.where(self.token_mask.unsqueeze(1), self.target_topk_idx, own)
        return scores.gather(1, chosen), chosen

    def _released(self, scores: Tensor, own: Tensor) -> Tensor:
        """The mask after ``release``, which sees real tokens alone; padding keeps what it has."""
        assert self.release is not None and self.token_mask is not None and self.real is not None
        ranked = scores.float().softmax(dim=-1) if self.logits else scores.float()
        sums = [ranked.gather(1, ids).sum(dim=1) for ids in (own, self.target_topk_idx)]
        return torch.where(
            self.real, self.release(self.token_mask & self.real, *sums), self.token_mask
        )


@dataclass(frozen=True)
class PackedRoutes:
    """What the routers are asked for: ``experts int16 [L, N, K]``, ``forced bool [L, N]``.

    ``real`` (bool ``[N]``) are the tokens that are no padding.
    """

    experts: Tensor
    forced: Tensor
    real: Tensor


def attach(model: LiveModel) -> None:
    """Give every MoE router of ``model`` a replay object of its own, and forget all others.

    Megatron keeps replay objects in a process-wide list; a second model built in the same process
    would otherwise receive the routes of the first.
    """
    RouterReplay.global_router_replay_instances.clear()
    for router in model.routers:
        router.router_replay = TokenRouterReplay()


@contextlib.contextmanager
def replaying(
    model: LiveModel, routes: PackedRoutes | None, release: Release | None = None
) -> Iterator[None]:
    """Run one forward with ``routes`` forced; afterwards compare every router's map with them.

    With None the model routes by itself. ``release`` lets tokens go while the model runs. All
    replay state is gone when the block ends, whatever happens in it.
    """
    if routes is None:
        yield
        return
    watch = _Watch(routes, drops=model.config.moe_expert_capacity_factor is not None)
    handles = []
    try:
        for layer, router in enumerate(model.routers):
            replay: TokenRouterReplay = router.router_replay
            replay.set_target_indices(routes.experts[layer].long())
            replay.token_mask = routes.forced[layer]
            replay.release, replay.real = release, routes.real
            config = model.config
            softmax = config.moe_router_score_function == "softmax"
            replay.logits = softmax and not config.moe_router_pre_softmax
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            handles.append(router.register_forward_hook(watch.hook(layer)))
        yield
        watch.check(len(model.routers))
    finally:
        for handle in handles:
            handle.remove()
        for router in model.routers:
            router.router_replay.clear_router_replay_action()
            router.router_replay.clear_indices()
            router.router_replay.token_mask = None
            router.router_replay.release = router.router_replay.real = None


def released(
    patches: Sequence[Patch], replayed_N: Tensor, own_N: Tensor, saved_N: Tensor
) -> Tensor:
    """Where saved experts stay forced after ``patches``; PatchError for what is no such mask."""
    left = replayed_N
    for patch in patches:
        given = patch(left.clone(), own_N.clone(), saved_N.clone())
        fits = isinstance(given, Tensor) and given.dtype == torch.bool
        if not fits or given.shape != left.shape or bool((given & ~left).any()):
            raise PatchError(
                f"a router patch must return a bool tensor {list(left.shape)} [N] that forces no "
                "token beyond those given"
            )
        left = given
    return left


class _Watch:
    """Counts, on the device, tokens whose routing map is not the one that was asked for."""

    def __init__(self, routes: PackedRoutes, *, drops: bool) -> None:
        self.routes = routes
        self.drops = drops
        self.missed: dict[int, Tensor] = {}

    def hook(self, layer: int) -> Callable[..., None]:
        def compare(module: Any, _inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            taken: Tensor = output[1].bool()
            asked = torch.zeros_like(taken).scatter_(1, self.routes.experts[layer].long(), True)
            # A finite capacity drops experts that were asked for, but never adds another one.
            wrong = (taken & ~asked) if self.drops else (taken != asked)
            forced = module.router_replay.token_mask  # what is left of it where some were released
            self.missed[layer] = (wrong.any(dim=1) & forced).sum()

        return compare

    def check(self, layers: int) -> None:
        silent = sorted(set(range(layers)) - set(self.missed))
        counts = torch.stack(list(self.missed.values())).tolist() if self.missed else []
        wrong = {layer: n for layer, n in zip(self.missed, counts, strict=True) if n > 0}
        if silent or wrong:
            raise EngineError(
                "the routers did not use the saved experts: "
                f"tokens routed elsewhere by MoE layer {wrong}, layers that never routed {silent}. "
                "A router that fuses or balances its top-k bypasses the replay."
            )
