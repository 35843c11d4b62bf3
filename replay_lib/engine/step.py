"""The replayed step: every micro-batch forward once, one backward for each experiment of a group.

Gradients are summed over micro-batches and recorded data-parallel ranks and divided once by the
summed denominators, as the trainer does after its all-reduce.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from replay_lib.batch import RankBatch
from replay_lib.engine.agreement import Report, agree, made_of_model, reporting
from replay_lib.engine.apply import Patched, patched_model, refused_by_model, try_router
from replay_lib.engine.auxiliary import auxiliary_losses
from replay_lib.engine.backwards import Asked, distinct
from replay_lib.engine.checkpoint import read_checkpoint
from replay_lib.engine.columns import Shared, apart, rows_on_device
from replay_lib.engine.comm import Comm
from replay_lib.engine.cosine import Unpatched, cosine_to
from replay_lib.engine.forward import Forward, backward, forward
from replay_lib.engine.gradients import (
    GradientBuffers,
    GradientCollector,
    Measured,
    fingerprint,
    measure,
)
from replay_lib.engine.inputs import MicroBatch, RankInput, packed_routes
from replay_lib.engine.model import LiveModel
from replay_lib.engine.routes import Release, released
from replay_lib.engine.signals import Signals, first_nonfinite, loss_note
from replay_lib.engine.weights import Slice
from replay_lib.errors import PatchError
from replay_lib.loss import GrpoSettings
from replay_lib.patch import Seam
from replay_lib.trainers.protocol import BUILT_IN, LoadedTrainer


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A session's state: the live model and everything that is read once.

    ``micro`` holds merged rows as trees, ``unmerged`` the same micro-batches with one row a path
    (empty where no row is merged). ``rows`` says which of them the session replays by itself.
    ``paths_from`` is where relative paths of methods start.
    """

    model: LiveModel
    collector: GradientCollector
    names: dict[str, str]  # reported parameter names by module name
    ranks: tuple[RankInput, ...]
    micro: tuple[MicroBatch, ...]
    settings: GrpoSettings
    comm: Comm
    trainer: LoadedTrainer = BUILT_IN
    unmerged: tuple[MicroBatch, ...] = ()
    rows: str = "merged"
    pieces: tuple[Slice, ...] = ()  # where this rank's parameters lie in the whole ones
    counted: frozenset[str] | None = None  # parameters that this rank counts; None: all
    paths_from: Path = Path()
    auxiliary: float = 1.0  # factor of auxiliary losses, see auxiliary_scale

    def micro_batches(self, rows: str) -> tuple[MicroBatch, ...]:
        """Micro-batches with merged rows packed as ``rows`` says."""
        return self.unmerged if rows == "unmerged" and self.unmerged else self.micro


