"""Which of two saved files ran, what the replay's model has instead, and what that means."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml

from replay_lib.engine.effective import (
    difference_notes,
    effective_differences,
    planned_differences,
    planned_values,
    refuse_another_step,
    same,
    unknown_fields,
    what_ran,
)
from replay_lib.engine.meanings import TABLE, entry_of
from replay_lib.engine.model_config import (
    GPT_FIELDS,
    NEUTRAL,
    OWN_SETTINGS,
    TAKEN,
    model_config,
)
from replay_lib.errors import UnsupportedModelError
from replay_lib.listing import describe_snapshot
from replay_lib.snapshot import load_model_fields, open_snapshot
from replay_lib.snapshot.run_config import read_model_fields

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "spike_cases/axrl-plain-step85/snapshot/iter_0000085"
BRIDGE = ROOT / "tests/data/snap/run_config_bridge_0.6.2.yaml"
MEGATRON_SAYS = "ignore::UserWarning"  # some are given where Megatron is imported first


@pytest.fixture(scope="module")
def snapshot():
    return open_snapshot(PLAIN)


@pytest.fixture(scope="module")
def fields(snapshot):
    return load_model_fields(snapshot)


def edited(tmp_path: Path, worker: dict[str, object], model: dict[str, object]) -> Path:
    """A copy of the embedded snapshot whose two files state something else."""
    copy = tmp_path / PLAIN.name
    copy.mkdir()
    for file in PLAIN.iterdir():
        (copy / file.name).symlink_to(file)
    for name in ("megatron_worker_config.json", "run_config.yaml"):
        (copy / name).unlink()
        shutil.copy(PLAIN / name, copy / name)
    path = copy / "megatron_worker_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | worker))
    path = copy / "run_config.yaml"
    document = yaml.safe_load(path.read_text())
    document["model"] |= model
    path.write_text(yaml.safe_dump(document))
    return copy


# --- which file ran ----------------------------------------------------------------------------


def test_the_embedded_cases_contradict_themselves_nowhere():
    for path in sorted((ROOT / "spike_cases").glob("*/*/iter_*")):
        one = open_snapshot(path)
        saved = load_model_fields(one)
        ran = what_ran(one.worker, one.parallel, saved)
        assert ran.contradictions == (), path
        assert all(same(ran.fields[f], v) for f, v in saved.items()), path


def test_an_auxiliary_loss_that_the_worker_switched_off_did_not_run(tmp_path):
    """The saved settings say no auxiliary loss, the model's own section has one."""
    model = {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"}
    one = open_snapshot(edited(tmp_path, {}, model))
    ran = what_ran(one.worker, one.parallel, load_model_fields(one))
    assert ran.fields["moe_aux_loss_coeff"] == 0
    assert ran.fields["moe_router_load_balancing_type"] == "none"
    first, second = ran.contradictions
    assert (first.field, first.saved, first.effective) == ("moe_aux_loss_coeff", 0.01, 0)
    assert (first.kind, first.meaning) == ("contradiction", "changes the step")
    assert first.told() == (
        "model.moe_aux_loss_coeff: run_config.yaml says 0.01, replayed is 0.0 (which changes the "
        "step; megatron_worker_config.json says 0.0, and the worker sets it before the model is "
        "built)"
    )
    assert second.field == "moe_router_load_balancing_type"
    shown = describe_snapshot(one.path)["model_differences"]
    assert [d["field"] for d in shown[:2]] == [first.field, second.field]


def test_an_auxiliary_loss_that_the_worker_switched_on_ran(tmp_path):
    worker = {"moe_aux_loss_coeff": 0.02, "moe_router_load_balancing_type": "aux_loss"}
    one = open_snapshot(edited(tmp_path, worker, {}))
    ran = what_ran(one.worker, one.parallel, load_model_fields(one))
    assert model_config(ran.fields).transformer["moe_aux_loss_coeff"] == 0.02
    assert len(ran.contradictions) == 2


def test_what_the_workers_file_does_not_state_settles_nothing(snapshot, fields):
    silent = type(snapshot.worker).model_validate({"seq_length": 128})
    ran = what_ran(silent, snapshot.parallel, fields | {"moe_aux_loss_coeff": 0.01})
    assert ran.fields["moe_aux_loss_coeff"] == 0.01
    assert ran.contradictions == ()


@pytest.mark.parametrize(
    ("worker", "model", "dtype"),
    [(True, False, "bfloat16"), (False, True, "bfloat16"), (False, False, "float32")],
)
def test_bfloat16_ran_where_either_file_says_so(snapshot, fields, worker, model, dtype):
    """The worker only ever switches it on; what the provider has stays otherwise."""
    said = snapshot.worker.model_copy(update={"bf16": worker})
    ran = what_ran(said, snapshot.parallel, fields | {"bf16": model})
    config = model_config(ran.fields)
    assert config.dtype == dtype
    refuse_another_step(effective_differences(ran.fields, planned_values(config)))
    assert bool(ran.contradictions) is (worker and not model)


def test_what_the_worker_always_sets_is_named_where_the_section_differs(snapshot, fields):
    ran = what_ran(snapshot.worker, snapshot.parallel, fields | {"moe_router_dtype": None})
    (one,) = ran.contradictions
    assert (one.field, one.saved, one.effective) == ("moe_router_dtype", "fp32", None)
    assert ran.fields["moe_router_dtype"] is None  # written by what ran
    dense = fields | {"moe_router_dtype": None, "num_moe_experts": None}
    assert what_ran(snapshot.worker, snapshot.parallel, dense).contradictions == ()


# --- against the model -------------------------------------------------------------------------


@pytest.mark.filterwarnings(MEGATRON_SAYS)
@pytest.mark.parametrize("path", [PLAIN / "run_config.yaml", BRIDGE], ids=["0.16", "bridge-0.6.2"])
def test_no_difference_of_the_embedded_and_the_real_section_matters(path):
    saved = read_model_fields(path)
    planned = effective_differences(saved, planned_values(model_config(saved)))
    assert [d.told() for d in planned if d.matters] == []
    assert {d.meaning for d in planned} <= {"does not"}
    assert unknown_fields(saved) == ()


def test_a_value_that_the_model_has_otherwise_is_refused_by_name(fields):
    live = planned_values(model_config(fields)) | {
        "layernorm_epsilon": 1e-5,
        "rotary_base": 500000.0,
        "moe_router_topk": [1, 2],
    }
    found = effective_differences(fields, live)
    with pytest.raises(UnsupportedModelError) as caught:
        refuse_another_step(found)
    for words in (
        "model.layernorm_epsilon=1e-06, where the model here has 1e-05: it changes what a layer",
        "model.rotary_base=10000, where the model here has 500000.0: it turns queries and keys",
        "model.moe_router_topk=2, where the model here has [1, 2]",
    ):
        assert words in str(caught.value)
    refuse_another_step(found, allowed=("layernorm_epsilon", "rotary_base", "moe_router_topk"))


def test_another_precision_is_named_and_not_refused(fields):
    found = effective_differences(fields, planned_values(model_config(fields, "bfloat16")))
    named = [d.field for d in found if d.matters]
    assert named == ["params_dtype"]
    refuse_another_step(found, allowed=named)
    assert "says 'float32', replayed is 'bfloat16'" in difference_notes(found)[0]


def test_a_field_that_nobody_knows_is_named_where_it_is_on(fields):
    found = unknown_fields(fields | {"moe_brand_new_trick": 3, "another_trick": None})
    assert [(d.field, d.saved, d.kind, d.meaning) for d in found] == [
        ("moe_brand_new_trick", 3, "unknown", "unknown")
    ]


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (None, False, True),
        ("none", 0.0, True),
        (1e-6, 1.0000000001e-6, True),
        (1e-6, 1e-5, False),
        (True, 1, False),
        ([0, 1], (0, 1), True),
        ([0, 1], [1, 0], False),
        ([1], None, False),
        (1.0, None, False),
        ("fp32", None, False),
    ],
)
def test_settings_that_are_the_same(one, other, alike):
    assert same(one, other) is same(other, one) is alike


