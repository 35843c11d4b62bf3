"""A case: a snapshot plus ``case.yaml``, whose thresholds and tolerances each state a reason.

The directory's name is the case's name and the test id, unless the file states another (a case that
was exported to another place does). A bare snapshot is a case with defaults.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from replay_lib import layout
from replay_lib.digests import check_digests, joint_digest
from replay_lib.engine.protocol import Experiment
from replay_lib.errors import CaseError, fault, number_hint
from replay_lib.expected import Expected
from replay_lib.rule import RECORDING_REDUCTION, TARGET_RATIO
from replay_lib.verdict import Bound

SCHEMA = 1

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Reason = Annotated[str, Field(min_length=1)]
_Name = Annotated[str, Field(pattern=r"^[^/\x00-\x1f]+$", max_length=255)]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Limit(_Strict):
    """A number with the reason for its size."""

    value: _Positive
    reason: _Reason


def _a_cosine(limit: Limit) -> Limit:
    if not limit.value <= 1:
        raise ValueError(f"a cosine is at most 1, not {limit.value:g}")
    return limit


class Thresholds(_Strict):
    """What counts as cured, what is worth recording, and what a method may do to ordinary steps.

    ``quiet_norm_change`` is the largest |norm(method) / norm(baseline) - 1| on the quiet control,
    ``quiet_cosine`` the smallest cosine there of the two gradients; beyond either a method is
    named and not proven.
    """

    target_ratio: Limit = Limit(
        value=TARGET_RATIO, reason="the published method documents call 1.5 x normal the target"
    )
    recording_reduction: Limit = Limit(
        value=RECORDING_REDUCTION,
        reason="the published method documents record methods above 15 % reduction",
    )
    quiet_norm_change: Limit = Limit(
        value=0.10,
        reason="an ordinary step needs no cure: a larger change of its norm is another step size",
    )
    quiet_cosine: Annotated[Limit, AfterValidator(_a_cosine)] = Limit(
        value=0.95,
        reason="18 degrees: an ordinary step that is turned further trains something else",
    )


class Tolerance(_Strict):
    """How far a baseline may lie from the recorded norm, relative."""

    float32: Limit = Limit(
        value=1e-5,
        reason="one step in float32 differs by summation order alone: up to 1e-5 of a norm",
    )
    bfloat16: Limit = Limit(
        value=3e-3,
        reason="8 bits of mantissa: other kernels move a norm by up to 3e-3",
    )
    reduced: Limit = Limit(
        value=0.20,
        reason="some data-parallel ranks are another batch; AXRL too allows 20 % in a replay",
    )


class Needs(_Strict):
    """What a machine must have to replay the case."""

    device: Literal["any", "cuda"] = "any"
    devices: Annotated[int, Field(ge=1)] = 1
    memory_gib: Annotated[float, Field(gt=0)] | None = None


class Platform(_Strict):
    """What a case was made on; a seed gives the same spike on the same platform."""

    device: str = ""
    system: str = ""
    python: str = ""
    torch: str = ""
    megatron_core: str = ""


class Provenance(_Strict):
    """Where the snapshot comes from; ``evidence`` says what its verdicts are worth.

    ``measured``: norms and median are a training run's. ``mechanism``: the median was invented, so
    verdicts show that replay and patches work and prove no method. Where this library made the
    case, ``command`` and ``seed`` make it again; ``commit`` is that of this library's repository.
    """

    evidence: Literal["measured", "mechanism"] = "measured"
    trainer: str = ""
    job: str = ""
    written_by: str = ""
    source: str = ""
    command: str = ""
    seed: int | None = None
    commit: str = ""
    platform: Platform | None = None


class CaseFile(_Strict):
    """``case.yaml`` as it is written."""

    schema_version: int = Field(alias="schema")
    snapshot: _Reason
    name: _Name | None = None
    quiet: _Reason | None = None
    note: str = ""
    thresholds: Thresholds = Thresholds()
    tolerance: Tolerance = Tolerance()
    needs: Needs = Needs()
    expected: dict[str, Expected] = Field(default_factory=dict)
    provenance: Provenance = Provenance()
    sha256: dict[str, _Sha256] = Field(default_factory=dict)


class Case(_Strict):
    """What a test needs to know of a case; paths are absolute, ``file`` is None without a file.

    ``sha256`` has the digests of the snapshots' files by their path beside ``case.yaml``; empty:
    the case is not sealed.
    """

    name: str
    snapshot: Path
    quiet: Path | None = None
    file: Path | None = None
    note: str = ""
    thresholds: Thresholds = Thresholds()
    tolerance: Tolerance = Tolerance()
    needs: Needs = Needs()
    expected: dict[str, Expected] = Field(default_factory=dict)
    provenance: Provenance = Provenance()
    sha256: dict[str, _Sha256] = Field(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path) -> Case:
        """From a case directory or its ``case.yaml``; CaseError names file and field."""
        given = Path(path)
        file = (given if given.name == layout.CASE_FILE else given / layout.CASE_FILE).absolute()
        read = read_case_file(file)
        fields = {k: getattr(read, k) for k in CaseFile.model_fields if k in cls.model_fields}
        fields["snapshot"] = _inside(file, "snapshot", read.snapshot)
        fields["quiet"] = _inside(file, "quiet", read.quiet) if read.quiet else None
        # one spelling of parameters: scale_up=true and scale_up=True are the same experiment
        fields["expected"] = {Experiment.parse(k).name: v for k, v in read.expected.items()}
        fields["name"] = read.name or file.parent.name
        return cls(file=file, **fields)

    @classmethod
    def from_snapshot(cls, path: str | Path) -> Case:
        """A bare snapshot as a case with default thresholds and no expectations."""
        snapshot = Path(path).absolute()
        return cls(name=snapshot.name, snapshot=snapshot)

    @classmethod
    def open(cls, path: str | Path) -> Case:
        """A case directory, a ``case.yaml`` or a bare snapshot, whichever ``path`` is."""
        given = Path(path)
        if given.name == layout.CASE_FILE or (given / layout.CASE_FILE).is_file():
            return cls.load(given)
        if not given.is_dir():
            raise CaseError(
                fault(given, None, "no such directory", "a case directory or a snapshot iter_*")
            )
        refuse_several(given)
        return cls.from_snapshot(given)

    def missing(self) -> Path | None:
        """The first of the case's snapshots that is not on this disk."""
        wanted = [self.snapshot] if self.quiet is None else [self.snapshot, self.quiet]
        return next((p for p in wanted if not p.is_dir()), None)

    def require(self) -> None:
        """CaseError where a snapshot of the case is absent, or a file differs from its digest.

        Files are read once in a process, however often this is called.
        """
        absent = self.missing()
        if absent is not None:
            raise CaseError(
                fault(
                    self.file or self.name,
                    "snapshot",
                    f"no directory {absent}",
                    "the snapshot of the case",
                    "Copy it there, or correct the path",
                )
            )
        if self.file is not None:
            check_digests(self.file, [self.snapshot, *filter(None, [self.quiet])], self.sha256)

    def digest(self) -> str:
        """sha256 of what is replayed: the files of its snapshots, not ``case.yaml``.

        Sealing a case or moving it does not change it. Files of a case that is not sealed are read.
        """
        roles = {"snapshot": self.snapshot} | ({} if self.quiet is None else {"quiet": self.quiet})
        return joint_digest(self.file, roles, self.sha256)

    def tolerance_for(self, fidelity: str, dtypes: set[str]) -> Bound:
        """Allowed relative distance of a baseline from the recorded norm.

        ``dtypes`` are those of the recorded run and of the replay: the coarser one rules.
        """
        if fidelity == "reduced":
            limit = self.tolerance.reduced
        else:
            limit = max((self._of_dtype(d) for d in sorted(dtypes)), key=lambda one: one.value)
        return Bound(limit.value, limit.reason)

    def _of_dtype(self, dtype: str) -> Limit:
        limit = {"float32": self.tolerance.float32, "bfloat16": self.tolerance.bfloat16}.get(dtype)
        if limit is None:
            raise CaseError(
                fault(self.file or self.name, "tolerance", dtype, "float32 or bfloat16")
            )
        return limit


