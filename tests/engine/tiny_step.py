"""A tiny model, a batch and a step, shared by the tests of the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.engine.reference import ReferenceStep, reference_step
from replay_lib.engine.reference_model import read_model
from replay_lib.loss import GrpoSettings

L, E, K, H, FF, V, D = 2, 4, 2, 8, 6, 11, 4
FIELDS = {
    "num_layers": L,
    "hidden_size": H,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": D,
    "layernorm_epsilon": 1e-6,
    "rotary_base": 100,
    "rotary_percent": 1.0,
    "qk_layernorm": True,
    "num_moe_experts": E,
    "moe_router_topk": K,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "share_embeddings_and_output_weights": False,
}
LAYER_SHAPES = {
    "self_attention.linear_qkv.layer_norm_weight": (H,),
    "self_attention.linear_qkv.weight": ((4 + 2 * 2) * D, H),
    "self_attention.linear_proj.weight": (H, 4 * D),
    "self_attention.q_layernorm.weight": (D,),
    "self_attention.k_layernorm.weight": (D,),
    "pre_mlp_layernorm.weight": (H,),
    "mlp.router.weight": (E, H),
    "mlp.experts.experts.linear_fc1.weight": (E, 2 * FF, H),
    "mlp.experts.experts.linear_fc2.weight": (E, H, FF),
}
# smooth everywhere: current / old as the ratio, never clipped
# No KL term: the trainer rounds it to float32, which finite differences cannot see through.
SETTINGS = GrpoSettings(
    loss_type="grpo",
    clip_ratio_low=0.999,
    clip_ratio_high=1000.0,
    dual_clip_neg_adv_factor=1000.0,
)


def make_weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values * 0.5 + (1.0 if len(shape) == 1 else 0.0)

    weights = {f"decoder.layers.{n}": draw((L, *s)) for n, s in LAYER_SHAPES.items()}
    weights["embedding.word_embeddings.weight"] = draw((V, H))
    weights["output_layer.weight"] = draw((V, H))
    weights["decoder.final_layernorm.weight"] = draw((H,))
    return weights


def unstack(weights: dict[str, Tensor], dense: Sequence[int] = ()) -> dict[str, Tensor]:
    """The layout of checkpoints whose layers differ: one name a layer, dense layers without E."""
    result = {n: t for n, t in weights.items() if not n.startswith("decoder.layers.")}
    for layer in range(L):
        for name in LAYER_SHAPES:
            tensor = weights[f"decoder.layers.{name}"][layer]
            full = f"decoder.layers.{layer}.{name}"
            if layer in dense:
                if "router" in name:
                    continue
                full = full.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
                if "experts" in name:
                    full, tensor = full.replace("experts.experts.", ""), tensor[0]
            result[full] = tensor
    return result


def make_batch(lengths: Sequence[int] = (5, 3, 4), width: int = 6, seed: int = 0) -> RankBatch:
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, V, (rows, width), generator=generator) * real
    following = torch.cat([ids[:, 1:], torch.zeros(rows, 1, dtype=torch.int64)], dim=1)
    mask = real.roll(-1, dims=1)
    mask[:, -1] = False
    mask[:, 0] = False  # the first label is a prompt token
    shape = (rows, width)
    noise = torch.randn(shape, generator=generator) * 0.1
    return RankBatch(
        dp_rank=0,
        index=torch.arange(rows),
        input_ids=ids,
        labels=torch.where(mask, following, -100),
        loss_mask=mask,
        attention_mask=real,
        advantage=torch.randn(shape, generator=generator) * mask,
        old_logprobs=(noise - 2.4) * real,
        rollout_logprobs=(noise - 2.3) * mask,
        ref_logprobs=(noise - 2.5) * real,
        routes=tuple(
            torch.stack(
                [torch.randperm(E, generator=generator)[:K] for _ in range((n - 1) * L)]
            ).reshape(n - 1, L, K)
            for n in lengths
        ),
    )


def run(
    weights: dict[str, Tensor] | None = None,
    batch: RankBatch | None = None,
    partition: list[list[int]] | None = None,
    forced: bool | Tensor = True,
    settings: GrpoSettings = SETTINGS,
    **fields: object,
) -> ReferenceStep:
    batch = batch if batch is not None else make_batch()
    model = read_model(FIELDS | fields)
    if isinstance(forced, bool):
        shape = (batch.rows, batch.width, len(model.moe_layers))
        forced = torch.full(shape, forced, dtype=torch.bool)
    return reference_step(
        weights if weights is not None else make_weights(),
        FIELDS | fields,
        [batch],
        settings,
        [partition if partition is not None else [[0, 1], [2]]],
        replayed=[forced],
    )


def assert_same(one: ReferenceStep, other: ReferenceStep) -> None:
    assert set(one.gradients) == set(other.gradients)
    for name, gradient in one.gradients.items():
        # two float64 summation orders
        torch.testing.assert_close(gradient, other.gradients[name], rtol=1e-10, atol=1e-13)
