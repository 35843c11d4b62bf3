"""Experiments in, outcomes out: resolve, patch, group, replay.

Experiments that change only the loss share one kept forward. An experiment that changes the
forward is replayed with the stored old log-probabilities, as published replays did, and with
carried ones (stored + current patched - current baseline), which is what recomputing them under
the patch gives on the first update of a window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from replay_lib.engine.agreement import Report, agree, made_of_inputs, reporting
from replay_lib.engine.apply import Patched, apply_patches
from replay_lib.engine.cosine import Unpatched
from replay_lib.engine.halves import watched
from replay_lib.engine.memory import group_size, place_to_keep
from replay_lib.engine.protocol import Experiment, MitigationCall, Outcome
from replay_lib.engine.signals import Signals, retained
from replay_lib.engine.step import Loaded, Replayed, Variant, new_variant, run_variants
from replay_lib.methods import resolve
from replay_lib.patch import LOSS_ONLY_SEAMS, Mitigation, Patch, Seam

Progress = Callable[[float], None]
Calls = tuple[MitigationCall, ...]


@dataclass
class Replayer:
    """A loaded session: what to replay on, the known methods, and the references so far.

    ``references`` holds, for each list of mitigations that others are compared with, its signals;
    the baseline's log-probabilities are kept too, since carried ones start from them. ``fresh``
    is the baseline's first replay with its seconds, until somebody asks for a baseline.
    ``unpatched`` is its gradient, None where no memory was left to keep it.
    """

    loaded: Loaded
    methods: Mapping[str, Mitigation]
    references: dict[Calls, Signals] = field(default_factory=dict)
    baseline_log_prob: tuple[Tensor, ...] | None = None
    fresh: tuple[Replayed, float] | None = None
    unpatched: Unpatched | None = None


@dataclass(frozen=True)
class _Job:
    """One experiment, resolved and patched; ``key`` is equal where a forward can be shared.

    ``forward`` are the labels of the methods that change the forward pass, ``watched`` those of
    a combination's methods that act before the norm, ``moved`` those of them that changed
    something; weights, model fields and token weights add theirs in a replay.
    """

    number: int
    experiment: Experiment
    patched: Patched
    key: tuple[object, ...]
    forward: tuple[str, ...]
    watched: tuple[str, ...] = ()
    moved: set[str] = field(default_factory=set)


def replay(
    replayer: Replayer, experiments: Sequence[Experiment], progress: Progress = lambda _share: None
) -> Iterator[Outcome]:
    """Outcomes in the order of ``experiments``; ``progress`` gets the share done, 0 to 1.

    All experiments are resolved and patched before the first forward, so a mistake in the last
    one costs nothing. What is compared with (the baseline, every ``against``) is replayed first
    where this session has not done so yet.
    """
    jobs = _jobs(replayer, experiments)
    _replay_references(replayer, experiments)
    done = _answered_already(replayer, jobs)
    emitted = 0
    left = [job for job in jobs if job.number not in done]
    groups = _groups(left, group_size(replayer.loaded))
    for count, group in enumerate(groups):
        for outcome, job in zip(_replay_group(replayer, group), group, strict=True):
            done[job.number] = outcome
        progress((count + 1) / len(groups))
        while emitted in done:
            yield done.pop(emitted)
            emitted += 1
    while emitted in done:  # nothing was left to replay
        yield done.pop(emitted)
        emitted += 1


def _answered_already(replayer: Replayer, jobs: Sequence[_Job]) -> dict[int, Outcome]:
    """The first baseline that is asked for is the one that everything is compared with."""
    asked = [job for job in jobs if not job.experiment.mitigations]
    if not asked or replayer.fresh is None:
        return {}
    replayed, seconds = replayer.fresh
    replayer.fresh = None
    first = _outcome(replayer, asked[0], replayed, None, shared=False, seconds=seconds)
    return {asked[0].number: first}


def _jobs(replayer: Replayer, experiments: Sequence[Experiment]) -> list[_Job]:
    """One job an experiment; a mistake in one, on whichever rank, is an error on all."""
    reports = [Report() for _ in experiments]
    jobs: list[_Job] = []
    for number, (experiment, report) in enumerate(zip(experiments, reports, strict=True)):
        with reporting(report):
            jobs.append(_job(replayer, number, experiment, report))
    if any(experiment.mitigations for experiment in experiments):
        agree(replayer.loaded.comm, reports)
    return jobs


def _job(replayer: Replayer, number: int, experiment: Experiment, report: Report) -> _Job:
    patches: list[Patch] = []
    forward_calls: list[str] = []
    methods: dict[Seam, str] = {}
    labels: list[str] = []
    moved: set[str] = set()
    for call in experiment.mitigations:
        mine: Sequence[Patch] = resolve(call, replayer.methods)
        if mine and len(experiment.mitigations) > 1:
            labels.append(call.label())
            mine = watched(mine, call.label(), moved)
        patches += mine
        if any(p.seam not in LOSS_ONLY_SEAMS for p in mine):
            forward_calls.append(call.label())
        for seam in dict.fromkeys(p.seam for p in mine):
            methods[seam] = f"{methods[seam]} + {call.label()}" if seam in methods else call.label()
    loaded = replayer.loaded
    loaded.trainer.check_patches(patches)
    patched = apply_patches(patches, loaded.ranks, loaded.settings, loaded.rows)
    report.methods = methods
    if loaded.comm.world > 1:
        report.made = made_of_inputs(patches, patched)
    entropy = patched.settings.entropy_control
    wants_entropy = entropy.alpha > 0 or entropy.compute_entropy
    return _Job(
        number=number,
        experiment=experiment,
        patched=replace(patched, methods=methods),
        key=(tuple(forward_calls), wants_entropy, entropy.top_k),
        forward=tuple(forward_calls),
        watched=tuple(labels),
        moved=moved,
    )


def replay_beside(
    replayer: Replayer,
    experiment: Experiment,
    others: Sequence[Experiment],
    progress: Progress = lambda _share: None,
) -> Iterator[Outcome]:
    """Outcomes of ``others`` whose cosines are to the gradient of ``experiment``.

    That gradient, with stored old log-probabilities, is kept until the last outcome was taken.
    """
    _replay_references(replayer, ())
    variant = new_variant(replayer.loaded, patched_for(replayer, experiment), alone=True)
    (replayed,) = run_variants(replayer.loaded, [variant])
    kept = Unpatched(variant.buffers.views, replayed.measured.norm)
    yield from replay(replace(replayer, unpatched=kept, fresh=None), others, progress)


def patched_for(replayer: Replayer, experiment: Experiment) -> Patched:
    """The inputs of ``experiment`` after its patches."""
    return _jobs(replayer, [experiment])[0].patched


def _groups(jobs: Sequence[_Job], size: int) -> list[list[_Job]]:
    """Jobs that may share a forward, in the order of first appearance, at most ``size`` each.

    In a group those that are watched come first: the patches of its first job act on the model.
    """
    by_key: dict[tuple[object, ...], list[_Job]] = {}
    for job in sorted(jobs, key=lambda job: not job.watched):
        by_key.setdefault(job.key, []).append(job)
    return [
        group[start : start + size]
        for group in by_key.values()
        for start in range(0, len(group), size)
    ]


def _replay_references(replayer: Replayer, experiments: Sequence[Experiment]) -> None:
    wanted: list[Calls] = [()]
    wanted += [e.against for e in experiments]
    for calls in dict.fromkeys(wanted):
        if calls not in replayer.references:
            (job,) = _jobs(replayer, [Experiment(mitigations=calls)])
            start = time.perf_counter()
            variant = new_variant(replayer.loaded, job.patched, keep_log_prob=not calls)
            (replayed,) = run_variants(replayer.loaded, [variant])
            replayer.references[calls] = replayed.signals
            if not calls:
                replayer.baseline_log_prob = replayed.log_prob
                place = place_to_keep(replayer.loaded)
                if place is not None:
                    norm = replayed.measured.norm
                    replayer.unpatched = Unpatched.keep(variant.buffers, norm, place)
                replayer.fresh = replayed, time.perf_counter() - start


def _replay_group(replayer: Replayer, group: Sequence[_Job]) -> Iterator[Outcome]:
    start = time.perf_counter()
    variants: list[Variant] = []
    known: set[str] = set()
    for job in group:
        # a baseline, or an experiment that is asked for again, shows whether replays repeat
        again = not job.experiment.mitigations or job.experiment.name in known
        known.add(job.experiment.name)
        variants.append(new_variant(replayer.loaded, job.patched, alone=again))
        if job.forward:
            base = replayer.baseline_log_prob
            other = new_variant(replayer.loaded, job.patched, carried_from=base, alone=again)
            variants.append(other)
    finished = iter(run_variants(replayer.loaded, variants, unpatched=replayer.unpatched))
    seconds = (time.perf_counter() - start) / len(group)
    _share_moves(group)
    for job in group:
        stored = next(finished)
        carried = next(finished) if job.forward else None
        yield _outcome(replayer, job, stored, carried, shared=len(group) > 1, seconds=seconds)


def _outcome(
    replayer: Replayer,
    job: _Job,
    stored: Replayed,
    carried: Replayed | None,
    *,
    shared: bool,
    seconds: float,
) -> Outcome:
    reference = replayer.references[job.experiment.against]
    comm = replayer.loaded.comm
    patched = bool(job.experiment.mitigations)
    keeps = retained(reference, stored.signals, comm) if patched else None
    return Outcome(
        experiment=job.experiment,
        grad_norm_preclip=stored.measured.norm,
        grad_norm_preclip_carried=carried.measured.norm if carried else None,
        digest=stored.measured.digest,
        loss=stored.loss,
        denominator=stored.denominator,
        param_norms=stored.measured.param_norms,
        touched=stored.touched,
        retained=keeps,
        retained_carried=retained(reference, carried.signals, comm) if carried else None,
        cosine=stored.cosine if patched else None,
        cosine_carried=carried.cosine if carried else None,
        nonfinite=stored.nonfinite + (carried.nonfinite if carried else ()),
        notes=stored.notes + _unkept(replayer) if patched else stored.notes,
        idle=_idle(replayer, job),
        shared_forward=shared,
        seconds=seconds,
    )


def _share_moves(group: Sequence[_Job]) -> None:
    """Weights and model fields are patched once a group, by the first job's patches."""
    first = group[0]
    for job in group[1:]:
        job.moved.update(first.moved.intersection(first.forward))


def _idle(replayer: Replayer, job: _Job) -> tuple[str, ...]:
    """Methods of a combination that changed nothing on any rank."""
    if not job.watched:
        return ()
    moved = set().union(*replayer.loaded.comm.gather(job.moved))
    return tuple(label for label in job.watched if label not in moved)


def _unkept(replayer: Replayer) -> tuple[str, ...]:
    if replayer.unpatched is not None:
        return ()
    return (
        "the unpatched gradient (float32) could not be kept for lack of memory: no cosine to it",
    )
