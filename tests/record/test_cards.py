"""Cards beside methods: one each, code that runs, figures as published, results rendered in."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from replay_lib.batch import RankBatch
from replay_lib.engine.checkpoint import Weights
from replay_lib.engine.protocol import MitigationCall, Retained
from replay_lib.errors import PatchError
from replay_lib.loss import GrpoSettings
from replay_lib.methods import load_methods
from replay_lib.patch import AfterNorm, Norms, Patch, Seam
from replay_lib.record.cards import (
    BLOCK_END,
    BLOCK_START,
    INDEX,
    NO_RESULT,
    cards_dir,
    check_cards,
    read_cards,
    render_block,
    render_index,
    update_cards,
)
from replay_lib.record.result import Result
from replay_lib.rule import Verdict

METHODS = load_methods()
CARDS = read_cards()
PUBLISHED = yaml.safe_load(
    (Path(__file__).parents[1] / "data" / "recorded_results.yaml").read_text()
)
SLUG = "disable-routing-replay"


def make_result(slug: str = "enable-token-mismatch-tis-max2", **changes: object) -> Result:
    parts = slug.split("+")
    fields = {
        "case": "a-case",
        "experiment": slug,
        "mitigations": tuple(MitigationCall(slug=s) for s in parts if s != "baseline"),
        "against": "baseline",
        "fidelity": "folded",
        "grad_norm_preclip": 1.25,
        "median_norm": 1.0,
        "ratio": 1.25,
        "compared_norm": 5.0,
        "reduction": 0.75,
        "verdict": Verdict.PASS,
        "reason": "it passes",
        "below_detector": True,
        "retained": Retained(tokens=1.0, advantage=0.9, dloss_dlogprob=0.8),
        "touched": {"settings": 1},
        "noise_band": 1e-6,
        "deterministic": True,
        "device": "cpu",
        "versions": {},
        "seconds": 1.0,
        "dtype": "float32",
        "digest": "d",
        "recorded_norm": 5.0,
        "relative_difference": 1e-7,
        "diagnostic": slug == SLUG,
        "timestamp": "2030-01-02T03:04:05+00:00",
    }
    return Result(**{**fields, **changes})


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the cards that a test may write to, without results."""
    copy = tmp_path / "cards"
    shutil.copytree(cards_dir(), copy)
    for file in copy.glob("*.md"):
        text = file.read_text()
        if file.name != INDEX:
            file.write_text(replace_block(text, NO_RESULT))
    (copy / INDEX).write_text(render_index(METHODS, read_cards(copy)))
    return copy


def replace_block(text: str, inside: str) -> str:
    before, rest = text.split(BLOCK_START)
    return f"{before}{BLOCK_START}\n{inside}\n{BLOCK_END}{rest.split(BLOCK_END)[1]}"


def block_of(file: Path) -> str:
    return file.read_text().split(BLOCK_START + "\n")[1].split("\n" + BLOCK_END)[0]


def test_every_method_has_a_card_and_every_card_a_method():
    assert set(CARDS) == set(METHODS)
    check_cards(METHODS, CARDS)


def test_a_method_without_card_and_a_card_without_method_are_both_named():
    methods = {s: m for s, m in METHODS.items() if s != SLUG}
    methods["invented"] = dataclasses.replace(METHODS[SLUG], slug="invented")
    with pytest.raises(PatchError) as caught:
        check_cards(methods, CARDS)
    assert str(caught.value) == (
        "mitigation invented has no card\ncard disable-routing-replay.md has no mitigation"
    )


def test_a_card_with_other_sections_or_no_code_or_no_block_says_so(folder):
    file = folder / f"{SLUG}.md"
    text = file.read_text().replace("## Patch", "## Code").replace("```python", "```")
    file.write_text(text.replace(BLOCK_END, ""))
    with pytest.raises(PatchError) as caught:
        check_cards(METHODS, read_cards(folder))
    assert str(caught.value) == (
        f"{file}: sections: found Description, Status, Published evidence, Code, Our results, "
        f"expected Description, Status, Published evidence, Patch, Our results\n"
        f"{file}: Patch: found no code block, expected one in ```python\n"
        f"{file}: generated block: found 0, expected one between {BLOCK_START} and {BLOCK_END}"
    )


