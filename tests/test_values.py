"""What is handed from stage to stage is named in full and cannot be written to."""

from __future__ import annotations

import dataclasses

import pytest

from replay_lib.batch import RankBatch
from replay_lib.loss import MicroBatchLoss
from replay_lib.loss.filters import PolicyFilter
from replay_lib.loss.inputs import LossInputs
from replay_lib.loss.policy import PolicyTerm, _Case
from replay_lib.microbatch import _State
from replay_lib.noise import Noise
from replay_lib.verdict import Bound, Judgement, Measured, OldFinding, Variant, _Finding

BY_NAME = (
    *(RankBatch, MicroBatchLoss, PolicyFilter, LossInputs, PolicyTerm),
    *(Measured, Variant, Judgement, OldFinding),
)


@pytest.mark.parametrize("kind", [*BY_NAME, Bound, Noise, _Case, _State, _Finding])
def test_no_field_can_be_set(kind: type) -> None:
    name = dataclasses.fields(kind)[0].name
    value = object.__new__(kind)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)


@pytest.mark.parametrize("kind", BY_NAME)
def test_values_of_many_fields_are_made_by_name(kind: type) -> None:
    with pytest.raises(TypeError, match="takes 1 positional argument"):
        kind(*[None for _ in dataclasses.fields(kind)])
