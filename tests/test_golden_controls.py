"""A test for the golden tests: each planted fault must turn at least one case red."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import golden_support
import pytest
import torch
from golden_support import GoldenCase

from replay_lib import detect, microbatch
from replay_lib.loss import aggregate, control, denominator, distillation, filters, policy, total
from replay_lib.loss.inputs import LossInputs

OWN = golden_support.load(Path(__file__).parent / "data" / "golden")


def first_red(kind: str) -> GoldenCase | None:
    for case in OWN:
        if case.kind == kind:
            try:
                golden_support.check(case)
            except AssertionError:
                return case
    return None


def wrong_clip_bound(patch: pytest.MonkeyPatch) -> None:
    right = policy._surrogate
    patch.setattr(
        policy,
        "_surrogate",
        lambda s, a, r: right(s.replace(clip_ratio_high=s.clip_ratio_high * 1.01), a, r),
    )


def hard_clip_keeps_its_gradient(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policy, "_MOVED", float("inf"))


def hard_clip_tests_the_bounds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policy, "_MOVED", -1.0)


def log_ratio_unbounded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("replay_lib.loss.ratios.LOG_RATIO_BOUND", float("inf"))


def mask_not_applied(patch: pytest.MonkeyPatch) -> None:
    right = aggregate.aggregate
    patch.setattr(total, "aggregate", lambda v, m, mode: right(v, torch.ones_like(m), mode))


def masked_values_selected_away(patch: pytest.MonkeyPatch) -> None:
    right = aggregate.aggregate
    patch.setattr(control, "aggregate", lambda v, m, mode: right(v.masked_fill(~m, 0), m, mode))


def filters_shrink_the_mask(patch: pytest.MonkeyPatch) -> None:
    right = policy.policy_term

    def shrunk(settings: object, inputs: LossInputs) -> policy.PolicyTerm:
        inputs.loss_mask_BT.logical_and_(filters.policy_filter(settings, inputs).keep_BT)
        return right(settings, inputs)

    patch.setattr(total, "policy_term", shrunk)


def veto_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(filters, "_veto", lambda m, _t: torch.ones_like(m[:, :1], dtype=torch.bool))


def icepop_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(filters, "_icepop", lambda m, _l, _h: torch.ones_like(m, dtype=torch.bool))


def sequence_mask_reads_old(patch: pytest.MonkeyPatch) -> None:
    right = filters.sequence_ratio
    patch.setattr(
        filters, "sequence_ratio", lambda cur, base, mask: right(torch.zeros_like(cur), base, mask)
    )


def kl_against_the_reference_only(patch: pytest.MonkeyPatch) -> None:
    right = control.kl_term
    patch.setattr(
        total, "kl_term", lambda s, i: right(s.replace(kl_base_logprobs="ref_logprobs"), i)
    )


def entropy_of_one_token_less(patch: pytest.MonkeyPatch) -> None:
    right = control.top_entropy_mask
    patch.setattr(control, "top_entropy_mask", lambda e, m, q: right(e, m, q * 0.5))


def turns_counted_over_the_batch(patch: pytest.MonkeyPatch) -> None:
    def whole(turn_index: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ids = turn_index[mask]
        return torch.tensor(ids[ids >= 0].unique().numel())

    patch.setattr(denominator, "count_turns", whole)


def teacher_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(total, "distil", lambda _settings, inputs: (inputs, {}))


def reverse_kl_not_clipped(patch: pytest.MonkeyPatch) -> None:
    right = distillation.distil
    patch.setattr(total, "distil", lambda s, i: right(s.replace(opd={"reverse_kl_clip": None}), i))


def error_not_raised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("replay_lib.loss.GrpoSettings.check", lambda _self: None)


def lower_median(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(detect, "upper_median", lambda values: sorted(values)[(len(values) - 1) // 2])


def spike_not_strict(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(detect, "is_spike", lambda n, m, r: m > 0 and n >= r * m)


def routes_shifted(patch: pytest.MonkeyPatch) -> None:
    right = golden_support.expand_routes
    patch.setattr(golden_support, "expand_routes", lambda r, m: right(r, m).roll(1, dims=1))


def tail_of_zeros(patch: pytest.MonkeyPatch) -> None:
    right = golden_support.pack
    patch.setattr(golden_support, "pack", lambda rows, mask, fill=0: right(rows, mask))


def packed_to_64(patch: pytest.MonkeyPatch) -> None:
    right = golden_support.pack
    patch.setattr(golden_support, "pack", lambda rows, mask: right(rows, mask, align=64))


def split_in_slices(patch: pytest.MonkeyPatch) -> None:
    def slices(lengths: list[int], count: int) -> list[list[int]]:
        return microbatch.static_split(len(lengths), -(-len(lengths) // count))

    patch.setattr(microbatch, "_karmarkar_karp", slices)


def split_lightest_first(patch: pytest.MonkeyPatch) -> None:
    right = microbatch._partition
    patch.setattr(microbatch, "_partition", lambda lengths, count: right(lengths, count)[::-1])


FAULTS: dict[str, list[Callable[[pytest.MonkeyPatch], None]]] = {
    "loss": [
        wrong_clip_bound,
        hard_clip_keeps_its_gradient,
        hard_clip_tests_the_bounds,
        log_ratio_unbounded,
        mask_not_applied,
        masked_values_selected_away,
        filters_shrink_the_mask,
        veto_off,
        icepop_off,
        sequence_mask_reads_old,
        kl_against_the_reference_only,
        entropy_of_one_token_less,
        turns_counted_over_the_batch,
        teacher_ignored,
        reverse_kl_not_clipped,
        error_not_raised,
    ],
    "spike": [lower_median, spike_not_strict],
    "expand": [routes_shifted, tail_of_zeros],
    "pack": [packed_to_64],
    "split": [split_in_slices, split_lightest_first],
}
PLANTED = [(kind, fault) for kind, faults in FAULTS.items() for fault in faults]


@pytest.mark.parametrize(("kind", "plant"), PLANTED, ids=[f.__name__ for _, f in PLANTED])
def test_a_planted_fault_turns_a_case_red(
    kind: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert first_red(kind) is not None, "no recorded case notices this fault"


def test_without_a_fault_nothing_is_red() -> None:
    assert [first_red(kind) for kind in FAULTS] == [None] * len(FAULTS)
