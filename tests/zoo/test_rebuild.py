"""An embedded spike, made once more from the command in its provenance (minutes)."""

from __future__ import annotations

import shlex

import pytest

from replay_lib.case import Case, builtin_cases
from replay_lib.case_files import made_here
from replay_lib.snapshot import load_batch, open_snapshot
from replay_lib.zoo import make_spike


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_command_of_a_case_gives_its_norm_again(tmp_path):
    case = Case.load(builtin_cases() / "zoo-misaligned-rows")
    command = shlex.split(case.provenance.command)
    assert command[:3] == ["spike-replay", "zoo", "make"] and command[4] == "--seed"
    here = made_here(case.provenance.command)["platform"]
    if case.provenance.platform.model_dump() != here:
        pytest.skip(f"made on {case.provenance.platform}, this is {here}")
    kind, seed = command[3], int(command[5])
    report = make_spike(kind, seed=seed, out=tmp_path / "made", cache=tmp_path / "cache")
    recorded = open_snapshot(case.snapshot)
    assert report["norm"] == recorded.grad_norm_preclip
    again = open_snapshot(tmp_path / "made" / report["snapshot"])
    assert load_batch(again, 0).input_ids.equal(load_batch(recorded, 0).input_ids)
