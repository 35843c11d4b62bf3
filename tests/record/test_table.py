"""The tables, as they are shown."""

from __future__ import annotations

import io

from make_results import BASELINE, KEPT, outcome, result, some_results
from rich.console import Console
from syrupy.assertion import SnapshotAssertion

from replay_lib.record.result import SideEffect
from replay_lib.record.table import (
    CASE_COLUMNS,
    COLUMNS,
    case_line,
    document_table,
    plain_tables,
    reproduction_table,
    rich_table,
)
from replay_lib.rule import Flag, Verdict

CARRIED = {"grad_norm_preclip_carried": 5.0}
EFFECT = SideEffect(
    quiet_norm=2.1,
    quiet_baseline_norm=2.0,
    change=0.05,
    verdict=Verdict.NOT_A_SPIKE,
    reason="the baseline is 1.000 x the median already",
    quiet_norm_carried=1.86,
    change_carried=-0.07,
    cosine=0.9987,
    cosine_carried=0.9312,
)


def test_plain_tables(snapshot: SnapshotAssertion) -> None:
    assert plain_tables(some_results()) == snapshot


def test_document_table(snapshot: SnapshotAssertion) -> None:
    assert document_table(some_results()) == snapshot


def test_reproduction_table(snapshot: SnapshotAssertion) -> None:
    assert reproduction_table(some_results()) == snapshot


def test_both_tables_show_the_same_cells() -> None:
    out = io.StringIO()
    Console(file=out, width=119).print(rich_table(some_results(), "title"))
    shown = [_words(line) for line in out.getvalue().splitlines()]
    for one in some_results():
        cells = " ".join(cell(one) for _, cell in CASE_COLUMNS[:-1])
        assert any(line.startswith(cells) for line in shown), cells


def _words(line: str) -> str:
    return " ".join(line.split())


def test_tables_stay_under_120_columns() -> None:
    slug = "use-current-routing-for-first-moe-layer"
    flagged = outcome(f"{slug}+enable-token-mismatch-tis-max2:clip_max=2.0", 2.5, **CARRIED)
    results = [result(flagged), result(outcome(slug, 123.456, **CARRIED))]
    effect = EFFECT.model_copy(update={"change_carried": -0.634})
    flags = (Flag.OLD_SENSITIVE, Flag.BEYOND_BUDGET)
    results = [r.model_copy(update={"side_effect": effect, "flags": flags}) for r in results]
    results.append(results[0].model_copy(update={"verdict": Verdict.REFERENCE_MISSING}))
    out = io.StringIO()
    Console(file=out, width=160).print(rich_table(results))
    for line in [*plain_tables(results).splitlines(), *out.getvalue().splitlines()]:
        assert len(line.rstrip()) < 120, line


def test_a_side_effect_is_the_larger_change_and_a_fault_is_red() -> None:
    cell = dict(CASE_COLUMNS)["quiet"]
    one = result(outcome("cap:at=2.0", 2.4, retained=KEPT))
    assert cell(one) == "-"
    measured = one.model_copy(update={"side_effect": EFFECT})
    assert cell(measured) == "-7.0% 0.931"
    loud = EFFECT.model_copy(update={"change": 0.5004, "cosine_carried": None})
    assert cell(one.model_copy(update={"side_effect": loud})) == "+50% 0.999"
    document = dict(COLUMNS)
    assert (document["quiet"](measured), document["quiet cosine"](measured)) == ("-7.0%", "0.931")
    spoiled = EFFECT.model_copy(update={"verdict": Verdict.NOT_REPRODUCED})
    shown = one.model_copy(update={"side_effect": spoiled})
    assert cell(shown) == document["quiet"](shown) == "RED"
    assert document["quiet cosine"](shown) == "-"
    assert rich_table([shown]).rows[0].style == "red"


def test_what_counted_under_carried_old_log_probabilities_is_shown() -> None:
    lost = KEPT.model_copy(update={"dloss_dlogprob": 0.2})
    one = result(outcome("x", 2.4, retained=KEPT, retained_carried=lost, **CARRIED))
    cells = {title: cell(one) for title, cell in CASE_COLUMNS}
    assert (cells["ratio"], cells["carried"]) == ("1.200", "2.500")
    assert (cells["reduction"], cells["retained"]) == ("37.5%", "20%")
    assert cells["verdict"] == "degenerate (old_sensitive, worse)"


def test_baselines_are_counted_where_more_were_asked_for_or_they_differ() -> None:
    usual = result(BASELINE)
    assert case_line(usual) == "tiny-step85: folded, float32 on cpu"
    more = usual.model_copy(update={"repeats": 5})
    assert case_line(more).endswith(" on cpu; 5 baselines, spread of their norm 0")
    apart = usual.model_copy(update={"repeat_spread": 1.25e-7})
    told = "; 2 baselines, spread of their norm 1.2e-07"
    assert case_line(apart).endswith(told)
    assert plain_tables([apart]).splitlines()[0].endswith(told)
    older = usual.model_copy(update={"repeats": None, "repeat_spread": None})
    assert case_line(older) == case_line(usual)


def test_the_cosine_in_documents_is_the_smaller_one() -> None:
    cell = dict(COLUMNS)["cosine"]
    assert cell(result(outcome("x", 2.4, cosine=0.25))) == "0.250"
    assert cell(result(outcome("x", 2.4, cosine=0.25, cosine_carried=-0.5))) == "-0.500"
    assert cell(result(outcome("x", 2.4))) == "-"


def test_a_reduced_replay_says_so_in_every_table() -> None:
    reduced = [r for r in some_results() if r.fidelity == "reduced"]
    assert "not full-fidelity" in plain_tables(reduced)
    assert "not full-fidelity" in document_table(reduced)
