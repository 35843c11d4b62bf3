"""Small faults planted one at a time: does a test of the module turn red?

    pip install cosmic-ray==8.7.0
    python benchmarks/mutation.py OUT.json [--module replay_lib/rule.py ...] [--sample N] [--again]
    python benchmarks/mutation_table.py      # the tables of docs/mutation.md

Cosmic Ray finds the places and writes the mutants; each is tested on a copy of the tree, never in
it, by pytest in a forked process that holds torch already, stopped at its first failure. Left out
are mutants that differ in annotations alone (never evaluated, or evaluated as types), those equal
to another one and those that do not compile. ``--sample`` runs N of each module's, drawn by a
fixed seed; ``--again`` goes on from OUT: what survived there is run again, what was not drawn yet
is drawn up to N.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import gc
import hashlib
import importlib
import importlib.metadata
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("replay_lib", "mitigations", "spike-mitigation-methods", "tests", "conftest.py")
COPIED += ("benchmarks",)
SEED = 0  # of the order in which mutants are drawn
OUTCOMES = ("killed", "broken", "timeout", "survived")
TIMEOUT_S = 180  # of one mutant; the slowest selection takes some 30 s on a busy machine

#: Arithmetic swapped for its inverse or neighbour; comparisons for those that no test can tell
#: apart by luck (Kaminski, Ammann and Offutt, Better predicate testing, 2011, and the opposite).
ARITHMETIC = (
    *("Add_Sub", "Sub_Add", "Mul_Div", "Mul_Add", "Div_Mul", "Div_FloorDiv", "FloorDiv_Div"),
    *("FloorDiv_Mul", "Pow_Mul", "Mod_Mul", "BitAnd_BitOr", "BitOr_BitAnd", "BitXor_BitAnd"),
)
COMPARISONS = (
    *("Lt_LtE", "Lt_GtE", "Lt_NotEq", "LtE_Lt", "LtE_Gt", "LtE_Eq", "Gt_GtE", "Gt_LtE"),
    *("Gt_NotEq", "GtE_Gt", "GtE_Lt", "GtE_Eq", "Eq_NotEq", "Eq_LtE", "Eq_GtE", "NotEq_Eq"),
    *("NotEq_Lt", "NotEq_Gt", "Is_IsNot", "IsNot_Is"),
)
UNARY = ("Delete_USub", "Delete_Not", "Delete_Invert")
OPERATORS = (
    *(f"core/ReplaceBinaryOperator_{name}" for name in ARITHMETIC),
    *(f"core/ReplaceComparisonOperator_{name}" for name in COMPARISONS),
    *(f"core/ReplaceUnaryOperator_{name}" for name in UNARY),
    *("core/AddNot", "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd", "core/NumberReplacer"),
    *("core/ReplaceTrueWithFalse", "core/ReplaceFalseWithTrue", "core/RemoveDecorator"),
    *("core/ReplaceBreakWithContinue", "core/ReplaceContinueWithBreak"),
    *("core/ZeroIterationForLoop", "core/ExceptionReplacer"),
)
GOLDEN = "tests/test_golden.py::test_golden"
#: The test file of each part of the loss; inputs and totals share one, ratios and filters too.
LOSS = {name: name for name in ("aggregate", "control", "denominator", "distillation", "filters")}
LOSS |= {name: name for name in ("logits", "policy", "settings", "total")}
LOSS |= {"inputs": "total", "ratios": "filters"}
SELECTIONS: dict[str, tuple[str, ...]] = {
    **{
        f"replay_lib/loss/{name}.py": (f"tests/loss/test_{own}.py", "tests/test_values.py", GOLDEN)
        for name, own in LOSS.items()
    },
    "replay_lib/routing.py": ("tests/test_routing.py", "tests/test_values.py", GOLDEN),
    "replay_lib/microbatch.py": ("tests/test_microbatch.py", "tests/test_values.py", GOLDEN),
    "replay_lib/detect.py": ("tests/test_detect.py", GOLDEN),
    "replay_lib/rule.py": ("tests/test_rule.py", "tests/test_verdict.py"),
    "replay_lib/verdict.py": ("tests/test_verdict.py", "tests/test_values.py"),
}
#: Files of golden cases that are of a module; the loss has its own.
GOLDEN_FILES = {
    "replay_lib/routing.py": "expand_routed_experts.json",
    "replay_lib/microbatch.py": "dynamic_microbatches.json",
    "replay_lib/detect.py": "spike_detection.json",
}
#: What pytest gets: no plugin but its own and the tests', plain asserts (they fail as well), and
#: no test that takes seconds: stories start pytest anew, the other two are searches.
SLOW = ("_story", "test_padding_rows_and_tails", "the_split_does_not_matter")
FAST = ("-q", "-x", "-k", " and ".join(f"not {name}" for name in SLOW), "--assert=plain")
FAST += ("-p", "no:logging", "-p", "no:cacheprovider")
FAST += ("-W", "ignore::pytest.PytestAssertRewriteWarning")
INI = "[pytest]\nmarkers =\n  golden: values computed by AXRL's own code\nfilterwarnings = error\n"
#: Loaded before the fork: all that the tests import, and this project itself for what it imports.
HELD = ("torch", "numpy", "hypothesis.strategies", "pytest", "_pytest.pytester")
HELD += ("replay_lib.pytest_plugin", "replay_lib.loss", "replay_lib.snapshot")


@dataclass(frozen=True)
class Mutant:
    """``code`` is the whole module; the rest says where it differs."""

    module: str
    where: str  # the function or class
    line: int
    operator: str
    before: str
    after: str
    code: str


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Every mutant of ``module`` under :data:`OPERATORS`, each different program once."""
    tree = get_ast(source)
    seen = {_meaning(source), None}
    for name in OPERATORS:
        operator = get_operator(name)()
        places = [start for n in ast_nodes(tree) for start, _ in operator.mutation_positions(n)]
        for occurrence, (line, _) in enumerate(places):
            code = mutate_code(source, operator, occurrence)
            meaning = _meaning(code)
            if meaning not in seen:
                seen.add(meaning)
                before, after = _difference(source, code)
                where = _enclosing(source, line)
                short = name.removeprefix("core/")
                yield Mutant(module, where, line, short, before, after, code)


