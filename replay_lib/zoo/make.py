"""Ask for spikes from outside: starts the process that trains, and reads its answer. No torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replay_lib.engine.machine import has_cuda
from replay_lib.errors import EngineError, UsageError, fault
from replay_lib.zoo.kinds import find_kind
from replay_lib.zoo.native import parse_parallel
from replay_lib.zoo.native.replace import rerecord
from replay_lib.zoo.recipe import Recipe

#: Where base runs are kept unless asked otherwise.
CACHE = Path("out/zoo-cache")
WORKER = "replay_lib.zoo.worker"

Tell = Callable[[str], None]


def _silent(_: str) -> None:
    return None


def make_spike(
    kind: str,
    *,
    seed: int,
    out: Path,
    cache: Path = CACHE,
    recipe: Recipe | None = None,
    layout: str | None = None,
    tell: Tell = _silent,
) -> dict[str, Any]:
    """Train, arrange ``kind`` and record it under the new directory ``out``; returns the report.

    The report's ``event`` is ``spike`` where the detector saw one; ``snapshot`` and ``quiet`` are
    relative to ``out``. The same seed gives the same norm on the same platform.

    ``layout``, as in ``tp=2`` or ``pp=2,vpp=2``: the recorded steps are run once more by
    Megatron-Core on that many ranks (:mod:`replay_lib.zoo.native`), and those are what is kept.
    """
    (report,) = make_spikes(
        {kind: out}, seed=seed, cache=cache, recipe=recipe, layout=layout, tell=tell
    )
    return report


def make_spikes(
    kinds: Mapping[str, Path],
    *,
    seed: int,
    cache: Path = CACHE,
    recipe: Recipe | None = None,
    layout: str | None = None,
    tell: Tell = _silent,
) -> list[dict[str, Any]]:
    """Several kinds of one seed, each into a new directory of its own, trained in one process."""
    recipe = recipe or Recipe()
    parallel = None if layout is None else parse_parallel(layout)
    if recipe.device == "cuda" and not has_cuda():
        raise UsageError("zoo: this recipe runs on cuda, but no NVIDIA device is visible here")
    for kind, out in kinds.items():
        find_kind(kind)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageError(fault(out, None, "something there already", "a new directory"))
    request = {
        "recipe": recipe.model_dump(mode="json"),
        "seed": seed,
        "cache": str(cache.absolute()),
        "kinds": {kind: str(out.absolute()) for kind, out in kinds.items()},
    }
    answer = _ask(request, tell)
    if "error" in answer:
        raise _named(answer["error"]["code"])(answer["error"]["message"])
    made: list[dict[str, Any]] = answer["made"]
    if parallel is not None:
        rerecord(made, list(kinds.values()), parallel, device=recipe.device, tell=tell)
    return made


def _ask(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="zoo-") as home:
        asked, told = Path(home) / "request.json", Path(home) / "answer.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        status, lines = _train(asked, told, request["recipe"]["device"], tell)
        if not told.exists():
            last = "\n  ".join(lines[-30:])
            raise EngineError(
                f"the zoo's process ended with status {status}. End of what it said:\n  {last}"
            )
        answer: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
        return answer


def _train(asked: Path, told: Path, device: str, tell: Tell) -> tuple[int, list[str]]:
    """Run the process to its end; its status and what it said."""
    command = [sys.executable, "-W", "ignore", "-m", WORKER, str(asked), str(told)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stderr=pipe, text=True, env=_environment(device), errors="replace"
    )
    lines: list[str] = []
    with process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                lines.append(line.rstrip())
                tell(lines[-1])
        except BaseException:
            process.kill()  # an interrupted caller leaves no training behind
            raise
    return process.returncode, lines


def _environment(device: str) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    if device == "cpu":
        own["CUDA_VISIBLE_DEVICES"] = ""
    # cuBLAS is deterministic only with a fixed workspace
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | os.environ | own


def _named(code: str) -> type[Exception]:
    from replay_lib import errors

    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    found = [k for k in kinds if issubclass(k, errors.SpikeReplayError) and k.code == code]
    return found[0] if found else EngineError
