"""What ranks may differ in, kind by kind, and what they are told when they differ in anything else."""

from __future__ import annotations

import math

import pytest

from farandole.integrations.horovod.named.stages import Kind, ranks_in_words, values_by_rank, why_invalid
from tests.support.negotiating import request


def problem(kind: Kind, *each: dict[str, object] | None, ranks: tuple[int, ...] | None = None) -> str | None:
    """What members are told that submit the operation with these fields; None for one that has joined."""
    parts = [None if fields is None else request(kind, **fields) for fields in each]
    return why_invalid(request(kind).key, ranks or tuple(range(len(parts))), parts)


ALL = (Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL, Kind.REDUCESCATTER)
REDUCING = (Kind.ALLREDUCE, Kind.REDUCESCATTER)
SAME_ROWS = (Kind.ALLREDUCE, Kind.BROADCAST, Kind.REDUCESCATTER)
ANY_ROWS = (Kind.ALLGATHER, Kind.ALLTOALL)


@pytest.mark.parametrize("kind", ALL)
def test_the_same_from_all_ranks_is_valid(kind: Kind) -> None:
    assert problem(kind, {}, {}, {}) is None


@pytest.mark.parametrize("kind", ALL)
def test_dtypes_must_be_the_same(kind: Kind) -> None:
    assert problem(kind, {}, {"dtype": "int64"}, {}) == (
        f"{kind.name.lower()} '{kind.name.lower()}.x': ranks disagree on the dtype: "
        f"ranks 0 and 2 have float32, rank 1 has int64"
    )


@pytest.mark.parametrize("kind", ALL)
def test_all_are_on_a_cpu_or_all_on_some_cuda_device(kind: Kind) -> None:
    assert problem(kind, {"device": 0}, {"device": 1}) is None
    assert "the device: rank 0 has CPU, rank 1 has CUDA" in str(problem(kind, {}, {"device": 0}))


@pytest.mark.parametrize("kind", SAME_ROWS)
def test_shapes_must_be_the_same(kind: Kind) -> None:
    assert "rank 0 has [60, 2], rank 1 has [30, 2]" in str(problem(kind, {}, {"shape": (30, 2)}))
    assert "rank 0 has [60, 2], rank 1 has [120]" in str(problem(kind, {}, {"shape": (120,)}))


@pytest.mark.parametrize("kind", ANY_ROWS)
def test_the_number_of_rows_may_differ_but_not_the_rows(kind: Kind) -> None:
    assert problem(kind, {}, {"shape": (30, 2)}) is None
    assert "rank 0 has [2], rank 1 has [3]" in str(problem(kind, {}, {"shape": (60, 3)}))
    assert "rank 0 has [2], rank 1 has []" in str(problem(kind, {}, {"shape": (60,)}))


@pytest.mark.parametrize("kind", [*ANY_ROWS, Kind.REDUCESCATTER])
def test_a_scalar_has_no_rows(kind: Kind) -> None:
    assert "the tensor of rank 1 is a scalar" in str(problem(kind, {}, {"shape": ()}))


def test_scalars_can_be_reduced_and_broadcast() -> None:
    for kind in (Kind.ALLREDUCE, Kind.BROADCAST):
        assert problem(kind, {"shape": ()}, {"shape": ()}) is None


@pytest.mark.parametrize("kind", REDUCING)
def test_reduction_and_scales_must_be_the_same(kind: Kind) -> None:
    assert "the reduction: rank 0 has Sum, rank 1 has Max" in str(problem(kind, {}, {"op": 4}))
    assert "prescale factor: rank 0 has 1.0, rank 1 has 0.5" in str(problem(kind, {}, {"prescale": 0.5}))
    assert "postscale factor: rank 0 has 1.0, rank 1 has 0.5" in str(problem(kind, {}, {"postscale": 0.5}))


def test_a_factor_that_is_nan_on_all_ranks_is_no_disagreement() -> None:
    assert problem(Kind.ALLREDUCE, {"prescale": math.nan}, {"prescale": float("nan")}) is None


def test_roots_must_be_the_same_and_a_member() -> None:
    assert "the root rank: rank 0 has 0, rank 1 has 1" in str(problem(Kind.BROADCAST, {"root": 0}, {"root": 1}))
    outside = problem(Kind.BROADCAST, {"root": 1}, {"root": 1}, ranks=(0, 2))
    assert "root rank 1 is not in the process set, which has ranks 0 and 2" in str(outside)


@pytest.mark.parametrize("splits", [(10,), (10, 51), (-1, 5), (10, 10, 10)])
def test_splits_that_do_not_fit_name_the_rank(splits: tuple[int, ...]) -> None:
    found = str(problem(Kind.ALLTOALL, {"splits": (30, 30)}, {"splits": splits}))
    assert f"rank 1 has splits {list(splits)}" in found


def test_splits_may_leave_rows_out_and_differ() -> None:
    assert problem(Kind.ALLTOALL, {"splits": (30, 30)}, {"splits": (0, 7)}) is None


def test_without_splits_rows_must_be_dealt_out_evenly() -> None:
    assert "rank 1 has 7 rows" in str(problem(Kind.ALLTOALL, {}, {"shape": (7, 2)}))


@pytest.mark.parametrize("kind", ALL[1:])
def test_only_allreduce_and_barrier_can_do_without_a_member(kind: Kind) -> None:
    assert problem(Kind.ALLREDUCE, {}, None, {}) is None
    assert problem(Kind.BARRIER, {}, None) is None
    assert "ranks 1 and 2 have called join()" in str(problem(kind, {}, None, None))


def test_long_lists_are_cut_in_large_worlds() -> None:
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([0, 1, 2]) == "ranks 0, 1 and 2"
    assert ranks_in_words(list(range(1000))) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (1000 in all)"
    found = str(values_by_rank((rank, str(rank)) for rank in range(1000)))
    assert found.startswith("rank 0 has 0, rank 1 has 1, ")
    assert found.endswith("and 992 more differ")
