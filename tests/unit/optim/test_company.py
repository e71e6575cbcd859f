"""Who may begin in the background."""

from __future__ import annotations

import pytest

from farandole.errors import StepError
from farandole.optim.company import Company
from farandole.state.global_batch import GlobalBatch


def global_batch() -> GlobalBatch:
    return GlobalBatch(0, 0, 4, 0, 4)


def test_only_one_that_was_by_itself_for_two_global_batches() -> None:
    company = Company()
    company.joins(1, global_batch())
    assert not company.is_alone(1)
    company.joins(1, global_batch())
    assert company.is_alone(1)
    both = global_batch()
    company.joins(1, both)
    company.joins(2, both)
    assert not company.is_alone(1)
    company.joins(1, global_batch())
    assert not company.is_alone(1)
    company.joins(1, global_batch())
    assert company.is_alone(1)


def test_while_one_flies_another_must_not_reduce() -> None:
    company = Company()
    company.flies(1)
    company.refuse_reducing(1)
    with pytest.raises(StepError, match="FARANDOLE_BUCKET_MB"):
        company.refuse_reducing(2)
    company.landed(2)
    with pytest.raises(StepError):
        company.refuse_reducing(2)
    company.landed(1)
    company.refuse_reducing(2)
