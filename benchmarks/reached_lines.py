"""Which lines of some modules a run of the suite gets to, its workers included.

``watch(copy)`` makes every Python process that starts with ``copy`` in its path note the lines
(``sitecustomize``, imported by Python itself); ``reached(copy, modules)`` reads the notes. No
coverage tool is needed: the workers are started by torchrun and may end with ``os._exit``.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path

NOTES = "reached"
#: Line numbers by file, written as a process ends. Frames of other files are not looked into.
TRACER = """
import atexit, json, os, pathlib, sys, threading

HERE = pathlib.Path(__file__).parent
OWN = str(HERE / "replay_lib") + os.sep
seen = set()


def of_line(frame, event, arg):
    if event == "line":
        seen.add((frame.f_code.co_filename, frame.f_lineno))
    return of_line


def of_call(frame, event, arg):
    return of_line if frame.f_code.co_filename.startswith(OWN) else None


def write():
    sys.settrace(None)
    notes = HERE / "reached" / f"{os.getpid()}.json"
    notes.write_text(json.dumps(sorted((file[len(str(HERE)) + 1 :], n) for file, n in seen)))


def leave(code, end=os._exit):
    write()
    end(code)


os._exit = leave
atexit.register(write)
threading.settrace(of_call)
sys.settrace(of_call)
"""


def watch(copy: Path) -> None:
    """From now on runs in ``copy`` are noted; :func:`reached` ends it."""
    (copy / NOTES).mkdir()
    (copy / "sitecustomize.py").write_text(TRACER, encoding="utf-8")


def reached(copy: Path, modules: Sequence[str]) -> dict[str, list[int]]:
    """All lines of the statements of each module that were run, in order."""
    lines: dict[str, set[int]] = {module: set() for module in modules}
    for file in (copy / NOTES).glob("*.json"):
        for module, line in json.loads(file.read_text(encoding="utf-8")):
            if module in lines:
                lines[module].add(line)
    (copy / "sitecustomize.py").unlink()
    return {
        module: sorted(n for span in _spans(copy / module) if span & own for n in span)
        for module, own in lines.items()
    }


def _spans(file: Path) -> list[set[int]]:
    """The lines of each statement; of one that holds others, its head and decorators."""
    spans = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            spans.append(set(range(first, max(end, node.lineno) + 1)))
    return spans
