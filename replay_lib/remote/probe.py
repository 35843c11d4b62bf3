"""What a node has, asked before anything is copied there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from replay_lib.errors import NodeError, UsageError
from replay_lib.remote.shell import SECONDS, Node, last_words, quoted

#: Where a node keeps what was copied to it, below its home directory.
CACHE = ".cache/spike-replay"
LEAST_PYTHON = (3, 11)
#: What has to be importable there: distribution, module, lowest version (as in pyproject.toml).
NEEDS = (
    ("torch", "torch", "2.8"),
    ("megatron-core", "megatron.core", "0.16.1"),
    ("numpy", "numpy", "1.26"),
    ("pydantic", "pydantic", "2.7"),
    ("pyyaml", "yaml", "6.0"),
    ("typer", "typer", "0.12"),
    ("rich", "rich", "13.7"),
    ("tabulate", "tabulate", "0.9"),
    ("filelock", "filelock", "3.13"),
    ("psutil", "psutil", "5.9"),
    ("safetensors", "safetensors", "0.4.3"),
)
MARK = "spike-replay-node "  # a login may print anything before it
_TOOLS = ("rsync", "flock")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A node that can be used: its interpreter, where things are kept, and how much room is there.

    ``directory`` is absolute; ``free`` are bytes.
    """

    python: str
    directory: str
    free: int
    host: str
    versions: dict[str, str]


def probe(node: Node, python: str | None, directory: str | None) -> Facts:
    """The interpreter that will run there and the directory that holds what is copied.

    ``python`` None: the first that has everything of: ``.venv`` in the directory, that of an
    installed ``spike-replay``, ``python3`` and its newer names. NodeError names what is missing.
    """
    if directory is not None and (":" in directory or not directory.strip()):
        # it goes into PYTHONPATH
        raise UsageError(f"--remote-dir: found {directory!r}, expected a path without a colon")
    # packages on a cold network file system are looked up in more than a moment
    done = node.attempt(_script(python, directory), seconds=2 * SECONDS)
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    told = [json.loads(line[len(MARK) :]) for line in lines if line.startswith(MARK)]
    tools = next((one for one in told if "tools" in one), None)
    if tools is None:
        raise NodeError(
            f"node {node.told}: its shell did not do what it was asked (status "
            f"{done.returncode}): {last_words(done.stderr)}"
        )
    absent = [tool for tool in _TOOLS if tool not in tools["tools"].split()]
    if absent:
        raise NodeError(
            f"node {node.told}: found no {' and no '.join(absent)} there, expected both "
            f"{' and '.join(_TOOLS)} on its PATH. Install {' and '.join(absent)} on the node"
        )
    return _chosen(node, [one for one in told if "python" in one], python)


def _chosen(node: Node, found: list[dict[str, Any]], asked: str | None) -> Facts:
    """The first interpreter that lacks nothing."""
    usable = next((one for one in found if not lacks(one)), None)
    if usable is None:
        each = "; ".join(f"{one['python']}: {', '.join(lacks(one))}" for one in found)
        who = f"--remote-python {asked}" if asked else "an interpreter"
        least = ".".join(map(str, LEAST_PYTHON))
        raise NodeError(
            f"node {node.told}: found {each or 'no python3'}; expected {who} of Python {least} "
            f"or newer with torch and the packages of this project. Name one with --remote-python"
        )
    if usable["fault"]:
        raise NodeError(f"node {node.told}: {usable['fault']}. Name another with --remote-dir")
    return Facts(
        python=usable["python"],
        directory=usable["directory"],
        free=usable["free"],
        host=usable["host"],
        versions={name: v for name, v in usable["versions"].items() if v},
    )


def lacks(one: dict[str, Any]) -> list[str]:
    """What an interpreter lacks, in words."""
    if one["version"] is None:
        return ["cannot be started"]
    if tuple(one["version"][:2]) < LEAST_PYTHON:
        return [f"Python {'.'.join(map(str, one['version']))}, too old"]
    return list(_old_or_absent(one["versions"]))


def _old_or_absent(versions: dict[str, str | None]) -> Iterable[str]:
    for name, _, lowest in NEEDS:
        found = versions.get(name)
        if found is None:
            yield f"no {name}"
        elif found and _numbers(found) < _numbers(lowest):
            yield f"{name} {found}, older than {lowest}"


def _numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cu129`` as (2, 13, 0); what follows a part that is no number is left out."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if digits:
            numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def _script(python: str | None, directory: str | None) -> str:
    """A script that prints one marked line of JSON for the tools and one an interpreter."""
    asked = files("replay_lib.remote").joinpath("node_probe.py").read_text(encoding="utf-8")
    needs = json.dumps([list(need) for need in NEEDS])
    place = quoted(directory) if directory else f'"$HOME"/{CACHE}'
    return f"""
place={place}
tools=
for tool in {" ".join(_TOOLS)}; do command -v $tool >/dev/null 2>&1 && tools="$tools $tool"; done
echo '{MARK}{{"tools": "'"$tools"'"}}'
try() {{
    command -v "$1" >/dev/null 2>&1 || return 0
    "$1" -c {quoted(asked)} "$1" "$place" {quoted(needs)} {quoted(MARK)} </dev/null || {{
        echo "{MARK}{{\\"python\\": \\"an interpreter\\", \\"version\\": null}}"
    }}
}}
{_candidates(python)}
"""


def _candidates(python: str | None) -> str:
    if python is not None:
        return f"command -v {quoted(python)} >/dev/null || exit 3\ntry {quoted(python)}"
    return """
try "$place/.venv/bin/python"
entry=$(command -v spike-replay) && {
    first=$(head -n 1 "$entry")
    case "$first" in '#!/'*) try "${first#??}" ;; esac
}
for name in python3 python3.13 python3.12 python3.11; do try "$name"; done
"""
