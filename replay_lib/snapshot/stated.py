"""Statements of a snapshot about itself, each checked and with a fault that names its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from replay_lib.errors import SnapshotError, fault
from replay_lib.snapshot.model import Parallel

KNOWN_VERSIONS = (1, 2)  # of AXRL's metadata; older files state none
MOST = 2**63 - 1
MOST_RANKS = 1 << 20  # what loops over ranks stays short
_T = TypeVar("_T", bound=BaseModel)


def validated(model: type[_T], build: Any, raw: Any, source: Path) -> _T:
    """``build(raw)``, with pydantic's complaint as a SnapshotError that names ``source``."""
    try:
        built = build(raw)
    except (ValidationError, AttributeError, TypeError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        field = ".".join(str(part) for part in first["loc"]) if first else None
        found = repr(first["input"]) if first else f"{type(raw).__name__} ({error})"
        expected = first["msg"] if first else f"an object of {model.__name__} fields"
        raise SnapshotError(fault(source, field, found, expected)) from error
    assert isinstance(built, model)
    return built


def number(values: dict[str, Any], key: str, source: Path) -> float | None:
    """The number ``key``, NaN and infinities included; None where there is none."""
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SnapshotError(fault(source, key, repr(value), "a number or null"))
    try:
        return float(value)
    except OverflowError as error:
        raise SnapshotError(
            fault(source, key, "an integer beyond float range", "a number or null")
        ) from error


def integer(values: dict[str, Any], key: str, source: Path, least: int = 0) -> int | None:
    """The integer ``key``, from ``least`` to what 64 bits hold; None where there is none."""
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        found = f"{value!r:.60}"
        raise SnapshotError(fault(source, key, found, f"an integer of {least} or more (64 bits)"))
    return value


def metadata_version(metadata: dict[str, Any], source: Path) -> int | None:
    """Version of AXRL's metadata; a SnapshotError where it is unknown here."""
    version = integer(metadata, "metadata_version", source)
    if version is not None and version not in KNOWN_VERSIONS:
        raise SnapshotError(
            fault(
                source,
                "metadata_version",
                str(version),
                " or ".join(map(str, KNOWN_VERSIONS)),
                "The trainer is newer than this reader: take a newer version of this package.",
            )
        )
    return version


def parallel_from(raw: dict[str, Any], source: Path) -> Parallel:
    """The layout that a worker configuration from file ``source`` states."""

    def ranks(key: str) -> int:
        return integer(raw, key, source, least=1) or 1

    tp = ranks("tp_size")
    # Megatron takes the tensor-parallel size for experts where none is given
    etp = tp if "etp_size" in raw and raw["etp_size"] is None else ranks("etp_size")
    parallel = Parallel(
        tp=tp,
        pp=ranks("pp_size"),
        vpp=integer(raw, "vpp_size", source, least=1),
        cp=ranks("cp_size"),
        ep=ranks("ep_size"),
        etp=etp,
        dp=ranks("dp_size"),
    )
    if parallel.world_size > MOST_RANKS:
        found = f"{parallel.world_size} ranks (tp x pp x cp x dp)"
        raise SnapshotError(fault(source, "dp_size", found, f"no more than {MOST_RANKS}"))
    dense = parallel.tp * parallel.cp * parallel.dp
    if dense % (parallel.ep * parallel.etp):
        raise SnapshotError(
            fault(
                source,
                "ep_size",
                f"ep {parallel.ep} x etp {parallel.etp}",
                f"a divisor of tp x cp x dp = {dense}",
            )
        )
    return parallel
