"""Build the live model: process groups, Megatron's configuration, GPTModel over our layer spec."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replay_lib.engine.groups import Groups
from replay_lib.engine.layout import ONE_RANK, Layout
from replay_lib.engine.model_config import OWN_SETTINGS, ModelConfig
from replay_lib.engine.rotary import PackedRotary


@dataclass
class LiveModel:
    """This rank's shard of the model on its device, with what the engine needs to know about it.

    ``moe_layers`` tells of every layer of the whole model, ``routers`` are those of this rank's
    pipeline stage, and ``moe_numbers`` their places among the whole model's MoE layers.
    """

    module: nn.Module
    config: Any
    routers: list[Any]
    moe_layers: tuple[bool, ...]
    device: torch.device
    rotary: PackedRotary | None
    topk: int
    experts: int
    vocab: int  # rows of the whole embedding
    moe_numbers: tuple[int, ...] = ()
    groups: Groups = field(default_factory=Groups)
    first_layer: int = 0  # number of this stage's first layer
    tied_copy: bool = False  # whether the output layer is the embedding's copy, on the last stage

    def parameters(self) -> dict[str, Tensor]:
        """This rank's trainable parameters by their module names in the whole model.

        Layers count from the whole model's first, and the last pipeline stage's copy of a tied
        embedding has the embedding's name.
        """
        return {self.whole_name(name): p for name, p in self.module.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """This rank's buffers (a router's expert bias, say), named as parameters are."""
        return {self.whole_name(name): b for name, b in self.module.named_buffers()}

    def whole_name(self, name: str) -> str:
        """A module name of this pipeline stage as it would be in the whole model."""
        if name == "output_layer.weight" and self.tied_copy:
            return "embedding.word_embeddings.weight"
        head = "decoder.layers."
        if not (self.first_layer and name.startswith(head)):
            return name
        number, _, rest = name[len(head) :].partition(".")
        return f"{head}{int(number) + self.first_layer}.{rest}"


def build_model(
    config: ModelConfig,
    *,
    vocab: int,
    replay: bool,
    device: torch.device,
    groups: Groups | None = None,
) -> LiveModel:
    """This rank's shard of an uninitialised GPTModel of ``vocab`` rows, in training mode.

    ``replay`` attaches Megatron's RouterReplay to every router. ``groups`` is what
    :func:`replay_lib.engine.groups.init_groups` gave (None: one rank); the layout has to fit the
    model (:func:`replay_lib.engine.fitting.refuse_what_cannot_be_split`). Parameters hold garbage
    until weights are loaded; nothing else may read them before.
    """
    from megatron.core.models.gpt import GPTModel

    from replay_lib.engine.layers import block_spec

    groups = groups or Groups()
    transformer = transformer_config(config, replay=replay, layout=groups.layout)
    each = len(config.moe_layers) // groups.layout.pp
    first = groups.pp.rank * each
    moe_here = config.moe_layers[first : first + each]
    module = GPTModel(
        config=transformer,
        transformer_layer_spec=block_spec(transformer, moe_here),
        vocab_size=vocab,
        max_sequence_length=max(config.max_sequence_length, 1),
        pre_process=groups.first_stage,
        post_process=groups.last_stage,
        parallel_output=True,
        pg_collection=_process_groups(groups),
        **config.gpt,
    )
    module.to(device)
    module.train()
    _mark_shards(module)
    moe = [
        layer.mlp for layer, is_moe in zip(module.decoder.layers, moe_here, strict=True) if is_moe
    ]
    for layer in moe:
        layer.token_dispatcher = _dispatcher(transformer, groups)
    rotary = None
    if hasattr(module, "rotary_pos_emb"):
        rotary = module.rotary_pos_emb = PackedRotary(module.rotary_pos_emb)
    before = sum(config.moe_layers[:first])
    return LiveModel(
        module=module,
        config=transformer,
        routers=[layer.router for layer in moe],
        moe_layers=config.moe_layers,
        device=device,
        rotary=rotary,
        topk=int(transformer.moe_router_topk),
        experts=int(transformer.num_moe_experts or 0),
        vocab=vocab,
        moe_numbers=tuple(range(before, before + len(moe))),
        groups=groups,
        first_layer=first,
        tied_copy=module.share_embeddings_and_output_weights and not groups.first_stage,
    )


def _mark_shards(module: nn.Module) -> None:
    """Say which parameters are tensor-parallel shards; Megatron does so only where it initialises.

    ``tensor_model_parallel`` is what Megatron's own norm and finalisation read too.
    """
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
    )

    for part in module.modules():
        rows = isinstance(part, RowParallelLinear)
        if not (rows or isinstance(part, ColumnParallelLinear | VocabParallelEmbedding)):
            continue
        for name, parameter in part.named_parameters(recurse=False):
            if name == "bias" and rows:
                continue  # every rank has the whole bias
            marked: Any = parameter
            marked.tensor_model_parallel = True
            marked.partition_dim = 1 if rows else 0


def _dispatcher(transformer: Any, groups: Groups) -> Any:
    from replay_lib.engine.dispatch import LocalDispatcher
    from replay_lib.engine.dispatch_ranks import RankDispatcher

    topk = int(transformer.moe_router_topk)
    if groups.ep.size == 1:
        return LocalDispatcher(topk)
    return RankDispatcher(topk, groups.ep, int(transformer.num_moe_experts))


def _process_groups(groups: Groups) -> Any:
    """Megatron's groups, except that its model is not told of context parallelism.

    Its attention would split every row in 2 * cp pieces and place rotary angles for them. Here the
    packed tokens are cut into cp equal parts, and our attention and rotary angles know of it. The
    router's groups stay as they are: auxiliary losses count the tokens of all parts.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    collection = ProcessGroupCollection.use_mpu_process_groups()
    if groups.layout.cp > 1:
        collection.cp = collection.expt_tp  # always of one rank here
    return collection


def transformer_config(config: ModelConfig, *, replay: bool, layout: Layout = ONE_RANK) -> Any:
    """Megatron's TransformerConfig for a saved model and this replay."""
    from megatron.core.transformer import TransformerConfig

    known = set(inspect.signature(TransformerConfig).parameters)
    dtype = getattr(torch, config.dtype)
    values: dict[str, Any] = dict(config.transformer)
    values.update(OWN_SETTINGS)
    values.update(
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.tp > 1,  # MoE layers want it
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=1,  # see _process_groups
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        activation_func=getattr(F, config.activation),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        moe_enable_routing_replay=replay and any(config.moe_layers),
    )
    return TransformerConfig(**{k: v for k, v in values.items() if k in known})
