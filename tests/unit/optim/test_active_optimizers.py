"""Who may begin in the background."""

from __future__ import annotations

import pytest

from farandole.errors import StepError
from farandole.training.optim.step_reduction import ActiveOptimizers
from farandole.training.state.batch import GlobalBatch

pytestmark = pytest.mark.core


def global_batch() -> GlobalBatch:
    return GlobalBatch(0, 0, 4, 0, 4)


def test_only_one_that_was_by_itself_for_two_global_batches() -> None:
    active = ActiveOptimizers()
    active.add(1, global_batch())
    assert not active.is_alone(1)
    active.add(1, global_batch())
    assert active.is_alone(1)
    both = global_batch()
    active.add(1, both)
    active.add(2, both)
    assert not active.is_alone(1)
    active.add(1, global_batch())
    assert not active.is_alone(1)
    active.add(1, global_batch())
    assert active.is_alone(1)


def test_while_one_flies_another_must_not_reduce() -> None:
    active = ActiveOptimizers()
    active.begin_overlap(1)
    active.refuse_reducing(1)
    with pytest.raises(StepError, match="FARANDOLE_BUCKET_MB"):
        active.refuse_reducing(2)
    active.end_overlap(2)
    with pytest.raises(StepError):
        active.refuse_reducing(2)
    active.end_overlap(1)
    active.refuse_reducing(2)
