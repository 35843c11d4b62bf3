"""Steps recorded on layouts by Megatron-Core itself, against a float64 computation of the step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from tiny_zoo import TINY, FakeRun, tiny_weights

from replay_lib.engine.reference import reference_step
from replay_lib.errors import EngineError, UnsupportedModelError, UsageError
from replay_lib.microbatch import split_ranks
from replay_lib.snapshot import (
    SpikeSettings,
    load_batch,
    load_grad_info,
    load_model_fields,
    load_settings,
    open_snapshot,
    read_tensors,
    write_snapshot,
)
from replay_lib.zoo.causes import with_advantage
from replay_lib.zoo.content import step_content
from replay_lib.zoo.losses import ORDINARY
from replay_lib.zoo.native import LayoutStep, launch, parse_parallel, record_steps
from replay_lib.zoo.native.replace import rerecord
from replay_lib.zoo.sampler import Sampler
from replay_lib.zoo.trainer import Gradient

pytestmark = pytest.mark.xdist_group("zoo-native")

SHAPE = TINY.shape.model_copy(update={"layers": 4, "groups": 2})
RECIPE = TINY.model_copy(update={"shape": SHAPE})
LAYOUTS = ("tp=2", "cp=2", "ep=2", "pp=2,vpp=2")
#: Float32 rounding along four layers; the worst parameter seen is off by 2.7e-6. A gradient that is
#: summed over the wrong ranks is off by a tenth and more.
FLOAT32 = 1e-5


@dataclass
class Recorded:
    path: Path
    norm: float
    parameters: Mapping[str, float]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A step of random weights; every rank of every layout has real tokens and experts to see."""
    run, weights = FakeRun(), tiny_weights(5, SHAPE)
    batch = run.ordinary(run.roll(Sampler(SHAPE, weights)))
    batch = with_advantage(batch, torch.linspace(-1.0, 2.0, batch.rows), 0.0)
    old = batch.column("rollout_logprobs")
    gradient = Gradient(
        norm=1.0,  # of no step: what the layouts give is compared with a computation of its own
        buffers=None,
        batch=batch.replace(old_logprobs=old, ref_logprobs=old),
    )
    content = step_content(
        RECIPE,
        step=12,
        seed=3,
        gradient=gradient,
        median=1.0,
        weights=weights,
        settings=ORDINARY,
        spike=SpikeSettings(enabled=True),
    )
    path = tmp_path_factory.mktemp("source") / "iter_0000012"
    return write_snapshot(path, content)


@pytest.fixture(scope="module")
def recorded(source, tmp_path_factory):
    """The step on every layout, in one job of two ranks."""
    home = tmp_path_factory.mktemp("native")
    steps = [
        LayoutStep(source.path, home / text / source.path.name, parse_parallel(text))
        for text in LAYOUTS
    ]
    made = record_steps(steps, device="cpu")
    return {
        text: Recorded(step.target, **told)
        for text, step, told in zip(LAYOUTS, steps, made, strict=True)
    }


@pytest.fixture(scope="module")
def exact(source):
    """Norms of the step in float64, plain torch: the whole and each parameter's, layers apart."""
    batches, worker = [load_batch(source, 0)], source.worker
    split = split_ranks(
        [b.lengths() for b in batches],
        [b.width for b in batches],
        dynamic=worker.use_dynamic_batch_size,
        micro_batch_size=worker.train_micro_batch_size,
        seq_length=worker.seq_length,
    )
    fields, settings = load_model_fields(source), load_settings(source)
    step = reference_step(read_tensors(source.path), fields, batches, settings, split)
    norms = {}
    for key, gradient in step.gradients.items():
        if key.startswith("decoder.layers."):
            norms |= {f"{key}[{i}]": float(layer.norm()) for i, layer in enumerate(gradient)}
        else:
            norms[key] = float(gradient.norm())
    return step.grad_norm_preclip, norms


@pytest.mark.parametrize("text", LAYOUTS)
def test_the_norm_is_that_of_the_step_on_any_layout(recorded, exact, text):
    assert abs(recorded[text].norm / exact[0] - 1) <= FLOAT32


@pytest.mark.parametrize("text", LAYOUTS)
def test_every_parameter_has_its_whole_gradient(recorded, exact, text):
    found, wanted = recorded[text].parameters, exact[1]
    assert set(found) == set(wanted)
    worst = max(abs(found[name] / wanted[name] - 1) for name in wanted)
    assert worst <= FLOAT32


