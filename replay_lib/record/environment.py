"""What decides the last digits of a figure: the key that baselines of figures are kept under."""

from __future__ import annotations

import re
from collections.abc import Mapping

from replay_lib.engine.protocol import Frozen
from replay_lib.noise import device_kind

_UNNAMED = re.compile(r"[^a-z0-9.]+")


class Environment(Frozen):
    """Where figures come from.

    ``device`` is ``cpu`` or ``cuda`` with the name that the driver gives the GPU, ``precision`` the
    dtype of the replay. ``dp_ranks`` is None for all of the recorded data-parallel ranks; a part of
    them (``0,1 of 8``) is another batch, with figures of its own. A CPU's model is left out, and so
    is what torch was built for where it runs on a CPU: both move figures by less than is allowed.
    """

    device: str
    precision: str
    torch: str
    megatron_core: str
    dp_ranks: str | None = None

    @classmethod
    def of(
        cls,
        device: str,
        precision: str,
        versions: Mapping[str, str],
        dp_ranks: str | None = None,
    ) -> Environment:
        """From what a session tells of itself; a version that it does not tell is ``unknown``."""
        torch = versions.get("torch", "unknown")
        if device_kind(device) == "cpu":
            torch = torch.partition("+")[0]
        return cls(
            device=device,
            precision=precision,
            torch=torch,
            megatron_core=versions.get("megatron-core", "unknown"),
            dp_ranks=dp_ranks,
        )

    @property
    def slug(self) -> str:
        """Its name as a file: no blanks, no capitals."""
        parts = (
            self.device,
            self.precision,
            f"torch{self.torch}",
            f"megatron{self.megatron_core}",
            *(() if self.dp_ranks is None else (f"ranks{self.dp_ranks.replace(',', '.')}",)),
        )
        return "-".join(_UNNAMED.sub("-", part.lower()).strip("-") for part in parts)

    def told(self) -> str:
        """For a reader."""
        part = "" if self.dp_ranks is None else f", data-parallel ranks {self.dp_ranks} alone"
        return (
            f"{self.precision} on {self.device}, torch {self.torch}, "
            f"Megatron-Core {self.megatron_core}{part}"
        )
