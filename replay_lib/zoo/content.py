"""What the zoo's trainer knows about a step, as a snapshot's content."""

from __future__ import annotations

from typing import Any

import yaml

from replay_lib.loss import GrpoSettings
from replay_lib.snapshot import Content, SpikeSettings
from replay_lib.zoo.model import Weights, model_fields
from replay_lib.zoo.recipe import Recipe
from replay_lib.zoo.trainer import Gradient

NAME = "zoo/tiny-moe"


def step_content(
    recipe: Recipe,
    *,
    step: int,
    seed: int,
    gradient: Gradient,
    median: float | None,
    weights: Weights,
    settings: GrpoSettings,
    spike: SpikeSettings,
) -> Content:
    """Weights before the update, the batch with its old log-probabilities, settings, norms."""
    return Content(
        step=step,
        grad_norm_preclip=gradient.norm,
        grad_norm_median=median,
        worker_config=worker_config(recipe, seed, gradient.batch.rows, spike),
        run_config=run_config(recipe),
        batches=(gradient.batch,),
        settings=settings,
        tensors={name: tensor.cpu() for name, tensor in weights.items()},
    )


def worker_config(recipe: Recipe, seed: int, rows: int, spike: SpikeSettings) -> dict[str, Any]:
    """The worker's settings by AXRL's names: those that say how the step was computed."""
    grpo = recipe.grpo
    return {
        "model": {"name": NAME, "seq_length": grpo.seq_length},
        "model_role": "actor",
        "seed": seed,
        "tp_size": 1,
        "pp_size": 1,
        "vpp_size": None,
        "dp_size": 1,
        "cp_size": 1,
        "ep_size": 1,
        "etp_size": 1,
        "enable_routing_replay": True,
        "replay_routing_for_loss_tokens_only": False,
        "fp8": None,
        "fp16": False,
        "bf16": recipe.precision == "bfloat16",
        "train_micro_batch_size": grpo.rows_at_once,
        "global_batch_size": rows,
        "use_dynamic_batch_size": True,
        "padding_sample_length": 4,
        "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "none",
        "reset_init_weights_every_k_steps": 1,
        "deterministic_mode": True,
        "batch_invariant_mode": False,
        "enable_fp32_lm_head": False,
        "use_magi_merged_forward": False,
        "use_magi_flat_forward": False,
        "spike_debug": spike.model_dump(),
        "optimizer": {
            "optimizer": "adam",
            "lr": grpo.learning_rate,
            "weight_decay": 0.0,
            "clip_grad": grpo.clip_grad,
            "adam_beta1": grpo.betas[0],
            "adam_beta2": grpo.betas[1],
        },
    }


def run_config(recipe: Recipe) -> str:
    """Megatron-Bridge's YAML with the model's fields; objects are written as Bridge writes them."""
    fields = model_fields(recipe.shape, recipe.precision) | {"seq_length": recipe.grpo.seq_length}
    fields["activation_func"] = {"_call_": False, "_target_": fields["activation_func"]}
    fields["params_dtype"] = {"_call_": False, "_target_": f"torch.{fields['params_dtype']}"}
    model = {"_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider", **fields}
    document = {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "checkpoint": None,
        "dataset": None,
        "model": model,
        "scheduler": None,
        "tokenizer": None,
    }
    return yaml.safe_dump(document, sort_keys=True)
