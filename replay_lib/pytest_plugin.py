"""The other door: recorded spikes as a pytest suite. Options and fixtures; no torch at import.

    def test_mitigation(case, mitigation, replay):
        result = replay(mitigation)
        assert not result.red, result.explain()

    def test_quiet_control(case, mitigation, quiet):
        effect = quiet(mitigation)
        assert not effect.red, effect.explain()

``case`` and ``mitigation`` are parametrized in two calls, the first with session scope: pytest
then orders the tests by case, so that each case is opened once. One joint call would reopen it for
every test. Under xdist all tests of a case go to one worker. Tests that ask for ``quiet`` exist for
cases with a quiet control; that is replayed once, under all methods of the run's tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from replay_lib.case import Case
from replay_lib.engine.meeting import part
from replay_lib.errors import SpikeReplayError
from replay_lib.methods import left_out
from replay_lib.pytest_cases import (
    cases_of,
    check_named,
    methods_of,
    no_case,
    params_of,
    unknown_of,
)
from replay_lib.pytest_options import add_options, options_of
from replay_lib.pytest_run import LINES, RunKeeper, ShardSelection, results_folder, shard_of
from replay_lib.pytest_task import check_task, keep_case
from replay_lib.record.result import Result, SideEffect
from replay_lib.record.shards import dearest_first
from replay_lib.record.summary import summary_lines
from replay_lib.suite import (
    NO_CASES,
    PROPERTY,
    Sessions,
    absent_snapshot,
    caseless_lines,
    checked,
    missing_device,
    mitigation_labels,
    results_in,
)

Replay = Callable[..., Result]
Quiet = Callable[[str], SideEffect]
_T = TypeVar("_T")
_DIST = "spike_replay_dist"

_MARKERS = (
    "gpu: the replay runs on an NVIDIA device; skipped where there is none",
    "multigpu: as gpu, on two devices or more",
    "slow: takes minutes",
    "xdist_group(name): tests of one group go to one worker",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser.getgroup("spike replay"))


def pytest_configure(config: pytest.Config) -> None:
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    try:
        options_of(config)
        check_task(config)
        shard = shard_of(config)
        if config.getoption("--spike-cases") is not None:
            check_named(config)
    except SpikeReplayError as error:
        raise pytest.UsageError(str(error)) from error
    if shard is not None:
        config.pluginmanager.register(ShardSelection(config, shard), "spike-replay-shard")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunKeeper(config), "spike-replay-run")
    # plain -n asks for "load", which would spread one case over all workers and open it in each;
    # "loadgroup" is the same for tests that belong to no group
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist = "loadgroup"
    # a worker reads the command line again and does not see that change
    if getattr(config, "workerinput", {}).get(_DIST) == "loadgroup":
        config.option.loadgroup = True


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell an xdist worker how tests are distributed."""
    node.workerinput[_DIST] = node.config.option.dist


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _is_ours(metafunc, "case"):
        metafunc.parametrize("case", _case_params(metafunc.config), indirect=True, scope="session")
    if _is_ours(metafunc, "mitigation"):
        labels = mitigation_labels(methods_of(metafunc.config), cases_of(metafunc.config))
        metafunc.parametrize("mitigation", labels, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without what a case has nothing for.

    A call with parameters is tried on the cases that expect something of it, on no others; a side
    effect is measured on the cases that have a quiet control.
    """
    idle = [item for item in items if _is_unstated(item) or _lacks_quiet(item)]
    if idle:
        config.hook.pytest_deselected(items=idle)
        items[:] = [item for item in items if item not in idle]


def _lacks_quiet(item: pytest.Item) -> bool:
    case = params_of(item).get("case")
    wants = "quiet" in getattr(item, "fixturenames", ())
    return wants and isinstance(case, Case) and case.quiet is None


def _is_unstated(item: pytest.Item) -> bool:
    params = params_of(item)
    case, label = params.get("case"), params.get("mitigation")
    if not isinstance(case, Case) or label is None:
        return False
    return label not in case.expected and label not in methods_of(item.config)


@pytest.fixture(scope="session")
def case(request: pytest.FixtureRequest) -> Case:
    """One recorded spike, its snapshot present."""
    found = request.param
    if found is NO_CASES:
        text = no_case(request.config)
        if request.config.getoption("--require-cases"):
            pytest.fail(text, pytrace=False)
        pytest.skip(text)
    absent = absent_snapshot(found)
    if absent is not None and not request.config.getoption("--require-cases"):
        pytest.skip(absent)
    try:
        found.require()
    except SpikeReplayError as error:
        pytest.fail(str(error), pytrace=False)
    assert isinstance(found, Case)
    return found


@pytest.fixture
def mitigation(request: pytest.FixtureRequest) -> str:
    """One mitigation, as it is written on a command line."""
    unknown = unknown_of(request.config, params_of(request.node).get("case"))
    if request.param in unknown:
        pytest.fail(unknown[request.param], pytrace=False)
    return str(request.param)


@pytest.fixture(scope="session")
def _spike_sessions(case: Case, request: pytest.FixtureRequest) -> Iterator[Sessions]:
    """Sessions of one case in this process, one a device; closed before the next case."""
    unknown = unknown_of(request.config, case)
    labels = [one for one in _labels_of(case, request.session.items) if one not in unknown]
    with keep_case(request.session, case, labels) as keep:
        sessions = Sessions(case, options_of(request.config), labels, keep)
        yield sessions
        sessions.close()


def pytest_unconfigure() -> None:
    """Let the other machines of this run go."""
    part()


def _labels_of(case: Case, items: Sequence[pytest.Item]) -> list[str]:
    """The methods that tests of ``case`` in this run are parametrized with."""
    params = [params_of(item) for item in items]
    labels = [p["mitigation"] for p in params if p.get("case") == case and "mitigation" in p]
    return list(dict.fromkeys(str(label) for label in labels))


@pytest.fixture
def replay(request: pytest.FixtureRequest, case: Case, _spike_sessions: Sessions) -> Replay:
    """``replay(mitigation, against="baseline") -> Result`` on the case of this test."""
    device = _device_of(request, case)

    def run(mitigation: str = "baseline", against: str = "baseline") -> Result:
        result = _or_fail(
            f"{case.name} / {mitigation}",
            lambda: _spike_sessions.replay(mitigation, against, device),
        )
        result = _or_fail(case.name, lambda: _checked(request.config, case, result))
        request.node.user_properties.append((PROPERTY, result.model_dump_json()))
        return result

    return run


def _checked(config: pytest.Config, case: Case, result: Result) -> Result:
    writing = bool(config.getoption("--update-baselines"))
    kept = results_folder(config) is not None
    return checked(result, case, compare=not writing, digest=writing or kept)


@pytest.fixture
def quiet(request: pytest.FixtureRequest, case: Case, _spike_sessions: Sessions) -> Quiet:
    """``quiet(mitigation) -> SideEffect`` on the quiet control of this test's case."""
    device = _device_of(request, case)

    def measure(mitigation: str) -> SideEffect:
        return _or_fail(
            f"{case.name} / {mitigation}", lambda: _spike_sessions.side_effect(mitigation, device)
        )

    return measure


def _or_fail(what: str, ask: Callable[[], _T]) -> _T:
    told = ""
    try:
        return ask()
    except SpikeReplayError as error:
        told = str(error)
    # outside the handler, so that the report tells it once
    pytest.fail(f"{what}: {told}", pytrace=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    stats = terminalreporter.stats
    reports = [report for found in stats.values() for report in found]
    lines = summary_lines(results_in(reports))
    lines += terminalreporter.config.stash.get(LINES, [])
    if lines and (without := left_out(methods_of(terminalreporter.config))):
        lines.append(without)
    for found in cases_of(terminalreporter.config):
        lines += unknown_of(terminalreporter.config, found).values()
        if absent := absent_snapshot(found):
            lines += caseless_lines(stats, absent, "Copy the snapshot there, or correct the path")
    lines += caseless_lines(stats, no_case(terminalreporter.config))
    if lines:
        terminalreporter.section("spike replay")
        for line in lines:
            terminalreporter.write_line(line)


def _device_of(request: pytest.FixtureRequest, case: Case) -> str:
    """The device this test replays on; skips or fails where it is missing."""
    node, config = request.node, request.config
    marked = {name for name in ("gpu", "multigpu") if node.get_closest_marker(name)}
    device = "cuda" if marked else str(config.getoption("--device"))
    nodes = config.getoption("--nnodes")
    at_least = 2 if "multigpu" in marked else 1
    reason = missing_device(case.needs, device, at_least=at_least, nodes=nodes)
    if reason is not None:
        text = f"{case.name}: {reason}"
        if config.getoption("--require-device"):
            pytest.fail(text, pytrace=False)
        pytest.skip(text)
    return device


def _is_ours(metafunc: pytest.Metafunc, name: str) -> bool:
    """Whether the test asks for this plugin's fixture and not for one of the same name."""
    if name not in metafunc.fixturenames:
        return False
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        given = names.split(",") if isinstance(names, str) else list(names)
        if name in [one.strip() for one in given]:
            return False
    found = metafunc.definition.session._fixturemanager.getfixturedefs(name, metafunc.definition)
    return found is not None and found[-1].func.__module__ == __name__


def _case_params(config: pytest.Config) -> list[Any]:
    # side by side the dearest should not be the last to start
    spread = hasattr(config, "workerinput")
    cases = dearest_first(cases_of(config)) if spread else cases_of(config)
    params = [
        pytest.param(found, id=found.name, marks=pytest.mark.xdist_group(found.name))
        for found in cases
    ]
    return params or [pytest.param(NO_CASES, id="no-cases")]
