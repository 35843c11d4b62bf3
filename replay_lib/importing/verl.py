"""verl's dumps: a pickled ``DataProto`` (``save_to_disk``), and ``trainer.rollout_data_dir``.

Source: volcengine/verl, ``verl/protocol.py``, ``verl/trainer/ppo/ray_trainer.py``,
``verl/experimental/agent_loop/agent_loop.py`` (commit b178a3cd5). The state of a DataProto is
``(bytes of torch.save of a TensorDict, {name: numpy array of objects}, meta_info)``; prompts are
padded on the left, responses on the right, ``input_ids`` is both side by side, and what belongs to
responses is ``[B, response length]``. The files of ``rollout_data_dir`` are JSON lines of decoded
text: input, output, score, step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replay_lib.errors import BatchError, SnapshotError, UsageError, fault
from replay_lib.importing.rows import Dump, Row, told
from replay_lib.importing.unpickling import load_plain_pickle, load_tensor_dict
from replay_lib.importing.values import integer, number, routes
from replay_lib.snapshot.imported import ImportedField, State
from replay_lib.snapshot.stand_ins import is_a

if TYPE_CHECKING:
    from torch import Tensor

#: Column of the batch, by verl's name.
TOKENS = {
    "old_log_probs": "old_logprobs",
    "rollout_log_probs": "rollout_logprobs",
    "ref_log_prob": "ref_logprobs",
    "advantages": "advantage",
    "returns": "returns",
    "values": "old_values",
}
_SCORES = ("token_level_scores", "token_level_rewards", "rm_scores")
Encode = Callable[[str], list[int]]


def read_data_proto(path: Path) -> Dump:
    """The DataProto pickled in ``path``; SnapshotError or BatchError names what does not fit."""
    found = load_plain_pickle(path)
    state = getattr(found, "state", None)
    if not is_a(found, "DataProto") or not isinstance(state, tuple) or len(state) != 3:
        raise SnapshotError(fault(path, None, f"a {type(found).__name__}", "a pickled DataProto"))
    content, others, meta = state
    if not isinstance(content, bytes):
        found_as = f"a batch of a {type(content).__name__}"
        raise SnapshotError(fault(path, "batch", found_as, "the bytes of a TensorDict"))
    tensors = load_tensor_dict(content, f"{path}: batch")
    groups = _objects(others.get("uid") if isinstance(others, dict) else None)
    rows = _rows(path, tensors, groups)
    steps = meta.get("global_steps") if isinstance(meta, dict) else None
    step = 0 if steps is None else integer(str(path), "meta_info.global_steps", steps)
    fields = _fields(tensors, steps is not None, groups is not None)
    return Dump(format="verl DataProto", step=step, rows=rows, fields=fields)


def _objects(value: Any) -> list[Any] | None:
    """Items of a numpy array of objects that are plain text or numbers."""
    state = value.state if is_a(value, "_reconstruct") else None
    items = state[-1] if isinstance(state, tuple) and len(state) == 5 else None
    plain = isinstance(items, list) and all(isinstance(i, str | int) for i in items)
    return items if plain else None


def _rows(path: Path, found: Mapping[str, Tensor], groups: list[Any] | None) -> list[Row]:
    import torch

    for name in ("input_ids", "attention_mask", "responses"):
        if name not in found:
            then = "A DataProto of prompts alone, before the rollout, holds no responses."
            raise SnapshotError(fault(path, name, "nothing", "a tensor [rows, tokens]", then))
    ids, mask, width = found["input_ids"], found["attention_mask"], found["responses"].shape[-1]
    if ids.dim() != 2 or ids.shape != mask.shape or not 0 < width <= ids.shape[1]:
        shapes = f"{list(ids.shape)}, {list(mask.shape)} and responses of {width}"
        raise BatchError(fault(path, "input_ids, attention_mask", shapes, "one shape"))
    rows = len(ids)
    for name in (*TOKENS, *_SCORES, "response_mask"):
        if name in found and found[name].shape != (rows, width):
            shape = f"shape {list(found[name].shape)}"
            raise BatchError(fault(path, name, shape, f"[{rows}, {width}], one a response token"))
    if groups is not None and len(groups) != rows:
        raise BatchError(fault(path, "uid", f"{len(groups)} names", f"{rows}"))
    trains = found.get("response_mask", mask[:, -width:]).bool()
    scores = next((found[name] for name in _SCORES if name in found), None)
    experts = found.get("routed_experts")
    made = []
    for i in range(rows):
        real = mask[i].bool()
        answered = real[-width:]
        where = f"{path}: row {i}"
        chosen = None if experts is None else routes(where, "routed_experts", experts[i][real][:-1])
        made.append(
            Row(
                where=where,
                tokens=ids[i][real].to(torch.int64),
                trains=trains[i][answered],
                values={
                    column: found[name][i][answered].float()
                    for name, column in TOKENS.items()
                    if name in found
                },
                reward=None if scores is None else float(scores[i].sum()),
                group=None if groups is None else groups[i],
                routes=chosen,
            )
        )
    return made


def _fields(found: Mapping[str, Tensor], step: bool, groups: bool) -> list[ImportedField]:
    lines = [
        told(column, State.TAKEN, name)
        if name in found
        else told(column, State.MISSING, f"no {name} in the batch")
        for name, column in TOKENS.items()
        if name in found or name not in ("returns", "values")
    ]
    lines.append(
        told("step", State.TAKEN, "meta_info.global_steps")
        if step
        else told("step", State.MISSING, "no meta_info.global_steps; 0 stands for it")
    )
    if not groups:
        lines.append(told("reward_baseline", State.MISSING, "no uid: groups are not known"))
    lines.append(told("micro-batches", State.MISSING, "rows are not yet divided over ranks"))
    return lines


def read_generations(path: Path, encode: Encode | None) -> Dump:
    """The JSON lines in ``path``, their text encoded anew by ``encode``.

    UsageError where none is given: the lines hold no token ids.
    """
    if encode is None:
        then = "Give --tokenizer PATH to encode the text anew, or dump the DataProto itself."
        raise UsageError(fault(path, None, "decoded text without token ids", "token ids", then))
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    read = [_line(f"{path}: line {i}", line) for i, line in enumerate(lines, 1)]
    if not read:
        raise SnapshotError(fault(path, None, "no lines", "one a sample"))
    rows = [_encoded(f"{path}: line {i}", one, encode) for i, one in enumerate(read, 1)]
    steps = {integer(str(path), "step", one.get("step")) for one in read}
    if len(steps) != 1:
        raise SnapshotError(fault(path, "step", f"{sorted(steps)}", "one step"))
    text = "encoded anew from decoded text: special tokens were dropped, and others may differ"
    fields = [told("input_ids", State.COMPUTED, text)]
    groups = "the mean score of lines with the same input"
    fields.append(told("reward_baseline", State.COMPUTED, groups))
    why = "lines of rollout_data_dir hold text and scores alone"
    absent = ("advantage", "old_logprobs", "rollout_logprobs", "ref_logprobs", "micro-batches")
    fields += [told(name, State.MISSING, why) for name in absent]
    return Dump(format="verl generations", step=steps.pop(), rows=rows, fields=fields)


def _line(where: str, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(fault(where, None, f"broken JSON ({error})", "an object")) from error
    if not isinstance(found, dict):
        raise SnapshotError(fault(where, None, f"a {type(found).__name__}", "an object"))
    for name in ("input", "output"):
        if not isinstance(found.get(name), str):
            raise SnapshotError(fault(where, name, f"{found.get(name)!r:.40}", "a text"))
    return found


def _encoded(where: str, line: Mapping[str, Any], encode: Encode) -> Row:
    import torch

    prompt, answer = encode(line["input"]), encode(line["output"])
    score = number(line.get("score"))
    return Row(
        where=where,
        tokens=torch.tensor([*prompt, *answer], dtype=torch.int64),
        trains=torch.ones(len(answer), dtype=torch.bool),
        values={},
        reward=score if score is not None and math.isfinite(score) else None,
        group=line["input"],
    )
