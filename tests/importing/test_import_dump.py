"""Dumps of slime and verl: what they hold lands where it belongs, the rest is told, all is safe."""

from __future__ import annotations

import pytest
import torch
from cli_ran import Ran
from dump_writers import (
    LENGTHS,
    evil,
    experts,
    per_token,
    slime_rollout,
    slime_train,
    slime_train_of_a_rank,
    tokens,
    verl_columns,
    verl_generations,
    verl_proto,
)

from replay_lib.analysis import Severity, examine
from replay_lib.analysis.signals.analyzing import analyze
from replay_lib.case import Case
from replay_lib.engine.protocol import Experiment
from replay_lib.errors import SnapshotError, SpikeReplayError, UnsafePickleError, UsageError
from replay_lib.importing.dumps import import_dump
from replay_lib.listing import describe_snapshot
from replay_lib.run import ReplayOptions, replay_case
from replay_lib.snapshot import load_batch

LOST = {"weights", "architecture", "loss settings", "grad_norm", "grad_norm_median"}
WRITERS = {
    "slime rollout": slime_rollout,
    "slime train": slime_train,
    "slime train (one rank)": slime_train_of_a_rank,
    "verl DataProto": lambda path: verl_proto(path, verl_columns()),
}


@pytest.fixture(params=WRITERS)
def imported(request, tmp_path):
    return import_dump(WRITERS[request.param](tmp_path / "dump"), tmp_path / "iter_0000007")


def state_of(snapshot, name):
    (state,) = [str(one.state) for one in snapshot.imported.fields if one.name == name]
    return state


def test_doctor_show_and_analyze_work_and_say_what_it_is(imported):
    examined = examine(imported.path)
    assert "imported" in examined.codes and not examined.count(Severity.ERROR)
    assert not examined.codes & {"column-absent", "advantage-zero", "norm-missing"}
    assert examined.read["rows"] == imported.worker.global_batch_size
    shown = describe_snapshot(imported.path)
    assert shown["step"] == 7 and "a trainer's own snapshot" in shown["refused"][0]
    signals = analyze(imported.path)
    assert signals.rows == imported.worker.global_batch_size and signals.norms.step == 7
    assert "norm" in signals.absent


def test_a_replay_is_refused_with_the_reason(imported):
    assert set(imported.imported.missing) >= LOST
    with pytest.raises(SnapshotError) as refused:
        replay_case(Case.open(imported.path), [Experiment.baseline()], ReplayOptions())
    text = str(refused.value)
    assert "a snapshot imported from a " in text and "without weights, architecture" in text
    assert "doctor, show and analyze work on it" in text


def row_of(snapshot, row):
    """The batch and the place of a row, found by its first token."""
    for rank in range(snapshot.parallel.dp):
        batch = load_batch(snapshot, rank)
        for place in range(batch.rows):
            if int(batch.input_ids[place, 0]) == tokens(row)[0]:
                return batch, place
    raise AssertionError(row)


def check_row(snapshot, row, **factors):
    batch, place = row_of(snapshot, row)
    prompt, answer = LENGTHS[row]
    assert batch.input_ids[place, : prompt + answer].tolist() == tokens(row)
    assert batch.lengths()[place] == prompt + answer
    where = slice(prompt - 1, prompt - 1 + answer)  # predicted from one place before
    for name, factor in factors.items():
        column = batch.column(name)[place]
        assert column[where].tolist() == pytest.approx(per_token(row, factor), rel=1e-2)
        assert column[: prompt - 1].tolist() == [0.0] * (prompt - 1)
        assert not column[prompt - 1 + answer :].any()
    return batch, place, where


@pytest.mark.parametrize("row", range(4))
def test_a_train_dump_of_slime(tmp_path, row):
    snapshot = import_dump(slime_train(tmp_path / "dump"), tmp_path / "out")
    assert snapshot.parallel.dp == 2 and snapshot.step == 7
    names = {"rollout_logprobs": -0.1, "old_logprobs": -0.2, "ref_logprobs": -0.3, "advantage": 1.0}
    batch, place, where = check_row(snapshot, row, **names, returns=1.0)
    assert batch.dp_rank == row % 2 and bool(batch.loss_mask[place, where].all())
    assert int(batch.loss_mask[place].sum()) == LENGTHS[row][1]
    assert batch.labels[place, where].tolist() == tokens(row)[LENGTHS[row][0] :]
    assert float(batch.reward[place]) == row
    assert int(batch.trajectory_id[place]) == 5 + row // 2
    assert state_of(snapshot, "old_logprobs") == "taken"
    assert state_of(snapshot, "routes") == "missing"


@pytest.mark.parametrize("row", range(4))
def test_a_rollout_dump_of_slime(tmp_path, row):
    snapshot = import_dump(slime_rollout(tmp_path / "dump"), tmp_path / "out", format_="slime")
    batch, place, where = check_row(snapshot, row, rollout_logprobs=-0.1)
    trains = [True, False] if row == 0 else [row != 3] * LENGTHS[row][1]  # 3 was removed
    assert batch.loss_mask[place, where].tolist() == trains
    assert batch.routes[place].tolist() == experts(row).tolist()
    assert batch.reward_baseline[place] == [0.5, 0.5, 2.5, 2.5][row]
    assert batch.old_logprobs is None and not batch.advantage.any()
    states = {name: state_of(snapshot, name) for name in ("old_logprobs", "advantage", "routes")}
    assert states == {"old_logprobs": "missing", "advantage": "missing", "routes": "taken"}
    assert state_of(snapshot, "trajectory_id") == "missing"


