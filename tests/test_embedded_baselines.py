"""The baselines of the embedded cases are of these cases, and of methods that there are."""

from __future__ import annotations

import pytest

from replay_lib.case import Case, builtin_cases, discover
from replay_lib.methods import load_methods
from replay_lib.record.baseline_update import abandoned
from replay_lib.record.baselines import files_in, read_document, rendered

CASES = discover(builtin_cases())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_embedded_case_has_baselines_of_its_own_files(case: Case) -> None:
    assert case.file is not None
    files = files_in(case.file)
    assert files
    known = {"baseline", *load_methods([]), *case.expected}
    for file in files:
        document = read_document(file)
        assert document is not None
        assert document.case_digest == case.digest(), file
        assert set(document.methods) <= known, file
        assert rendered(document) == file.read_text(), file
        for name, entry in document.methods.items():
            if name in case.expected:
                assert entry.verdict in case.expected[name].verdicts, (file, name)


def test_every_lane_has_baselines_of_every_case() -> None:
    names = {tuple(file.name for file in files_in(case.file)) for case in CASES if case.file}
    assert len(names) == 1
    assert abandoned(builtin_cases()) == []
