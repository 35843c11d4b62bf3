"""What a case expects of a method: one verdict, or several between which arithmetic decides."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from replay_lib.rule import Verdict

#: How a set of verdicts is written.
FORM = "{verdicts: [fail, no_op], reason: why arithmetic decides between them}"


class Expected(BaseModel):
    """The verdicts that are as expected, and why there are several of them.

    Several are for results that depend on the machine's arithmetic alone: a ratio that is exactly
    1 where it was recorded is 1 +- 1e-7 elsewhere, so a method touches nothing here and something
    there. In ``case.yaml`` a single verdict is written as such.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    verdicts: Annotated[
        tuple[Annotated[Verdict, Field(strict=False)], ...], Field(min_length=1, strict=False)
    ]
    reason: str = ""

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, given: Any) -> Any:
        if isinstance(given, list):
            raise _fault(f"a list with its reason, {FORM}")
        if not isinstance(given, str):
            return given
        if given not in list(Verdict):
            raise _fault(f"one of {', '.join(map(repr, map(str, Verdict)))}")
        return {"verdicts": [given]}

    @model_validator(mode="after")
    def _checked(self) -> Expected:
        if len(set(self.verdicts)) < len(self.verdicts):
            raise _fault("each verdict once")
        if len(self.verdicts) > 1 and not self.reason.strip():
            raise _fault(f"a reason for several verdicts, {FORM}")
        return self

    @classmethod
    def one(cls, verdict: Verdict) -> Expected:
        """A single verdict."""
        return cls(verdicts=(verdict,))

    @property
    def several(self) -> bool:
        """Whether arithmetic decides between verdicts."""
        return len(self.verdicts) > 1

    @property
    def stated(self) -> Verdict | tuple[Verdict, ...]:
        """The one verdict, or all of several."""
        return self.verdicts if self.several else self.verdicts[0]

    def widened(self, verdict: Verdict, reason: str) -> Expected:
        """With ``verdict`` as well; reasons are joined, each once."""
        if verdict in self.verdicts:
            return self
        known = self.reason.strip()
        joint = known if known and reason in known else "; ".join(filter(None, [known, reason]))
        return Expected(verdicts=(*self.verdicts, verdict), reason=joint)

    def plain(self) -> str | dict[str, Any]:
        """As it is written in ``case.yaml``."""
        if not self.several and not self.reason:
            return str(self.verdicts[0])
        return {"verdicts": [str(v) for v in self.verdicts], "reason": self.reason}

    def __str__(self) -> str:
        return " or ".join(self.verdicts)


def _fault(expected: str) -> PydanticCustomError:
    """Told by the case as what was expected where the fault is."""
    return PydanticCustomError("expected", "{expected}", {"expected": expected})
