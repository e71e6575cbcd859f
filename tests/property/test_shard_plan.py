"""Whatever workers are lost and however far commits have come: who gives which shard."""

from __future__ import annotations

from hypothesis import given, strategies as st

from farandole.integrations.sharding.shard_plan import Held, awaited, choose, missing, rows, shards_within_hosts

commits = st.builds(
    lambda number, count, index: Held(number, index % count, count),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(0, 3),
)
worlds = st.lists(st.lists(commits, max_size=3), min_size=1, max_size=6)


@given(worlds)
def test_the_newest_commit_that_is_whole_is_chosen_and_each_shard_comes_from_its_lowest_holder(
    held: list[list[Held]],
) -> None:
    def holders(number: int, index: int, count: int) -> list[int]:
        return [rank for rank, each in enumerate(held) if Held(number, index, count) in each]

    def is_whole(number: int) -> bool:
        return any(all(holders(number, index, count) for index in range(count)) for count in range(1, 5))

    whole = [number for number in range(4) if is_whole(number)]
    plan = choose(held)
    if plan is None:
        assert not whole
        if any(held):
            number, lost, count = missing(held)
            assert lost
            assert all(not holders(number, index, count) for index in lost)
        return
    assert plan.number == max(whole)
    for index, source in enumerate(plan.sources):
        assert source == min(holders(plan.number, index, plan.count))


@given(worlds, st.integers(1, 4))
def test_only_shards_that_are_where_they_belong_do_not_travel(held: list[list[Held]], count: int) -> None:
    plan = choose(held)
    if plan is None:
        return
    indices = [rank % count for rank in range(len(held))]
    travelling = awaited(plan, held, indices, count)
    for index, each in zip(indices, held, strict=True):
        if count != plan.count:
            assert travelling == set(range(plan.count))
        elif Held(plan.number, index, count) not in each:
            assert index in travelling
    if count == plan.count and all(Held(plan.number, i, count) in each for i, each in zip(indices, held, strict=True)):
        assert travelling == set()


@given(st.integers(0, 50), st.integers(1, 8))
def test_shards_cover_a_dimension_without_overlap_as_torch_divides_it(length: int, count: int) -> None:
    import torch

    parts = [rows(length, index, count) for index in range(count)]
    assert [row for start, stop in parts for row in range(start, stop)] == list(range(length))
    if length:
        expected = [len(chunk) for chunk in torch.arange(length).chunk(count)]
        assert [stop - start for start, stop in parts if stop > start] == expected


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 8))
def test_shard_groups_do_not_leave_their_host(hosts: list[int], limit: int) -> None:
    shards = shards_within_hosts(hosts, limit)
    assert 1 <= shards <= limit
    assert all(workers % shards == 0 for workers in hosts)
    assert not any(all(workers % more == 0 for workers in hosts) for more in range(shards + 1, limit + 1))
