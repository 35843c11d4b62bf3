"""What a process leaves that is killed while it builds a directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from replay_lib.unfinished import clear_leftovers, leftovers

_BUILD = """
import pathlib, sys, time
from replay_lib.unfinished import hidden_sibling
with hidden_sibling(pathlib.Path(sys.argv[1])) as part:
    (part / "half").write_text("x")
    print(part, flush=True)
    time.sleep(60)
"""


def killed_while_building(target: Path) -> Path:
    """The hidden directory that a process left which was killed (SIGKILL) while it built."""
    paths = {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", _BUILD, str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | paths) as it:
        assert it.stdout is not None
        part = Path(it.stdout.readline().rstrip("\n"))
        assert leftovers(target.parent) == []  # its builder lives
        assert clear_leftovers(target.parent) == []
        it.kill()
    return part
