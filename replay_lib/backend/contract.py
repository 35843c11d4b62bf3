"""What of AXRL is called, and what its source says about that. Nothing of it is imported; no torch.

Source: AXRL ``MegatronWorker`` and its ``reproduce_spike``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from replay_lib.trainers.axrl_source import file_of

MODULE = "axrl.worker.megatron_worker"
CLASS = "MegatronWorker"
METHOD = "reproduce_spike"
#: What the worker is made with and what the method is given, by name.
MADE_WITH = ("config", "rank", "world_size", "local_rank", "master_ip", "master_port")
GIVEN = ("snapshot_dir",)
#: What a replay is read out of: keys of the answer that are always there.
ANSWERED = ("reproduced", "original_grad_norm", "replayed_grad_norm")
#: Keys that are there where the gradients were finite, where not, and where figures were saved.
ANSWERED_SOMETIMES = (
    "relative_diff",
    "reason",
    "per_param_diff",
    "mismatched_params",
    "total_params",
)
#: Files of a snapshot that AXRL itself opens, ``{}`` for the global rank; Megatron opens the
#: checkpoint beside them.
FILES = (
    "axrl_metadata.json",
    "metadata.json",
    "trainer.pt",
    "batch_rank{}.pt",
    "routing_payload_rank{}.pt",
    "grad_info_rank{}.pt",
)


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What AXRL's source says: parameters by name, files by pattern, keys of the answers."""

    made_with: tuple[str, ...]
    given: tuple[str, ...]
    files: frozenset[str]
    answers: frozenset[str]

    def faults(self) -> list[str]:
        """Where it is not what this library calls, reads and writes; empty: it fits."""
        told = [
            (f"{CLASS} is made with", self.made_with, MADE_WITH),
            (f"{METHOD} is given", self.given, GIVEN),
        ]
        wrong = [
            f"{who} {', '.join(found)}; expected {', '.join(expected)}"
            for who, found, expected in told
            if found != expected
        ]
        unread = sorted(set(ANSWERED) - self.answers)
        if unread:
            wrong.append(f"{METHOD} does not answer {', '.join(unread)}")
        unwritten = sorted(self.files - set(FILES))
        if unwritten:
            wrong.append(f"{METHOD} reads {', '.join(unwritten)}, which a replay directory has not")
        return wrong


def read_contract(root: Path) -> Contract | None:
    """The contract in the source under ``root``, or None where there is no such method.

    Needs a Python that can parse AXRL's syntax (3.12); SyntaxError else.
    """
    file = file_of(root, MODULE)
    tree = ast.parse(file.read_text(encoding="utf-8")) if file else ast.Module([], [])
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == CLASS]
    methods = {
        node.name: node for c in classes for node in c.body if isinstance(node, ast.FunctionDef)
    }
    if METHOD not in methods:
        return None
    used = list(_reached(METHOD, methods))
    made = methods.get("__init__")
    return Contract(
        made_with=_parameters(made) if made else (),
        given=_parameters(methods[METHOD]),
        files=frozenset(name for method in used for name in _files(method)),
        answers=frozenset(key for method in used for key in _keys(method)),
    )


def _reached(name: str, methods: dict[str, ast.FunctionDef]) -> Iterator[ast.FunctionDef]:
    """``name`` and the class's own methods that it calls with the snapshot's directory."""
    yield methods[name]
    for node in ast.walk(methods[name]):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        handed = {n.id for a in node.args for n in ast.walk(a) if isinstance(n, ast.Name)}
        if node.func.attr in methods and handed & set(GIVEN):
            yield methods[node.func.attr]


def _parameters(method: ast.FunctionDef) -> tuple[str, ...]:
    given = method.args
    return tuple(a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)[1:])


def _files(method: ast.FunctionDef) -> Iterator[str]:
    """Names that are joined to the snapshot's directory."""
    for node in ast.walk(method):
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)):
            continue
        if isinstance(node.left, ast.Name) and node.left.id in GIVEN:
            yield _pattern(node.right)


def _pattern(name: ast.expr) -> str:
    if isinstance(name, ast.JoinedStr):
        parts = [str(p.value) if isinstance(p, ast.Constant) else "{}" for p in name.values]
        return "".join(parts)
    return str(name.value) if isinstance(name, ast.Constant) else ast.unparse(name)


def _keys(method: ast.FunctionDef) -> Iterator[str]:
    """Keys of what is returned as a dictionary, or put into one named ``result``."""
    for node in ast.walk(method):
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict) and _named(node) == "result":
            yield from (str(k.value) for k in value.keys if isinstance(k, ast.Constant))
        if not (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)):
            continue
        if ast.unparse(node.value) == "result" and isinstance(node.slice, ast.Constant):
            yield str(node.slice.value)


def _named(node: ast.AST) -> str | None:
    """What a statement gives its value to; a return counts as ``result``."""
    if isinstance(node, ast.Return):
        return "result"
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return ast.unparse(targets[0]) if targets[0] is not None else None
