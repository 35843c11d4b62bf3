"""Loss settings by AXRL's own field names, strict and frozen.

Source: AXRL ``configs.GrpoTrainerConfig`` with its ``EntropyControlConfig`` and ``OPDConfig``.
A field of the wrong type or an unknown one is refused when the settings are made. Settings that
contradict each other are refused when they are used (:meth:`GrpoSettings.check`), as in AXRL, so
that several patches may be applied one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from pydantic_core import ErrorDetails

from replay_lib.errors import SettingsError, fault

ValueAggType = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-std",
    "token-max",
    "token-min",
    "token-std",
    "token-p05",
    "token-p95",
]
LossType = Literal["grpo", "ppo", "tis", "gspo", "grpo2", "topr", "kimi2_5"]
DenominatorType = Literal["token", "sequence", "seq_turn"]


#: Field, what was found, what was expected.
_Wrong = tuple[str, str, str]


class _Settings(BaseModel):
    """Strict and frozen; every fault of validation comes out as a SettingsError."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    where: ClassVar[str] = "loss settings"
    inert: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            known = sorted(type(self).model_fields)
            raise SettingsError(_describe(self.where, known, error.errors()[0])) from None

    @field_validator("*", mode="after")
    @classmethod
    def _no_nan(cls, value: Any) -> Any:
        # NaN would compare false with everything and switch a filter off without a word
        if isinstance(value, float) and math.isnan(value):
            raise ValueError("NaN is no setting")
        return value

    def replace(self, **fields: Any) -> Self:
        """A validated copy with other values.

        A mapping for a group (``entropy_control={"alpha": 0.1}``) changes the named fields of it
        and keeps the rest. Raises SettingsError for an unknown field, for a wrong value, and for
        a field that the loss does not read, since changing it would be without effect.
        """
        known = sorted(set(type(self).model_fields) - self.inert)
        for name in fields:
            if name in self.inert:
                raise SettingsError(
                    fault(
                        self.where,
                        name,
                        "a field that acts before a batch is saved or not on the loss",
                        f"one of {', '.join(known)}",
                        "Patch the batch to change what it acts on.",
                    )
                )
        present = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**present, **{k: self._merged(k, v) for k, v in fields.items()}})

    def _merged(self, name: str, value: Any) -> Any:
        group = getattr(self, name, None)
        if isinstance(group, _Settings) and isinstance(value, Mapping):
            return group.replace(**value)
        return value


class EntropySettings(_Settings):
    """Entropy control: ``alpha * (target_entropy - mean entropy)^2``, entropies in nats."""

    where: ClassVar[str] = "loss settings: entropy_control"
    inert: ClassVar[frozenset[str]] = frozenset({"easy_score_cutoff", "epsilon"})

    target_entropy: float = 0.1
    alpha: float = 0.0  # 0 or less: no control
    compute_entropy: bool = False  # entropies are computed although alpha is 0
    top_k: int = -1  # largest logits that enter the entropy; 0 or less: all
    top_quantile: float = 1.0  # share of each row's tokens of largest entropy; 1: all
    easy_score_cutoff: float = 0.4  # inert: the trainer has no use of it
    epsilon: float = 1e-6  # inert: the trainer has no use of it


class OpdSettings(_Settings):
    """On-policy distillation: a share of the advantage comes from a teacher's log-probabilities."""

    where: ClassVar[str] = "loss settings: opd"
    inert: ClassVar[frozenset[str]] = frozenset(
        {
            "backend",
            "teacher_model",
            "sglang_worker",
            "sglang_host",
            "sglang_port",
            "teacher_weight_name",
        }
    )

    enabled: bool = False
    opd_alpha: float = 0.1  # 0..1, the teacher's share
    reverse_kl_clip: float | None = 10.0  # nats a token
    student_logprob_source: Literal["rollout_logprobs", "old_logprobs", "cur_logprobs"] = (
        "cur_logprobs"
    )
    normalize_student_logprob_scale: bool = False
    # inert: how the teacher was run; its log-probabilities are in the batch
    backend: Literal["sglang", "megatron"] = "sglang"
    teacher_model: dict[str, Any] | None = None
    sglang_worker: dict[str, Any] | None = None
    sglang_host: str | None = None
    sglang_port: int | None = None
    teacher_weight_name: str = "opd_teacher_weights"


