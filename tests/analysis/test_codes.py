"""Every code is found where it should be, and its page in the documents is the code's own list."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutate
import mutate_files
import pytest
import torch
import yaml

from replay_lib.analysis import CODES, Examined, Severity, examine, examine_case
from replay_lib.analysis.findings import finding
from replay_lib.snapshot import Content, open_snapshot, read_content
from replay_lib.snapshot.naming import Instance, named, save_named

ROOT = Path(__file__).parents[2]
MERGED = ROOT / "tests/data/snap/merged/iter_0000085"
NAN = math.nan
Change = Callable[[Content], Content]


def worker(**settings: Any) -> Change:
    return lambda content: mutate.with_worker(content, **settings)


def model(**fields: Any) -> Change:
    return lambda content: mutate.with_model(content, **fields)


def without_model(content: Content, field: str) -> Content:
    document = yaml.safe_load(content.run_config)
    del document["model"][field]
    return dataclasses.replace(content, run_config=yaml.safe_dump(document))


def value(column: str, number: float, *, masked: bool = False) -> Change:
    return lambda content: mutate.not_finite(content, column, number, masked=masked)


def scaled_labels(content: Content) -> Content:
    labels = content.batches[0].labels
    return mutate.with_batch(content, 0, labels=torch.where(labels > 0, labels - 1, labels))


def longer_mask(content: Content) -> Content:
    batch = content.batches[0]
    last = batch.lengths()[2] - 1
    mask = batch.loss_mask.clone()
    mask[2, last] = True
    return mutate.with_batch(content, 0, loss_mask=mask)


def empty_row(content: Content) -> Content:
    batch = mutate.masked_rows(content, 0, [3]).batches[0]
    mask = batch.attention_mask.clone()
    mask[3] = False
    fewer = mutate.with_routes(content, 0, lambda row, r: r[:0] if row == 3 else r)
    return mutate.with_batch(fewer, 0, loss_mask=batch.loss_mask, attention_mask=mask)


def same_rows(content: Content) -> Content:
    return mutate.with_batch(content, 1, index=content.batches[0].index)


def fewer_layers(content: Content) -> Content:
    return mutate.with_routes(content, 0, lambda _row, routes: routes[:, :3])


def wider_topk(content: Content) -> Content:
    return mutate.with_routes(
        content, 0, lambda _row, routes: torch.cat([routes, routes[..., :1]], dim=2)
    )


def broken_weight(content: Content) -> Content:
    weight = content.tensors["output_layer.weight"].clone()
    weight[3, 5] = math.inf
    return mutate.with_tensors(content, {"output_layer.weight": weight})


def capped_with_padding(content: Content) -> Content:
    return mutate.mostly_padding(mutate.finite_capacity(content), times=1)


def rollout(number: float) -> Change:
    return value("rollout_logprobs", number)


CONTENT: dict[str, Change] = {
    "norm-missing": lambda c: mutate.norms(c, None, 2.0),
    "norm-not-finite": lambda c: mutate.norms(c, -3.0, 2.0),
    "median-undefined": lambda c: mutate.norms(c, 8.0, 0.0),
    "norm-below-detector": lambda c: mutate.norms(c, 2.0, 2.0),
    "column-absent": lambda c: mutate.column_absent(c, "ref_logprobs"),
    "value-not-finite": value("advantage", NAN),
    "masked-value-not-finite": value("old_logprobs", -math.inf, masked=True),
    "loss-not-finite": value("old_logprobs", NAN, masked=True),
    "loss-of-nothing": lambda c: mutate.masked_rows(c, 1, range(7)),
    "rank-without-loss": lambda c: mutate.masked_rows(c, 1, range(7)),
    "row-without-loss": lambda c: mutate.masked_rows(c, 0, [1, 4]),
    "row-empty": empty_row,
    "rows-padding": lambda c: c,
    "rows-repeated": same_rows,
    "token-outside": lambda c: mutate.with_batch(
        c, 0, input_ids=c.batches[0].input_ids + 128 * c.batches[0].attention_mask
    ),
    "mask-outside": longer_mask,
    "labels-differ": scaled_labels,
    "advantage-zero": mutate.no_advantage,
    "logprob-positive": rollout(0.5),
    "logprob-absent": rollout(0.0),
    "logratio-large": mutate.far_token,
    "sequence-weight-explodes": mutate.far_token,
    "route-missing": mutate.rows_without_routes,
    "route-count": lambda c: mutate.more_or_fewer_routes(c, -1),
    "route-unused": lambda c: mutate.more_or_fewer_routes(c, 1),
    "route-layers": fewer_layers,
    "route-topk": wider_topk,
    "route-duplicate-expert": mutate.one_expert_twice,
    "route-expert-outside": lambda c: mutate.ids_in(c, torch.int16, -1, 8),
    "route-dtype-narrow": lambda c: mutate.ids_in(c, torch.int8, 300, 301),
    "route-constant": mutate.later_turns_filled,
    "route-switch": worker(enable_routing_replay=False),
    "setting-unread": lambda c: mutate.unread_settings(c, 0.5),
    "setting-unknown": lambda c: mutate.unread_settings(c, None),
    "config-differs": mutate.worker_in_bfloat16,
    "model-field-unknown": model(moe_brand_new_trick=3),
    "model-unsupported": model(multi_latent_attention=True),
    "model-value": model(layernorm_epsilon="1e-06"),
    "model-field-assumed": lambda c: without_model(c, "layernorm_epsilon"),
    "run-unsupported": worker(fp16=True),
    "weights-not-compared": model(multi_latent_attention=True),
    "padding-moves-balance": capped_with_padding,
    "capacity-drops": mutate.finite_capacity,
    "packed-length-uneven": mutate.context_parallel,
    "not-deterministic": worker(deterministic_mode=False),
    "weights-missing": mutate.other_parameters,
    "weights-unknown": mutate.other_parameters,
    "weights-shape": mutate.other_parameters,
    "weights-not-finite": broken_weight,
}


def refused_settings(directory: Path) -> None:
    config = Instance(named("axrl.configs.GrpoTrainerConfig"), {"__dict__": {"loss_type": "sppo"}})
    name = named("axrl.trainer.grpo_trainer.GrpoTrainer")
    save_named(Instance(name, {"config": config}), directory / "trainer.pt")


def tensor_parallel(directory: Path) -> None:
    """As if recorded with two tensor-parallel ranks instead of two data-parallel ones."""
    for name in ("megatron_worker_config.json", "run_config.yaml"):
        text = (directory / name).read_text()
        if name.endswith("yaml"):
            document = yaml.safe_load(text)
            document["model"]["tensor_model_parallel_size"] = 2
            (directory / name).write_text(yaml.safe_dump(document))
        else:
            settings = json.loads(text) | {"dp_size": 1, "tp_size": 2}
            (directory / name).write_text(json.dumps(settings))


def overlapping_chunks(directory: Path) -> None:
    path = directory / ".metadata"
    path.write_bytes(path.read_bytes()[:-30])


FILES: dict[str, Callable[[Path], object]] = {
    "file-incomplete": lambda d: (d / "batch_rank1.pt").unlink(),
    "file-broken": lambda d: mutate_files.corrupt_rank(d, 0),
    "pickle-unsafe": lambda d: mutate_files.foreign_objects(d, "argparse"),
    "rank-file-extra": lambda d: (d / "batch_rank2.pt").write_bytes(b""),
    "rank-copies-differ": tensor_parallel,
    "metadata-legacy": mutate_files.legacy_metadata,
    "imported": lambda d: (d / "imported.json").write_text('{"format": "f", "source": "s"}'),
    "ratio-differs": lambda d: mutate_files.bare_words(d, spike_ratio_actual=3.0),
    "batch-broken": lambda d: mutate_files.add_to_batch(
        d / "batch_rank0.pt", advantage=torch.zeros(1, 4).long()
    ),
    "settings-refused": refused_settings,
}
#: Of snapshots or cases of another kind, each with a test of its own.
ELSEWHERE = {"tree-inconsistent", "case-unsealed"}
#: Raised by readers that a snapshot on disk does not reach; the mapping itself is looked at.
UNREACHED = {"weights-refused"}


@pytest.mark.parametrize("code", CONTENT)
def test_a_change_of_the_content_is_found(
    code: str, content: Content, written: Callable[[Content], Examined]
) -> None:
    assert code in written(CONTENT[code](content)).codes


@pytest.mark.parametrize("code", FILES)
def test_a_change_of_the_files_is_found(code: str, copy: Path) -> None:
    FILES[code](copy)
    assert code in examine(copy).codes


def found(examined: Examined, code: str) -> list[str]:
    return [f.found for f in examined.findings if f.code == code]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"real_total": 3}, "merge_info.real_total: found 3 of"),
        ({"path_to_leaf": []}, "merge_info.path_to_leaf: found no path"),
        ({"turn_sample_lens": []}, "merge_info.turn_sample_lens: found 0 lengths"),
        ({"q_ranges": "x"}, "merge_info.q_ranges: found str, expected a list"),
        ({"routing_source_path": None}, "merge_info.routing_source_path: found none"),
    ],
)
def test_an_inconsistent_tree_is_found_with_its_row(
    fields: dict[str, Any], told: str, written: Callable[[Content], Examined]
) -> None:
    examined = written(mutate.broken_tree(read_content(open_snapshot(MERGED)), **fields))
    (one,) = [f for f in examined.findings if f.code == "tree-inconsistent"]
    assert told in one.found
    assert (one.file, one.dp_rank) == ("batch_rank0.pt", 0) and one.row is not None


def test_routes_of_a_path_are_counted(written: Callable[[Content], Examined]) -> None:
    assert found(examine(MERGED), "route-count") == []
    changed = mutate.shorter_path_routes(read_content(open_snapshot(MERGED)))
    assert found(written(changed), "route-count")[0] == "path 0: 2 routes for 4 tokens, not 3"


def test_a_case_whose_files_are_not_those_that_were_sealed(tmp_path: Path) -> None:
    case = Path(shutil.copytree(ROOT / "spike_cases/zoo-natural", tmp_path / "case"))
    sealed = examine_case(case)
    assert found(sealed, "case-unsealed") == [] and sealed.read["sealed_files"] > 20
    (quiet,) = (case / "quiet").glob("iter_*")
    (quiet / "latest.txt").write_text("x")
    (quiet / "train_state.pt").unlink()
    (case / "snapshot/iter_0000061/train_state.pt").write_bytes(b"PK")
    examined = examine_case(case)
    told = sorted(found(examined, "case-unsealed"))
    assert len(told) == 3, told
    assert told[0].startswith(f"{quiet}/latest.txt: not listed in case.yaml")
    assert told[1].startswith("quiet/iter_0000044/train_state.pt: sha256 no such file, sealed as ")
    assert told[2].startswith("snapshot/iter_0000061/train_state.pt: sha256 ")


def test_the_quiet_control_of_a_case_is_examined_too(tmp_path: Path) -> None:
    case = Path(shutil.copytree(ROOT / "spike_cases/zoo-natural", tmp_path / "case"))
    whole = examine_case(case)
    assert whole.findings == () and whole.read["quiet_files"] == 11  # its norm is no finding
    (quiet,) = (case / "quiet").glob("iter_*")
    (quiet / "batch_rank0.pt").write_bytes(b"PK")
    told = [f for f in examine_case(case).findings if f.code != "case-unsealed"]
    assert {f.severity for f in told} == {Severity.ERROR}
    assert "quiet/batch_rank0.pt" in {f.file for f in told}
    shutil.rmtree(quiet)
    gone = [f for f in examine_case(case).findings if f.code != "case-unsealed"]
    assert [f.file for f in gone] == [f"quiet/{quiet.name}"]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"fp8": "hybrid"}, "fp8='hybrid'"),
        ({"fp16": True}, "fp16=True"),
        ({"bf16": True, "enable_fp32_lm_head": True}, "enable_fp32_lm_head=True in bfloat16"),
        ({"model_role": "critic"}, "model_role='critic'"),
    ],
)
def test_what_the_run_used_and_no_engine_here_models(
    settings: dict[str, Any],
    told: str,
    content: Content,
    written: Callable[[Content], Examined],
) -> None:
    assert found(written(worker(**settings)(content)), "run-unsupported") == [told]


@pytest.mark.parametrize(
    "fields",
    [
        {"num_layers": 10**8},
        {"moe_expert_capacity_factor": NAN},
        {"moe_expert_capacity_factor": -1.0},
        {"microbatch_group_size_per_vp_stage": 10**9},
        {"moe_router_topk": "2"},
    ],
)
def test_what_cannot_be_is_told_and_nothing_is_computed_with_it(
    fields: dict[str, Any], content: Content, written: Callable[[Content], Examined]
) -> None:
    examined = written(model(**fields)(content))
    assert len(found(examined, "model-value")) == 1
    assert "capacity-drops" not in examined.codes


def test_a_parameter_of_whole_numbers_is_found(
    content: Content, written: Callable[[Content], Examined]
) -> None:
    whole = {"output_layer.weight": torch.ones(128, 64, dtype=torch.int64)}
    examined = written(mutate.with_tensors(content, whole))
    assert found(examined, "weights-shape") == ["output_layer.weight is int64, no floating point"]


def test_ranks_that_no_run_has_are_told_at_once(copy: Path) -> None:
    path = copy / "megatron_worker_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"dp_size": 5000}))
    told = found(examine(copy), "file-incomplete")
    assert len(told) == 21 and "no batches of 4978 more ranks, up to 4999 of 5000" in told
    path.write_text(json.dumps(settings | {"dp_size": 10**12}))
    (refused,) = found(examine(copy), "file-broken")
    assert "dp_size: found 1000000000000 ranks (tp x pp x cp x dp), expected no more" in refused


def test_the_good_snapshot_has_one_note(copy: Path) -> None:
    """The control of all tests above: none of the codes is found where nothing is wrong."""
    assert examine(copy).codes == {"rows-padding"}


def test_every_code_is_tried() -> None:
    assert {*CONTENT, *FILES, *ELSEWHERE, *UNREACHED} == set(CODES)
    assert not set(CONTENT) & set(FILES)


def test_every_code_is_documented_and_every_documented_code_exists() -> None:
    text = (ROOT / "docs/doctor.md").read_text().split("## Codes")[1]
    rows = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (.+) \| (.+) \|$", text, re.MULTILINE)
    assert rows == [(n, str(c.severity), c.meaning, c.then) for n, c in CODES.items()]


def test_codes_are_used_and_used_codes_are_known() -> None:
    sources = [p for p in (ROOT / "replay_lib/analysis").glob("*.py") if p.name != "codes.py"]
    text = "\n".join(p.read_text() for p in sources)
    assert {code for code in CODES if f'"{code}"' not in text} == set()
    with pytest.raises(KeyError):
        finding("no-such-code", "file", "nothing")


def test_severities_come_worst_first(
    content: Content, written: Callable[[Content], Examined]
) -> None:
    changed = mutate.one_expert_twice(mutate.norms(content, None, 2.0))
    severities = [f.severity for f in written(changed).findings]
    assert severities == [Severity.ERROR, Severity.WARNING, Severity.NOTE]
