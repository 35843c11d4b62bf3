"""The weights of another checkpoint for one experiment; the snapshot's own are back afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import fake_engine
import pytest
import torch
from hand_made import only_patch
from torch.distributed import checkpoint as dcp

from replay_lib import layout, run
from replay_lib.case import Case, builtin_cases
from replay_lib.engine.checkpoint import Weights
from replay_lib.engine.protocol import Experiment
from replay_lib.engine.session import ReplaySession
from replay_lib.errors import PatchError
from replay_lib.methods import callable_alone, left_out, load_methods
from replay_lib.run import ReplayOptions, parse_experiments, replay_case
from replay_lib.snapshot.checkpoint import read_tensors

SLUG = "use-initial-model"
HOME = builtin_cases() / "zoo-poisoned-row"
SPIKE, EARLIER = HOME / "snapshot/iter_0000050", "quiet/iter_0000044"
BASELINE = Experiment.baseline()


def on(checkpoint: object, rest: str = "") -> Experiment:
    return Experiment.parse(f"{SLUG}:checkpoint={checkpoint}{rest}")


@pytest.fixture(scope="module")
def session() -> Iterator[ReplaySession]:
    with ReplaySession.open(SPIKE, device="cpu", paths_from=HOME) as opened:
        yield opened


def differing() -> int:
    """Elements in which the two checkpoints are not the same."""
    mine, theirs = read_tensors(SPIKE), read_tensors(HOME / EARLIER)
    return sum(int((mine[key] != theirs[key]).sum()) for key in mine)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the same step on a snapshot that holds the other weights."""
    copy = tmp_path_factory.mktemp("there") / SPIKE.name
    shutil.copytree(SPIKE, copy)
    for file in (HOME / EARLIER).iterdir():
        if file.suffix == ".distcp" or file.name == layout.DCP_METADATA:
            shutil.copy(file, copy / file.name)
    with ReplaySession.open(copy, device="cpu") as opened:
        return opened.run(BASELINE).digest


def test_the_step_is_that_of_the_other_weights_and_leaves_no_trace(
    session: ReplaySession, there: str
) -> None:
    before = session.run(BASELINE)
    found = session.run(on(EARLIER))
    assert found.digest == there != before.digest
    assert found.touched == {"weights": differing()} and differing() > 0
    assert session.run(BASELINE).digest == before.digest
    assert session.run(on(HOME / EARLIER)).digest == there  # an absolute path is one, too
    own = session.run(on(SPIKE))
    assert (own.digest, own.touched) == (before.digest, {"weights": 0})


def test_it_combines_and_a_later_weights_patch_sees_the_other_weights(
    session: ReplaySession, there: str
) -> None:
    both = session.run(on(EARLIER, "+seam_examples:scaled_router:factor=1.0"))
    assert both.digest == there
    assert both.idle == ("seam_examples:scaled_router:factor=1.0",)


def altered(root: Path, change: str) -> Path:
    tensors = {key: tensor.clone() for key, tensor in read_tensors(HOME / EARLIER).items()}
    key = "decoder.final_layernorm.weight"
    if change == "missing":
        del tensors[key]
    elif change == "wide":
        tensors[key] = torch.ones(tensors[key].numel() + 1)
    else:
        tensors["decoder.one_more.weight"] = torch.ones(2)
    where = root / change
    dcp.save(tensors, checkpoint_id=where, no_dist=True)
    return where


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("missing", "missing in the checkpoint: decoder.final_layernorm.weight"),
        ("wide", "decoder.final_layernorm.weight has shape [65], the model wants [64]"),
        ("more", "unknown to the model: decoder.one_more.weight"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_changed(
    session: ReplaySession, tmp_path: Path, change: str, told: str
) -> None:
    before = session.run(BASELINE).digest
    where = altered(tmp_path, change)
    with pytest.raises(PatchError) as caught:
        session.run(on(where))
    assert str(caught.value) == (
        f"weights of another checkpoint: {where}: checkpoint and model differ, nothing was "
        f"replayed: {told}. It has to be a checkpoint of the same model."
    )
    assert session.run(BASELINE).digest == before


def test_a_path_where_there_is_no_checkpoint_is_named(
    session: ReplaySession, tmp_path: Path
) -> None:
    with pytest.raises(PatchError) as caught:
        session.run(on("gone/iter_0000001"))
    assert str(caught.value) == (
        f"{HOME / 'gone/iter_0000001'}: found no such directory, expected a checkpoint (a "
        f"snapshot, or an iter_* of the trainer). A relative path starts at {HOME}"
    )
    with pytest.raises(PatchError, match=rf"{tmp_path}/\.metadata: found no such file"):
        session.run(on(tmp_path))


def test_a_relative_path_of_a_case_starts_at_its_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, Path | None]] = []

    class Engine(fake_engine.FakeEngine):
        def __init__(self, snapshot: Path, options: ReplayOptions) -> None:
            asked.append((snapshot.name, options.paths_from))
            super().__init__(snapshot, options)

    monkeypatch.setattr(run, "open_engine", Engine)
    for case in (Case.load(HOME), Case.from_snapshot(SPIKE)):
        replay_case(case, [on(EARLIER)], ReplayOptions(device="cpu"))
    quiet = Path(EARLIER).name
    assert asked == [(quiet, HOME), (SPIKE.name, HOME), (SPIKE.name, None)]


@pytest.mark.slow
def test_on_two_ranks_each_takes_its_part(session: ReplaySession) -> None:
    alone = session.run(on(EARLIER))
    with ReplaySession.open(SPIKE, device="cpu", paths_from=HOME, layout="tp=2") as split:
        before = split.run(BASELINE)
        found = split.run(on(EARLIER))
        assert found.grad_norm_preclip == pytest.approx(alone.grad_norm_preclip, rel=1e-5)
        assert found.touched == alone.touched
        with pytest.raises(PatchError, match="gone: found no such directory"):
            split.run(on("gone"))
        assert split.run(BASELINE).digest == before.digest


def test_it_gives_what_the_checkpoint_has() -> None:
    weights = Weights({"a": torch.zeros(2)}, lambda path: {path: torch.ones(2)})
    after = only_patch(SLUG, checkpoint="a").apply(weights)
    assert list(after) == ["a"] and after["a"].tolist() == [1, 1]


def test_it_is_tried_only_where_somebody_names_a_checkpoint() -> None:
    methods = load_methods()
    assert methods[SLUG].needs == ("checkpoint",)
    assert SLUG not in callable_alone(methods)
    assert left_out(methods) == (f"{SLUG}:checkpoint=CHECKPOINT needs a parameter and was left out")
    with pytest.raises(PatchError) as caught:
        parse_experiments([SLUG], "baseline", methods)
    assert str(caught.value) == (
        f"mitigation {SLUG}: found no checkpoint, which it needs; write "
        f"{SLUG}:checkpoint=CHECKPOINT"
    )
    with pytest.raises(PatchError, match="checkpoint: found 3, expected text"):
        parse_experiments([f"{SLUG}:checkpoint=3"], "baseline", methods)
    with pytest.raises(PatchError, match=r"unknown parameter path; known: checkpoint$"):
        parse_experiments([f"{SLUG}:path=x"], "baseline", methods)