def test_one_rank_of_an_older_train_dump(tmp_path):
    snapshot = import_dump(slime_train_of_a_rank(tmp_path / "dump"), tmp_path / "out")
    assert snapshot.parallel.dp == 1 and load_batch(snapshot, 0).rows == 2
    check_row(snapshot, 3, old_logprobs=-0.2, advantage=1.0)
    told = {one.name: one.told for one in snapshot.imported.fields}
    assert told["micro-batches"].startswith("the other data-parallel ranks wrote files of their")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("row", range(4))
def test_a_data_proto_of_verl(tmp_path, row, whole):
    path = verl_proto(tmp_path / "dump", verl_columns(), whole=whole)
    snapshot = import_dump(path, tmp_path / "out")
    names = {"rollout_logprobs": -0.1, "old_logprobs": -0.2, "ref_logprobs": -0.3, "advantage": 1.0}
    batch, place, _ = check_row(snapshot, row, **names)
    assert batch.routes[place].tolist() == experts(row).tolist()
    assert float(batch.reward[place]) == row and snapshot.step == 7
    assert batch.reward_baseline[place] == [0.5, 0.5, 2.5, 2.5][row]


def test_generations_of_verl_need_a_tokenizer(tmp_path):
    path = verl_generations(tmp_path / "7.jsonl")
    with pytest.raises(UsageError, match=r"decoded text without token ids.*Give --tokenizer PATH"):
        import_dump(path, tmp_path / "out")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["?", "1", "+", "2", "3", "!"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    snapshot = import_dump(path, tmp_path / "out", tokenizer=tmp_path)
    batch = load_batch(snapshot, 0)
    assert batch.input_ids.tolist() == [[1, 2, 1, 3, 5], [1, 2, 1, 4, 0]]
    assert batch.loss_mask.tolist()[0] == [False, False, True, True, False]
    assert batch.reward.tolist() == [1.0, 0.0] and batch.reward_baseline.tolist() == [0.5, 0.5]
    assert state_of(snapshot, "input_ids") == "computed" and snapshot.step == 7
    assert not examine(snapshot.path).count(Severity.ERROR)


@pytest.mark.parametrize("bare", [True, False])
def test_a_malicious_pickle_is_refused_by_name_and_nothing_runs(tmp_path, bare):
    path, victim = tmp_path / "dump", tmp_path / "victim"
    with pytest.raises(UnsafePickleError, match=r"touch|pathlib|getattr"):
        import_dump(evil(path, victim, bare=bare), tmp_path / "out")
    assert not victim.exists() and not (tmp_path / "out").exists()


def without(name):
    return lambda dump: [sample.pop(name) for sample in dump["samples"]]


def with_value(name, value):
    return lambda dump: dump["samples"][1].update({name: value})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without("tokens"), "sample 0: tokens: found nothing, expected a value of every sample"),
        (without("response_length"), "sample 0: response_length: found nothing"),
        (with_value("rollout_log_probs", [0.0]), "rollout_logprobs: found .1. values, expected 4"),
        (with_value("loss_mask", [1]), "sample 1: loss_mask: found 1 values, expected 4"),
        (with_value("tokens", [1, 2, 3]), "sample 1: tokens: found 3 tokens, 4 of them"),
        (with_value("tokens", "text"), "sample 1: tokens: found a str"),
        (with_value("rollout_routed_experts", torch.zeros(3, 2, 2).int()), "routed experts: found"),
        (with_value("rollout_routed_experts", torch.full((5, 2, 2), 70000)), "that fit int16"),
        (lambda dump: dump["samples"].clear(), "samples: found none, expected one or more"),
        (lambda dump: dump.pop("rollout_id"), "rollout_id: found None, expected an integer"),
        (lambda dump: dump.pop("samples"), "expected samples, or rollout_data with tokens"),
    ],
)
def test_what_does_not_fit_is_named_with_its_sample(tmp_path, change, told):
    with pytest.raises(SpikeReplayError, match=told):
        import_dump(slime_rollout(tmp_path / "dump", change), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["dump"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"responses": None}, "responses: found nothing, .* A DataProto of prompts alone"),
        ({"advantages": torch.zeros(4, 3)}, r"advantages: found shape \[4, 3\], expected \[4, 4\]"),
        ({"attention_mask": torch.ones(4, 7)}, "input_ids, attention_mask: found"),
    ],
)
def test_a_data_proto_that_contradicts_itself(tmp_path, change, told):
    columns = {k: v for k, v in (verl_columns() | change).items() if v is not None}
    with pytest.raises(SpikeReplayError, match=told):
        import_dump(verl_proto(tmp_path / "dump", columns), tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "found a file that begins with b''"),
        (b"\x80\x04broken", "broken bytes"),
        (b"PK\x03\x04broken", "cut short|broken"),
        (b'{"input": 1}\n', "decoded text without token ids"),
    ],
)
def test_files_that_are_no_dump(tmp_path, content, told):
    (tmp_path / "dump").write_bytes(content)
    with pytest.raises(SpikeReplayError, match=told):
        import_dump(tmp_path / "dump", tmp_path / "out")


def test_the_command_tells_every_field(tmp_path, capsys):
    path = slime_train(tmp_path / "dump")
    done = Ran(capsys, "import-dump", path, tmp_path / "out")
    assert done.code == 0, done.err
    assert "step 7, 4 rows, 2 rank(s), from a slime train dump" in done.out
    for name in (*LOST, "old_logprobs", "micro-batches"):
        assert name in done.out
    told = Ran(capsys, "import-dump", path, tmp_path / "two", "--json").document
    assert told["imported"]["source"] == "dump" and told["rows"] == 4
    again = Ran(capsys, "import-dump", path, tmp_path / "three", "--format", "verl")
    assert again.code == 3 and "a pickled DataProto, or JSON lines" in again.err
