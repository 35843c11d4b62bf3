"""Debug dumps in the true layouts of slime and verl, small, with nothing of theirs installed.

Rows are ragged. Values are chosen so that each is seen where it has to be: the value of response
token i is ``10 * row + i``.
"""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from replay_lib.snapshot.naming import Call, Instance, _NamingPickler, named, save_named

LENGTHS = [(3, 2), (2, 4), (4, 1), (2, 3)]  # prompt and response tokens of each row
LAYERS, TOPK = 2, 2


def tokens(row: int) -> list[int]:
    return [100 * (row + 1) + i for i in range(sum(LENGTHS[row]))]


def per_token(row: int, factor: float = 1.0) -> list[float]:
    return [factor * (10 * row + i) for i in range(LENGTHS[row][1])]


def experts(row: int) -> torch.Tensor:
    rows = sum(LENGTHS[row]) - 1
    return torch.arange(rows * LAYERS * TOPK).view(rows, LAYERS, TOPK) % 4


def slime_rollout(path: Path, change: Any = None) -> Path:
    """``--save-debug-rollout-data``: ``Sample.to_dict()`` of each sample."""
    samples = [
        {
            "group_index": row // 2,
            "index": row,
            "rollout_id": None,
            "prompt": [{"role": "user", "content": "1+1"}],
            "tokens": tokens(row),
            "response": "2",
            "response_length": LENGTHS[row][1],
            "label": "2",
            "reward": float(row),
            "loss_mask": None if row else [1, 0],
            "rollout_log_probs": per_token(row, -0.1),
            "rollout_routed_experts": experts(row).int(),
            "remove_sample": row == 3,
            "teacher_log_probs": None,
            "status": "completed",
            "metadata": {"source": np.float64(1.5)},
            "spec_info": {"spec_accept_token_num": 0},
            "prefix_cache_info": {"cached_tokens": 0},
        }
        for row in range(4)
    ]
    dump = {"rollout_id": 7, "samples": samples}
    if change is not None:
        change(dump)
    torch.save(dump, path)
    return path


def slime_train(path: Path, change: Any = None) -> Path:
    """``--save-debug-train-data``, version 2: the columns of each sample and the ranks' shares."""
    samples = [
        {
            "data_parallel_rank": row % 2,
            "sample_index": row,
            "rollout_position": row,
            "tokens": torch.tensor(tokens(row)),
            "response_lengths": LENGTHS[row][1],
            "loss_masks": torch.ones(LENGTHS[row][1], dtype=torch.int32),
            "rewards": float(row),
            "truncated": 0,
            "rollout_ids": 5 + row // 2,
            "rollout_mask_sums": 6,
            "rollout_log_probs": torch.tensor(per_token(row, -0.1)),
            "log_probs": torch.tensor(per_token(row, -0.2)),
            "ref_log_probs": torch.tensor(per_token(row, -0.3)),
            "advantages": torch.tensor(per_token(row, 1.0)),
            "returns": torch.tensor(per_token(row, 1.0)),
        }
        for row in range(4)
    ]
    shares = [
        {"rank": r, "data_parallel_rank": r, "partition": [r, r + 2], "num_microbatches": [1]}
        for r in range(2)
    ]
    head = {"format_version": 2, "rollout_id": 7, "rank": 0}
    dump = head | {"samples": samples, "dp_shards": shares, "raw_reward": [0.0, 1.0, 2.0, 3.0]}
    if change is not None:
        change(dump)
    torch.save(dump, path)
    return path


def slime_train_of_a_rank(path: Path) -> Path:
    """The same before version 2: one file a rank, columns."""
    rows = [1, 3]
    columns = {
        "partition": rows,
        "tokens": [torch.tensor(tokens(row)) for row in rows],
        "response_lengths": [LENGTHS[row][1] for row in rows],
        "loss_masks": [torch.ones(LENGTHS[row][1]) for row in rows],
        "rewards": [float(row) for row in rows],
        "raw_reward": [0.0, 1.0, 2.0, 3.0],
        "total_lengths": [sum(pair) for pair in LENGTHS],
        "log_probs": [torch.tensor(per_token(row, -0.2)) for row in rows],
        "advantages": [torch.tensor(per_token(row)) for row in rows],
        "num_microbatches": [1],
    }
    torch.save({"rollout_id": 7, "rank": 1, "rollout_data": columns}, path)
    return path


