"""Reading golden cases and comparing them with this library, case by case.

The schema is in tests/data/golden/README.md. A file is recognized by what it holds, not by its
name, so any directory of that schema can be run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.detect import SpikeDetector
from replay_lib.errors import BatchError, SettingsError, SpikeReplayError
from replay_lib.loss import GrpoSettings, MicroBatchLoss, micro_batch_loss
from replay_lib.methods import load_methods
from replay_lib.microbatch import balanced_split
from replay_lib.packing import pack, unpack
from replay_lib.routing import expand_routes, placeholder

#: Relative tolerance of values and gradients: float32 sums of up to a few hundred terms in another
#: order (another torch, another device) differ by some 1e-6; in the recorder's torch they are
#: bit-equal.
RTOL = 1e-5
#: Times the largest gradient of the case: tokens whose gradient cancels carry the rounding of the
#: larger ones. Recorded float32 and float64 gradients differ by at most 2e-7 of the largest.
ATOL = 1e-6
#: Against the recorded float64 run: equal up to the order of float64 sums. What the trainer rounds
#: to float32 all the same (KL, quantiles) is summed in float32 too, so its share gets more.
RTOL_64 = 1e-12
RTOL_64_ROUNDED = 1e-6

#: A recorded exception type, and what this library raises in its place.
ERRORS: dict[str, tuple[type[SpikeReplayError], ...]] = {
    "AssertionError": (SettingsError, BatchError),
    "KeyError": (BatchError,),
}
FLOAT_COLUMNS = (
    "advantage",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "teacher_logprobs",
)


@dataclass(frozen=True)
class GoldenCase:
    """One recorded case; ``kind`` says what it is a case of."""

    id: str
    kind: str
    payload: Mapping[str, Any]


def load(directory: Path) -> list[GoldenCase]:
    """All cases of a directory. One without cases gives a single case that always fails."""
    cases = [case for path in sorted(directory.glob("*.json*")) for case in _load_file(path)]
    return cases or [GoldenCase("no-cases", "empty", {"where": str(directory)})]


def check(case: GoldenCase) -> None:
    """Compare one case; AssertionError says what differs, by how much, and what was allowed."""
    CHECKS[case.kind](case.payload)


def _load_file(path: Path) -> Iterator[GoldenCase]:
    text = path.read_text(encoding="utf-8")
    lines = path.suffix == ".jsonl"
    entries = [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)
    if not isinstance(entries, list) or not entries:
        yield GoldenCase(f"{path.stem}-no-cases", "empty", {"where": str(path)})
        return
    for number, entry in enumerate(entries):
        name = entry.get("id") or entry.get("name") or number
        yield GoldenCase(f"{path.stem}-{name}", _kind(entry), {**entry, "where": str(path)})


def _kind(entry: Mapping[str, Any]) -> str:
    marks = {
        "outputs": "loss",
        "steps": "spike",
        "expanded": "expand",
        "packed": "pack",
        "micro_batches": "split",
        "negative_abs_sum": "balance",
    }
    return next((kind for mark, kind in marks.items() if mark in entry), "unknown")


# ---- numbers -----------------------------------------------------------------------------------


def number(value: Any) -> float:
    """A recorded number; non-finite ones are strings."""
    return float(value)  # float() reads "NaN", "Infinity" and "-Infinity"


def floats(values: Any) -> Tensor:
    """A nested list of recorded float32 numbers, bit-exact."""

    def plain(item: Any) -> Any:
        return [plain(i) for i in item] if isinstance(item, list) else number(item)

    return torch.tensor(plain(values), dtype=torch.float64).to(torch.float32)


def assert_same(name: str, got: Tensor, want: Tensor, rtol: float, atol: float) -> None:
    """Same shape, same NaNs, same infinities, and the rest within ``atol + rtol * |want|``."""
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, recorded {list(want.shape)}"
    got, want = got.detach().to(torch.float64), want.to(torch.float64)
    finite = torch.isfinite(want)
    odd = ~torch.isclose(got, want, rtol=0, atol=0, equal_nan=True) & ~finite
    odd |= finite & ~((got - want).abs() <= atol + rtol * want.abs())
    if bool(odd.any()):
        at = tuple(odd.nonzero()[0].tolist())
        allowed = atol + rtol * float(want[at].abs())
        raise AssertionError(
            f"{name}{list(at) if at else ''}: found {float(got[at])!r}, recorded "
            f"{float(want[at])!r}, allowed difference {allowed:.3g}; {int(odd.sum())} of "
            f"{odd.numel()} differ"
        )


# ---- loss --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    result: MicroBatchLoss
    grad_log_prob: Tensor
    grad_entropy: Tensor


def check_loss(case: Mapping[str, Any]) -> None:
    """Value, gradients, denominator, filters and metrics in float32; then float64 as recorded."""
    expected = case["expected"]
    if expected["status"] == "error":
        _check_error(case)
        return
    single = _run(case, torch.float32)
    largest = _check_against_float32(case, single)
    _check_metrics(expected["metrics"], single.result)
    double = _run(case, torch.float64)
    _check_against_float32(case, double)
    if expected["ref64"] is not None:
        _check_against_float64(case, double, largest)


def _run(case: Mapping[str, Any], dtype: torch.dtype) -> _Run:
    log_prob, entropy = (
        floats(case["outputs"][name]).to(dtype).requires_grad_() for name in ("log_prob", "entropy")
    )
    settings = GrpoSettings(**case["config"])
    result = micro_batch_loss(settings, _rows(case), log_prob, entropy)
    result.scaled.backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in (log_prob, entropy)]
    return _Run(result, *grads)


def _rows(case: Mapping[str, Any]) -> RankBatch:
    batch, shape = case["batch"], (case["B"], case["T"])
    columns: dict[str, Any] = {
        "dp_rank": 0,
        "index": torch.arange(case["B"]),
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "attention_mask": torch.ones(shape, dtype=torch.bool),
        # these three have no default in RankBatch; a case may still leave one out
        "labels": None,
        "loss_mask": None,
        "advantage": None,
    }
    for name, values in batch.items():
        if values is not None:
            read = floats if name in FLOAT_COLUMNS else torch.tensor
            columns[name] = read(values)
    if columns["loss_mask"] is not None:
        columns["loss_mask"] = columns["loss_mask"].bool()
    return RankBatch(**columns)


def _check_error(case: Mapping[str, Any]) -> None:
    recorded = case["expected"]["error"]
    try:
        _run(case, torch.float32)
    except SpikeReplayError as error:
        allowed = ERRORS.get(recorded, (SpikeReplayError,))
        assert isinstance(error, allowed), f"{type(error).__name__} for {recorded}: {error}"
        if recorded == "KeyError":
            absent = [
                n for n in (*FLOAT_COLUMNS[:4], "labels", "loss_mask") if n not in case["batch"]
            ]
            assert any(name in str(error) for name in absent), f"{absent} not named in: {error}"
        return
    raise AssertionError(f"no error, recorded {recorded}: {case['expected'].get('message')}")


def _check_against_float32(case: Mapping[str, Any], run: _Run) -> float:
    """Returns the largest finite recorded |gradient|."""
    expected = case["expected"]
    grad_log_prob = floats(expected["grad_log_prob"])
    no_entropy = expected["grad_entropy"] is None
    grad_entropy = (
        torch.zeros_like(grad_log_prob) if no_entropy else floats(expected["grad_entropy"])
    )
    grads = torch.stack([grad_log_prob, grad_entropy])
    largest = max(grads[torch.isfinite(grads)].abs().tolist(), default=0.0)
    result, atol = run.result, ATOL * largest
    assert int(result.denominator) == expected["denom"], "denominator"
    kept = int(expected["metrics"]["policy_loss_mask_sum"])
    assert int(result.keep_BT.sum()) == kept, f"{int(result.keep_BT.sum())} kept, recorded {kept}"
    assert_same("loss", result.loss, floats(expected["loss"]), RTOL, atol)
    assert_same("scaled_loss", result.scaled, floats(expected["scaled_loss"]), RTOL, atol)
    assert_same("grad_log_prob", run.grad_log_prob, grad_log_prob, RTOL, atol)
    assert_same("grad_entropy", run.grad_entropy, grad_entropy, RTOL, atol)
    finite = math.isfinite(number(expected["loss"])) and bool(torch.isfinite(grads).all())
    assert finite == (expected["status"] == "ok"), "status and values of the case disagree"
    return largest


def _check_metrics(expected: Mapping[str, Any], result: MicroBatchLoss) -> None:
    for name, value in expected.items():
        found = torch.tensor(result.metrics[name], dtype=torch.float64)
        want = torch.tensor(number(value), dtype=torch.float64)
        # printed means of terms of order 1
        assert_same(f"metrics.{name}", found, want, RTOL, ATOL)


def _check_against_float64(case: Mapping[str, Any], run: _Run, largest: float) -> None:
    """The trainer's function on float64 copies: same loss, same distance of both gradients."""
    recorded = case["expected"]["ref64"]
    alpha = case["config"]["kl_control_alpha"]
    quantile = case["config"]["loss_agg_type"] in ("token-p05", "token-p95")
    kl = abs(alpha * run.result.metrics["kl_loss"]) if alpha else 0.0
    loss = torch.tensor(number(recorded["loss"]), dtype=torch.float64)
    of_loss = RTOL_64_ROUNDED if quantile else RTOL_64
    assert_same("ref64.loss", run.result.loss, loss, of_loss, RTOL_64_ROUNDED * kl)
    rtol = RTOL_64_ROUNDED if alpha or quantile else RTOL_64
    spread = (run.grad_log_prob - floats(case["expected"]["grad_log_prob"])).abs().max()
    want = torch.tensor(number(recorded["grad_max_abs_diff"]), dtype=torch.float64)
    assert_same("ref64.grad_max_abs_diff", spread, want, RTOL_64, rtol * largest)


