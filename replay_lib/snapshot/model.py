"""What a snapshot states about itself: step, norms, spike settings, parallel layout, files.

Source: AXRL's ``MegatronWorkerConfig`` and ``GradSpikeDebugConfig`` (field names and defaults).
Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from replay_lib import layout
from replay_lib.snapshot.imported import Imported


class _Saved(BaseModel):
    """A part of a saved configuration: frozen; keys it does not know are listed elsewhere."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class SpikeSettings(_Saved):
    """The run's own detector (``spike_debug``)."""

    enabled: bool = False
    warmup_steps: int = 10
    spike_ratio: float = 2.0  # a step is a spike if norm > spike_ratio * median
    history_window: int = 100  # steps, the current one included
    max_snapshots: int = 3
    save_per_param_grads: bool = True


class _Sections(_Saved):
    """Sections of the worker configuration that hold fields of the replay's."""

    model: dict[str, Any] | None = None
    optimizer: dict[str, Any] | None = None


class WorkerConfig(_Saved):
    """What a replay needs of the saved worker configuration, by AXRL's names.

    ``seq_length`` is the model's, ``clip_grad`` the optimizer's. Keys that cannot influence the
    gradient are ignored knowingly (:data:`INERT_WORKER_KEYS`); any other key of a newer or
    older trainer is named in ``unknown``.
    """

    model_name: str = ""
    model_role: str = "actor"
    seq_length: int = Field(ge=1)  # tokens
    train_micro_batch_size: int = Field(default=4, ge=1)  # rows a rank and micro-batch
    global_batch_size: int = Field(default=32, ge=1)  # rows over all ranks
    use_dynamic_batch_size: bool = True
    padding_sample_length: int = Field(default=4, ge=1)  # tokens of a padding row
    enable_routing_replay: bool = False
    replay_routing_for_loss_tokens_only: bool = False
    moe_aux_loss_coeff: float = 0.0
    moe_router_load_balancing_type: str = "none"
    bf16: bool = False
    fp16: bool = False
    fp8: str | None = None
    enable_fp32_lm_head: bool = False
    deterministic_mode: bool = True
    batch_invariant_mode: bool = False
    attention_backend: str | None = "flash"
    apply_rope_fusion: bool | None = None
    use_language_model_only: bool = False
    use_magi_merged_forward: bool = False
    use_magi_flat_forward: bool = False
    clip_grad: float = 1.0  # L2 norm
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: tuple[str, ...] | None = None
    unknown: tuple[str, ...] = ()


#: Keys of a saved worker configuration that cannot change a step's gradient, or that are read
#: into :class:`Parallel`, :class:`SpikeSettings` or a renamed field.
INERT_WORKER_KEYS = frozenset(
    [
        "model",
        "seed",
        "tp_size",
        "pp_size",
        "vpp_size",
        "dp_size",
        "cp_size",
        "ep_size",
        "etp_size",
        "data_loader",
        "distributed_timeout_seconds",
        "fp8_recipe",
        "eval_micro_batch_size",
        "num_epochs",
        "cpu_offloading",
        "cpu_offloading_num_layers",
        "cpu_offloading_double_buffering",
        "log_every_k_steps",
        "checkpoint_dir",
        "checkpoint_step",
        "most_recent_checkpoint_k",
        "save_hf_checkpoint",
        "log_microbatches",
        "reset_init_weights_every_k_steps",
        "log_gpu_usaegs",
        "metric_logger_config",
        "log_level",
        "use_gloo_process_groups",
        "spike_debug",
        "optimizer",
        "lr_scheduler",
        "num_dataloader_workers",
        "inference_only",
        "shuffle_train_data",
    ]
)


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The recorded layout, in ranks. Megatron's default rank order: tp-cp-ep-dp-pp."""

    tp: int
    pp: int
    vpp: int | None
    cp: int
    ep: int
    etp: int
    dp: int

    @property
    def world_size(self) -> int:
        """Global ranks; expert parallelism lives inside dp * cp * tp."""
        return self.tp * self.pp * self.cp * self.dp

    def first_rank(self, dp_rank: int) -> int:
        """The lowest global rank of data-parallel rank ``dp_rank`` (tp, cp and pp rank 0)."""
        return dp_rank * self.tp * self.cp

    def dp_rank(self, rank: int) -> int:
        """Data-parallel rank of global rank ``rank``."""
        return rank // (self.tp * self.cp) % self.dp

    def micro_batch_group(self, fields: Mapping[str, Any]) -> int | None:
        """What a virtual pipeline rounds the number of micro-batches to, beside its own size.

        Megatron's ``microbatch_group_size_per_vp_stage``: the pipeline's size, unless the model
        section ``fields`` states another. None without a virtual pipeline.
        """
        if self.vpp is None:
            return None
        stated = fields.get("microbatch_group_size_per_vp_stage")
        return stated if isinstance(stated, int) and stated > 0 else self.pp


