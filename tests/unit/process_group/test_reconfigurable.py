"""Groups whose members are named by handles: connections, ranks, time limits and refusals. Members are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch

from farandole.errors import ConfigError, GenerationEnded, GroupOutdated, NotInitialized, PeerLost
from farandole.integrations.torchrun.process_group import FarandoleGroup
from farandole.integrations.torchrun.process_group.reconfigurable import NamedMembers, TimeLimits, WorldsByHandles
from farandole.integrations.torchrun.process_group.works import Some

SIZE = 3
LIMIT = timedelta(seconds=30)

T = TypeVar("T")


@pytest.fixture
def groups() -> Iterator[list[FarandoleGroup]]:
    """Three members that are not connected yet."""
    members = [NamedMembers(WorldsByHandles(rank, SIZE, LIMIT), may_change=True) for rank in range(SIZE)]
    yield [FarandoleGroup(each) for each in members]
    for each in members:
        each.close()


def together(groups: list[FarandoleGroup], call: Callable[[FarandoleGroup], T]) -> list[T]:
    """Return what the call returns for each group, run in a thread of its own."""
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(call, groups))


def reconfigure(groups: list[FarandoleGroup], uuid: int, handles: Collection[str] | None = None) -> None:
    wanted = [each.get_reconfigure_handle() for each in groups] if handles is None else handles
    options = SimpleNamespace(uuid=uuid, handles=wanted, timeout=LIMIT, hints={})
    together(groups, lambda group: group.reconfigure(options).wait())


def sums(groups: list[FarandoleGroup]) -> list[float]:
    """Return each member's sum of the members' ranks plus one."""

    def add(group: FarandoleGroup) -> float:
        tensor = torch.full((4,), group.rank() + 1.0)
        group.allreduce([tensor]).wait()
        return float(tensor[0])

    return together(groups, add)


def test_a_group_has_no_connections_before_the_first_reconfigure(groups: list[FarandoleGroup]) -> None:
    assert all(group.supports_reconfigure for group in groups)
    assert [(group.rank(), group.size()) for group in groups] == [(0, 3), (1, 3), (2, 3)]
    with pytest.raises(NotInitialized, match=r"all_reduce: .*not connected: call torch.distributed._reconfigure"):
        groups[0].allreduce([torch.ones(1)])


def test_members_get_the_ranks_of_their_handles(groups: list[FarandoleGroup]) -> None:
    reconfigure(groups[::-1], 7)
    assert [group.rank() for group in groups] == [2, 1, 0]
    assert sums(groups) == [6.0] * 3


def test_members_of_a_set_of_handles_agree_on_the_ranks(groups: list[FarandoleGroup]) -> None:
    reconfigure(groups, 7, {each.get_reconfigure_handle() for each in groups})
    assert sorted(group.rank() for group in groups) == [0, 1, 2]
    assert sums(groups) == [6.0] * 3


def test_a_group_shrinks_splits_and_grows_with_the_same_handles(groups: list[FarandoleGroup]) -> None:
    reconfigure(groups, 1)
    reconfigure([groups[0], groups[2]], 2)
    assert [(group.rank(), group.size()) for group in groups] == [(0, 2), (1, 3), (1, 2)]
    assert sums([groups[0], groups[2]]) == [3.0] * 2
    reconfigure([groups[1]], 3)
    assert sums([groups[1]]) == [1.0]
    reconfigure(groups, 4)
    assert sums(groups) == [6.0] * 3


def test_messages_reach_the_new_members(groups: list[FarandoleGroup]) -> None:
    reconfigure(groups, 1)
    reconfigure(groups[1:], 2)
    groups[1].send([torch.ones(3)], 1)
    received = torch.zeros(3)
    groups[2].recv([received], 0).wait()
    assert received.tolist() == [1.0] * 3


def test_an_aborted_group_works_again_after_reconfigure(groups: list[FarandoleGroup]) -> None:
    reconfigure(groups, 1)
    groups[0].abort()
    with pytest.raises(GenerationEnded, match="the group was aborted"):
        groups[0].barrier()
    reconfigure(groups, 2)
    assert sums(groups) == [6.0] * 3


def test_a_lost_member_is_left_out_by_reconfigure(groups: list[FarandoleGroup]) -> None:
    reconfigure(groups, 1)
    groups[1].shutdown()
    survivors = [groups[0], groups[2]]

    def fail(group: FarandoleGroup) -> None:
        with pytest.raises((PeerLost, GenerationEnded)):
            group.allreduce([torch.ones(1)])

    together(survivors, fail)
    reconfigure(survivors, 2)
    assert sums(survivors) == [3.0] * 2


def test_a_uuid_is_used_once(groups: list[FarandoleGroup]) -> None:
    reconfigure(groups, 5)
    with pytest.raises(RuntimeError, match="uuid 5 was already used"):
        reconfigure(groups[:1], 5)
    assert sums(groups) == [6.0] * 3, "a refused call changes nothing"


@pytest.mark.parametrize("handles", ["nonsense", "{}"])
def test_a_text_that_is_no_handle_is_refused(groups: list[FarandoleGroup], handles: str) -> None:
    with pytest.raises(ConfigError, match='is no handle of the backend "farandole"'):
        reconfigure(groups[:1], 1, [handles])


def test_handles_without_ones_own_or_with_one_twice_are_refused(groups: list[FarandoleGroup]) -> None:
    first, second, _ = (each.get_reconfigure_handle() for each in groups)
    with pytest.raises(ConfigError, match="none of the 1 handles is this process's"):
        reconfigure(groups[:1], 1, [second])
    with pytest.raises(ConfigError, match="one of the 2 handles occurs twice"):
        reconfigure(groups[:1], 1, [first, first])


def test_handles_of_machines_that_cannot_be_reached_are_refused(groups: list[FarandoleGroup]) -> None:
    first, second, _ = (each.get_reconfigure_handle() for each in groups)
    name = groups[1].members.worlds._listener.handle.machine  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"on the machines .*elsewhere.* can be reached at 127.0.0.1 only"):
        reconfigure(groups[:1], 1, [first, second.replace(f'"{name}"', '"elsewhere"')])


def test_a_member_that_does_not_come_ends_the_call_and_permits_another(groups: list[FarandoleGroup]) -> None:
    handles = [each.get_reconfigure_handle() for each in groups]
    options = SimpleNamespace(uuid=1, handles=handles, timeout=timedelta(seconds=0.5), hints={})
    with pytest.raises(PeerLost, match=r"connect failed .* within 0.5 s"):
        groups[0].reconfigure(options)
    with pytest.raises(NotInitialized, match=r"its last reconfigure\(\) failed"):
        groups[0].barrier()
    reconfigure(groups, 2)
    assert sums(groups) == [6.0] * 3


def test_an_operation_ends_at_its_time_limit(groups: list[FarandoleGroup]) -> None:
    reconfigure(groups, 1)
    with pytest.raises(GenerationEnded, match="Timed out waiting 200ms for the other ranks in barrier"):
        groups[0].barrier(timeout=timedelta(milliseconds=200))


def test_a_group_of_fixed_members_refuses_reconfigure() -> None:
    group = FarandoleGroup(NamedMembers(WorldsByHandles(0, 1, LIMIT), may_change=False))
    try:
        assert not group.supports_reconfigure
        with pytest.raises(ConfigError, match=r"created with init_process_group\(.farandole., enable_reconfigure=True"):
            group.get_reconfigure_handle()
        with pytest.raises(ConfigError, match="reconfigure: the members of this group do not change"):
            group.reconfigure(SimpleNamespace(uuid=1, handles=[], timeout=None))
    finally:
        group.shutdown()


def test_subgroups_end_with_the_members(groups: list[FarandoleGroup]) -> None:
    reconfigure(groups, 1)
    pair = [FarandoleGroup(Some([0, 2], 0, groups[rank].members.worlds)) for rank in (0, 2)]
    assert sums(pair) == [3.0] * 2
    reconfigure(groups, 2)
    with pytest.raises(GroupOutdated, match=r"ranks \[0, 2\] in generation 1, and this is generation 2"):
        pair[0].barrier()


def test_time_limits_of_several_blocks_hold_at_once() -> None:
    limits, exceeded = TimeLimits(), threading.Event()
    try:
        with limits.limit(1000.0, lambda: pytest.fail("too early")), limits.limit(0.01, exceeded.set):
            assert exceeded.wait(30.0)
        with limits.limit(timedelta.max.total_seconds(), lambda: pytest.fail("too early")):
            pass
    finally:
        limits.close()
