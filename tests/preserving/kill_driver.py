"""Kill commands at chosen points, many times, from one process that has loaded everything.

Called as a program with a job as JSON on stdin; what it saw is JSON on stdout. A point is the
number of an audit event (files opened, linked, renamed, removed, directories listed): the child
kills itself with SIGKILL when it comes to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from replay_lib.preserving import preserve, release, verify
from replay_lib.preserving.hashing import fill
from replay_lib.snapshot.preserved import check_preserved
from replay_lib.unfinished import leftovers

_POINTS = ("open", "os.", "shutil.", "tempfile.", "fcntl.")


def main() -> None:
    """Do the job on stdin."""
    job = json.loads(sys.stdin.read())
    json.dump(JOBS[job["what"]](Path(job["source"]), job["kills"], job["seed"]), sys.stdout)


def killed_preserves(source: Path, kills: int, seed: int) -> dict[str, Any]:
    """Preserve with a kill at random points; whole or absent each time, the source as it was."""
    before, target = _digests(source), _target(source)
    states, half = [], 0
    for point in _points(kills, seed, lambda: preserve(source, task="job-a"), _undo(target)):
        _child(lambda: preserve(source, task="job-a"), point)
        states.append(_state(target, before))
        half += bool(leftovers(target.parent))
        assert _digests(source) == before, f"the source changed at point {point}"
        if states[-1] == "whole":  # goes on with the next point from nothing
            assert preserve(source).already
            _undo(target)()
    left = [path.name for path in leftovers(target.parent)]
    done = preserve(source)
    assert sorted(path.name for path in done.cleared) == left
    assert _hidden(target.parent) == [".locks"]
    return {"states": states, "half": half}


def killed_releases(source: Path, kills: int, seed: int) -> dict[str, Any]:
    """Release with a kill at random points; whole or gone each time, and told in the end."""
    from replay_lib.record import ledger
    from replay_lib.record.task import Task

    before, target, task = _digests(source), _target(source), Task("job-a")

    def ready() -> None:
        done = preserve(source, task="job-a")
        ledger.append(task, "preserved", preserved=str(done.path))
        for file in (task.report, task.page):
            file.write_text("x")
        ledger.append(task, "reported", report=str(task.report), page=str(task.page))
        ledger.append(task, "finished", text="x")

    states = []
    ready()
    for point in _points(kills, seed, lambda: release(target), ready):
        if not target.exists():
            ready()
        _child(lambda: release(target), point)
        states.append(_state(target, before))
        assert _digests(source) == before, f"the source changed at point {point}"
        if states[-1] == "absent" and ledger.read(task)[-1].kind != "released":
            assert release(target).before
    return {"states": states}


def killed_readers(source: Path, kills: int, seed: int) -> dict[str, Any]:
    """Fill in and verify with a kill at random points: the manifest is whole each time."""
    before = _digests(source)
    target = preserve(source).path
    manifest = (target / "preserved.json").read_bytes()

    def forget() -> None:
        (target / "preserved.json").write_bytes(manifest)

    states = []
    for work in (lambda: fill(target), lambda: verify(target)):
        for point in _points(kills // 2, seed, work, forget):
            forget()
            _child(work, point)
            states.append(_state(target, before))
    verify(target)
    return {"states": states}


def two_at_once(source: Path, kills: int, seed: int) -> dict[str, Any]:
    """Two processes at once, as often as ``kills`` says: one does it, the other finds it done."""
    target, before = _target(source), _digests(source)
    states, already = [], []
    for _ in range(kills):
        read, write = os.pipe()
        work = partial(_tell, source, write)
        children = [_forked(work, 0) for _ in range(2)]
        codes = [os.waitpid(child, 0)[1] for child in children]
        assert codes == [0, 0], codes
        already.append(sorted(os.read(read, 2).decode()))
        states.append(_state(target, before))
        _undo(target)()
        os.close(read)
        os.close(write)
    return {"states": states, "already": already}


def _tell(source: Path, write: int) -> None:
    os.write(write, b"1" if preserve(source).already else b"0")


def _points(
    count: int, seed: int, work: Callable[[], object], again: Callable[[], object]
) -> list[int]:
    """Points spread over all that a whole run of ``work`` comes to; ``again`` undoes that run."""
    read, write = os.pipe()
    child = _forked(lambda: _counted(work, write), 0)
    assert os.waitpid(child, 0)[1] == 0
    total = int(os.read(read, 20))
    os.close(read)
    os.close(write)
    again()
    chosen = random.Random(seed)
    # the last ones are few, so some are taken for certain; the very last comes after the end
    return [chosen.randrange(1, total + 1) for _ in range(count - 3)] + [
        total - 1,
        total,
        10 * total,
    ]


def _counted(work: Callable[[], object], write: int) -> None:
    seen = _Counter(0)
    sys.addaudithook(seen)
    work()
    os.write(write, str(seen.count).encode())


class _Counter:
    """An audit hook: kills this process at event number ``point`` (0: never)."""

    def __init__(self, point: int) -> None:
        self.point, self.count = point, 0

    def __call__(self, event: str, _arguments: tuple[Any, ...]) -> None:
        if event.startswith(_POINTS):
            self.count += 1
            if self.count == self.point:
                os.kill(os.getpid(), signal.SIGKILL)


def _child(work: Callable[[], object], point: int) -> None:
    _, status = os.waitpid(_forked(work, point), 0)
    assert status in (0, signal.SIGKILL), status


def _forked(work: Callable[[], object], point: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        if point:
            sys.addaudithook(_Counter(point))
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _target(source: Path) -> Path:
    return source.parent.with_name("spike_snapshots-active") / source.name


def _undo(target: Path) -> Callable[[], None]:
    return lambda: shutil.rmtree(target, ignore_errors=True)


def _state(target: Path, before: dict[str, str]) -> str:
    if not target.exists():
        return "absent"
    assert check_preserved(target) is not None
    found = _digests(target)
    found.pop("preserved.json")
    assert found == before
    return "whole"


def _digests(directory: Path) -> dict[str, str]:
    return {
        p.name: f"{p.stat().st_mtime_ns} {hashlib.sha256(p.read_bytes()).hexdigest()}"
        for p in directory.iterdir()
        if not p.name.startswith(".") or p.name == ".metadata"
    }


def _hidden(directory: Path) -> list[str]:
    if not directory.is_dir():
        return []
    return sorted(p.name for p in directory.iterdir() if p.name[0] == "." and p.name != ".metadata")


JOBS: dict[str, Callable[[Path, int, int], dict[str, Any]]] = {
    "preserve": killed_preserves,
    "release": killed_releases,
    "read": killed_readers,
    "two": two_at_once,
}

if __name__ == "__main__":
    main()
