"""AXRL for the tests of this folder: found, or skipped by name; copies with one line broken."""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from replay_lib.trainers.axrl_source import (
    NEEDS_PYTHON,
    TRAINER_MODULE,
    VARIABLE,
    file_of,
    find_axrl,
)

Change = Callable[[ast.AST], bool]


def source_or_skip() -> Path:
    """The directory that holds AXRL's package; reading it needs no Python 3.12."""
    root = find_axrl()
    if root is None:
        pytest.skip(f"AXRL is absent: name a checkout in the environment variable {VARIABLE}")
    return root


def importable_or_skip() -> Path:
    """The same, where this Python can import it."""
    root = source_or_skip()
    if sys.version_info < NEEDS_PYTHON:
        pytest.skip("AXRL's syntax needs Python 3.12")
    return root


def broken_copy(root: Path, target: Path, function: str, change: Change) -> Path:
    """A copy of AXRL's package under ``target`` in which ``change`` altered ``function`` once.

    ``change`` gets the nodes of the method one after the other until it says that it changed one.
    """
    skip = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(root / "axrl", target / "axrl", ignore=skip)
    file = file_of(target, TRAINER_MODULE)
    assert file is not None
    tree = ast.parse(file.read_text())
    (method,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    before = ast.unparse(method).splitlines()
    assert any(change(node) for node in ast.walk(method)), f"nothing to break in {function}"
    after = ast.unparse(method).splitlines()
    differing = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert len(differing) == 1, differing  # one line, as promised
    file.write_text(ast.unparse(tree))
    return target


def environment(root: Path) -> dict[str, str]:
    """This process's environment with AXRL at ``root``."""
    return {**os.environ, VARIABLE: str(root)}