@dataclass
class Variant:
    """One backward of a group: an experiment's patches with stored or carried old log-probs.

    ``carried_from``: per rank the baseline's log-probabilities [B, T]; None for stored ones.
    ``alone``: its backwards are its own, though another's may be bit-equal.
    ``report`` is what its token weights and its loss have to tell the other ranks; with an error in
    it the rest of the step adds nothing.
    """

    patched: Patched
    buffers: GradientBuffers
    signals: Signals
    report: Report
    carried_from: tuple[Tensor, ...] | None = None
    alone: bool = False
    log_prob: tuple[Tensor, ...] | None = None  # filled where somebody asks for it
    sums: list[tuple[Tensor, Tensor, RankBatch, Sequence[int]]] = field(default_factory=list)
    touched: dict[Seam, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # losses that are not finite


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A finished variant. ``loss`` is the summed loss over the summed denominators.

    ``cosine`` is that to the unpatched gradient, where that was kept and both have a direction.
    """

    measured: Measured
    cosine: float | None
    signals: Signals
    log_prob: tuple[Tensor, ...] | None
    loss: float
    denominator: float
    touched: dict[Seam, int]
    nonfinite: tuple[str, ...]
    notes: tuple[str, ...] = ()


def new_variant(
    loaded: Loaded,
    patched: Patched,
    *,
    carried_from: tuple[Tensor, ...] | None = None,
    alone: bool = False,
    keep_log_prob: bool = False,
) -> Variant:
    """An empty variant, with its own gradient buffers."""
    shapes = [r.batch.input_ids.shape for r in loaded.ranks]
    return Variant(
        patched=patched,
        buffers=loaded.collector.new_buffers(),
        signals=Signals.empty(patched.batches),
        report=Report(patched.methods),
        carried_from=carried_from,
        alone=alone,
        log_prob=tuple(torch.zeros(s) for s in shapes) if keep_log_prob else None,
        touched=dict(patched.touched),
    )


def run_variants(
    loaded: Loaded,
    variants: Sequence[Variant],
    progress: Callable[[], None] = lambda: None,
    *,
    unpatched: Unpatched | None = None,
) -> list[Replayed]:
    """Replay variants that share one forward pass: same weights, model fields and routes.

    The first variant's forward patches are applied; the caller groups only variants whose forward
    patches are the same. What a patch or a loss does wrong on one rank all ranks raise together.
    ``unpatched`` is what cosines are taken to, the same on every rank.
    """
    with contextlib.ExitStack() as stack:
        touched = _enter_model(loaded, variants[0].patched, stack)
        for variant in variants:
            variant.touched.update(touched)
        for micro in loaded.micro_batches(variants[0].patched.rows):
            _one_micro_batch(loaded, micro, variants)
            progress()
    if loaded.comm.world > 1:
        agree(loaded.comm, [variant.report for variant in variants])
    return [_finish(loaded, variant, unpatched) for variant in variants]


def _enter_model(
    loaded: Loaded, patched: Patched, stack: contextlib.ExitStack
) -> Mapping[Seam, int]:
    """Put the patches of weights and model fields on until ``stack`` ends; what they touched."""
    if not (patched.weights or patched.model):
        return stack.enter_context(patched_model(loaded.model, patched))
    elsewhere = partial(read_checkpoint, loaded.model, loaded.comm, loaded.paths_from)
    report, touched = Report(patched.methods), {}
    with reporting(report):
        touched = stack.enter_context(patched_model(loaded.model, patched, elsewhere))
        if loaded.comm.world > 1:
            if patched.model:  # refused here or, with the other ranks waiting, in the forward pass
                with refused_by_model(patched):
                    try_router(loaded.model)
            report.made = made_of_model(loaded.model, loaded.pieces, patched)
    agree(loaded.comm, [report])
    return touched


def _one_micro_batch(loaded: Loaded, micro: MicroBatch, variants: Sequence[Variant]) -> None:
    first = variants[0].patched
    routes = None
    if not micro.idle:
        routes = packed_routes(loaded.ranks[micro.rank], first.forced[micro.rank], micro)
    release = _release(loaded, variants) if first.router else None
    out = forward(loaded.model, micro, routes, first.settings, release)
    shared: Shared = {}
    with auxiliary_losses(0.0 if micro.idle else loaded.auxiliary):
        work = distinct(_asked(loaded, micro, v, out, shared) for v in variants)
        for number, one in enumerate(work):
            loaded.collector.current = one.buffers
            backward(loaded.model, micro, out, one.grads, keep=number + 1 < len(work))
    loaded.collector.current = ()


def _asked(
    loaded: Loaded, micro: MicroBatch, variant: Variant, out: Forward, shared: Shared
) -> Asked:
    grads = _gradients_or_zeros(loaded, micro, variant, out, shared)
    # ranks take part in each other's backwards, and what is equal on one may differ on another
    alone = variant.alone or loaded.comm.world > 1
    return Asked(grads, variant.buffers, alone)


def _release(loaded: Loaded, variants: Sequence[Variant]) -> Release:
    """The router patches as one function; what they release is counted for every variant.

    An error leaves the mask as it was, and ends the experiment as one of the loss does.
    """
    report = variants[0].report

    def release(replayed_N: Tensor, own_N: Tensor, saved_N: Tensor) -> Tensor:
        with reporting(report):
            left = released(variants[0].patched.router, replayed_N, own_N, saved_N)
            count = int((replayed_N & ~left).sum())
            for variant in variants:
                variant.touched[Seam.ROUTER] += count
            return left
        if loaded.comm.world == 1:
            agree(loaded.comm, [report])
        return replayed_N

    return release


def _gradients_or_zeros(
    loaded: Loaded, micro: MicroBatch, variant: Variant, out: Forward, shared: Shared
) -> tuple[Tensor, Tensor | None]:
    """What the loss asks for; zeros in an idle step, and once an error has ended the experiment.

    The other ranks wait for this one in the backward pass, so it goes on to the end of the step,
    where all ranks raise the error. A rank that is alone raises it here.
    """
    if not micro.idle and variant.report.error is None:
        with reporting(variant.report):
            return _loss_gradients(loaded, micro, variant, out, shared)
        if loaded.comm.world == 1:
            agree(loaded.comm, [variant.report])
    return torch.zeros_like(out.log_prob), torch.zeros_like(out.entropy)


def _loss_gradients(
    loaded: Loaded, micro: MicroBatch, variant: Variant, out: Forward, shared: Shared
) -> tuple[Tensor, Tensor | None]:
    log_prob = out.log_prob.detach().requires_grad_()
    entropy = out.entropy.detach().requires_grad_()
    rows = _loss_rows(loaded, micro, variant, log_prob.detach(), shared)
    weights = _token_weights(variant, rows, log_prob.detach())
    if weights is not None and loaded.comm.world > 1:
        place = (Seam.TOKEN_WEIGHTS, f"weights of dp rank {rows.dp_rank}", str(micro.rows))
        variant.report.made[place] = fingerprint(weights)
    loss = loaded.trainer.loss(variant.patched.settings, rows, log_prob, entropy, weights)
    grad, grad_entropy = torch.autograd.grad(
        loss.scaled, [log_prob, entropy], allow_unused=True, materialize_grads=True
    )
    variant.sums.append((loss.scaled.detach(), loss.denominator, rows, micro.rows))
    share = loss.keep_BT.float() if weights is None else loss.keep_BT * weights.clamp(0, 1)
    signal = loss.advantage_BT * loss.policy_weight_BT
    variant.signals.put(micro.rank, micro.rows, share, torch.where(loss.keep_BT, signal, 0), grad)
    if variant.log_prob is not None:
        variant.log_prob[micro.rank][list(micro.rows)] = log_prob.detach().cpu()
    return grad, grad_entropy


def _loss_rows(
    loaded: Loaded, micro: MicroBatch, variant: Variant, log_prob: Tensor, shared: Shared
) -> RankBatch:
    batch, own = variant.patched.batches[micro.rank], loaded.ranks[micro.rank].batch
    rows = rows_on_device(batch, own, micro.rows, shared, log_prob.device)
    if loaded.trainer is not BUILT_IN:  # whose loss may write into what it is given
        rows = apart(rows)
    if variant.carried_from is None:
        return rows
    before = variant.carried_from[micro.rank][list(micro.rows)].to(log_prob.device)
    carried = rows.column("old_logprobs") + (log_prob - before)
    return rows.replace(old_logprobs=carried)


def _token_weights(variant: Variant, rows: RankBatch, log_prob: Tensor) -> Tensor | None:
    patches = variant.patched.token_weights
    if not patches:
        return None
    weights = torch.ones_like(log_prob)
    for patch in patches:
        # copies: other experiments of this forward read the same rows and log-probabilities
        weights = patch(weights.clone(), rows.clone(), log_prob.clone())
        if not isinstance(weights, Tensor) or weights.shape != log_prob.shape:
            raise PatchError(
                f"a token-weights patch must return a tensor {list(log_prob.shape)} [B, T], "
                f"not {type(weights).__name__}"
            )
        if not weights.is_floating_point() or weights.device != log_prob.device:
            raise PatchError(
                f"a token-weights patch must return real numbers on {log_prob.device}, not "
                f"{str(weights.dtype).removeprefix('torch.')} on {weights.device}"
            )
    variant.touched[Seam.TOKEN_WEIGHTS] += int(((weights != 1) & rows.loss_mask).sum())
    return weights


def _finish(loaded: Loaded, variant: Variant, unpatched: Unpatched | None) -> Replayed:
    comm = loaded.comm
    loaded.collector.sum_over_ranks(variant.buffers)
    variant.signals.settle()
    loss, denominator = comm.sums_of_batches(_sums(variant))
    if denominator > 0:  # the trainer divides only then; an empty batch has no gradient
        variant.buffers.scale(1.0 / denominator)
        variant.signals.scale(1.0 / denominator)
        loss /= denominator
    measured = measure(variant.buffers, loaded.names, comm, loaded.counted)
    nonfinite = measured.nonfinite
    if nonfinite:
        batches = [r.batch for r in loaded.ranks]
        tokens = first_nonfinite(variant.signals, batches) if comm.groups.speaks else ()
        nonfinite = tuple(chain.from_iterable(comm.gather(tokens))) + nonfinite
    counts = comm.sums([_own_share(comm, seam, n) for seam, n in variant.touched.items()])
    cosine = None
    if unpatched is not None:
        cosine = cosine_to(unpatched, variant.buffers, measured, comm, loaded.counted)
    return Replayed(
        measured=measured,
        cosine=cosine,
        signals=variant.signals,
        log_prob=variant.log_prob,
        loss=loss,
        denominator=denominator,
        touched={s: int(n) for s, n in zip(variant.touched, counts, strict=True)},
        nonfinite=nonfinite,
        notes=tuple(chain.from_iterable(comm.gather(variant.notes if comm.groups.speaks else []))),
    )


def _sums(variant: Variant) -> list[float]:
    """Loss and denominator of its micro-batches, read off the device together; notes on losses."""
    pairs = [(scaled.double(), count.double()) for scaled, count, *_ in variant.sums]
    flat = [value for pair in pairs for value in pair]
    values = torch.stack(flat).tolist() if flat else []
    for value, (_, _, rows, numbers) in zip(values[::2], variant.sums, strict=True):
        if not math.isfinite(value):
            variant.notes.append(loss_note(rows, numbers, value, variant.patched.settings))
    variant.sums.clear()
    return [sum(values[::2], 0.0), sum(values[1::2], 0.0)]


def _own_share(comm: Comm, seam: Seam, count: int) -> float:
    """What this rank adds to a count: model fields and settings are the same on every rank, and
    batches on those that share them; of weights and routed tokens each rank has counted its own."""
    if seam in (Seam.MODEL, Seam.SETTINGS):
        return float(count) if comm.rank == 0 else 0.0
    if seam in (Seam.WEIGHTS, Seam.ROUTER) or comm.groups.speaks:
        return float(count)
    return 0.0


def bare_pass(loaded: Loaded) -> float:
    """Seconds of one forward and backward over all micro-batches, without loss or patches.

    What a replay is compared with: no experiment can be cheaper with its own forward.
    """
    buffers = loaded.collector.new_buffers()
    loaded.collector.current = (buffers,)
    start = time.perf_counter()
    for micro in loaded.micro_batches(loaded.rows):
        routes = None
        if not micro.idle:
            rank = loaded.ranks[micro.rank]
            routes = packed_routes(rank, rank.forced_BTL, micro)
        out = forward(loaded.model, micro, routes, loaded.settings)
        backward(loaded.model, micro, out, (torch.ones_like(out.log_prob), None), keep=False)
    if loaded.model.device.type == "cuda":
        torch.cuda.synchronize()
    loaded.collector.current = ()
    return time.perf_counter() - start