# ---- the others --------------------------------------------------------------------------------


def check_spike(case: Mapping[str, Any]) -> None:
    """Every step of a recorded run of the detector."""
    detector = SpikeDetector(**case["config"])
    for step in case["steps"]:
        norm = step["grad_norm"] if step["called"] else None
        found = detector.observe(step["step"], norm)
        assert found == step["is_spike"], f"step {step['step']}: is_spike {found}"
        assert detector.median == step["median"], f"step {step['step']}: {detector.median}"
        if "history_len" in step:
            assert len(detector.history) == step["history_len"], f"step {step['step']}"


def check_expand(case: Mapping[str, Any]) -> None:
    """Routes laid over tokens, then packed as each router gets them."""
    layers, topk = case["L"], case["K"]
    mask = torch.tensor(case["attention_mask"], dtype=torch.bool)
    routes = [
        torch.tensor(rows, dtype=torch.int16).reshape(-1, layers, topk) for rows in case["routing"]
    ]
    expanded = expand_routes(routes, mask)
    assert expanded.tolist() == case["expanded"], "expanded routes differ"
    packed = pack(expanded, mask, fill=placeholder(layers, topk))
    assert packed.values.transpose(0, 1).tolist() == case["packed_LTK"], "packed routes differ"
    assert packed.cu_seqlens.tolist() == case["cu_seqlens_padded"], "cu_seqlens"