# --- the table ---------------------------------------------------------------------------------


def test_everything_that_the_engine_takes_over_or_refuses_changes_the_step():
    harmless = {"attention_softmax_in_fp32", "rotary_percent"}
    for field in {*TAKEN, *GPT_FIELDS, *NEUTRAL} - harmless:
        entry = entry_of(field)
        assert entry is not None and entry.meaning == "changes the step", field


def test_what_the_replay_sets_itself_leaves_the_step_alone():
    # of these another saved value is refused, by NEUTRAL or because it changes the step
    refused = {"hidden_dropout", "attention_dropout", "calculate_per_token_loss"}
    for field in set(OWN_SETTINGS) - refused:
        entry = entry_of(field)
        assert entry is not None and entry.meaning == "does not", field


def test_every_entry_has_a_reason_and_no_name_stands_twice():
    names = [name for entry in TABLE for name in entry.names]
    assert len(names) == len(set(names))
    assert all(entry.reason for entry in TABLE)


@pytest.mark.filterwarnings(MEGATRON_SAYS)
def test_the_table_names_every_field_of_the_installed_megatron_and_of_a_real_section():
    from megatron.core.transformer import TransformerConfig

    known = {f.name for f in dataclasses.fields(TransformerConfig)}
    known |= set(read_model_fields(BRIDGE)) | set(read_model_fields(PLAIN / "run_config.yaml"))
    assert sorted(field for field in known if entry_of(field) is None) == []


# --- in a session ------------------------------------------------------------------------------


@pytest.mark.xdist_group("engine-plain")
def test_a_session_tells_every_difference_of_its_live_model(plain, snapshot, fields):
    told = {d.field: d for d in plain.info.differences}
    assert {d.meaning for d in told.values()} == {"does not"}
    assert {"perform_initialization", "attention_backend"} <= set(told)
    planned = {d.field for d in planned_differences(snapshot, fields)}
    assert planned <= set(told)
    assert plain.info.notes == ()
