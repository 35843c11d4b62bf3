"""What is called of AXRL, held against its source."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from replay_lib.backend.contract import (
    ANSWERED,
    ANSWERED_SOMETIMES,
    FILES,
    GIVEN,
    MADE_WITH,
    read_contract,
)
from replay_lib.trainers.axrl_source import NEEDS_PYTHON, VARIABLE, find_axrl

STAGE = Path(__file__).parent / "stage"


def test_axrls_own_source_has_the_contract() -> None:
    root = find_axrl()
    if root is None:
        pytest.skip(f"AXRL is absent: name a checkout in the environment variable {VARIABLE}")
    if sys.version_info < NEEDS_PYTHON:
        pytest.skip("AXRL's syntax needs Python 3.12 to be read")
    contract = read_contract(root)
    assert contract is not None
    assert contract.made_with == MADE_WITH
    assert contract.given == GIVEN
    assert contract.files == set(FILES)
    assert contract.answers == {*ANSWERED, *ANSWERED_SOMETIMES}
    assert contract.faults() == []


def test_so_has_the_worker_that_stands_for_it_in_these_tests() -> None:
    contract = read_contract(STAGE)
    assert contract is not None
    assert (contract.made_with, contract.given) == (MADE_WITH, GIVEN)
    assert contract.answers == {*ANSWERED, *ANSWERED_SOMETIMES}


SOURCE = """
class MegatronWorker:
    def __init__(self, config, rank, world_size, local_rank, master_ip, master_port):
        pass

    def _metadata(self, snapshot_dir):
        return open(snapshot_dir / "axrl_metadata.json")

    def _elsewhere(self, other):
        return open(other / "not_read.json")

    def reproduce_spike(self, snapshot_dir):
        self._metadata(snapshot_dir)
        self._elsewhere(3)
        rank = 0
        open(snapshot_dir / f"batch_rank{rank}.pt")
        if rank:
            return {"reproduced": False, "original_grad_norm": 1.0, "replayed_grad_norm": 2.0}
        result = {"reproduced": True}
        result["extra"] = {"inner": 1}
        return result
"""


@pytest.fixture
def changed(tmp_path: Path):
    def write(old: str = "", new: str = ""):
        worker = tmp_path / "axrl" / "worker"
        worker.mkdir(parents=True, exist_ok=True)
        assert old in SOURCE
        (worker / "megatron_worker.py").write_text(SOURCE.replace(old, new, 1) if old else SOURCE)
        return read_contract(tmp_path)

    return write


def test_files_and_keys_are_read_out_of_the_methods_that_are_reached(changed) -> None:
    contract = changed()
    assert contract.files == {"axrl_metadata.json", "batch_rank{}.pt"}
    assert contract.answers == {*ANSWERED, "extra"}
    assert contract.faults() == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "def reproduce_spike(self, snapshot_dir):",
            "def reproduce_spike(self, snapshot_dir, step):",
            "reproduce_spike is given snapshot_dir, step; expected snapshot_dir",
        ),
        (
            ", master_port):",
            "):",
            "MegatronWorker is made with config, rank, world_size, local_rank, master_ip; "
            "expected config, rank, world_size, local_rank, master_ip, master_port",
        ),
        (
            ', "replayed_grad_norm": 2.0',
            "",
            "reproduce_spike does not answer replayed_grad_norm",
        ),
        (
            "batch_rank",
            "samples_rank",
            "reproduce_spike reads samples_rank{}.pt, which a replay directory has not",
        ),
    ],
)
def test_another_contract_is_told(changed, old: str, new: str, told: str) -> None:
    assert changed(old, new).faults() == [told]


def test_no_such_method_is_no_contract(changed, tmp_path: Path) -> None:
    assert changed("def reproduce_spike", "def replay") is None
    assert read_contract(tmp_path / "absent") is None
