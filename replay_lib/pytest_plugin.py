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
from pathlib import Path
from typing import Any, TypeVar

import pytest

from replay_lib.case import Case
from replay_lib.engine.layout import AUTO, read_ranks
from replay_lib.engine.meeting import part
from replay_lib.engine.nodes import JOIN_TIMEOUT_S, Nodes
from replay_lib.errors import SpikeReplayError, UsageError
from replay_lib.methods import left_out
from replay_lib.pytest_cases import cases_of, check_named, methods_of, no_case, params_of
from replay_lib.pytest_run import LINES, RunKeeper, ShardSelection, results_folder, shard_of
from replay_lib.pytest_task import check_task, keep_case
from replay_lib.record.result import Result, SideEffect
from replay_lib.record.shards import dearest_first
from replay_lib.record.summary import summary_lines
from replay_lib.run import BACKENDS, LEAST_REPEATS, NATIVE, ReplayOptions
from replay_lib.suite import (
    NO_CASES,
    PROPERTY,
    Sessions,
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
    group = parser.getgroup("spike replay")
    group.addoption(
        "--spike-cases",
        metavar="DIR",
        type=Path,
        help="directory of cases, one DIR/*/case.yaml each [default: spike_cases in the rootdir]",
    )
    group.addoption(
        "--mitigations",
        metavar="DIR",
        type=Path,
        action="append",
        default=[],
        help="directory with mitigations beside the built-in ones; may be repeated",
    )
    group.addoption(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="where tests without the gpu marker replay [default: auto]",
    )
    group.addoption(
        "--layout",
        metavar="AXES",
        default=AUTO,
        help="ranks that replay, as in tp=2 or ep=2,dp=2 [default: auto, one where it is enough]",
    )
    group.addoption(
        "--dp-ranks",
        metavar="N,N,...",
        help="replay these recorded data-parallel ranks only, with baselines of their own",
    )
    group.addoption(
        "--nnodes",
        metavar="N",
        type=int,
        default=1,
        help="machines that replay together; the others run spike-replay join [default: 1]",
    )
    group.addoption(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="with --nnodes: an address of this machine, and a free port",
    )
    group.addoption(
        "--join-timeout",
        metavar="SECONDS",
        type=float,
        default=JOIN_TIMEOUT_S,
        help=f"how long the machines wait for each other [default: {JOIN_TIMEOUT_S:g}]",
    )
    group.addoption(
        "--trainer",
        metavar="NAME",
        help="whose loss is replayed: grpo, axrl or module:factory [default: the backend's own]",
    )
    group.addoption(
        "--backend",
        default=NATIVE,
        choices=BACKENDS,
        help="what replays: this library's engine, or AXRL's own worker [default: native]",
    )
    group.addoption(
        "--repeats",
        metavar="N",
        type=int,
        default=LEAST_REPEATS,
        help="replay the baseline N times; the spread of its norm enters the noise band "
        f"[default: {LEAST_REPEATS}]",
    )
    group.addoption(
        "--update-baselines",
        action="store_true",
        help="write the figures of this run as baselines; a run that writes any fails",
    )
    group.addoption(
        "--spike-results",
        metavar="DIR",
        type=Path,
        help="keep outcomes, results and a report in this folder (spike-replay merge reads it)",
    )
    group.addoption(
        "--spike-task",
        metavar="JOB",
        help="keep every replay in the ledger of this task [default: that of a case's snapshot]",
    )
    group.addoption(
        "--shard",
        metavar="I/N",
        help="run the I-th of N parts of the tests; a case is never split",
    )
    group.addoption(
        "--require-device",
        action="store_true",
        help="a test whose device is missing fails; without this it is skipped",
    )
    group.addoption(
        "--require-cases",
        action="store_true",
        help="fail if no case is found; without this such tests are skipped",
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    try:
        _options(config)
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
    try:
        found.require()
    except SpikeReplayError as error:
        pytest.fail(str(error), pytrace=False)
    assert isinstance(found, Case)
    return found


@pytest.fixture
def mitigation(request: pytest.FixtureRequest) -> str:
    """One mitigation, as it is written on a command line."""
    return str(request.param)


@pytest.fixture(scope="session")
def _spike_sessions(case: Case, request: pytest.FixtureRequest) -> Iterator[Sessions]:
    """Sessions of one case in this process, one a device; closed before the next case."""
    labels = _labels_of(case, request.session.items)
    with keep_case(request.session, case, labels) as keep:
        sessions = Sessions(case, _options(request.config), labels, keep)
        yield sessions
        sessions.close()


def _options(config: pytest.Config) -> ReplayOptions:
    """How the command line asks for replays; UsageError where it cannot."""
    return ReplayOptions(
        mitigations=tuple(config.getoption("--mitigations")),
        layout=config.getoption("--layout"),
        nodes=_nodes(config),
        dp_ranks=read_ranks(config.getoption("--dp-ranks")),
        trainer=config.getoption("--trainer"),
        repeats=config.getoption("--repeats"),
        backend=config.getoption("--backend"),
    )


def _nodes(config: pytest.Config) -> Nodes | None:
    """The machines of this run: one process of it meets the others."""
    nodes = Nodes.of(
        config.getoption("--nnodes"),
        config.getoption("--rdzv-endpoint"),
        config.getoption("--join-timeout"),
    )
    if nodes is not None and getattr(config.option, "numprocesses", None):
        raise UsageError("--nnodes: found -n beside it, expected one process: leave -n out")
    return nodes


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
