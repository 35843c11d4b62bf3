"""How several machines are asked for: what is read, refused and hinted at."""

from __future__ import annotations

import pytest

from replay_lib.engine.nodes import Hello, Nodes, nodes_hint, read_endpoint
from replay_lib.errors import UsageError


def test_what_is_written_is_read():
    assert Nodes.of(1, None) is None
    made = Nodes.of(2, "[::1]:29400", 5.0)
    assert (made.number, made.host, made.port, made.timeout_s) == (2, "::1", 29400, 5.0)
    assert read_endpoint("gpu-a.cluster:80") == ("gpu-a.cluster", 80)
    assert Hello(name="a", node_rank=None, gpus=0, versions={}).op == "hello"


@pytest.mark.parametrize(
    ("number", "endpoint", "seconds", "words"),
    [
        (2, None, 1.0, "--nnodes: found without --rdzv-endpoint, expected both, as in --nnodes 2"),
        (1, "a:1", 1.0, "--rdzv-endpoint: found without --nnodes, expected both"),
        (0, "a:1", 1.0, "--nnodes: found 0, expected 1 or more machines"),
        (2, "29400", 1.0, "--rdzv-endpoint: found '29400', expected host:port of the machine"),
        (2, "a:99999", 1.0, "found 'a:99999', expected host:port"),
        (2, "a:1", 0.0, "--join-timeout: found 0, expected seconds, more than 0"),
        (2, "a:1", float("nan"), "--join-timeout: found nan, expected seconds, more than 0"),
    ],
)
def test_what_contradicts_itself_is_told(number, endpoint, seconds, words):
    with pytest.raises(UsageError) as caught:
        Nodes.of(number, endpoint, seconds)
    assert words in str(caught.value)


def test_a_machine_that_is_too_small_says_what_to_start_elsewhere():
    assert nodes_hint(16, 8) == (
        "; over 2 such machines: --nnodes 2 --rdzv-endpoint HOST:29400 here, and on each other one "
        "spike-replay join --rdzv-endpoint HOST:29400 (HOST: an address of this machine)"
    )
    assert "--nnodes 3 " in nodes_hint(17, 8)
    assert nodes_hint(2, 0) == ""
