"""Drop the policy term of rows whose log-probabilities moved away from the rollout engine."""

from __future__ import annotations

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="mask-sequences-by-mismatch",
    family="masking",
    summary="Policy term only of rows whose mean log-ratio to the rollout engine is small.",
    source="https://richardli.xyz/rl-collapse; AXRL mismatch_seq_masking_low and _high",
)
def mask_sequences_by_mismatch(low: float = 0.98, high: float = 1.02) -> Patch:
    """Switch the geometric sequence mask on.

    ratio[b] = exp(mean over loss tokens of (current - rollout)); the row's policy term is kept
    where low <= ratio[b] <= high. Denominators go on counting every loss token.

    Limits: it reads the current log-probabilities, so a routing patch changes which rows pass.
    """
    if not 0 <= low < high:
        raise PatchError(
            f"mitigation mask-sequences-by-mismatch: found low={low!r}, high={high!r}, "
            "expected 0 <= low < high"
        )
    return settings_patch(
        mismatch_seq_masking_low=float(low), mismatch_seq_masking_high=float(high)
    )
