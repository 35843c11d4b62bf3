"""The commands of a document, and a reader who follows them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cli_ran import Ran

ROOT = Path(__file__).parents[1]
SKILLS = ROOT / "skills"
JOB = "axrl-v002-052915-math-moe-r3"
#: Commands that judge, whose exit code may be that of a verdict.
JUDGES = ("replay", "sweep", "guard")


def skill(name: str) -> str:
    """The text of a skill."""
    return (SKILLS / name / "SKILL.md").read_text()


def commands(text: str) -> Iterator[str]:
    """Lines of the bash blocks, with those that go on in the next one joined."""
    for block in re.findall(r"^ *```bash\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        lines = block.replace("\\\n", " ").splitlines()
        yield from (line.strip() for line in lines if line.strip())


def follow(text: str, ran: Callable[..., Ran], node: Sequence[str] = ()) -> list[str]:
    """Run every command as somebody would who has filled in the names; which ones were run.

    ``node`` is added to those that take ``--ssh``.
    """
    done: list[str] = []
    for line in commands(text):
        words = [os.path.expandvars(word) for word in shlex.split(line)]
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            # an example's own value is the reader's to replace
            if name == "SNAPSHOT" or name not in os.environ:
                os.environ[name] = value
        elif words[0] == "spike-replay":
            its = ran(*words[1:], *(node if "--ssh" in words else ()))
            allowed = (0, 1) if words[1] in JUDGES else (0,)
            assert its.code in allowed, f"{line}\n{its.out}\n{its.err}"
            done.append(words[1])
        else:
            subprocess.run(words, check=True, capture_output=True)
    return done


def outputs_with(home: Path, snapshot: Path) -> Path:
    """A tree of outputs in which ``JOB`` has left a copy of ``snapshot``, and a log."""
    output = home / "outputs" / f"2026-05-29~me~{JOB}__actor"
    copy = output / "checkpoints" / "spike_snapshots" / snapshot.name
    shutil.copytree(snapshot, copy)
    for file in copy.iterdir():
        os.utime(file, (1e9, 1e9))  # nobody writes it any more
    step = int(snapshot.name.removeprefix("iter_"))
    (output / "train.log").write_text(
        f"Gradient spike detected at step {step}, grad_norm=8.4419, saving debug snapshot.\n"
    )
    return output