def refuse_several(directory: Path) -> None:
    """CaseError that names them where cases lie right inside ``directory``, where one is wanted."""
    files = directory.glob(f"[!.]*/{layout.CASE_FILE}")  # hidden ones are half written
    inside = sorted(file.parent.name for file in files if file.is_file())
    if inside:
        raise CaseError(
            fault(
                directory,
                None,
                f"a directory of {len(inside)} case(s)",
                "one case, or a snapshot iter_*",
                f"Name one of them: {', '.join(inside)}; all of them are tried by "
                f"pytest --spike-cases={directory}",
            )
        )


def discover(directory: str | Path) -> list[Case]:
    """Every ``*/case.yaml`` under ``directory``, by name; a directory that is absent is an error.

    A case whose snapshot is absent is in the list: ``Case.require`` tells where it should be.
    """
    root = Path(directory)
    if not root.is_dir():
        raise CaseError(fault(root, None, "no such directory", "a directory of cases"))
    # hidden: what a killed process left behind, half written
    directories = [d for d in root.iterdir() if d.is_dir() and not d.name.startswith(".")]
    for inner in sorted(directories):
        snapshots = [
            *inner.glob("iter_*"),
            *inner.glob("snapshot/iter_*"),
            *inner.glob(layout.PORTABLE),
            *inner.glob(f"*/{layout.PORTABLE}"),
        ]
        if snapshots and not (inner / layout.CASE_FILE).exists():
            raise CaseError(
                fault(
                    inner,
                    None,
                    f"a snapshot ({snapshots[0].name}) without {layout.CASE_FILE}",
                    f"a {layout.CASE_FILE} beside it",
                    "Else the case would be left out without a word",
                )
            )
    files = [d / layout.CASE_FILE for d in sorted(directories)]
    cases = [Case.load(file) for file in files if file.exists()]
    _check_names(cases)
    return cases


