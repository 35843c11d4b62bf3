"""What a loop hands over: mistakes are named at once, the obvious is filled in."""

from __future__ import annotations

import pytest
import torch
from small_job import FIELDS, HOW, batch_of
from steps import SETTINGS

from replay_lib.errors import BatchError, WeightsError
from replay_lib.recorder import torch_job
from replay_lib.recording.checkpoint import check_places, gathered_places
from replay_lib.recording.columns import rank_batch
from replay_lib.recording.figures import Figures, judged
from replay_lib.recording.ranks import Ranks


def test_labels_and_row_numbers_are_filled_in():
    given = batch_of()
    batch = rank_batch(given, 3)
    ids, mask = given["input_ids"], given["loss_mask"]
    assert batch.dp_rank == 3 and batch.index.tolist() == [0, 1, 2, 3, 4]
    for row in range(batch.rows):
        for t in range(batch.width - 1):
            expected = int(ids[row, t + 1]) if mask[row, t] else -100
            assert int(batch.labels[row, t]) == expected
    assert rank_batch(batch, 1).labels.equal(batch.labels)
    assert rank_batch({**given, "input_ids": ids.int()}, 0).input_ids.dtype == torch.int64


ROUTE = torch.zeros(3, 2, 2, dtype=torch.int16)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"advantages": 1}, "advantages: found a column nobody knows.* did you mean advantage"),
        ({"ref_logprobs": None}, "ref_logprobs: found nothing, .*is given the old ones"),
        ({"loss_mask": torch.ones(5, 3)}, r"loss_mask: found shape \[5, 3\], expected \[5, 12\]"),
        ({"reward": torch.ones(4)}, r"reward: found shape \[4\], expected \[5\]"),
        ({"advantage": "many"}, "advantage: found str, expected a tensor"),
        ({"routes": [ROUTE]}, "routes: found 1 rows, expected 5"),
        ({"routes": [None] * 4 + [ROUTE]}, r"routes\[4\]: found \[3, 2, 2\], expected \[\d+, "),
        ({"input_ids": torch.ones(5)}, "input_ids: found shape .5., expected .rows, tokens."),
    ],
)
def test_a_wrong_column_is_named(change, told):
    with pytest.raises(BatchError, match=told):
        rank_batch({**batch_of(), **change}, 0)


NAMES = {"first": "output_layer.weight", "second": "decoder.layers.mlp.router.weight[0]"}


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(40, 16))
        self.second = torch.nn.Parameter(torch.ones(8, 16))


def job(names):
    return torch_job(Pair(), names=names, fields=FIELDS, settings=SETTINGS, step=HOW)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ({"first": "a"}, "found no place for second, expected one place for every"),
        ({**NAMES, "third": "a"}, "found no parameter third, expected one place"),
        ({**NAMES, "second": "a b"}, "second: found 'a b', expected key, key.3. or key"),
        ({**NAMES, "second": "a[0, 1:4]"}, r"place: found shape \[8, 16\], expected \[3\] in"),
        ({"first": "a[0]", "second": "a"}, r"a: found 2 axes, expected 3"),
    ],
)
def test_names_that_do_not_fit_are_told(names, told):
    with pytest.raises(WeightsError, match=told):
        list(job(names).pieces())


@pytest.mark.parametrize(
    ("second", "told"),
    [
        ("output_layer.weight[40:48]", ""),
        ("output_layer.weight[44:52]", r"output_layer.weight: found 64 elements too few, .*tile"),
        ("output_layer.weight[36:44]", r"output_layer.weight: found 64 elements too many"),
    ],
)
def test_pieces_that_do_not_tile_a_tensor_are_found_before_any_spike(second, told):
    pieces = job({"first": "output_layer.weight", "second": second}).pieces()
    wrong = check_places(gathered_places(Ranks(), pieces))
    if told:
        with pytest.raises(AssertionError, match=told):
            raise AssertionError(wrong)
    assert bool(told) == bool(wrong)


@pytest.mark.parametrize(
    ("squares", "kind"), [(9.0, "preclip"), (1.0, "clipped_or_partial"), (18.0, "unreduced")]
)
def test_what_the_figures_are_is_seen_from_their_sum(squares, kind):
    told = judged(Figures({}, squares), 3.0, Ranks())
    assert told["grad_info_gradients"] == kind and told["grad_info_l2"] == squares**0.5
