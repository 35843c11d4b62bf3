"""Small changes to a good snapshot, each a condition met in the field (docs/conditions.md).

A mutator takes what is good and returns it changed; ``@condition`` files it under its row. Those
here change the content of a snapshot (``write_snapshot`` writes it); ``mutate_files`` changes files
on disk, ``mutate_values`` batches of a loss and histories of norms. ``of`` makes them all known.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import yaml
from torch import Tensor

from replay_lib.batch import ROW_COLUMNS, TOKEN_COLUMNS, RankBatch
from replay_lib.snapshot import Content

MUTATORS: dict[str, list[Callable[..., Any]]] = {}
MODULES = ("mutate", "mutate_files", "mutate_values")


def condition(*rows: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """File a mutator under one or more rows."""

    def file(function: Callable[..., Any]) -> Callable[..., Any]:
        for row in rows:
            MUTATORS.setdefault(row, []).append(function)
        return function

    return file


def of(row: str) -> list[Callable[..., Any]]:
    """Mutators of a row."""
    for module in MODULES:
        importlib.import_module(module)
    return MUTATORS.get(row, [])


def with_batch(content: Content, dp_rank: int, **columns: Any) -> Content:
    """Other columns of one data-parallel rank."""
    batches = list(content.batches)
    batches[dp_rank] = batches[dp_rank].replace(**columns)
    return dataclasses.replace(content, batches=tuple(batches))


def with_worker(content: Content, **settings: Any) -> Content:
    """Other settings of the worker."""
    return dataclasses.replace(content, worker_config={**content.worker_config, **settings})


def with_model(content: Content, **fields: Any) -> Content:
    """Other fields of the model section."""
    document = yaml.safe_load(content.run_config)
    document["model"].update(fields)
    return dataclasses.replace(content, run_config=yaml.safe_dump(document))


def with_settings(content: Content, **fields: Any) -> Content:
    """Other loss settings."""
    return dataclasses.replace(content, settings=content.settings.replace(**fields))


def with_tensors(content: Content, tensors: dict[str, Tensor | None]) -> Content:
    """Other parameters; None takes one away."""
    changed = {**content.tensors, **tensors}
    kept = {name: t for name, t in changed.items() if t is not None}
    return dataclasses.replace(content, tensors=kept)


def with_value(content: Content, column: str, row: int, token: int, value: float) -> Content:
    """One value of one column of data-parallel rank 0."""
    values = getattr(content.batches[0], column).clone()
    values[row, token] = value
    return with_batch(content, 0, **{column: values})


def with_routes(content: Content, dp_rank: int, change: Callable[[int, Tensor], Any]) -> Content:
    """Every row's routes of one rank as ``change(row, routes)`` gives them."""
    routes = content.batches[dp_rank].routes
    changed = [None if r is None else change(i, r.clone()) for i, r in enumerate(routes)]
    return with_batch(content, dp_rank, routes=tuple(changed))


def loss_token(batch: RankBatch, *, masked: bool = False) -> tuple[int, int]:
    """A row and token on the loss mask, or off it but real and in a row that trains."""
    wanted = batch.loss_mask
    if masked:
        wanted = ~batch.loss_mask & batch.attention_mask & batch.loss_mask.any(dim=1, keepdim=True)
    row, token = (int(i) for i in wanted.nonzero()[0])
    return row, token


def rows_added(batch: RankBatch, count: int, length: int, fill: Sequence[int]) -> RankBatch:
    """``count`` padding rows of ``length`` tokens behind the others, with the routes ``fill``."""
    columns: dict[str, Any] = {}
    for name in (*TOKEN_COLUMNS, *ROW_COLUMNS):
        value: Tensor | None = getattr(batch, name)
        if value is not None:
            blank = -100 if name == "labels" else -1 if name in _MINUS_ONE else 0
            more = torch.full((count, *value.shape[1:]), blank, dtype=value.dtype)
            columns[name] = torch.cat([value, more])
    columns["attention_mask"][batch.rows :, :length] = True
    layers, topk = batch.routes[0].shape[1:]
    route = torch.tensor(fill, dtype=torch.int16).expand(length - 1, layers, topk).clone()
    return batch.replace(**columns, routes=(*batch.routes, *[route] * count))


_MINUS_ONE = ("index", "trajectory_id", "turn_index")


