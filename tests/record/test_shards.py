"""Which shard a case belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_lib.case import Case
from replay_lib.errors import UsageError
from replay_lib.record.baselines import Document, file_of, files_in, rendered
from replay_lib.record.environment import Environment
from replay_lib.record.shards import Shard, cost_of, dearest_first, shard_of_file, split_cases


def case(root: Path, name: str, *costs: float) -> Case:
    file = root / name / "case.yaml"
    file.parent.mkdir()
    for number, seconds in enumerate(costs):
        environment = Environment.of("cpu", "float32", {"torch": str(number)})
        document = Document(
            case_digest="", environment=environment, deterministic=True, seconds=seconds, methods={}
        )
        file_of(file, environment).parent.mkdir(exist_ok=True)
        file_of(file, environment).write_text(rendered(document))
    return Case(name=name, snapshot=file.parent / "iter_0000001", file=file)


def test_cases_are_split_by_what_they_cost(tmp_path: Path) -> None:
    costs = {"a": [1.0], "b": [2.0, 9.0], "c": [3.0], "d": [4.0], "e": [1.0]}
    cases = [case(tmp_path, name, *seconds) for name, seconds in costs.items()]
    assert [one.name for one in dearest_first(cases)] == ["b", "d", "c", "a", "e"]
    assert split_cases(cases, 2) == {"b": 1, "d": 2, "c": 2, "a": 2, "e": 2}
    assert split_cases(cases[::-1], 2) == split_cases(cases, 2)
    unknown = case(tmp_path, "z")  # as dear as the dearest
    assert split_cases([*cases, unknown], 3) == {"z": 1, "b": 2, "d": 3, "c": 3, "a": 3, "e": 3}


def test_cases_without_a_record_are_split_evenly(tmp_path: Path) -> None:
    cases = [case(tmp_path, name) for name in "abcde"]
    assert split_cases(cases, 2) == {"a": 1, "b": 2, "c": 1, "d": 2, "e": 1}
    for count in (1, 3, 7):
        assert set(split_cases(cases, count).values()) <= set(range(1, count + 1))


def test_a_document_that_cannot_be_read_leaves_the_split_to_the_others(tmp_path: Path) -> None:
    broken = case(tmp_path, "a", 9.0)
    assert broken.file is not None
    (document,) = files_in(broken.file)
    document.write_text("{")
    cases = [broken, case(tmp_path, "b", 2.0), case(tmp_path, "c", 1.0)]
    assert cost_of(broken) is None
    assert split_cases(cases, 2) == {"a": 1, "b": 2, "c": 1}


def test_files_without_cases_are_spread() -> None:
    places = [shard_of_file(f"tests/test_{number}.py", 3) for number in range(60)]
    assert set(places) == {1, 2, 3} and min(map(places.count, (1, 2, 3))) > 10


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "a/2", "1/2/3", "-1/2", " 1/2"])
def test_what_is_no_shard(text: str) -> None:
    with pytest.raises(UsageError, match="expected i/n with 1 <= i <= n"):
        Shard.parse(text)


def test_a_shard_is_written_as_it_is_read() -> None:
    assert str(Shard.parse("2/13")) == "2/13"
