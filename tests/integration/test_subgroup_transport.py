"""Collectives of some ranks through the memory of their host, and the way back to messages; ranks are threads here."""

from __future__ import annotations

import gc
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import torch

from farandole.errors import CollectiveMismatch, GenerationEnded, PeerLost, RecoverableError, StepError
from farandole.training.collectives.connection_pair import DTYPES
from farandole.training.collectives.control_blocks import ControlBlockRefs, OwnControlBlocks
from farandole.training.collectives.p2p_transport import P2PTransport
from farandole.training.collectives.point_to_point import PointToPoint
from farandole.training.collectives.shared_memory_group import Wanted
from farandole.training.collectives.subgroup_transport import SubgroupTransport, connect_members
from farandole.training.collectives.transport import Reduction
from tests.support.rings import in_threads, outcomes_in_threads, p2p_group

SUBJECT = b"s" * 16

AT_ONCE_S = 1.0
"""The limit for a wait that ends within milliseconds, on a machine that is busy."""

T = TypeVar("T")


def connect(p2p: PointToPoint, ranks: Sequence[int], subject: bytes = SUBJECT) -> SubgroupTransport:
    transport = connect_members(p2p, ranks, subject)
    assert isinstance(transport, SubgroupTransport)
    return transport


@contextmanager
def subgroup(size: int, check: Callable[[], None] | None = None) -> Iterator[list[SubgroupTransport]]:
    """A group of all ranks but rank 0, by their places in it."""
    with p2p_group(size + 1, memories=["here"] * (size + 1), check=check) as everybody:
        made = in_threads(size, lambda place: connect(everybody[place + 1], range(1, size + 1)))
        try:
            yield made
        finally:
            for transport in made:
                transport.close()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("op", [Reduction.SUM, Reduction.MIN, Reduction.MAX, Reduction.PRODUCT])
def test_reductions_are_those_of_messages(size: int, op: Reduction) -> None:
    """From nothing to several pieces, with trailers that fit beside the tensor and one that does not."""

    def work(p2p: PointToPoint) -> None:
        memory, messages = connect(p2p, range(size)), P2PTransport(p2p, range(size), b"m" * 16)
        for numel in (0, 1, 5, 20_001, 600_001):
            for dtype in DTYPES:
                mine = ((torch.arange(numel) + p2p.rank) % 3 + 1).to(dtype)
                theirs = mine.clone()
                trailer = b"trailer of %d" % p2p.rank
                assert memory.all_reduce(mine, trailer, op) == messages.all_reduce(theirs, trailer, op)
                assert torch.equal(mine, theirs)
            long, sums = bytes([p2p.rank]) * 10_000, torch.ones(numel)
            assert memory.all_reduce(sums, long) == [bytes([rank]) * 10_000 for rank in range(size)]
            assert sums.tolist() == [float(size)] * numel
        memory.close()

    with p2p_group(size, memories=["here"] * size) as everybody:
        in_threads(size, lambda rank: work(everybody[rank]))


def test_some_ranks_in_another_order_gather_broadcast_and_wait() -> None:
    ranks = [2, 0]

    def work(p2p: PointToPoint) -> None:
        transport = connect(p2p, ranks)
        place = ranks.index(p2p.rank)
        assert (transport.rank, transport.size) == (place, 2)
        for length in (0, 1, 4000, 60_000, 100_000, 3_000_000):  # the other one gives a byte more
            expected = [b"x" * (length + rank) for rank in ranks]
            assert transport.all_gather(b"x" * (length + p2p.rank)) == expected
        for numel in (0, 1, 70_000, 600_001):
            for source in (0, 1):
                tensor = torch.full((numel,), float(p2p.rank))
                transport.broadcast(tensor, source)
                assert tensor.tolist() == [float(ranks[source])] * numel
        transport.barrier()
        with pytest.raises(ValueError, match="source must be a rank from 0 to 1, got 2"):
            transport.broadcast(tensor, 2)
        transport.barrier()
        transport.close()

    with p2p_group(3, memories=["here"] * 3) as everybody:
        in_threads(2, lambda number: work(everybody[ranks[number]]))


def test_parts_go_to_those_that_want_them() -> None:
    """Each rank has a part for each rank, over several pieces, and takes those that are for it; twice in a row."""
    nbytes = 1_000_000

    def take(transport: SubgroupTransport) -> None:
        for number in range(2):
            mine = torch.cat([torch.full((nbytes,), 10 * transport.rank + to + number) for to in range(3)])
            outputs = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(3)]
            transport.exchange(mine.to(torch.uint8), [Wanted(nbytes * transport.rank, each) for each in outputs])
            found = [each.unique().tolist() for each in outputs]
            assert found == [[10 * source + transport.rank + number] for source in range(3)]

    with subgroup(3) as members:
        in_threads(3, lambda place: take(members[place]))


