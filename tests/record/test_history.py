"""What the events of a task come to."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from make_results import BASELINE, outcome, result

from replay_lib.record.history import RUNNING, UNKNOWN, History, history_of
from replay_lib.record.ledger import Event

FIRST, HELPED = result(BASELINE), result(outcome("disable-routing-replay", 2.5))
OUTPUT = "/data/0612~job__actor"
COPY = f"{OUTPUT}/checkpoints/spike_snapshots-active/iter_0000085"


def history(*events: tuple[str, str, dict[str, Any]], **more: Any) -> History:
    """Of events given as (run, kind, data), a second apart, by a process that ended long ago."""
    began = datetime(2026, 5, 29, 15, 0, tzinfo=UTC)
    by: dict[str, Any] = {"host": "elsewhere", "pid": 1} | more
    return history_of(
        [
            Event(at=began + timedelta(seconds=n), run=run, kind=kind, data=data, schema=1, **by)
            for n, (run, kind, data) in enumerate(events)
        ]
    )


def started(*planned: str, **more: Any) -> dict[str, Any]:
    return {"command": "spike-replay sweep S", "snapshot": COPY, "planned": list(planned)} | more


def test_nothing_was_done() -> None:
    assert history() == History()


def test_a_command_that_ended() -> None:
    found = history(
        ("a", "started", started("baseline", "disable-routing-replay", "c", output="tmp/x")),
        ("a", "result", {"result": FIRST.as_json()}),
        ("a", "result", {"result": HELPED.as_json(), "under": "mine:make"}),
        ("a", "failure", {"experiment": "tiny / c", "code": "batch", "message": "no column"}),
        ("a", "ended", {"exit_code": 4, "seconds": 2.0}),
    )
    (command,) = found.commands
    assert (command.state, command.exit_code, command.seconds) == ("ended", 4, 2.0)
    assert (command.missing, command.output) == ((), "tmp/x")
    assert found.results == [FIRST, HELPED]
    assert [one.under for one in found.attempts] == ["", "mine:make", ""]
    (refused,) = found.failures
    assert (refused.case, refused.experiment, refused.code) == ("tiny", "c", "batch")
    assert found.output_directories == (OUTPUT,)
    assert found.roles == ["actor"]


def test_a_command_that_was_killed_says_how_far_it_came() -> None:
    events = [
        ("a", "started", started("baseline", "b")),
        ("a", "result", {"result": FIRST.as_json()}),
        ("z", "observation", {"text": "later"}),
    ]
    found = history(*events)
    assert (found.commands[0].state, found.commands[0].missing) == (UNKNOWN, ("b",))
    (killed,) = found.failures
    assert (killed.experiment, killed.code) == (None, UNKNOWN)
    assert killed.message == "1 of 2 planned experiments are known"
    assert killed.at == found.attempts[0].at


def test_only_a_process_of_this_host_that_began_before_still_runs() -> None:
    here = {"host": socket.gethostname(), "pid": os.getpid()}

    def state(at: datetime, **by: Any) -> str:
        event = Event(at=at, run="a", kind="started", data=started(), schema=1, **(here | by))
        return history_of([event]).commands[0].state

    now = datetime.now(UTC)
    assert state(now) == RUNNING
    assert state(now, host="elsewhere") == UNKNOWN
    assert state(now - timedelta(days=400)) == UNKNOWN  # this process got its number later
    assert state(now, pid=2**22 - 1) == UNKNOWN  # no process


def test_what_is_preserved_until_it_is_released() -> None:
    copies = [("a", "preserved", {"preserved": f"{COPY}{n}", "snapshot": "S"}) for n in (1, 2, 1)]
    assert [e.data["preserved"] for e in history(*copies).active] == [f"{COPY}2", f"{COPY}1"]
    found = history(*copies, ("b", "released", {"preserved": f"{COPY}2"}))
    assert [e.data["preserved"] for e in found.active] == [f"{COPY}1"]


def test_a_task_is_finished_until_something_begins_again() -> None:
    end = ("a", "finished", {"text": "cured"})
    assert history(end).finished is not None
    assert history(end, ("b", "observation", {"text": "by the way"})).finished is not None
    assert history(end, ("b", "started", started())).finished is None
    assert history(end, ("b", "next_step", {"text": "look again"})).finished is None


@pytest.mark.parametrize("data", [{}, {"result": None}, {"result": {"case": "x", "surprise": 1}}])
def test_a_result_of_another_version_is_told(data: dict[str, Any]) -> None:
    (one,) = history(("a", "result", data)).attempts
    assert (one.result, one.code) == (None, "unreadable")
    assert "another version wrote this result" in one.message


def test_events_that_lack_everything_are_no_error() -> None:
    kinds = ("found", "preserved", "released", "started", "failure", "ended", "analyzed")
    more = ("observation", "next_step", "recorded", "reported", "finished", "unheard-of")
    history(*(("a", kind, {}) for kind in (*kinds, *more)))
    odd = {"snapshots": 5, "planned": "x", "output_directories": [{"path": OUTPUT}, 7], "text": 5}
    found = history(*(("a", kind, odd) for kind in (*kinds, *more)))
    assert found.output_directories == (OUTPUT,)
