"""Cases and methods of a pytest run, and which of them a test is about. No torch at import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replay_lib.case import Case, discover
from replay_lib.errors import CaseError, SpikeReplayError, UsageError, fault
from replay_lib.expectations import unknown_expected
from replay_lib.methods import callable_alone, load_methods
from replay_lib.patch import Mitigation

#: Cases, methods, and by case file what is expected of methods that there are not.
Known = tuple[list[Case], dict[str, Mitigation], dict[Path | None, dict[str, str]]]
_KNOWN = pytest.StashKey[Known]()


def params_of(item: pytest.Item) -> dict[str, Any]:
    """The parameters of a test, by name."""
    return dict(getattr(getattr(item, "callspec", None), "params", {}))


def cases_dir(config: pytest.Config) -> Path:
    """Where the cases of this run are."""
    return Path(config.getoption("--spike-cases") or config.rootpath / "spike_cases")


def no_case(config: pytest.Config) -> str:
    """Why a test that asks for a case is skipped where there is none."""
    return f"no case in {cases_dir(config)}"


def cases_of(config: pytest.Config) -> list[Case]:
    """All cases, by name."""
    return _known(config)[0]


def methods_of(config: pytest.Config) -> dict[str, Mitigation]:
    """All registered methods by slug."""
    return _known(config)[1]


def unknown_of(config: pytest.Config, case: Any) -> dict[str, str]:
    """What ``case`` expects of methods that there are not, and why, by what it calls them.

    The test of that name is red, and no other one.
    """
    return _known(config)[2].get(case.file, {}) if isinstance(case, Case) else {}


def labels_of(config: pytest.Config, case: Case) -> set[str]:
    """The methods that need no parameter and what ``case`` lists: what it can have baselines of."""
    return {*callable_alone(methods_of(config)), *case.expected}


def _known(config: pytest.Config) -> Known:
    """Read once; a fault of theirs is one clear line and ends the run."""
    if _KNOWN not in config.stash:
        try:
            config.stash[_KNOWN] = _read(config)
        except SpikeReplayError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[_KNOWN]


def check_named(config: pytest.Config) -> None:
    """UsageError for an option --spike-cases without cases, or with broken ones.

    Methods that a case expects something of are looked up later: they may lie beside the tests.
    """
    directory, what = cases_dir(config), "a directory that holds cases, as DIR/NAME/case.yaml"
    if not directory.is_dir():
        raise UsageError(fault("--spike-cases", None, f"no directory {directory}", what))
    try:
        cases = discover(directory)
    except CaseError as error:
        raise UsageError(f"--spike-cases: {error}") from error
    if not cases:
        raise UsageError(fault("--spike-cases", None, f"none in {directory}", what))


def _read(config: pytest.Config) -> Known:
    directory = cases_dir(config)
    cases = discover(directory) if directory.is_dir() else []
    methods = load_methods(config.getoption("--mitigations"))
    return cases, methods, {case.file: unknown_expected(case, methods) for case in cases}
