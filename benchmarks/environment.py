"""The environment that a figure was measured in."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import subprocess

from replay_lib.engine.versions import versions


def environment() -> dict[str, object]:
    """Versions, devices and the day; nothing that names a machine or a user."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        **versions(),
        "cpu_cores": os.cpu_count(),
        "machine": platform.machine(),
        "gpus": _gpus(),
    }


def _gpus() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    told = subprocess.run(query, capture_output=True, text=True, check=False)
    return [line.strip() for line in told.stdout.splitlines() if line.strip()]