def _meaning(code: str) -> str | None:
    """The program without its annotations; None if it does not compile."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arguments):  # a bare * in a signature multiplies nothing
            node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
            node.defaults += [default for default in node.kw_defaults if default is not None]
            node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
    return ast.dump(tree)


def _difference(source: str, code: str) -> tuple[str, str]:
    """The lines that differ, as one line each."""
    old, new = source.splitlines(), code.splitlines()
    same = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    tail = next(i for i, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b)
    parts = (lines[same : max(len(lines) - tail, same)] for lines in (old, new))
    before, after = (" ".join(" ".join(part).split()) for part in parts)
    return before, after


def _enclosing(source: str, line: int) -> str:
    names = [
        (node.lineno, node.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and min([node.lineno, *(d.lineno for d in node.decorator_list)])
        <= line
        <= (node.end_lineno or 0)
    ]
    return max(names)[1] if names else "module"


def run(copy: Path, module: str) -> str:
    """``survived``, ``killed`` (a test failed), ``broken`` (no test could start) or ``timeout``."""
    child = os.fork()
    if child == 0:
        _test_and_exit(copy, module)
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return {0: "survived", 1: "killed"}.get(code, "broken")
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def _test_and_exit(copy: Path, module: str) -> None:
    log = os.open(copy / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    for name in [name for name in sys.modules if name.split(".")[0] == "replay_lib"]:
        del sys.modules[name]  # the tree's own, which holds no mutant
    import pytest

    code = 70
    try:
        code = int(pytest.main([*FAST, f"--golden={_golden(module)}", *SELECTIONS[module]]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def measure(
    out: Path, document: dict[str, Any], modules: Sequence[str], sample: int | None
) -> None:
    """Fill ``document["modules"]`` and write it after each of them.

    A module that the document holds already is run again where it survived: more tests kill no
    fewer. Its source must be the same.
    """
    for name in HELD:
        importlib.import_module(name)
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        copy = Path(place)
        _fill(copy)
        for module in modules:
            earlier = document["modules"].get(module)
            document["modules"][module] = _measure(copy, module, earlier, sample)
            out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _golden(module: str) -> str:
    return f"golden/{GOLDEN_FILES.get(module, 'loss')}"


def _fill(copy: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    for file in (copy / "tests/data/golden").glob("*.json*"):
        kind = "loss" if file.suffix == ".jsonl" else file.name
        (copy / "golden" / kind).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy / "golden" / kind)
    (copy / "pytest.ini").write_text(INI, encoding="utf-8")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    compileall.compile_dir(copy, quiet=1)  # the copies keep their old times, mutants do not
    sys.dont_write_bytecode = True  # mutants of one size and second would share their bytecode


def _measure(
    copy: Path, module: str, earlier: dict[str, Any] | None, sample: int | None
) -> dict[str, Any]:
    """How many mutants there are, were tried and had which outcome, and the survivors."""
    start, target = time.monotonic(), copy / module
    source = target.read_text(encoding="utf-8")
    drawn = list(mutants(module, source))
    random.Random(SEED).shuffle(drawn)
    row: dict[str, Any] = {"sha256": hashlib.sha256(source.encode()).hexdigest()}
    row |= {"mutants": len(drawn), "tried": 0, **dict.fromkeys(OUTCOMES, 0)}
    again: list[Mutant] = []
    if earlier is not None:
        if earlier["sha256"] != row["sha256"]:
            raise SystemExit(f"{module}: its source is not the one that was measured")
        row |= {name: earlier[name] for name in ("tried", *OUTCOMES)} | {"survived": 0}
        again = [m for m in drawn[: row["tried"]] if _shown(m) in earlier["survivors"]]
    if run(copy, module) != "survived":
        raise SystemExit(f"{module}: red without a mutant\n{(copy / 'log').read_text()}")
    end = len(drawn) if sample is None else max(min(sample, len(drawn)), row["tried"])
    survivors: list[Mutant] = []
    for mutant in again + drawn[row["tried"] : end]:
        target.write_text(mutant.code, encoding="utf-8")
        outcome = run(copy, module)
        row[outcome] += 1
        if outcome == "survived":
            survivors.append(mutant)
            print(f"{module}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)
    target.write_text(source, encoding="utf-8")
    row["tried"] = end
    print(f"{module}: {row} in {time.monotonic() - start:.0f} s", flush=True)
    return row | {"survivors": [_shown(m) for m in sorted(survivors, key=lambda m: m.line)]}


def _shown(mutant: Mutant) -> dict[str, Any]:
    names = ("where", "line", "operator", "before", "after")
    return {name: getattr(mutant, name) for name in names}


def main() -> None:
    """Measure and write the document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--module", action="append", choices=sorted(SELECTIONS))
    parser.add_argument("--sample", type=int, help="mutants of each module (default: all)")
    parser.add_argument("--again", action="store_true", help="go on from OUT")
    options = parser.parse_args()
    document: dict[str, Any] = {
        "command": "python benchmarks/mutation.py OUT.json [--sample N], then --again",
        "seed": SEED,
        "cosmic_ray": importlib.metadata.version("cosmic-ray"),
        "operators": [name.removeprefix("core/") for name in OPERATORS],
        "modules": {},
    }
    if options.again:
        document = json.loads(options.out.read_text(encoding="utf-8"))
    from environment import environment

    document["environment"] = environment()
    measure(options.out, document, options.module or list(SELECTIONS), options.sample)


if __name__ == "__main__":
    main()
