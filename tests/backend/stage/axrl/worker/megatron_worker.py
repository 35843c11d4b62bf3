"""A worker that reads a replay directory with this library's readers and adds up what it finds."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from replay_lib.snapshot import load_batch, load_grad_info, load_settings, open_snapshot
from replay_lib.snapshot.write import read_worker_config


class Chunk:
    """A part of a model: Megatron's ``get_model_config`` reads its field ``config``."""

    def __init__(self) -> None:
        self.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)


class MegatronWorker:
    """See AXRL's class of this name."""

    def __init__(  # noqa: PLR0917 - as AXRL's
        self,
        config: Any,
        rank: int,
        world_size: int,
        local_rank: int,
        master_ip: str,
        master_port: int,
    ) -> None:
        assert (rank, world_size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        assert local_rank == rank and master_ip and master_port > 0
        assert config.metric_logger_config == {"logger_type": "console"}
        self.rank = rank
        self.model = [Chunk()]

    def initialize(self) -> None:
        """Leave word where its output would go."""
        output = Path(os.environ["AXRL_OUTPUT_DIR"])
        output.mkdir(exist_ok=True)
        (output / f"started_rank{self.rank}").touch()

    def reproduce_spike(self, snapshot_dir: Path) -> dict[str, Any]:
        """Twice the summed |advantage| of all ranks, changed by settings and routes."""
        snapshot = open_snapshot(snapshot_dir)  # complete, by this library's own reader
        settings = load_settings(snapshot)
        batches = [load_batch(snapshot, r) for r in range(snapshot.parallel.dp)]
        norm = 2 * sum(float(batch.advantage.abs().sum()) for batch in batches)
        norm += settings.mismatch_token_clip_max or 0.0
        forced = sum(route is not None for batch in batches for route in batch.routes)
        live = self.model[0].config.moe_replay_routing_for_loss_tokens_only
        assert live == read_worker_config(snapshot)["replay_routing_for_loss_tokens_only"]
        norm += 1000.0 * (forced > 0) + 500.0 * live
        if math.isnan(norm):
            return {
                "reproduced": False,
                "original_grad_norm": snapshot.grad_norm_preclip,
                "replayed_grad_norm": float("nan"),
                "reason": "NaN/Inf in replayed gradients",
            }
        saved = load_grad_info(snapshot, self.rank)
        figures = {n: {"original": f["grad_norm"], "replayed": norm} for n, f in saved.items()}
        (snapshot_dir.parent.parent / "seen.json").write_text(
            json.dumps(sorted(f.name for f in snapshot_dir.iterdir()))
        )
        return {
            "reproduced": True,
            "original_grad_norm": snapshot.grad_norm_preclip,
            "replayed_grad_norm": norm,
            "relative_diff": 0.0,
            "per_param_diff": figures,
            "mismatched_params": 0,
            "total_params": len(figures),
        }

    def shutdown(self) -> None:
        """Nothing to give back."""
