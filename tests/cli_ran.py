"""A command of ``spike-replay`` called in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from replay_lib.cli import main


class Ran:
    """What a command printed and how it ended."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        self.code = ended.value.code
        self.out, self.err = capsys.readouterr()

    @property
    def document(self) -> Any:
        def refuse(name: str) -> None:
            raise ValueError(f"{name} is not JSON")

        return json.loads(self.out, parse_constant=refuse)