def check_pack(case: Mapping[str, Any]) -> None:
    """Tokens packed; and unpacked again."""
    mask = torch.tensor(case["attention_mask"], dtype=torch.bool)
    ids = torch.tensor(case["input_ids"])
    packed = pack(ids, mask)
    assert packed.values.tolist() == case["packed"], "packed tokens differ"
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded"):
        assert packed.cu_seqlens.tolist() == case[name], name
    assert packed.max_seqlen == case["max_seqlen_q"], "max_seqlen"
    assert torch.equal(unpack(packed.values, packed.cu_seqlens, mask), ids * mask), "unpacked"


def check_split(case: Mapping[str, Any]) -> None:
    """Row indices of each micro-batch, in order."""
    found = balanced_split(
        case["seq_lens"], case["S"], case["max_token_len"], case["min_num_micro_batch"]
    )
    assert found == case["micro_batches"], f"found {found}, recorded {case['micro_batches']}"


def check_balance(case: Mapping[str, Any]) -> None:
    """The published code block, which also scales up, bit for bit."""
    advantage = floats(case["advantage"])
    ids = torch.zeros(advantage.shape, dtype=torch.int64)
    mask = torch.tensor(case["loss_mask"], dtype=torch.bool).reshape(ids.shape)
    batch = RankBatch(
        dp_rank=0,
        index=torch.arange(len(ids)),
        input_ids=ids,
        labels=ids,
        loss_mask=mask,
        attention_mask=torch.ones_like(mask),
        advantage=advantage,
    )
    method = load_methods()["balance-negative-advantages"]
    (patch,) = method.patches({"eps": case["eps"], "scale_up": True})
    found, recorded = patch(batch).advantage, floats(case["result"])
    assert torch.equal(found.view(torch.int32), recorded.view(torch.int32)), "advantage differs"


def fail_empty(case: Mapping[str, Any]) -> None:
    """Nothing to compare is a failure."""
    raise AssertionError(f"no golden cases in {case['where']}")


def fail_unknown(case: Mapping[str, Any]) -> None:
    """A file that no check reads is a failure, or its cases would vanish."""
    raise AssertionError(f"{case['where']}: a case of no known kind, keys {sorted(case)}")


CHECKS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "loss": check_loss,
    "spike": check_spike,
    "expand": check_expand,
    "pack": check_pack,
    "split": check_split,
    "balance": check_balance,
    "empty": fail_empty,
    "unknown": fail_unknown,
}