def test_two_groups_with_common_members_are_used_in_turn() -> None:
    def work(p2p: PointToPoint) -> None:
        mine = [ranks for ranks in ([0, 1], [1, 2], [0, 1, 2]) if p2p.rank in ranks]
        groups = [(connect(p2p, ranks, bytes(ranks).ljust(16, b"-")), ranks) for ranks in mine]
        for number in range(50):
            for group, ranks in groups:
                tensor = torch.full((1 + number * 1000,), p2p.rank + 1.0)
                group.all_reduce(tensor)
                assert tensor.unique().tolist() == [sum(ranks) + len(ranks)]
        for group, _ in groups:
            group.close()

    with p2p_group(3, memories=["here"] * 3) as everybody:
        in_threads(3, lambda rank: work(everybody[rank]))


# The way back to messages ---------------------------------------------------------------------------------------------


def check_messages(everybody: list[PointToPoint]) -> None:
    """All ranks get a transport of messages, which works."""

    def work(p2p: PointToPoint) -> type:
        transport = connect_members(p2p, range(p2p.size), SUBJECT)
        tensor = torch.ones(100_000)
        transport.all_reduce(tensor)
        assert tensor.unique().tolist() == [float(p2p.size)]
        return type(transport)

    assert in_threads(len(everybody), lambda rank: work(everybody[rank])) == [P2PTransport] * len(everybody)


@pytest.mark.parametrize("memories", [["a", "a", "b"], ["a", "a", None], [None, None, None]])
def test_ranks_of_several_hosts_or_without_memory_send_messages(memories: list[str | None]) -> None:
    with p2p_group(3, memories=memories) as everybody:
        check_messages(everybody)


