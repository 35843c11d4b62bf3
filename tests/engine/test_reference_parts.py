"""The engine against the oracle, parameter by parameter, on parts that no embedded case has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from written_step import SHAPE, Replays, content, make_batch, make_weights

pytestmark = pytest.mark.xdist_group("engine-parts")

#: Float32 rounding of one parameter's norm; a part left out moves some norm by 1e-2 and more.
ORACLE = 2e-5
N, H, E = SHAPE.layers, SHAPE.hidden, SHAPE.experts
PROJECTED = (SHAPE.heads + 2 * SHAPE.groups) * SHAPE.channels
SHARED = 24
BIASES = {
    "self_attention.linear_qkv.layer_norm_bias": (H,),
    "self_attention.q_layernorm.bias": (SHAPE.channels,),
    "self_attention.k_layernorm.bias": (SHAPE.channels,),
    "pre_mlp_layernorm.bias": (H,),
}
SHARED_EXPERT = {
    "mlp.shared_experts.linear_fc1.weight": (2 * SHARED, H),
    "mlp.shared_experts.linear_fc2.weight": (H, SHARED),
}
GATE = {"mlp.shared_experts.gate_weight": (1, H)}
GROUPS = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
AUXILIARY = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
PARTS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "layer-norm": ({"normalization": "LayerNorm"}, BIASES),
    "qkv-bias": ({"add_qkv_bias": True}, {"self_attention.linear_qkv.bias": (PROJECTED,)}),
    "shared-expert": ({"moe_shared_expert_intermediate_size": SHARED}, SHARED_EXPERT),
    "gated-shared-expert": (
        {"moe_shared_expert_intermediate_size": SHARED, "moe_shared_expert_gate": True},
        SHARED_EXPERT | GATE,
    ),
    "groups-of-experts": (GROUPS, {}),
    "auxiliary-loss": (AUXILIARY, {}),
    "z-loss": ({"moe_z_loss_coeff": 0.01}, {}),
    "sigmoid-auxiliary-and-z-loss": (
        AUXILIARY | {"moe_z_loss_coeff": 0.01, "moe_router_score_function": "sigmoid"},
        {},
    ),
}


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replays]:
    one = Replays(tmp_path_factory.mktemp("parts"))
    yield one
    one.close()


def with_parts(sizes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tiny model's weights with more parameters in each layer."""
    g = torch.Generator().manual_seed(5)
    more = {
        f"decoder.layers.{name}": torch.randn(N, *size, generator=g) * 0.3
        for name, size in sizes.items()
    }
    if "pre_mlp_layernorm.bias" in sizes:
        more["decoder.final_layernorm.bias"] = torch.randn(H, generator=g) * 0.3
    return make_weights() | more


@pytest.mark.parametrize("part", PARTS)
def test_every_parameter_has_the_norm_of_the_oracle(replays: Replays, part: str) -> None:
    model, sizes = PARTS[part]
    step = content(make_batch(), weights=with_parts(sizes), model=model)
    # experts inside groups are only chosen by a router that is not told them
    routed = part == "groups-of-experts"
    if routed:
        step.worker_config["enable_routing_replay"] = False
    outcome = replays(step)
    oracle = replays.oracle(step, routed=routed)
    assert abs(outcome.grad_norm_preclip / oracle.grad_norm_preclip - 1) <= ORACLE
    assert outcome.denominator == oracle.denominator
    norms = unstacked(oracle.gradients)
    assert set(outcome.param_norms) == set(norms)
    for name, norm in norms.items():
        assert abs(outcome.param_norms[name] / norm - 1) <= ORACLE, name


def test_each_loss_of_the_routers_matters(replays: Replays) -> None:
    """A control: without its losses the router's norm is another one, far beyond the tolerance."""
    name = "decoder.layers.mlp.router.weight"
    plain = replays.oracle(content(make_batch())).param_norms[name]
    for part in ("auxiliary-loss", "z-loss"):
        lossy = replays.oracle(content(make_batch(), model=PARTS[part][0])).param_norms[name]
        assert abs(lossy / plain - 1) > 100 * ORACLE, part


def unstacked(gradients: dict[str, Tensor]) -> dict[str, float]:
    """Norms by the names that runs print, from gradients by checkpoint names."""
    out: dict[str, float] = {}
    for key, value in gradients.items():
        name = key.replace("experts.experts.", "experts.")
        head = "decoder.layers."
        if name.startswith(head):
            inner = name.removeprefix(head)
            out |= {f"{head}{i}.{inner}": float(layer.norm()) for i, layer in enumerate(value)}
        else:
            out[name] = float(value.norm())
    return out
