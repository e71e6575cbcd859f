"""How gradients are cut into buckets."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from farandole.errors import ConfigError
from farandole.training.optim.bucket_size import bucket_sizes, bytes_of, cut, has_core_to_spare

pytestmark = pytest.mark.core

MB = 1 << 20


def has_core(cores: int = 4, local_size: int = 2, threads: int = 1, is_by_network: bool = True) -> bool:
    return has_core_to_spare(cores, local_size, threads, is_by_network, is_on_device=False)


def test_a_core_is_to_spare_when_workers_and_their_threads_leave_one() -> None:
    assert has_core()
    assert not has_core(cores=2)
    assert not has_core(threads=2)
    assert has_core(cores=1 + 8, local_size=8)


def test_through_shared_memory_nothing_goes_on_in_the_background() -> None:
    assert not has_core(cores=64, is_by_network=False)


def test_where_a_device_computes_cores_are_to_spare() -> None:
    assert has_core_to_spare(1, 4, 1, is_by_network=False, is_on_device=True)


def sizes(
    total_mb: int, ranks: int = 2, is_by_network: bool = True, has_cores: bool = True, pinned_bytes: int | None = None
) -> list[int]:
    return bucket_sizes(total_mb * MB, ranks, is_by_network, has_cores, pinned_bytes)


def test_through_memory_or_without_much_to_cut_there_is_one_bucket() -> None:
    assert sizes(100, is_by_network=False) == [0]
    assert sizes(1) == [0]
    assert sizes(100, ranks=1) == [0]


def test_with_cores_to_spare_several_of_a_sensible_size_come_first() -> None:
    assert [sizes(mb)[0] // MB for mb in (40, 1000, 2)] == [10, 25, 1]
    assert sizes(100, ranks=64)[0] == 25 * MB
    assert sizes(40) == [10 * MB, 10 * MB // 4, 0]
    assert sizes(2) == [MB, 0]


def test_without_cores_to_spare_one_comes_first() -> None:
    assert sizes(40, has_cores=False) == [0, 10 * MB]


def test_what_is_pinned_is_not_tried() -> None:
    assert sizes(100, has_cores=False, pinned_bytes=7) == [7]
    assert sizes(100, pinned_bytes=0) == [0]


def test_buckets_are_full_in_the_order_in_which_gradients_come() -> None:
    assert cut([1, 1, 5, 1, 1], ["f", "f", "f", "f", "f"], 2) == [[0, 1], [2], [3, 4]]
    assert cut([1, 3, 1, 1], ["f", "h", "f", "f"], 2) == [[1], [0, 2], [3]]
    assert cut([1, 1, 1], ["f", "h", "f"], 0) == [[0, 2], [1]]
    assert cut([], [], 0) == cut([], [], 5) == []


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from("fhd"))), st.integers(0, 100))
def test_each_gradient_is_in_one_bucket_of_its_kind_beside_its_neighbours(
    gradients: list[tuple[int, str]], least: int
) -> None:
    sizes, kinds = [size for size, _ in gradients], [kind for _, kind in gradients]
    buckets = cut(sizes, kinds, least)
    assert sorted(place for bucket in buckets for place in bucket) == list(range(len(gradients)))
    for bucket in buckets:
        kind = kinds[bucket[0]]
        assert bucket == [p for p in range(bucket[0], bucket[-1] + 1) if kinds[p] == kind]
    not_full = [kinds[bucket[0]] for bucket in buckets if sum(sizes[place] for place in bucket) < least]
    assert len(not_full) == len(set(not_full))


def test_a_size_is_a_number_of_megabytes() -> None:
    assert bytes_of("0.5") == MB // 2
    assert bytes_of(0) == 0
    for wrong in ("many", "-1", "inf", "nan", ""):
        with pytest.raises(ConfigError, match="FARANDOLE_BUCKET_MB"):
            bytes_of(wrong)