@pytest.mark.parametrize("text", LAYOUTS)
def test_what_is_written_is_what_such_a_job_leaves(source, recorded, text):
    snapshot = open_snapshot(recorded[text].path)
    assert snapshot.parallel == parse_parallel(text)
    assert snapshot.grad_norm_preclip == recorded[text].norm
    model = yaml.safe_load(snapshot.run_config_file.read_text())["model"]
    assert model["tensor_model_parallel_size"] == snapshot.parallel.tp
    assert model["virtual_pipeline_model_parallel_size"] == snapshot.parallel.vpp
    for rank in range(2):
        for kind in ("batch", "routing_payload", "grad_info"):
            assert (snapshot.path / f"{kind}_rank{rank}.pt").is_file()
    wanted, found = read_tensors(source.path), read_tensors(snapshot.path)
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_ranks_that_hold_parts_wrote_their_parts_of_the_checkpoint(recorded):
    for text, made in recorded.items():
        writers = {file.name.split("_")[2] for file in made.path.glob("__*.distcp")}
        # with context parallelism alone the second rank has nothing that the first has not
        assert writers == ({"0"} if text == "cp=2" else {"0", "1"}), text


def test_rows_are_those_of_the_source_shuffled_over_the_ranks(source, recorded):
    before = load_batch(source, 0).input_ids
    for text in LAYOUTS:
        snapshot = open_snapshot(recorded[text].path)
        after = [load_batch(snapshot, rank) for rank in range(snapshot.parallel.dp)]
        rows = torch.cat([b.input_ids for b in after])
        assert sorted(rows.tolist()) == sorted(before.tolist())
        assert not torch.equal(rows, before)


def test_figures_of_parameters_are_those_after_clipping(recorded):
    made = recorded["cp=2"]
    figures = load_grad_info(open_snapshot(made.path), 0)
    clipped = 1.0 / (made.norm + 1e-6)
    name = "module.embedding.word_embeddings.weight"
    whole = made.parameters["embedding.word_embeddings.weight"]
    assert figures[name]["grad_norm"] == pytest.approx(whole * clipped, rel=1e-5)


def test_a_layout_that_cannot_split_the_model_is_refused_by_name(source, tmp_path):
    steps = [LayoutStep(source.path, tmp_path / "iter_0000012", parse_parallel("pp=2,vpp=4"))]
    with pytest.raises(UnsupportedModelError, match=r"4 layers, which pp \* vpp=8 does not divide"):
        record_steps(steps, device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_dies_is_told_with_the_end_of_what_it_said(source, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "WORKER", "no_such_module")
    steps = [LayoutStep(source.path, tmp_path / "iter_0000012", parse_parallel("dp=2"))]
    with pytest.raises(EngineError, match="recorded on dp=2 ended with status 1") as told:
        record_steps(steps, device="cpu")
    assert "No module named no_such_module" in str(told.value)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("vpp=2", "found vpp=2 with pp=1"),
        ("pp=2,vpp=1", "found vpp=1"),
        ("pp=2,vpp=x", "found vpp=x"),
        ("qp=2", "found 'qp=2'"),
    ],
)
def test_layouts_that_make_no_sense_are_refused(text, word):
    with pytest.raises(UsageError, match=word):
        parse_parallel(text)


def test_the_smallest_job_for_a_layout_is_taken():
    assert parse_parallel("tp=2,ep=2").world_size == 2
    assert parse_parallel("ep=2").dp == 2
    assert parse_parallel("pp=2,vpp=2").vpp == 2


def test_a_made_spike_is_replaced_by_the_one_on_the_layout(tmp_path, monkeypatch):
    def fake(steps, *, device, tell):
        for step in steps:
            step.target.mkdir(parents=True)
            (step.target / "new").touch()
        return [{"norm": 6.5, "parameters": {}} for _ in steps]

    monkeypatch.setattr("replay_lib.zoo.native.replace.record_steps", fake)
    report = {"snapshot": "spikes/iter_0000003", "quiet": "quiet/iter_0000001"}
    report |= {"norm": 6.0, "median": 2.0, "ratio": 3.0}
    for key in ("snapshot", "quiet"):
        (tmp_path / report[key]).mkdir(parents=True)
    rerecord([report], [tmp_path], parse_parallel("ep=2"), device="cpu", tell=print)
    told = json.loads((tmp_path / "zoo.json").read_text())
    assert told == report
    assert (told["norm"], told["ratio"], told["one_rank_norm"]) == (6.5, 3.25, 6.0)
    assert told["layout"] == "ep=2,dp=2"
    assert (tmp_path / report["snapshot"] / "new").exists()
    assert (tmp_path / report["quiet"] / "new").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["quiet", "spikes", "zoo.json"]
