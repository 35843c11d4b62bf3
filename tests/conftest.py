"""Options of this suite."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

# the same examples every time, and no limit on the time of one: a loaded machine is no fault
hypothesis.settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("steady")

OWN_GOLDEN = Path(__file__).parent / "data" / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden",
        metavar="DIR",
        default=str(OWN_GOLDEN),  # a string: options travel to the workers of pytest-xdist
        help="directory of golden cases (schema: tests/data/golden/README.md), one test a case",
    )