def _check_names(cases: Sequence[Case]) -> None:
    """CaseError where two cases have one name: it is a test's id."""
    first: dict[str, Case] = {}
    for case in cases:
        other = first.setdefault(case.name, case)
        if other is not case and case.file is not None:
            found = f"{case.name!r}, the name of {other.file} too"
            raise CaseError(fault(case.file, "name", found, "a name of its own"))


def builtin_cases() -> Path:
    """The repository's own cases."""
    return Path(__file__).parent.parent / "spike_cases"


def read_case_file(file: Path) -> CaseFile:
    """``case.yaml`` as it is written; CaseError with all its faults."""
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CaseError(fault(file, None, "no such file", "a case.yaml")) from error
    except OSError as error:
        raise CaseError(fault(file, None, f"{error.strerror}", "a file to read")) from error
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:
        # what is no date, no number or too deep is told by other errors than YAML's own
        raise CaseError(fault(file, None, f"{error}", "YAML in UTF-8")) from error
    if not isinstance(raw, dict):
        raise CaseError(fault(file, None, type(raw).__name__, "a mapping"))
    version: Any = raw.get("schema")
    # read first: the rest of another version has no meaning here
    if version != SCHEMA:
        then = "A newer version of this library wrote it" if _newer(version) else None
        raise CaseError(fault(file, "schema", repr(version), repr(SCHEMA), then))
    return case_file_from(file, raw)


def case_file_from(file: Path, raw: Mapping[str, Any]) -> CaseFile:
    """``raw`` as the content of ``file``; CaseError with all its faults."""
    try:
        return CaseFile.model_validate(raw)
    except ValidationError as error:
        raise CaseError(_told(file, error)) from error


def _newer(version: object) -> bool:
    return isinstance(version, (int, float)) and math.isfinite(version) and version > SCHEMA


def _told(file: Path, error: ValidationError) -> str:
    """All faults of the file at once, one a line."""
    lines = []
    for one in error.errors():
        field = ".".join(str(part) for part in one["loc"])
        if one["type"] == "extra_forbidden":
            known = ", ".join(_known(one["loc"][:-1]))
            lines.append(fault(file, field, "an unknown key", f"one of {known}"))
        else:
            lines.append(
                fault(file, field, repr(one["input"]), one["msg"], number_hint(one["input"]))
            )
    return "\n".join(lines)


def _known(place: tuple[int | str, ...]) -> list[str]:
    model: Any = CaseFile
    for part in place:
        # what is no field is a key of a mapping, whose values' model is known by then
        field = model.model_fields.get(part)
        model = model if field is None else next(_models_in(field.annotation), model)
    return [f.alias or name for name, f in model.model_fields.items()]


def _models_in(annotation: Any) -> Iterator[Any]:
    """The models that a field's type names, as in ``X``, ``X | None`` and ``dict[str, X]``."""
    if hasattr(annotation, "model_fields"):
        yield annotation
    for one in get_args(annotation):
        yield from _models_in(one)


def _inside(file: Path, field: str, value: str) -> Path:
    relative = Path(value)
    if relative.is_absolute():
        raise CaseError(
            fault(file, field, f"the absolute path {value}", "a path relative to the case")
        )
    return (file.parent / relative).resolve()