def verl_columns() -> dict[str, torch.Tensor]:
    """Prompts padded on the left to 4, responses on the right to 4."""
    ids, mask = torch.zeros(4, 8, dtype=torch.int64), torch.zeros(4, 8, dtype=torch.int64)
    response = torch.zeros(4, 4, dtype=torch.int64)
    value = torch.zeros(4, 4)
    for row, (prompt, answer) in enumerate(LENGTHS):
        span = slice(4 - prompt, 4 + answer)
        ids[row, span], mask[row, span] = torch.tensor(tokens(row)), 1
        response[row, :answer] = 1
        value[row, :answer] = torch.tensor(per_token(row))
    score = torch.zeros(4, 4)
    score[torch.arange(4), torch.tensor([r - 1 for _, r in LENGTHS])] = torch.arange(4.0)
    routed = torch.zeros(4, 8, LAYERS, TOPK, dtype=torch.int64)
    for row, (prompt, _) in enumerate(LENGTHS):
        made = experts(row)
        routed[row, 4 - prompt : 4 - prompt + len(made)] = made
    return {
        "prompts": ids[:, :4].clone(),
        "responses": ids[:, 4:].clone(),
        "input_ids": ids,
        "attention_mask": mask,
        "response_mask": response,
        "old_log_probs": value * -0.2,
        "rollout_log_probs": value * -0.1,
        "ref_log_prob": (value * -0.3).bfloat16(),
        "advantages": value,
        "token_level_scores": score,
        "routed_experts": routed,
    }


def verl_proto(path: Path, columns: dict[str, torch.Tensor], *, whole: bool = True) -> Path:
    """``DataProto.save_to_disk``; its TensorDict consolidated into one storage, or not."""
    leaves: dict[str, Any] = {}
    parts, start = [], 0
    for name, column in columns.items():
        raw = column.contiguous().flatten().view(torch.uint8)
        pad = -len(raw) % 8
        stop = start + len(raw) + pad
        leaves[name] = (str(column.dtype), list(column.shape), start, stop, pad)
        parts += [raw, torch.zeros(pad, dtype=torch.uint8)]
        start = stop
    size = [len(next(iter(columns.values())))]
    described = {
        "cls": "TensorDict",
        "non_tensors": {},
        "leaves": leaves,
        "cls_metadata": {"device": None, "names": [None], "batch_size": size, "is_locked": False},
    }
    prefix = "tensordict._reductions."
    batch = Call(
        named(f"{prefix}_rebuild_tensordict_files_consolidated"), (described, torch.cat(parts))
    )
    if not whole:
        state = {"_tensordict": columns, "_batch_size": torch.Size(size), "_device": None}
        batch = Call(named(f"{prefix}_make_td"), (named("tensordict._td.TensorDict"), state))
    inner = io.BytesIO()
    save_named(batch, inner)  # type: ignore[arg-type]
    others = {"uid": np.array(["a", "a", "b", "b"], dtype=object)}
    state = (inner.getvalue(), others, {"global_steps": 7, "timing": {"gen": 1.5}})
    with path.open("wb") as out:
        _NamingPickler(out, protocol=4).dump(Instance(named("verl.protocol.DataProto"), state))
    return path


def verl_generations(path: Path) -> Path:
    """A file of ``trainer.rollout_data_dir``."""
    lines = [
        {"input": "1 + 1", "output": "2 !", "gts": "2", "score": 1.0, "step": 7, "acc": True},
        {"input": "1 + 1", "output": "3", "gts": "2", "score": 0.0, "step": 7, "acc": False},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


class Evil:
    """What a pickle of an attacker asks for."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return (Path.touch, (self.victim,))


def evil(path: Path, victim: Path, *, bare: bool) -> Path:
    if bare:
        path.write_bytes(pickle.dumps({"batch": Evil(victim)}))
    else:
        torch.save({"rollout_id": 1, "samples": [Evil(victim)]}, path)
    return path
