"""One small method for each seam, and some that misbehave, named ``seam_examples:<function>``."""

from __future__ import annotations

from replay_lib.patch import (
    batch_patch,
    model_patch,
    routing_patch,
    settings_patch,
    token_weights_patch,
    weights_patch,
)


def scaled_router(factor=0.5):
    """Weights: every router's weight times a factor."""
    return weights_patch(
        lambda weights: {k: v * factor for k, v in weights.items() if k.endswith("router.weight")}
    )


def scaled_topk(factor=2.5):
    """Model fields: the scaling of the chosen experts' probabilities."""
    return model_patch(moe_router_topk_scaling_factor=factor)


def even_rows_replay():
    """Routing: only rows with an even index keep their saved routes."""
    return routing_patch(lambda mask, batch: mask & (batch.index % 2 == 0)[:, None, None])


def smaller_advantage(factor=0.25):
    """Batch: every advantage times a factor."""
    return batch_patch(lambda batch: batch.replace(advantage=batch.advantage * factor))


def sequence_mean():
    """Settings: another aggregation."""
    return settings_patch(loss_agg_type="seq-mean-token-mean")


def weighted_tokens(share=0.5):
    """Token weights: the same weight for every token."""
    return token_weights_patch(lambda weights, rows, logprob: weights * share)


def entropy_bonus():
    """Settings that make the forward compute entropies."""
    return settings_patch(entropy_control={"alpha": 0.1, "target_entropy": 1.0})


def keeps_nothing():
    """A mask that keeps no token."""
    return weighted_tokens(0.0)


def touches_nothing():
    """A patch that returns what it was given."""
    return routing_patch(lambda mask, batch: mask)


def nan_advantage():
    """One advantage that is not a number, at the first loss token of every rank."""

    def apply(batch):
        advantage = batch.advantage.clone()
        row, token = (int(x) for x in batch.loss_mask.nonzero()[0])
        advantage[row, token] = float("nan")
        return batch.replace(advantage=advantage)

    return batch_patch(apply)


def other_tokens():
    """Changes what the model reads, which is not allowed."""
    return batch_patch(lambda batch: batch.replace(input_ids=batch.input_ids + 1))


def wrong_shape():
    """A routing patch that returns another shape."""
    return routing_patch(lambda mask, batch: mask[:, :, :1])


def frozen_field():
    """A model field that is not read at every forward."""
    return model_patch(hidden_size=8)


def unknown_weight():
    """A parameter that the model does not have."""
    return weights_patch(lambda weights: {"no.such.weight": next(iter(weights.values()))})


def raising():
    """A patch with a mistake in it."""
    return batch_patch(lambda batch: batch.replace(advantage=batch.advantage / None))