class GrpoSettings(_Settings):
    """Everything that AXRL's ``GrpoTrainer`` is configured with; defaults are AXRL's."""

    inert: ClassVar[frozenset[str]] = frozenset(
        {
            "log_sample",
            "normalize_advantage_by_batch_std",
            "normalize_advantages_over_valid_tokens_in_batch",
            "ppo_value",
        }
    )

    loss_type: LossType = "grpo2"
    clip_ratio_high: float = 0.28  # upper bound of the ratio is 1 + this
    clip_ratio_low: float = 0.2  # lower bound of the ratio is 1 - this
    dual_clip_neg_adv_factor: float | None = 3.0  # grpo and ppo only, > 1
    dual_soft_clip: float | None = 3.0  # grpo2 only: an absolute ratio
    loss_agg_type: ValueAggType = "token-mean"
    micro_batch_denominator_type: DenominatorType = "token"
    entropy_control: EntropySettings = EntropySettings()
    kl_control_alpha: float = 0.0
    is_base_logprobs: Literal["old_logprobs", "rollout_logprobs"] = "old_logprobs"
    kl_base_logprobs: Literal["old_logprobs", "ref_logprobs"] = "old_logprobs"
    mismatch_token_clip_max: float | None = None  # cap of the old / rollout ratio of a token
    mismatch_seq_masking_low: float | None = None  # bounds of the current / rollout ratio of a row
    mismatch_seq_masking_high: float | None = None
    mismatch_token_veto_threshold: float | None = None  # least old / rollout ratio in a row
    icepop_masking_low: float | None = None  # bounds of the old / rollout ratio of a token
    icepop_masking_high: float | None = None
    turn_reward_alpha: float = 0.0  # read by the loss only where seq_turn_alpha is None
    seq_turn_alpha: float | None = None  # weight of a turn in the seq_turn denominator
    opd: OpdSettings = OpdSettings()
    # inert: these act before the batch is saved, or on another loss
    log_sample: bool = True
    normalize_advantage_by_batch_std: bool = False
    normalize_advantages_over_valid_tokens_in_batch: bool = False
    ppo_value: dict[str, Any] | None = None

    @property
    def wants_entropy(self) -> bool:
        """Whether entropies are computed from the logits (else they are zeros)."""
        return self.entropy_control.alpha > 0.0 or self.entropy_control.compute_entropy

    def check(self) -> None:
        """Raise SettingsError where two settings contradict each other or one is out of range.

        Source: the assertions in AXRL's ``GrpoTrainer`` (they vanish under ``python -O``), named
        by the setting that has to change.
        """
        for field, found, expected in self._contradictions():
            raise SettingsError(fault(self.where, field, found, expected))

    def _contradictions(self) -> list[_Wrong]:
        of_type = {
            "grpo": self._against_grpo,
            "ppo": self._against_ppo,
            "grpo2": self._against_grpo2,
            "gspo": self._against_gspo,
            "kimi2_5": self._against_kimi,
        }
        own = of_type[self.loss_type]() if self.loss_type in of_type else []
        return own + self._out_of_range()

    def _against_grpo(self) -> list[_Wrong]:
        factor = self.dual_clip_neg_adv_factor
        if factor is None or factor > 1.0:
            return []
        expected = f"more than 1, or none, for {self._named}"
        return [("dual_clip_neg_adv_factor", f"{factor:g}", expected)]

    def _against_ppo(self) -> list[_Wrong]:
        return self._needs_base("old_logprobs") + self._against_grpo()

    def _against_grpo2(self) -> list[_Wrong]:
        if self.dual_soft_clip is not None:
            return []
        return [("dual_soft_clip", "none", f"a ratio for {self._named}")]

    def _against_gspo(self) -> list[_Wrong]:
        if self.loss_agg_type == "seq-mean-token-mean":
            return []
        return [("loss_agg_type", self.loss_agg_type, f"seq-mean-token-mean for {self._named}")]

    def _against_kimi(self) -> list[_Wrong]:
        wrong = self._needs_base("rollout_logprobs")
        cap = self.mismatch_token_clip_max
        if cap is not None:
            wrong.append(("mismatch_token_clip_max", f"{cap:g}", f"none for {self._named}"))
        return wrong

    def _needs_base(self, base: str) -> list[_Wrong]:
        if self.is_base_logprobs == base:
            return []
        return [("is_base_logprobs", self.is_base_logprobs, f"{base} for {self._named}")]

    def _out_of_range(self) -> list[_Wrong]:
        quantile, share = self.entropy_control.top_quantile, self.opd.opd_alpha
        wrong: list[_Wrong] = []
        if quantile <= 0.0:
            wrong.append(("entropy_control.top_quantile", f"{quantile:g}", "more than 0"))
        if self.opd.enabled and not 0.0 <= share <= 1.0:
            wrong.append(("opd.opd_alpha", f"{share:g}", "0 to 1"))
        return wrong

    @property
    def _named(self) -> str:
        return f"loss_type {self.loss_type}"


def _describe(where: str, known: list[str], error: ErrorDetails) -> str:
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return fault(where, field, "an unknown field", f"one of {', '.join(known)}")
    reason = error["msg"].removeprefix("Value error, ")
    return fault(where, field, repr(error["input"]), f"another value ({reason})")