def test_a_missing_directory_is_an_error(tmp_path):
    with pytest.raises(PatchError, match="found no such directory, expected a directory of cards"):
        read_cards(tmp_path / "gone")


def sample_batch() -> RankBatch:
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]], dtype=torch.bool)
    ids = torch.zeros(2, 4, dtype=torch.int64)
    return RankBatch(
        dp_rank=0,
        index=torch.arange(2),
        input_ids=ids,
        labels=ids,
        loss_mask=mask,
        attention_mask=torch.ones_like(mask),
        advantage=torch.tensor([[1.0, -3.0, -2.0, 0.5], [-1.5, 0.25, -0.7, 9.0]]),
        old_logprobs=torch.tensor([[-1.0, -6.0, -0.5, -0.1], [-4.0, -3.0, -2.5, -1.0]]),
        rollout_logprobs=torch.tensor([[-1.3, -5.0, -0.5, -0.1], [-4.5, -3.0, -2.4, -1.0]]),
    )


NORMS = Norms(
    norm=5.0,
    median=1.0,
    clip_grad=2.0,
    param_norms={"a": 3.0, "b": 4.0},
    quiet_param_norms={"a": 2.0, "b": 10.0},
)


def outcome(patch: Patch) -> object:
    """What a patch does to a sample of its seam, as something comparable."""
    batch = sample_batch()
    whole = {
        Seam.SETTINGS: GrpoSettings(),
        Seam.MODEL: {},
        Seam.WEIGHTS: Weights({}, lambda path: {"read": path}),
        Seam.ROWS: "merged",
    }
    if patch.seam in whole:
        return patch.apply(whole[patch.seam])
    if patch.seam is Seam.BATCH:
        after = patch.apply(batch)
        columns = (after.advantage, after.loss_mask, after.column("rollout_logprobs"))
        return [column.tolist() for column in columns]
    if patch.seam is Seam.TOKEN_WEIGHTS:
        return patch.apply(torch.ones(2, 4), batch, batch.column("old_logprobs")).tolist()
    replayed = torch.ones(2, 4, 3, dtype=torch.bool)
    given = (replayed, batch)
    if patch.seam is Seam.ROUTER:
        own = torch.tensor([0.9, 0.9, 0.5])
        given = (own > 0, own, torch.tensor([0.69, 0.71, 0.5]))
    return patch.apply(*given).tolist()


@pytest.mark.parametrize("slug", CARDS)
def test_the_patch_on_the_card_runs_and_does_what_the_method_does(slug):
    (code,) = CARDS[slug].code
    names: dict[str, object] = {}
    exec(compile(code, str(CARDS[slug].file), "exec"), names)
    shown = names["patch"]
    if METHODS[slug].after_norm:
        assert isinstance(shown, AfterNorm)
        assert shown(NORMS) == METHODS[slug].answer()(NORMS) != NORMS.norm
        return
    assert isinstance(shown, Patch)
    needed = {name: names[name] for name in METHODS[slug].needs}  # the card states an example
    (built,) = METHODS[slug].patches(needed)
    assert shown.seam is built.seam
    assert outcome(shown) == outcome(built)


def published_methods() -> set[str]:
    found = {part for s in PUBLISHED["spikes"] for e in s["experiments"] for part in [e["method"]]}
    return {slug for label in found for slug in label.split("+")} & set(CARDS)


@pytest.mark.parametrize("slug", sorted(published_methods()))
def test_every_published_figure_is_on_the_card(slug):
    figures = []
    for spike in PUBLISHED["spikes"]:
        bands = spike.get("layer_bands", {})
        found = [e for e in bands.get("experiments", []) if e["method"] == slug]
        figures += [(e["norm"], bands["baseline"]) for e in found]
        found = [e for e in spike["experiments"] if slug in e["method"].split("+")]
        figures += [(e["norm"], e["baseline"]) for e in found]
    assert figures
    for norm, baseline in figures:
        row = f"{norm:.7f} | {baseline:.7f}"
        assert row in CARDS[slug].text, row


