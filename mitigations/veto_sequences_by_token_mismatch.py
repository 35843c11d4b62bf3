"""Drop the policy term of rows that hold one token the trainer finds far less probable."""

from __future__ import annotations

from replay_lib.errors import PatchError
from replay_lib.patch import Patch, mitigation, settings_patch


@mitigation(
    slug="veto-sequences-by-token-mismatch",
    family="masking",
    summary="Policy term only of rows whose least old/rollout ratio reaches a threshold.",
    source="https://richardli.xyz/rl-collapse; AXRL mismatch_token_veto_threshold",
)
def veto_sequences_by_token_mismatch(threshold: float = 1e-4) -> Patch:
    """Switch the token veto on.

    A row's policy term is kept where min over its tokens of exp(old - rollout) >= threshold.

    Limits: the minimum is over all positions, and off the loss mask the ratio is 1: a threshold
    above 1 would drop every row, so it is refused.
    """
    if not 0 < threshold <= 1:
        raise PatchError(
            f"mitigation veto-sequences-by-token-mismatch: found threshold={threshold!r}, "
            "expected more than 0 and at most 1"
        )
    return settings_patch(mismatch_token_veto_threshold=float(threshold))
