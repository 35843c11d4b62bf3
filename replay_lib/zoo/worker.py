"""The process in which the zoo trains: started by :mod:`replay_lib.zoo.make`, one for a request.

Megatron's globals and the CPU shims live and die here. The request is a JSON file, the answer
another one; progress goes to stderr, a line each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Entry of ``python -m replay_lib.zoo.worker REQUEST ANSWER``."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    _settle(request["recipe"]["device"])
    from replay_lib.errors import SpikeReplayError
    from replay_lib.zoo.spikes import make_kinds

    try:
        answer: dict[str, Any] = {"made": make_kinds(request, _tell)}
    except SpikeReplayError as error:
        answer = {"error": {"code": error.code, "message": str(error)}}
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")


def _settle(device: str) -> None:
    """One thread, deterministic algorithms, a process group of one: the same seed, the same run."""
    import torch

    from replay_lib.engine import shims

    shims.install()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    backend = "nccl" if device == "cuda" else "gloo"
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