def test_results_are_rendered_into_the_card_and_the_index(folder):
    slug = "enable-token-mismatch-tis-max2"
    results = [make_result(repeats=5, repeat_spread=1.23e-6)]
    changed = update_cards(results, METHODS, folder)
    assert {f.name for f in changed} == {f"{slug}.md", INDEX}
    assert block_of(folder / f"{slug}.md").splitlines() == [
        "Status: proven (1 of 1 recorded; side effects not measured).",
        "",
        "| case   | experiment                     | grad norm   | ratio   | carried   "
        "| reduction   | retained   | cosine   | quiet   | quiet cosine   | verdict   "
        "| expected    | fidelity   | dtype   "
        "| device   | repeats   | spread   | date       |",
        "|--------|--------------------------------|-------------|---------|-----------"
        "|-------------|------------|----------|---------|----------------|-----------"
        "|-------------|------------|---------"
        "|----------|-----------|----------|------------|",
        "| a-case | enable-token-mismatch-tis-max2 | 1.25        | 1.250   | -         "
        "| 75.0%       | 80%        | -        | -       | -              | pass      "
        "| as expected | folded     | float32 "
        "| cpu      | 5         | 1.2e-06  | 2030-01-02 |",
    ]
    cards = read_cards(folder)
    assert cards[slug].status == "proven"
    assert {c.status for s, c in cards.items() if s != slug} == {"-"}
    assert (folder / INDEX).read_text() == render_index(METHODS, cards)
    assert update_cards(results, METHODS, folder) == []


def test_a_card_whose_method_was_not_tried_is_left_alone(folder):
    before = (folder / f"{SLUG}.md").read_bytes()
    update_cards([make_result(), make_result("baseline")], METHODS, folder)
    assert (folder / f"{SLUG}.md").read_bytes() == before


def test_nothing_is_written_where_methods_and_cards_do_not_fit(folder):
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    with pytest.raises(PatchError, match="has no mitigation"):
        update_cards([make_result()], {SLUG: METHODS[SLUG]}, folder)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before


def test_the_last_result_of_an_experiment_counts_and_the_best_status_stands():
    slug = "enable-token-mismatch-tis-max2"
    old = make_result(reduction=0.01, ratio=4.0, verdict=Verdict.FAIL)
    other_case = make_result(case="b-case", reduction=0.2, ratio=4.0, verdict=Verdict.PARTIAL)
    block = render_block(slug, [old, other_case, make_result()])
    assert block.startswith("Status: proven (1 of 2 recorded; side effects not measured).")
    assert "fail" not in block
    assert render_block(slug, [make_result(), old]).startswith("Status: negative (1 of 1 recorded)")


def test_a_combination_is_shown_but_gives_no_status():
    slug = "enable-token-mismatch-tis-max2"
    block = render_block(slug, [make_result(f"{slug}+{SLUG}")])
    assert block.startswith("Status: none (no result here says what the method alone is worth).")
    assert f"{slug}+{SLUG}" in block


def test_reduced_and_mechanism_results_say_what_they_are_not():
    slug = "enable-token-mismatch-tis-max2"
    measured = render_block(slug, [make_result(fidelity="reduced")])
    assert "reduced: not full-fidelity" in measured
    assert measured.startswith("Status: partial (1 of 1 recorded; side effects not measured).")
    block = render_block(slug, [make_result(evidence="mechanism")])
    assert block.startswith("Status: none (no result here says what the method alone is worth).")
    assert block.endswith(
        "The median of a-case was not measured: ratio and verdict there show the mechanism, not "
        "the method's worth."
    )


def test_a_diagnostic_method_never_becomes_proven():
    assert render_block(SLUG, [make_result(SLUG)]).startswith("Status: diagnostic (1 of 1")


def test_without_results_the_block_says_so():
    assert render_block(SLUG, []) == NO_RESULT


def test_a_killed_writer_leaves_the_old_card(folder, monkeypatch):
    before = {f.name: f.read_bytes() for f in folder.iterdir()}

    def dies(_handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", dies)
    with pytest.raises(KeyboardInterrupt):
        update_cards([make_result()], METHODS, folder)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before


def test_the_index_is_what_would_be_generated_now():
    assert (cards_dir() / INDEX).read_text() == render_index(METHODS, CARDS)
