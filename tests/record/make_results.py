"""Hand-made outcomes, as an engine would give them, for tests of what comes after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replay_lib.case import Case, Provenance
from replay_lib.engine.protocol import Experiment, Outcome, Retained, SessionInfo
from replay_lib.patch import Seam
from replay_lib.record.judge import Comparison, Recorded, Traits, judge_outcome
from replay_lib.record.result import Result

RECORDED = Recorded(norm=8.0, median=2.0, spike_ratio=2.0, dtype="float32", clip_grad=1.0)
INFO = SessionInfo(
    snapshot="iter_0000085",
    step=85,
    fidelity="folded",
    dp_ranks=(0, 1),
    dp_recorded=2,
    layout={"dp": 1},
    device="cpu",
    dtype="float32",
    deterministic=True,
    parameters=10,
    versions={"torch": "2.13.0"},
    seconds={"imports": 1.0},
)


def outcome(name: str, norm: float, digest: str | None = None, **fields: Any) -> Outcome:
    """An outcome of the experiment written as ``name``; its digest is its norm by default."""
    against = fields.pop("against", "baseline")
    given: dict[str, Any] = {
        "digest": digest or f"digest of {norm}",
        "loss": 0.5,
        "denominator": 10.0,
        "param_norms": {"w": norm},
        "touched": {} if name == "baseline" else {Seam.SETTINGS: 1},
        "seconds": 0.25,
    }
    return Outcome(
        experiment=Experiment.parse(name, against), grad_norm_preclip=norm, **(given | fields)
    )


BASELINE = outcome("baseline", 8.0)
KEPT = Retained(tokens=1.0, advantage=0.75, dloss_dlogprob=0.9)


def case(**fields: Any) -> Case:
    return Case(name="tiny-step85", snapshot=Path("/data/iter_0000085"), **fields)


def result(one: Outcome, **fields: Any) -> Result:
    beside = fields.pop("beside", None) or Comparison(
        baseline=BASELINE, repeats=(BASELINE,), compared=BASELINE
    )
    given: dict[str, Any] = {
        "session": INFO,
        "case": case(),
        "recorded": RECORDED,
        "traits": Traits(),
    }
    return judge_outcome(one, beside=beside, **(given | fields))


def some_results() -> list[Result]:
    """A baseline, a pass, an old_sensitive partial, a degenerate, a no_op and a reduced one."""
    expecting = case(
        expected={"halve": "partial", "drop-all": "degenerate"},
        provenance=Provenance(evidence="mechanism"),
    )
    lost = Retained(tokens=0.0, advantage=0.0, dloss_dlogprob=0.0)
    routed = outcome(
        "halve",
        2.5,
        grad_norm_preclip_carried=4.0,
        retained=KEPT,
        retained_carried=KEPT,
        touched={Seam.ROUTING: 12},
    )
    reduced = INFO.model_copy(update={"fidelity": "reduced", "dp_ranks": (1,)})
    return [
        result(BASELINE),
        result(outcome("cap:at=2.0", 2.4, retained=KEPT)),
        result(routed, case=expecting),
        result(outcome("drop-all", 0.0, retained=lost), case=expecting),
        result(outcome("nothing", 8.0, touched={Seam.SETTINGS: 0})),
        result(outcome("cap:at=2.0", 2.4, retained=KEPT), session=reduced),
    ]
