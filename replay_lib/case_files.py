"""Write into a ``case.yaml`` what a program knows best: how the case was made, and its digests.

The rest of the file, comments included, stays as it was written by hand.
"""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from replay_lib import layout
from replay_lib.case import Case, case_file_from, read_case_file
from replay_lib.digests import digests
from replay_lib.engine.versions import versions
from replay_lib.errors import CaseError, fault
from replay_lib.writing import replace_file

_TOP_LEVEL = re.compile(r"^[\"']?\w[\w-]*[\"']?\s*:", re.MULTILINE)


def made_here(command: str, *, seed: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """Provenance of a case that this process made: command, seed, commit and platform.

    ``device`` is what it ran on, in words, e.g. ``cpu`` or ``cuda (NVIDIA H200)``. ``commit`` is
    the repository's, with ``-dirty`` where files differ from it; empty outside a repository.
    """
    known = versions()
    return {
        "command": command,
        "seed": seed,
        "commit": _commit(),
        "platform": {
            "device": device,
            "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "torch": known["torch"],
            "megatron_core": known["megatron-core"],
        },
    }


def seal(case_dir: str | Path, made: Mapping[str, Any] | None = None) -> Case:
    """Put the sha256 of every file of the case's snapshots into its ``case.yaml``.

    ``made`` (see :func:`made_here`) is put into its provenance, over fields of the same name.
    CaseError where the file is malformed, or a snapshot is absent; nothing is written then.
    """
    directory = Path(case_dir).absolute()
    file = directory / layout.CASE_FILE
    stated = read_case_file(file)
    snapshots = [stated.snapshot, *([stated.quiet] if stated.quiet else [])]
    found = digests(directory, snapshots)
    for name in snapshots:
        if not any(path.startswith(f"{name}/") for path in found):
            raise CaseError(fault(file, "sha256", f"no file under {name}", "a snapshot"))
    text = file.read_text(encoding="utf-8")
    if made:
        provenance = (yaml.safe_load(text).get("provenance") or {}) | dict(made)
        text = _with_block(file, text, "provenance", provenance)
    replace_file(file, _with_block(file, text, "sha256", found).encode("utf-8"))
    sealed = Case.load(file)
    sealed.require()
    return sealed


def write_expected(case_dir: str | Path, expected: Mapping[str, Any]) -> None:
    """Put ``expected`` into ``case.yaml``, over what it states now.

    By experiment, a verdict or a set with its reason (``Expected.plain``). All else stays as it is.
    One writer at a time: what another one stated meanwhile is kept.
    """
    file = Path(case_dir).absolute() / layout.CASE_FILE
    with FileLock(file.with_name(f".{file.name}.lock")):
        text = file.read_text(encoding="utf-8")
        stated = yaml.safe_load(text).get("expected") or {}
        new = _with_block(file, text, "expected", stated | dict(expected))
        replace_file(file, new.encode("utf-8"))


def _with_block(file: Path, text: str, key: str, value: Mapping[str, Any]) -> str:
    """``text`` with the top-level ``key`` replaced, or put at the end; checked by reading it."""
    wanted: dict[str, Any] = yaml.safe_load(text) | {key: dict(value)}
    case_file_from(file, wanted)
    block = _dumped({key: dict(value)})
    start, end = _lines_of(text, key)
    head = text[:start] + ("" if text[:start].endswith("\n") else "\n")
    new = head + block + text[end:]
    with contextlib.suppress(yaml.YAMLError):
        if yaml.safe_load(new) == wanted:
            return new
    # written in a style that cannot be edited by lines: the content is kept, its layout is not
    return _dumped(wanted)


class _Dumper(yaml.SafeDumper):
    """Lists in one line: those of a case are short."""


def _flow(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


_Dumper.add_representer(list, _flow)


def _dumped(value: Mapping[str, Any]) -> str:
    return yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, width=96, allow_unicode=True)


def _lines_of(text: str, key: str) -> tuple[int, int]:
    """From the top-level ``key`` to the next one, without the comments that lead to that."""
    starts = [match.start() for match in _TOP_LEVEL.finditer(text)]
    mine = [at for at in starts if re.match(rf"[\"']?{re.escape(key)}[\"']?\s*:", text[at:])]
    if not mine:
        return len(text), len(text)
    end = min((at for at in starts if at > mine[0]), default=len(text))
    led_by = re.search(r"(?:^(?:#.*|\s*)\n)+\Z", text[mine[0] : end], re.MULTILINE)
    return mine[0], mine[0] + led_by.start() if led_by else end


def _commit() -> str:
    """The commit of this library's own repository."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    ask = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
