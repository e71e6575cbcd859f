"""The step header: all ranks did the same, or nobody applies anything."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from farandole.errors import CollectiveMismatch
from farandole.training.optim.step_agreement import HEADER_BYTES, StepHeader, check

pytestmark = pytest.mark.core

HEADER = StepHeader(generation=3, step=7, plan=99, epoch=1, start=24, stop=36, samples=6, prepared=0)


def test_a_step_of_two_halves_is_one_step() -> None:
    check([HEADER, HEADER])


@pytest.mark.parametrize("field", ["generation", "step", "plan", "epoch", "start", "stop"])
def test_a_rank_that_differs_is_found_and_the_values_are_named(field: str) -> None:
    other = msgspec.structs.replace(HEADER, **{field: 77})
    with pytest.raises(CollectiveMismatch, match=f"rank 0: {getattr(HEADER, field)}, rank 1: 77"):
        check([HEADER, other])


def test_workers_whose_streams_differ_are_told_so() -> None:
    header = msgspec.structs.replace(HEADER, content=1)
    for other in ({"content": 2}, {"stop": 30, "content": 3}):
        with pytest.raises(CollectiveMismatch, match="yields other samples to ranks"):
            check([header, header, msgspec.structs.replace(header, **other)])


def test_shares_that_do_not_make_up_the_global_batch_are_found() -> None:
    with pytest.raises(CollectiveMismatch, match=r"hold 11 samples.*holds 12"):
        check([HEADER, msgspec.structs.replace(HEADER, samples=5)])


def test_without_a_loader_there_is_no_batch_to_make_up() -> None:
    check([msgspec.structs.replace(HEADER, epoch=-1, start=-1, stop=-1, samples=0)] * 3)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=8, max_size=8))
def test_a_header_comes_back_as_it_was_and_always_has_the_same_size(values: list[int]) -> None:
    header = StepHeader(*values)
    assert StepHeader.unpack(header.pack()) == header
    assert len(header.pack()) == HEADER_BYTES


def test_workers_whose_loaders_do_not_know_of_each_other_are_told_to_give_them_to_the_state() -> None:
    with pytest.raises(CollectiveMismatch, match=r"each of the 2 workers .* whole global batch \[24, 36\).*TorchState"):
        check([msgspec.structs.replace(HEADER, samples=12)] * 2)


def test_one_worker_alone_trains_the_whole_global_batch() -> None:
    check([msgspec.structs.replace(HEADER, samples=12)])


def test_a_global_batch_of_which_others_trained_nothing_is_one() -> None:
    check([msgspec.structs.replace(HEADER, samples=12), msgspec.structs.replace(HEADER, samples=0)])