def test_where_memory_cannot_be_had_all_send_messages_and_one_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Files of this process may not be larger than 4 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with p2p_group(3, memories=["here"] * 3) as everybody, caplog.at_level(logging.WARNING, "farandole"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            check_messages(everybody)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(caplog.messages) == 1
    assert "ranks [0, 1, 2] are sent over TCP; shared memory cannot be used: rank 0 has no shared memory" in caplog.text


@pytest.mark.parametrize("answer", [ControlBlockRefs((), "rank 1 has none"), None], ids=["has none", "cannot read"])
def test_where_one_member_cannot_share_memory_the_others_release_theirs(answer: ControlBlockRefs | None) -> None:
    def refuse(p2p: PointToPoint) -> None:
        """What a member does that has no memory, or cannot read that of others."""
        messages = P2PTransport(p2p, range(3), SUBJECT)
        own = OwnControlBlocks(1, 1)
        messages.all_gather(msgspec.msgpack.encode(answer or own.refs))
        messages.all_gather(b"rank 1 cannot share memory")

    with p2p_group(3, memories=["here"] * 3) as everybody:

        def work(rank: int) -> object:
            return refuse(everybody[1]) if rank == 1 else type(connect_members(everybody[rank], range(3), SUBJECT))

        assert in_threads(3, work) == [P2PTransport, None, P2PTransport]
        assert mapped() == 0


# Ends -----------------------------------------------------------------------------------------------------------------


def mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:farandole")


def when(transport: SubgroupTransport) -> threading.Event:
    """An event that is set when this rank has arrived in its next operation: it waits for others from then on."""
    arrived, barrier = threading.Event(), transport._group._barrier
    assert barrier is not None
    arrive = barrier.arrive

    def arrive_and_tell() -> None:
        arrive()
        arrived.set()

    barrier.arrive = arrive_and_tell  # type: ignore[method-assign]
    return arrived


@pytest.mark.parametrize("numel", [10, 1_000_000])
def test_a_lost_member_ends_the_wait_of_all_others_at_once(numel: int) -> None:
    with p2p_group(3, memories=["here"] * 3) as everybody:
        members = in_threads(3, lambda rank: connect(everybody[rank], range(3)))
        waiting = [when(members[rank]) for rank in (0, 1)]

        def work(rank: int) -> float:
            if rank == 2:
                assert all(each.wait(10) for each in waiting)
                lost_s = time.monotonic()
                everybody[2].close()
                return lost_s
            with pytest.raises(RecoverableError) as raised:
                members[rank].all_reduce(torch.ones(numel))
            assert isinstance(raised.value, PeerLost | GenerationEnded)
            with pytest.raises(GenerationEnded):  # and so does every later call
                members[rank].barrier()
            return time.monotonic()

        first, second, lost_s = in_threads(3, work)
        assert max(first, second) - lost_s < AT_ONCE_S
        for member in members:
            member.close()


def test_a_member_that_is_lost_before_the_group_is_connected() -> None:
    with p2p_group(2, memories=["here"] * 2) as (one, other):
        one.send(1, b"hello")
        other.send(0, b"hello")
        one.receive(1, b"hello")
        other.close()
        with pytest.raises(RecoverableError):
            connect_members(one, range(2), SUBJECT)


def test_an_abort_from_another_thread_ends_a_wait_at_once() -> None:
    with subgroup(2) as (one, _):
        waiting = when(one)

        def abort() -> float:
            assert waiting.wait(10)
            aborted_s = time.monotonic()
            one._members.p2p.abort("for a test")
            return aborted_s

        def wait() -> float:
            with pytest.raises(GenerationEnded, match="barrier: generation 7 has ended: for a test"):
                one.barrier()
            return time.monotonic()

        ended_s, aborted_s = in_threads(2, lambda number: abort() if number else wait())
        assert ended_s - aborted_s < AT_ONCE_S
        with pytest.raises(GenerationEnded):
            one.all_gather(b"")


def test_what_all_have_arrived_for_counts_although_members_leave_at_once() -> None:
    for _ in range(10):
        with p2p_group(3, memories=["here"] * 3) as everybody:

            def work(rank: int, everybody: list[PointToPoint] = everybody) -> float:
                transport, tensor = connect(everybody[rank], range(3)), torch.ones(300_000)
                transport.all_reduce(tensor)
                transport.barrier()
                transport.close()
                everybody[rank].close()
                return tensor.sum().item()

            assert in_threads(3, work) == [900_000.0] * 3


def test_members_in_different_operations_are_told_now_and_later() -> None:
    def work(transport: SubgroupTransport) -> None:
        with pytest.raises(CollectiveMismatch, match=r"rank \d is in .* rank \d is in .* must make the same calls"):
            transport.barrier() if transport.rank else transport.all_reduce(torch.ones(3))
        with pytest.raises(CollectiveMismatch, match="must make the same calls"):
            transport.barrier()

    with subgroup(3) as members:
        in_threads(3, lambda place: work(members[place]))


def test_a_mismatch_that_one_member_sees_reaches_the_others() -> None:
    def work(transport: SubgroupTransport) -> None:
        nbytes = 9 if transport.rank == 1 else 8
        wanted = [Wanted(0, torch.empty(nbytes, dtype=torch.uint8)) for _ in range(3)]
        with pytest.raises(CollectiveMismatch, match="bytes 0 to 9 of rank 0 are expected, and it has 8"):
            transport.exchange(torch.zeros(8, dtype=torch.uint8), wanted)

    with subgroup(3) as members:
        in_threads(3, lambda place: work(members[place]))


def test_an_error_in_one_member_ends_the_others() -> None:
    """The error is that of the check while a rank waits, as when the job is over."""
    failing = threading.local()

    def check() -> None:
        if getattr(failing, "is_failing", False):
            raise KeyboardInterrupt

    def work(transport: SubgroupTransport) -> None:
        failing.is_failing = transport.rank == 0
        if transport.rank < 2:
            transport.barrier()  # the third member does not come

    with subgroup(3, check) as members:
        outcomes = outcomes_in_threads(3, lambda place: work(members[place]))
    assert isinstance(outcomes[0], KeyboardInterrupt)
    assert isinstance(outcomes[1], PeerLost | GenerationEnded)


def test_two_threads_in_one_group_are_an_error_of_the_second_one() -> None:
    with subgroup(2) as (one, other):
        waiting = when(one)

        def intrude() -> None:
            assert waiting.wait(10)
            with pytest.raises(StepError, match=r"barrier: another thread is in a collective of this group of ranks"):
                one.barrier()
            other.barrier()

        in_threads(2, lambda number: intrude() if number else one.barrier())
        in_threads(2, lambda place: (one, other)[place].barrier())


# Memory ---------------------------------------------------------------------------------------------------------------


def test_100_groups_leave_no_descriptor_and_no_mapping_behind() -> None:
    with p2p_group(2, memories=["here"] * 2) as everybody:

        def one_group(number: int) -> None:
            def work(rank: int) -> None:
                transport = connect(everybody[rank], range(2), number.to_bytes(16, "big"))
                transport.all_reduce(torch.ones(100_000))
                transport.close()
                transport.close()
                with pytest.raises(GenerationEnded, match="its transport was closed"):
                    transport.barrier()

            in_threads(2, work)

        one_group(0)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(1, 100):
            one_group(number)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before
        assert mapped() == 0


def test_a_group_that_is_closed_in_an_operation_ends_it_first() -> None:
    with subgroup(2) as (one, other):
        waiting, tensors = when(one), [torch.ones(1_000_000), torch.ones(1_000_000)]

        def close() -> None:
            assert waiting.wait(10)
            one.close()
            other.all_reduce(tensors[1])
            other.close()

        in_threads(2, lambda number: close() if number else one.all_reduce(tensors[0]))
        assert [each.unique().tolist() for each in tensors] == [[2.0], [2.0]]
        assert mapped() == 0
