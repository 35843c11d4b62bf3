"""Files of a run's directory on the node."""

from __future__ import annotations

JOB = "job.json"
EVENTS = "events.jsonl"
LOG = "log"  # what the run and its workers print
LOCK = "lock"  # held by the run as long as it lives; its last line is the run's pid
RESULTS = "results.jsonl"  # of a sweep
WORK = "work"  # the current directory of the run