@dataclass(frozen=True, kw_only=True)
class RankFiles:
    """Files that are read for one data-parallel rank: those of its first global rank."""

    dp_rank: int
    rank: int
    batch: Path
    routing: Path | None
    grad_info: Path | None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One ``iter_*`` directory, or a portable one, checked for completeness.

    Norms are L2 over all parameters; ``grad_norm_preclip`` is before clipping and None where
    the trainer did not record one. The median is of the steps before, the spike excluded. Both
    may be NaN or infinite, as recorded.
    """

    path: Path
    step: int
    grad_norm_preclip: float | None
    grad_norm_median: float | None
    spike_ratio_recorded: float | None
    metadata_version: int | None
    legacy: bool
    routing_payload_count_rank0: int | None  # as recorded; None in old snapshots
    spike: SpikeSettings
    parallel: Parallel
    worker: WorkerConfig
    dp_rank_files: tuple[RankFiles, ...]
    sizes: dict[str, int]  # bytes by file name
    portable: bool = False  # in this library's own layout, not in the trainer's
    imported: Imported | None = None  # from another trainer's dump: no weights, no settings

    @property
    def trainer_file(self) -> Path:
        """The file that holds the loss settings."""
        return self.path / (layout.PORTABLE_TRAINER if self.portable else layout.TRAINER)

    @property
    def run_config_file(self) -> Path:
        """The file that holds the model's architecture."""
        return self.path / (layout.PORTABLE_RUN_CONFIG if self.portable else layout.RUN_CONFIG)

    def routing_file(self, dp_rank: int) -> Path:
        """Where the routes of data-parallel rank ``dp_rank`` are, if it has any."""
        if self.portable:
            return self.path / layout.portable_routing(dp_rank)
        return self.path / layout.routing_file(self.parallel.first_rank(dp_rank))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    def files_of(self, dp_rank: int) -> RankFiles:
        """Files of data-parallel rank ``dp_rank``; a ValueError outside 0..dp-1."""
        if not 0 <= dp_rank < self.parallel.dp:
            raise ValueError(f"dp rank {dp_rank} of a snapshot with dp={self.parallel.dp}")
        return self.dp_rank_files[dp_rank]


def worker_from(raw: dict[str, Any]) -> WorkerConfig:
    """Worker settings of a saved configuration; a pydantic ValidationError where they are bad."""
    known = set(WorkerConfig.model_fields) | INERT_WORKER_KEYS
    fields = {key: value for key, value in raw.items() if key in WorkerConfig.model_fields}
    sections = _Sections.model_validate({key: raw.get(key) for key in _Sections.model_fields})
    model, optimizer = sections.model or {}, sections.optimizer or {}
    fields["model_name"] = model.get("name", "")
    fields["seq_length"] = model.get("seq_length")
    fields["unknown"] = tuple(sorted(set(raw) - known))
    if "clip_grad" in optimizer:
        fields["clip_grad"] = optimizer["clip_grad"]
    return WorkerConfig.model_validate(fields)
