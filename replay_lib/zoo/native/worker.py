"""One rank of a recording job: started by torchrun for :mod:`replay_lib.zoo.native.launch`.

The request is a JSON file; rank 0 writes the answer into another one. The first rank that meets
an error writes it there instead: the others only tell that a peer is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

#: A collective that takes longer has lost a rank.
TIMEOUT = timedelta(seconds=300)


def main() -> None:
    """Entry of ``python -m replay_lib.zoo.native.worker REQUEST ANSWER`` under torchrun."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        _serve(request)
    except Exception as error:
        _tell({"error": _describe(error)})
        raise


def _serve(request: dict[str, Any]) -> None:
    from replay_lib.zoo.native import shims

    shims.install()
    device = _join(request["device"])
    recorded = _record(request, device)
    if os.environ["RANK"] == "0":
        _tell({"recorded": recorded})
    import torch

    torch.distributed.destroy_process_group()


def _describe(error: Exception) -> dict[str, str]:
    from replay_lib.errors import SpikeReplayError

    if isinstance(error, SpikeReplayError):
        return {"code": error.code, "message": str(error)}
    told = "".join(traceback.format_exception(error))
    rank = os.environ["RANK"]
    message = f"rank {rank} of the recording job met an unexpected {type(error).__name__}: {error}"
    return {"code": "engine", "message": f"{message}\n{told}"}


def _record(request: dict[str, Any], device: Any) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from replay_lib.snapshot.model import Parallel
    from replay_lib.zoo.native.model import join_groups, leave_groups
    from replay_lib.zoo.native.record import record

    recorded = []
    for step in request["steps"]:
        parallel = Parallel(**step["parallel"])
        join_groups(parallel)
        made = record(Path(step["source"]), Path(step["target"]), parallel, device)
        recorded.append(asdict(made))
        leave_groups()
    return recorded


def _join(device: str) -> Any:
    import torch

    cuda = device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo", timeout=TIMEOUT, device_id=own if cuda else None
    )
    return own


def _tell(answer: dict[str, Any]) -> None:
    """Into the answer file, whole, unless another rank was first."""
    target = Path(sys.argv[2])
    own = target.with_suffix(f".{os.environ['RANK']}")
    own.write_text(json.dumps(answer), encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        os.link(own, target)


if __name__ == "__main__":
    main()
