"""One small method for each seam, and some that misbehave, named ``seam_examples:<function>``."""

from __future__ import annotations

from replay_lib.patch import (
    batch_patch,
    model_patch,
    router_patch,
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


def half_sure_replay(margin=0.1):
    """Router: saved experts are forced where they score nearly as the model's own."""
    return router_patch(lambda mask, own, saved: mask & (own - saved <= margin))


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


def writes_into_the_batch():
    """Multiplies the advantage in place."""

    def apply(batch):
        batch.advantage.mul_(0.6)
        return batch

    return batch_patch(apply)


def writes_into_the_tokens():
    """Changes what the model reads, in place."""

    def apply(batch):
        batch.input_ids[0, 0] += 1
        return batch

    return batch_patch(apply)


def writes_into_the_mask_of_another_seam():
    """A routing patch that empties the loss mask and the attention mask it was shown."""

    def apply(mask, batch):
        batch.loss_mask.zero_()
        batch.attention_mask.zero_()
        return mask & (batch.index % 2 == 0)[:, None, None]

    return routing_patch(apply)


def writes_into_the_log_probabilities():
    """A token-weights patch that writes into all it was given."""

    def apply(weights, rows, logprob):
        logprob.mul_(2.0)
        rows.advantage.zero_()
        return weights * 0.5

    return token_weights_patch(apply)


def writes_into_the_weights():
    """A weights patch that empties the tensors it was shown and returns one of them."""

    def apply(weights):
        for value in weights.values():
            value.zero_()
        name = next(n for n in weights if n.endswith("router.weight"))
        return {name: weights[name]}

    return weights_patch(apply)


def other_routes():
    """Drops the last row of every route."""
    return batch_patch(lambda batch: batch.replace(routes=tuple(r[:-1] for r in batch.routes)))


def not_a_tensor():
    """A column of text."""
    return batch_patch(lambda batch: batch.replace(advantage="high"))


def no_weights():
    """A token-weights patch that forgets to return."""
    return token_weights_patch(lambda weights, rows, logprob: None)


def no_parameters():
    """A weights patch that forgets to return."""
    return weights_patch(lambda weights: None)


def unknown_score():
    """A router that Megatron does not have."""
    return model_patch(moe_router_score_function="tanh")


def impossible_groups():
    """Expert groups that do not divide the experts."""
    return model_patch(moe_router_num_groups=3, moe_router_group_topk=1)


def leaving():
    """A patch that wants to end the program."""

    def apply(batch):
        raise SystemExit(3)

    return batch_patch(apply)


def entropy_of_few(top_k=7):
    """Entropy control over the largest logits only, strong enough to overflow if done naively."""
    return settings_patch(entropy_control={"alpha": 0.6, "target_entropy": 1.0, "top_k": top_k})
