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
    dtype of the replay. A CPU's model is left out, and so is what torch was built for where it
    runs on a CPU: both move figures by less than is allowed.
    """

    device: str
    precision: str
    torch: str
    megatron_core: str

    @classmethod
    def of(cls, device: str, precision: str, versions: Mapping[str, str]) -> Environment:
        """From what a session tells of itself; a version that it does not tell is ``unknown``."""
        torch = versions.get("torch", "unknown")
        if device_kind(device) == "cpu":
            torch = torch.partition("+")[0]
        return cls(
            device=device,
            precision=precision,
            torch=torch,
            megatron_core=versions.get("megatron-core", "unknown"),
        )

    @property
    def slug(self) -> str:
        """Its name as a file: no blanks, no capitals."""
        parts = (
            self.device,
            self.precision,
            f"torch{self.torch}",
            f"megatron{self.megatron_core}",
        )
        return "-".join(_UNNAMED.sub("-", part.lower()).strip("-") for part in parts)

    def told(self) -> str:
        """For a reader."""
        return (
            f"{self.precision} on {self.device}, torch {self.torch}, "
            f"Megatron-Core {self.megatron_core}"
        )