@condition("A1")
def dense_and_moe_layers(content: Content) -> Content:
    """Layers 0 and 2 dense, routes of the MoE layers alone, virtual pipeline stages."""
    inner = int(content.tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape[2])
    tensors: dict[str, Tensor] = {}
    for key, stacked in content.tensors.items():
        if not key.startswith("decoder.layers."):
            tensors[key] = stacked
            continue
        name = key.removeprefix("decoder.layers.")
        for layer, tensor in enumerate(stacked):
            dense = layer % 2 == 0
            if dense and "router" in name:
                continue
            own, values = name, tensor
            if dense and "experts" in name:
                own, values = name.replace("experts.experts.", ""), tensor[0]
            if dense:
                own = own.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
            tensors[f"decoder.layers.{layer}.{own}"] = values.clone()
    changed = dataclasses.replace(content, tensors=tensors)
    for dp_rank in range(len(content.batches)):
        changed = with_routes(changed, dp_rank, lambda _row, routes: routes[:, [1, 3]])
    changed = with_worker(changed, pp_size=2, vpp_size=2, train_micro_batch_size=1)
    pipeline = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    frequency = {"moe_layer_freq": [0, 1, 0, 1], "ffn_hidden_size": inner // 2}
    return with_model(changed, **frequency, **pipeline)


@condition("A3")
def one_expert_twice(content: Content) -> Content:
    """Token 3 of row 0 names an expert twice in layer 2."""

    def change(row: int, routes: Tensor) -> Tensor:
        if row == 0:
            routes[3, 2] = 3
        return routes

    return with_routes(content, 0, change)


@condition("A4")
def full_recompute(content: Content) -> Content:
    """The run recomputed every layer in its backward pass."""
    options = {"granularity": "full", "method": "uniform", "num_layers": 1}
    fields = {f"recompute_{name}": value for name, value in options.items()}
    return with_model(with_worker(content, **fields), **fields)


@condition("A5", "A18")
def mostly_padding(content: Content, fill: Sequence[int] = (0, 1), times: int = 9) -> Content:
    """``times`` padding rows for each row; ``fill`` are their routes (the trainer's: 0..K-1)."""
    batches = [rows_added(b, times * b.rows, 4, fill) for b in content.batches]
    return dataclasses.replace(content, batches=tuple(batches))


@condition("A6")
def rows_without_routes(content: Content) -> Content:
    """Rows 2 and 5 have none."""
    return with_routes(content, 0, lambda row, routes: None if row in (2, 5) else routes)


@condition("A6")
def first_turn_only(content: Content) -> Content:
    """The routes of row 1 end with its first turn."""
    return with_routes(content, 0, lambda row, routes: routes[:5] if row == 1 else routes)


@condition("A6")
def later_turns_filled(content: Content) -> Content:
    """What is missing was filled with one pair of experts."""

    def change(row: int, routes: Tensor) -> Tensor:
        if row == 1:
            routes[5:] = torch.tensor([0, 1], dtype=routes.dtype)
        return routes

    return with_routes(content, 0, change)


@condition("A7")
def another_model(content: Content) -> Content:
    """A second model for the same process, with other routers."""
    name = "decoder.layers.mlp.router.weight"
    return with_tensors(content, {name: content.tensors[name].flip(1)})


@condition("A10")
def more_or_fewer_routes(content: Content, extra: int) -> Content:
    """``n - 1 + extra`` routes for the ``n`` tokens of row 0."""

    def change(row: int, routes: Tensor) -> Tensor:
        return (torch.cat([routes, routes])[: len(routes) + extra]) if row == 0 else routes

    return with_routes(content, 0, change)


@condition("A11")
def ids_in(content: Content, dtype: torch.dtype, expert: int, experts: int) -> Content:
    """Id ``expert`` at token 3, layer 2 of row 0, stored in ``dtype``, of ``experts`` in all."""

    def change(row: int, routes: Tensor) -> Tensor:
        wide = routes.long()
        if row == 0:
            wide[3, 2, 0] = expert
        return wide.to(dtype)

    return with_model(with_routes(content, 0, change), num_moe_experts=experts)


@condition("A12")
def ids_equal_position(content: Content) -> Content:
    """The experts of token i are i and i + 1 modulo 8, so that a shift shows."""

    def change(_row: int, routes: Tensor) -> Tensor:
        place = torch.arange(len(routes), dtype=routes.dtype).reshape(-1, 1, 1)
        return torch.cat([place, place + 1], dim=2).remainder(8).expand(-1, routes.shape[1], 2)

    return with_routes(content, 0, lambda row, routes: change(row, routes).contiguous())


@condition("A15")
def tied_scores(content: Content) -> Content:
    """Routers of zeros: every expert has the same score."""
    name = "decoder.layers.mlp.router.weight"
    return with_tensors(content, {name: torch.zeros_like(content.tensors[name])})


@condition("A18")
def finite_capacity(content: Content, factor: float = 1.0) -> Content:
    """Each expert takes a share of the tokens and drops the rest."""
    return with_model(content, moe_expert_capacity_factor=factor, moe_token_drop_policy="probs")


@condition("C1", "A5")
def balanced(content: Content, coefficient: float = 0.01, z: float = 0.001) -> Content:
    """Auxiliary and z-loss are on, in the worker's settings and in the model section."""
    fields = {"moe_aux_loss_coeff": coefficient, "moe_router_load_balancing_type": "aux_loss"}
    return with_model(with_worker(content, **fields), **fields, moe_z_loss_coeff=z)


@condition("C4")
def model_with_own_balance(content: Content) -> Content:
    """The worker says no auxiliary loss, the model section has one."""
    return with_model(content, moe_aux_loss_coeff=0.01, moe_router_load_balancing_type="aux_loss")


@condition("C4")
def worker_in_bfloat16(content: Content) -> Content:
    """The worker says bfloat16, the model section float32."""
    return with_worker(content, bf16=True)


@condition("B6", "C11")
def masked_rows(content: Content, dp_rank: int, rows: Sequence[int]) -> Content:
    """The loss mask of some rows is all false; their advantages and labels follow."""
    batch = content.batches[dp_rank]
    mask = batch.loss_mask.clone()
    mask[list(rows)] = False
    return with_batch(
        content,
        dp_rank,
        loss_mask=mask,
        labels=torch.where(mask, batch.labels, -100),
        advantage=batch.advantage * mask,
    )


@condition("B3")
def far_token(content: Content) -> Content:
    """One token 100 nats apart: old - rollout."""
    row, token = loss_token(content.batches[0])
    rollout = content.batches[0].column("rollout_logprobs")[row, token]
    return with_value(content, "old_logprobs", row, token, float(rollout) - 100.0)


@condition("B7")
def not_finite(content: Content, column: str, value: float, *, masked: bool) -> Content:
    """NaN or infinity in a column, at a loss token or beside it."""
    row, token = loss_token(content.batches[0], masked=masked)
    return with_value(content, column, row, token, value)


@condition("B7")
def column_absent(content: Content, column: str) -> Content:
    """The trainer did not write a column."""
    changed = content
    for dp_rank in range(len(content.batches)):
        changed = with_batch(changed, dp_rank, **{column: None})
    return changed


@condition("B11")
def no_advantage(content: Content) -> Content:
    """Every advantage is 0 over the whole window, so the median norm is 0 too."""
    changed = dataclasses.replace(content, grad_norm_preclip=0.0, grad_norm_median=0.0)
    for dp_rank, batch in enumerate(content.batches):
        changed = with_batch(changed, dp_rank, advantage=torch.zeros_like(batch.advantage))
    return changed


@condition("C13")
def tied_embeddings(content: Content) -> Content:
    """The output layer is the embedding: one parameter, used twice."""
    fewer = with_tensors(content, {"output_layer.weight": None})
    return with_model(fewer, share_embeddings_and_output_weights=True)


@condition("C15")
def context_parallel(content: Content) -> Content:
    """Recorded with two context-parallel ranks."""
    return with_model(with_worker(content, cp_size=2), context_parallel_size=2)


@condition("D3", "E19")
def norms(content: Content, norm: float | None, median: float | None) -> Content:
    """Other recorded norms: null where the trainer returned none, NaN, infinity."""
    return dataclasses.replace(content, grad_norm_preclip=norm, grad_norm_median=median)


@condition("E6")
def other_parameters(content: Content) -> Content:
    """One parameter is missing, one too many, one of another shape."""
    norm = content.tensors["decoder.final_layernorm.weight"]
    return with_tensors(
        content,
        {
            "decoder.layers.mlp.router.weight": None,
            "decoder.layers.mlp.extra.weight": torch.ones(4, 2),
            "decoder.final_layernorm.weight": norm[:-1].clone(),
        },
    )


@condition("E18")
def unread_settings(content: Content, value: Any) -> Content:
    """An option of the worker that nothing here reads."""
    return with_worker(content, brand_new_option=value)


def broken_tree(content: Content, **fields: Any) -> Content:
    """Other fields in the prefix tree of the first merged row of data-parallel rank 0."""
    batch = content.batches[0]
    rows = list(batch.merge_info or ())
    first = next(i for i, row in enumerate(rows) if row is not None)
    merged = rows[first]
    assert merged is not None and merged.tree is not None
    rows[first] = dataclasses.replace(merged, tree={**merged.tree, **fields})
    return with_batch(content, 0, merge_info=tuple(rows))


def shorter_path_routes(content: Content, fewer: int = 1) -> Content:
    """Each path of each merged row of data-parallel rank 0 has ``fewer`` routes."""
    rows = [
        row and dataclasses.replace(row, path_routes=tuple(r[:-fewer] for r in row.path_routes))
        for row in content.batches[0].merge_info or ()
    ]
    return with_batch(content, 0, merge_info=tuple(rows))
