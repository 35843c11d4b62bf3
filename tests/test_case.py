"""case.yaml: read strictly, every fault told with file and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from replay_lib.case import Case, discover
from replay_lib.errors import CaseError
from replay_lib.expected import Expected
from replay_lib.rule import Verdict

WHOLE = """\
schema: 1
snapshot: snapshot/iter_0000085
quiet: quiet/iter_0000080
note: a spike of one row
thresholds:
  target_ratio: {value: 1.4, reason: the run was calm}
tolerance:
  float32: {value: 2.0e-5, reason: two kinds of attention}
needs: {device: cuda, devices: 2, memory_gib: 80.0}
expected:
  disable-routing-replay: partial
  enable-token-mismatch-tis-max2:clip_max=1.5: fail
provenance: {evidence: mechanism, trainer: AXRL, job: tiny, written_by: two CPU ranks}
"""


def write(root: Path, text: str, name: str = "tiny-step85", snapshot: bool = True) -> Path:
    directory = root / name
    (directory / "snapshot" / "iter_0000085").mkdir(parents=True) if snapshot else None
    directory.mkdir(exist_ok=True)
    (directory / "case.yaml").write_text(text)
    return directory


def error_of(root: Path, text: str) -> str:
    directory = write(root, text, snapshot=False)
    with pytest.raises(CaseError) as caught:
        Case.load(directory)
    return str(caught.value).replace(f"{directory}/", "")


def test_a_whole_case(tmp_path: Path) -> None:
    directory = write(tmp_path, WHOLE)
    case = Case.load(directory)

    assert case.name == "tiny-step85"
    assert case.snapshot == directory / "snapshot" / "iter_0000085"
    assert case.quiet == directory / "quiet" / "iter_0000080"
    assert case.thresholds.target_ratio.value == 1.4
    assert case.thresholds.recording_reduction.value == 0.15  # the default, with its reason
    assert case.thresholds.recording_reduction.reason
    assert (case.needs.device, case.needs.devices, case.needs.memory_gib) == ("cuda", 2, 80.0)
    assert case.expected == {
        "disable-routing-replay": Expected.one(Verdict.PARTIAL),
        "enable-token-mismatch-tis-max2:clip_max=1.5": Expected.one(Verdict.FAIL),
    }
    assert case.provenance.evidence == "mechanism"
    assert Case.load(directory / "case.yaml") == case
    assert Case.open(directory) == case


def test_expectations_are_spelled_as_experiments_are(tmp_path: Path) -> None:
    text = "schema: 1\nsnapshot: x\nexpected: {'some-method: b=true, a=1.50': fail}\n"
    case = Case.load(write(tmp_path, text))
    assert case.expected == {"some-method:a=1.5,b=True": Expected.one(Verdict.FAIL)}


def test_a_bare_snapshot_is_a_case_with_defaults(tmp_path: Path) -> None:
    snapshot = tmp_path / "iter_0000085"
    snapshot.mkdir()
    case = Case.open(snapshot)
    assert (case.name, case.snapshot, case.file) == ("iter_0000085", snapshot, None)
    assert case.expected == {}
    assert case.thresholds.target_ratio.value == 1.5


def test_tolerance_by_fidelity_and_by_the_coarser_dtype(tmp_path: Path) -> None:
    case = Case.load(write(tmp_path, WHOLE))
    assert case.tolerance_for("folded", {"float32"}).value == 2e-5
    assert case.tolerance_for("full", {"float32", "bfloat16"}).value == 3e-3
    assert case.tolerance_for("full", {"bfloat16"}).reason.startswith("8 bits of mantissa")
    assert case.tolerance_for("reduced", {"float32"}).value == 0.20
    with pytest.raises(CaseError, match="tolerance: found float16, expected float32 or bfloat16"):
        case.tolerance_for("full", {"float16"})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("schema: 1\n", "case.yaml: snapshot: found {'schema': 1}, expected Field required"),
        ("snapshot: x\n", "case.yaml: schema: found None, expected 1"),
        (
            "schema: 2\nsnapshots: [x]\n",
            "case.yaml: schema: found 2, expected 1. A newer version of this library wrote it",
        ),
        ("- schema\n", "case.yaml: found list, expected a mapping"),
        (
            "schema: 1\nsnapshot: x\nneeds: {gpus: 1}\n",
            "case.yaml: needs.gpus: found an unknown key, expected one of "
            "device, devices, memory_gib",
        ),
        (
            "schema: 1\nsnapshot: x\ncolour: red\n",
            "case.yaml: colour: found an unknown key, expected one of schema, snapshot, name, "
            "quiet, note, thresholds, tolerance, needs, expected, provenance, sha256",
        ),
        (
            "schema: 1\nsnapshot: x\ntolerance: {float32: {value: 1e-5, reason: r}}\n",
            "case.yaml: tolerance.float32.value: found '1e-5', expected Input should be a valid "
            "number. YAML reads 1e-5 as text: write it with a point, as in 1.0e-5",
        ),
        (
            "schema: 1\nsnapshot: x\nthresholds: {target_ratio: {value: .nan, reason: r}}\n",
            "case.yaml: thresholds.target_ratio.value: found nan, expected Input should be a "
            "finite number",
        ),
        (
            "schema: 1\nsnapshot: x\nthresholds: {target_ratio: {value: 1.5}}\n",
            "case.yaml: thresholds.target_ratio.reason: found {'value': 1.5}, expected Field "
            "required",
        ),
        (
            "schema: 1\nsnapshot: /data/iter_0000085\n",
            "case.yaml: snapshot: found the absolute path /data/iter_0000085, "
            "expected a path relative to the case",
        ),
    ],
)
def test_a_fault_is_told_whole(tmp_path: Path, text: str, told: str) -> None:
    assert error_of(tmp_path, text) == told


def test_an_unknown_verdict_lists_the_known_ones(tmp_path: Path) -> None:
    told = error_of(tmp_path, "schema: 1\nsnapshot: x\nexpected: {a-method: passes}\n")
    assert told.startswith("case.yaml: expected.a-method: found 'passes', expected one of ")
    assert "'pass', 'partial'" in told


def test_several_verdicts_have_their_reason(tmp_path: Path) -> None:
    text = "schema: 1\nsnapshot: x\nexpected: {a: {verdicts: [no_op, fail], reason: rounding}}\n"
    several = Case.load(write(tmp_path, text)).expected["a"]
    assert (several.verdicts, several.reason) == ((Verdict.NO_OP, Verdict.FAIL), "rounding")
    assert str(several) == "no_op or fail"
    assert several.plain() == {"verdicts": ["no_op", "fail"], "reason": "rounding"}


FORM = "{verdicts: [fail, no_op], reason: why arithmetic decides between them}"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("[fail, no_op]", f"a: found ['fail', 'no_op'], expected a list with its reason, {FORM}"),
        ("{verdicts: [fail, no_op]}", f"a reason for several verdicts, {FORM}"),
        ("{verdicts: [fail, no_op], reason: ' '}", f"a reason for several verdicts, {FORM}"),
        ("{verdicts: [fail, fail], reason: r}", "expected each verdict once"),
        ("{verdicts: [], reason: r}", "should have at least 1 item"),
        ("{verdicts: [fail, fial], reason: r}", "expected.a.verdicts.1: found 'fial', expected"),
        ("{verdict: fail}", "expected.a.verdict: found an unknown key, expected one of verdicts,"),
        ("3", "expected.a: found 3, expected"),
    ],
)
def test_a_set_of_verdicts_without_a_reason_is_no_set(tmp_path, written, told) -> None:
    assert told in error_of(tmp_path, f"schema: 1\nsnapshot: x\nexpected: {{a: {written}}}\n")


def test_an_unknown_key_of_the_platform_lists_the_known_ones(tmp_path: Path) -> None:
    told = error_of(tmp_path, "schema: 1\nsnapshot: x\nprovenance: {platform: {gpu: yes}}\n")
    assert "provenance.platform.gpu: found an unknown key, expected one of device, system" in told


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    told = error_of(tmp_path, "schema: 1\nsnapshot: x\nnote: 3\nneeds: {devices: 0}\n")
    assert told.splitlines() == [
        "case.yaml: note: found 3, expected Input should be a valid string",
        "case.yaml: needs.devices: found 0, expected Input should be greater than or equal to 1",
    ]


def test_discovery_keeps_a_case_whose_snapshot_is_absent(tmp_path: Path) -> None:
    write(tmp_path, WHOLE.replace("quiet: quiet/iter_0000080\n", ""), name="b-here")
    gone = write(tmp_path, WHOLE, name="a-gone", snapshot=False)
    (tmp_path / "no-case").mkdir()

    found = discover(tmp_path)

    assert [case.name for case in found] == ["a-gone", "b-here"]
    assert found[1].missing() is None
    found[1].require()
    assert found[0].missing() == gone / "snapshot" / "iter_0000085"
    with pytest.raises(CaseError) as caught:
        found[0].require()
    assert str(caught.value) == (
        f"{gone}/case.yaml: snapshot: found no directory {gone}/snapshot/iter_0000085, "
        f"expected the snapshot of the case. Copy it there, or correct the path"
    )


def test_discovery_in_a_directory_that_is_absent(tmp_path: Path) -> None:
    with pytest.raises(CaseError) as caught:
        discover(tmp_path / "nowhere")
    assert str(caught.value) == (
        f"{tmp_path}/nowhere: found no such directory, expected a directory of cases"
    )


def test_open_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="expected a case directory or a snapshot iter_"):
        Case.open(tmp_path / "iter_0000001")


@pytest.mark.parametrize(
    "line",
    [
        "note: 2026-13-45",
        "note: 0x_",
        'note: !!int "abc"',
        'note: !!bool "abc"',
        "x: " + "[" * 3000,
    ],
)
def test_text_that_yaml_itself_stumbles_over_is_one_error(tmp_path, line):
    (tmp_path / "case.yaml").write_text(f"schema: 1\nsnapshot: iter_0000001\n{line}\n")
    with pytest.raises(CaseError, match=r"case.yaml: found .*, expected YAML in UTF-8"):
        Case.load(tmp_path)


def test_a_directory_by_the_name_of_the_file_is_one_error(tmp_path):
    (tmp_path / "case.yaml").mkdir()
    with pytest.raises(CaseError, match="expected a file to read"):
        Case.load(tmp_path)
