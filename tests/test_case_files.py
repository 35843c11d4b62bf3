"""A case is sealed by its files' digests, and says how it was made."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml

from replay_lib import digests
from replay_lib.case import Case, Platform
from replay_lib.case_files import made_here, seal
from replay_lib.errors import CaseError
from replay_lib.expected import Expected
from replay_lib.rule import Verdict

BY_HAND = """\
# what this case is about
schema: 1
snapshot: snapshot/iter_0000085
quiet: quiet/iter_0000080
provenance:  # as far as it is known
  job: tiny

# the table gave these
expected:
  disable-routing-replay: fail  # nothing was wrong with the routes
"""
MADE = {
    "command": "spike-replay zoo make natural --seed 3 --out DIR",
    "seed": 3,
    "commit": "0" * 40,
    "platform": {"device": "cpu", "python": "3.11.7", "torch": "2.13.0", "megatron_core": "0.16.1"},
}
THEN = ". Restore the file; if the change is meant, seal the case anew (replay_lib.case_files.seal)"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A case of two snapshots with two files each, not sealed."""
    for name in ("snapshot/iter_0000085", "quiet/iter_0000080"):
        (tmp_path / "a" / name).mkdir(parents=True)
        for file in (".metadata", "batch_rank0.pt"):
            (tmp_path / "a" / name / file).write_text(f"{name} {file}")
    (tmp_path / "a" / "case.yaml").write_text(BY_HAND)
    return tmp_path / "a"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def error_of(directory: Path) -> str:
    with pytest.raises(CaseError) as caught:
        Case.load(directory).require()
    return str(caught.value)


def test_a_sealed_case_names_every_file_and_how_it_was_made(directory: Path) -> None:
    case = seal(directory, MADE)
    assert list(case.sha256) == [
        "snapshot/iter_0000085/.metadata",
        "snapshot/iter_0000085/batch_rank0.pt",
        "quiet/iter_0000080/.metadata",
        "quiet/iter_0000080/batch_rank0.pt",
    ]
    assert case.sha256["quiet/iter_0000080/.metadata"] == digest("quiet/iter_0000080 .metadata")
    made = case.provenance
    assert (made.job, made.seed, made.command) == ("tiny", 3, MADE["command"])
    assert made.platform == Platform(**MADE["platform"])
    assert case == Case.load(directory)


def test_what_was_written_by_hand_stays(directory: Path) -> None:
    seal(directory, MADE)
    text = (directory / "case.yaml").read_text()
    before, after = BY_HAND.split("provenance:  # as far as it is known\n  job: tiny\n")
    assert text.startswith(before + "provenance:\n  job: tiny\n  command: spike-replay zoo make")
    assert after in text
    seal(directory, MADE)
    assert (directory / "case.yaml").read_text() == text
    seal(directory)
    assert (directory / "case.yaml").read_text() == text


def test_a_case_in_another_style_keeps_its_content(directory: Path) -> None:
    flow = "{schema: 1, snapshot: snapshot/iter_0000085, expected: {a-method: partial}}"
    (directory / "case.yaml").write_text(flow)
    case = seal(directory, MADE)
    assert (case.expected, len(case.sha256), case.provenance.seed) == (
        {"a-method": Expected.one(Verdict.PARTIAL)},
        2,
        3,
    )


def test_an_altered_file_is_named_with_both_digests(directory: Path) -> None:
    seal(directory)
    Case.load(directory).require()
    altered = "snapshot/iter_0000085/batch_rank0.pt"
    (directory / altered).write_text("something else")
    assert error_of(directory) == (
        f"{directory}/case.yaml: sha256.{altered}: found {digest('something else')}, "
        f"expected {digest('snapshot/iter_0000085 batch_rank0.pt')}{THEN}"
    )


def test_files_that_are_gone_or_new_are_told_at_once(directory: Path) -> None:
    seal(directory)
    (directory / "quiet/iter_0000080/.metadata").unlink()
    (directory / "snapshot/iter_0000085/batch_rank1.pt").write_text("of another run")
    gone, new = error_of(directory).splitlines()
    assert gone.startswith(
        f"{directory}/case.yaml: sha256.quiet/iter_0000080/.metadata: found no such file, expected "
    )
    assert new.startswith(
        f"{directory}/case.yaml: sha256: found nothing about "
        f"{directory}/snapshot/iter_0000085/batch_rank1.pt, expected every file of a snapshot"
    )


def test_an_unsealed_case_is_not_checked(directory: Path) -> None:
    (directory / "snapshot/iter_0000085/batch_rank0.pt").write_text("something else")
    Case.load(directory).require()


def test_a_file_is_read_once_in_a_process(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = hashlib.file_digest
    monkeypatch.setattr(
        digests.hashlib, "file_digest", lambda f, kind: (read.append(f.name), real(f, kind))[1]
    )
    seal(directory)
    for _ in range(3):
        Case.load(directory).require()
    assert len(read) == len(set(read)) == 4


def test_a_snapshot_behind_a_link_is_sealed_too(directory: Path, tmp_path: Path) -> None:
    (directory / "snapshot").rename(tmp_path / "elsewhere")
    (directory / "snapshot").symlink_to(tmp_path / "elsewhere")
    seal(directory).require()
    (tmp_path / "elsewhere/iter_0000085/.metadata").write_text("something else")
    assert "sha256.snapshot/iter_0000085/.metadata: found " in error_of(directory)


def test_nothing_is_written_for_a_mistake(directory: Path) -> None:
    with pytest.raises(
        CaseError, match=r"provenance\.colour: found an unknown key, expected one of evidence"
    ):
        seal(directory, {"colour": "red"})
    (directory / "quiet").rename(directory / "loud")
    with pytest.raises(CaseError) as caught:
        seal(directory)
    assert str(caught.value) == (
        f"{directory}/case.yaml: sha256: found no file under quiet/iter_0000080, "
        "expected a snapshot"
    )
    assert (directory / "case.yaml").read_text() == BY_HAND


def test_a_digest_is_64_digits(directory: Path) -> None:
    (directory / "case.yaml").write_text(f"{BY_HAND}sha256: {{a: 12ab}}\n")
    with pytest.raises(CaseError, match=r"sha256\.a: found '12ab', expected String should match"):
        Case.load(directory)


def test_what_this_process_makes_says_where() -> None:
    made = made_here("a command", seed=7, device="cuda (NVIDIA H200)")
    assert (made["command"], made["seed"]) == ("a command", 7)
    assert made["platform"]["device"] == "cuda (NVIDIA H200)"
    assert all(made["platform"].values())
    Platform(**made["platform"])
    assert yaml.safe_load(yaml.safe_dump(made)) == made
