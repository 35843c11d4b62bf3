"""Imports point one way, and the two doors open without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "replay_lib"

#: From the ground up: a room imports only from rooms in lines above its own, or from its own line.
ROOMS = [
    "errors layout exit_codes writing digests unfinished",
    "batch routing microbatch packing merged tree_check",
    "loss",
    "snapshot",
    "patch",
    "methods",
    "trainers",
    "engine",
    "backend",
    "detect noise rule",
    "expected",
    "recording importing",
    "recorder",
    "verdict",
    "case",
    "devices case_files",
    "analysis porting",
    "record",
    "report",
    "finding preserving",
    "quiet replays",
    "run",
    "pin expectations guard sweep method_cards",
    "remote",
    "zoo",
    "demo listing suite",
    "cli pytest_cases pytest_options pytest_run pytest_task pytest_plugin",
]


def imports_of(file: Path) -> set[str]:
    """Rooms of this package that a file names anywhere, type checking and functions included."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    plain = chain.from_iterable(n.names for n in nodes if isinstance(n, ast.Import))
    found = {alias.name for alias in plain}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "replay_lib":
            found |= {f"replay_lib.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name.split(".")[1] for name in found if name.startswith("replay_lib.")}


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def wrong_way(rooms: list[str]) -> list[str]:
    level = {room: number for number, line in enumerate(rooms) for room in line.split()}
    return [
        f"{file.relative_to(PACKAGE)} imports {room}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for room in sorted(imports_of(file) - {"__version__"})
        if file.parent != PACKAGE or file.stem != "__init__"
        if level[room] > level[room_of(file)]
    ]


def test_imports_point_one_way() -> None:
    assert wrong_way(ROOMS) == []


def test_the_reversed_order_is_seen_to_be_wrong() -> None:
    assert len(wrong_way(ROOMS[::-1])) > 30


#: Slow to import, or absent on a node that only replays.
HEAVY = {"torch", "megatron", "matplotlib", "jinja2", "tokenizers", "zstandard"}


@pytest.mark.parametrize("door", ["cli", "pytest_plugin"])
def test_doors_open_without_torch_and_without_what_a_replay_never_needs(door: str) -> None:
    code = f"import sys, replay_lib.{door}; sys.exit(bool({HEAVY} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=True)
