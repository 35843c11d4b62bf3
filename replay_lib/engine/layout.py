"""How many ranks replay, and along which axes the model and its tokens are split over them.

The words are Megatron's: tensor (tp), pipeline (pp), context (cp), expert (ep) and data (dp)
parallelism. A job has ``tp * pp * cp * dp`` ranks, ordered tp-cp-dp-pp; expert parallelism lives
inside ``tp * cp * dp`` of them, so ``ep=2`` alone means two data-parallel ranks that share the
experts out between them. Experts are never tensor-split. Needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from replay_lib.errors import UsageError
from replay_lib.snapshot.model import Parallel

AUTO = "auto"  # the word that leaves the choice to the engine
SYNTAX = "sizes as in tp=2 or ep=2,dp=2 (tp, pp, cp, ep, dp)"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the axes; all are 1 for a replay on one rank."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes below 1 and an ep that does not divide tp * cp * dp: UsageError."""
        for name, size in self.sizes.items():
            if not (type(size) is int and size >= 1):
                raise UsageError(f"layout: {name}={size!r}: expected a whole number from 1 on")
        inside = self.tp * self.cp * self.dp
        if inside % self.ep:
            raise UsageError(
                f"layout: ep={self.ep}: expected a divisor of tp * cp * dp = {inside}, since "
                "experts are shared out among these ranks"
            )

    @classmethod
    def parse(cls, text: str, ranks: int | None = None) -> Layout:
        """From ``tp=2`` or ``ep=2,dp=2``; axes that are not named are 1.

        A dp that is not named is the smallest that ``ep`` needs. ``ranks``, where given, is how
        many processes there are. Raises UsageError that names what it found.
        """
        sizes: dict[str, int] = {}
        known = [f.name for f in fields(cls)]
        for part in text.split(","):
            name, _, size = (piece.strip() for piece in part.partition("="))
            if name not in known or not (size.isascii() and size.isdigit()):
                raise UsageError(f"layout {text!r}: found {part.strip()!r}, expected {SYNTAX}")
            if name in sizes:
                raise UsageError(f"layout {text!r}: found {name} twice, expected it once")
            sizes[name] = int(size)
        if "dp" not in sizes and sizes.get("ep", 1) > 0:
            inside = sizes.get("tp", 1) * sizes.get("cp", 1)
            sizes["dp"] = sizes.get("ep", 1) // math.gcd(sizes.get("ep", 1), inside)
        layout = cls(**sizes)
        if ranks is not None and layout.ranks != ranks:
            raise UsageError(
                f"layout {layout}: it has tp * pp * cp * dp = {layout.ranks} ranks, "
                f"but there are {ranks}"
            )
        return layout

    @property
    def sizes(self) -> dict[str, int]:
        """Size by axis."""
        return asdict(self)

    @property
    def ranks(self) -> int:
        """Processes of the job."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def shards(self) -> int:
        """Ranks among which the tokens of one micro-batch are shared out: tp * cp."""
        return self.tp * self.cp

    def __str__(self) -> str:
        """``tp=2,dp=2``: the axes that are split, or ``dp=1``."""
        split = [f"{name}={size}" for name, size in self.sizes.items() if size > 1]
        return ",".join(split) or "dp=1"


ONE_RANK = Layout()


def same_as_recorded(layout: Layout, parallel: Parallel) -> bool:
    """Whether the replay's layout is the recorded one (virtual pipeline stages do not count)."""
    recorded: dict[str, Any] = {name: getattr(parallel, name) for name in layout.sizes}
    return recorded == layout.sizes and parallel.etp == 1


def read_ranks(text: str | None) -> tuple[int, ...] | None:
    """Recorded data-parallel ranks as in ``0,1``; None for all. UsageError where it is not that."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--dp-ranks: found {text!r}, expected numbers as in 0,1") from error
