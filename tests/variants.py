"""Every variant on disk that a trainer writes, and what a replay of each must equal.

``write(name, home)`` makes one; the writers are in ``variant_writers.py``.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from variant_writers import (
    NORM_OF_LOCAL,
    NORM_OF_MOE,
    PLAIN,
    TESTS,
    Write,
    base,
    bfloat16,
    by_megatron,
    by_sequence,
    changed,
    dense_and_moe,
    in_pipeline,
    laid_out,
    legacy,
    metadata,
    model,
    parameters,
    portable,
    renamed,
    rounded,
    saved,
    shared_prefix,
    views,
    with_padding,
    without,
    without_common,
    without_routes,
    worker,
)

BRIDGE = TESTS / "data/snap/run_config_bridge_0.6.2.yaml"
#: Float32 sums in another order; the bar that a replay's norm has to keep.
FLOAT32 = 1e-5
#: bfloat16 has 8 bits of mantissa: the embedded step's norm moves by up to this when rounded.
BFLOAT16 = 3e-3


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way to write a snapshot, and what its replay is compared with.

    ``like`` names the variant whose norm it must give within ``bound`` (0: the same gradient bit
    for bit). With ``micro_batches`` (of each rank) it is compared with the float64 oracle instead.
    ``refused`` is a part of the error where it cannot be replayed.
    """

    write: Write
    like: str = "plain"
    micro_batches: int = 0
    bound: float = 0.0
    refused: str = ""


#: By name; every ``like`` is a name too. The first one is the plain snapshot itself.
VARIANTS: dict[str, Variant] = {
    "plain": Variant(write=saved(base())),
    # how routes are spread over objects
    "one-object-a-path": Variant(write=saved(shared_prefix()), micro_batches=2),
    "views-shared-by-rows": Variant(write=saved(views()), like="one-object-a-path"),
    # rows and columns
    "padding-anywhere": Variant(
        write=saved(changed(batches=tuple(map(with_padding, base().batches)))), bound=FLOAT32
    ),
    "optional-columns-absent": Variant(
        write=saved(
            without("turn_index", "position_ids", "reward", "reward_baseline", "trajectory_id")
        )
    ),
    "routes-off": Variant(
        write=saved(model(worker(enable_routing_replay=False), moe_enable_routing_replay=False)),
        like="routes-off",
    ),
    "no-routes": Variant(write=saved(without_routes(base())), like="routes-off"),
    # micro-batches
    "static": Variant(
        write=saved(worker(use_dynamic_batch_size=False, train_micro_batch_size=3)), bound=FLOAT32
    ),
    "sequence": Variant(write=saved(by_sequence(base())), micro_batches=2),
    "sequence-static": Variant(
        write=saved(by_sequence(worker(use_dynamic_batch_size=False, train_micro_batch_size=3))),
        micro_batches=3,
    ),
    "virtual-pipeline": Variant(
        write=saved(in_pipeline(4)),
        micro_batches=4,
    ),
    "virtual-pipeline-default": Variant(
        write=saved(in_pipeline(None)),
        like="virtual-pipeline",
    ),
    # ranks
    "several-ranks-a-group": Variant(write=saved(laid_out(base(), tp=2, cp=2, pp=2, ep=2))),
    # checkpoints
    "local-norm-names": Variant(
        write=saved(
            changed(tensors={k.replace(NORM_OF_MOE, NORM_OF_LOCAL): t for k, t in parameters()})
        )
    ),
    "by-megatron": Variant(write=by_megatron),
    "common-inside": Variant(write=without_common),
    # metadata
    "legacy": Variant(write=legacy()),
    "legacy-version-1": Variant(write=legacy(1, worker=False)),
    "legacy-no-trainer": Variant(
        write=legacy(trainer=False),
        refused="put the trainer.pt of a newer snapshot",
    ),
    "legacy-no-routes": Variant(
        write=legacy(routes=False), refused="Old versions of the trainer did not save routes"
    ),
    "infinite-ratio": Variant(write=metadata(grad_norm_median=0.0, spike_ratio_actual=math.inf)),
    "nan-median": Variant(write=metadata(grad_norm_median=math.nan, spike_ratio_actual=math.nan)),
    "null-norms": Variant(
        write=metadata(grad_norm=None, grad_norm_median=None, spike_ratio_actual=None)
    ),
    "no-figures": Variant(write=saved(changed(grad_info={}))),
    # names of other versions
    "older-names": Variant(
        write=renamed(
            {
                b"ray\nObjectRef\n": b"ray._raylet\nObjectRef\n",
                b"numpy._core.multiarray\n_reconstruct\n": b"numpy.core.multiarray\n_reconstruct\n",
                b"tensordict._td\nTensorDict\n": b"tensordict.tensordict\nTensorDict\n",
            }
        )
    ),
    # models
    "bfloat16-values": Variant(
        write=saved(changed(tensors=rounded(torch.float32))), micro_batches=2
    ),
    "bfloat16": Variant(write=saved(bfloat16(base())), like="bfloat16-values", bound=BFLOAT16),
    "bridge-like": Variant(
        write=saved(
            model(
                changed(tensors=rounded(torch.float32)),
                rotary_base=1_000_000,
                moe_router_pre_softmax=True,
            )
        ),
        micro_batches=2,
    ),
    "bridge-0.6.2": Variant(
        write=saved(
            dataclasses.replace(bfloat16(base()), run_config=BRIDGE.read_text(encoding="utf-8"))
        ),
        like="bridge-like",
        bound=BFLOAT16,
    ),
    "dense-and-moe": Variant(write=saved(dense_and_moe(all_layers=True)), micro_batches=2),
    "dense-and-moe-routes-of-moe": Variant(
        write=saved(dense_and_moe(all_layers=False)), like="dense-and-moe"
    ),
    # without a pickle
    "portable": Variant(write=portable),
}


def write(name: str, home: Path) -> Path:
    """The snapshot directory of the variant ``name``, written under ``home``."""
    directory = home / name / PLAIN.name
    VARIANTS[name].write(directory)
    return directory
