"""Messages between the ranks of a generation, and the collectives that are made of them; ranks are threads here."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from farandole.base.membership import GenerationId
from farandole.base.wire.authentication import PROOF_BYTES, Introduction
from farandole.base.wire.frames import frame
from farandole.errors import CollectiveMismatch, GenerationEnded, PeerLost
from farandole.training.collectives.connection_pair import DTYPES
from farandole.training.collectives.p2p_transport import P2PTransport
from farandole.training.collectives.point_to_point import CHANNEL, PointToPoint
from farandole.training.collectives.transport import Reduction
from tests.support.rings import CHALLENGE_BYTES, P2P_GENERATION, hello, in_threads, p2p_group

SUBJECT = b"s" * 16


def test_large_letters_cross_each_other() -> None:
    content = bytes(3_000_000)
    with p2p_group(2) as both:
        for p2p in both:  # in one thread: a sender does not wait for the receiver
            p2p.send(1 - p2p.rank, b"large", content, b"end")
        for p2p in both:
            assert p2p.receive(1 - p2p.rank, b"large") == content + b"end"


def test_a_letter_to_oneself() -> None:
    with p2p_group(1) as (p2p,):
        p2p.send(0, b"trailer", b"text", memoryview(b"s"))
        assert p2p.receive(0, b"trailer") == b"texts"


def test_an_empty_letter() -> None:
    with p2p_group(2) as (one, other):
        one.send(1, b"empty")
        assert other.receive(0, b"empty") == b""


def test_a_rank_that_goes_is_lost_for_who_waits_for_it_and_what_it_sent_arrives() -> None:
    hints: list[tuple[str, str, str]] = []
    with p2p_group(2, lambda *hint: hints.append(hint)) as (one, other):
        one.send(1, b"first", b"text")
        one.close()
        assert other.receive(0, b"first") == b"text"
        with pytest.raises(PeerLost, match="receive failed in generation 7: lost rank 0"):
            other.receive(0, b"second")
        assert hints == [("w0", "receive", "end of file")]
        with pytest.raises(GenerationEnded):  # and so does everything after it
            other.receive(0, b"third")


def test_a_rank_that_has_failed_takes_the_others_with_it() -> None:
    with p2p_group(3) as all_three:
        for p2p in all_three:
            for other in range(3):
                p2p.send(other, b"hello")
        all_three[2].close()

        def wait(rank: int) -> None:
            if rank < 2:  # rank 1 waits for rank 0 only, which waits for the one that is gone
                with pytest.raises((PeerLost, GenerationEnded)):
                    all_three[rank].receive(2 if rank == 0 else 0, b"never sent")

        in_threads(3, wait)


def test_several_threads_write_to_one_rank() -> None:
    with p2p_group(2) as (one, other):

        def work(number: int) -> None:
            sender, subject = (
                (one, b"thread %d" % (number // 2)) if number % 2 else (other, b"thread %d" % (number // 2))
            )
            for size in (1, 1_000_000, 3):
                sender.send(1 - sender.rank, subject, bytes([number]) * size)
            assert [sender.receive(1 - sender.rank, subject) for _ in range(3)] == [
                bytes([number ^ 1]) * size for size in (1, 1_000_000, 3)
            ]

        in_threads(8, work)


def test_an_abort_from_another_thread_ends_a_wait_at_once() -> None:
    with p2p_group(2) as (one, _):
        thread = threading.Timer(0.1, one.abort, ("for a test",))
        thread.start()
        with pytest.raises(GenerationEnded, match="receive: generation 7 has ended: for a test"):
            one.receive(1, b"never sent")
        thread.join()
        with pytest.raises(GenerationEnded):
            one.send(1, b"trailer")


def address_of(p2p: PointToPoint) -> tuple[str, int]:
    return p2p._listener.address.host, p2p._listener.address.port


@pytest.mark.parametrize(
    ("dialer", "generation", "channel"),
    [("w9", P2P_GENERATION, CHANNEL), ("w1", GenerationId(1, 1, 6, "nonce"), CHANNEL), ("w1", P2P_GENERATION, 0)],
)
def test_a_caller_of_another_job_generation_or_channel_is_hung_up_on(
    dialer: str, generation: GenerationId, channel: int
) -> None:
    with p2p_group(2) as (one, _), socket.create_connection(address_of(one), 5) as sock:
        sock.sendall(hello(Introduction(generation, dialer, "w0", channel)))
        assert sock.recv(100) == b""


def test_nobody_writes_who_does_not_know_the_key() -> None:
    with p2p_group(2) as (one, _), socket.create_connection(address_of(one), 5) as sock:
        expected = one.expect(1, b"trailer")
        sock.sendall(hello(Introduction(P2P_GENERATION, "w1", "w0", CHANNEL)))
        assert len(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        sock.sendall(frame(bytes(PROOF_BYTES)))
        assert sock.recv(100) == b""
        assert expected.message is None


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("op", [Reduction.SUM, Reduction.MIN, Reduction.MAX, Reduction.PRODUCT])
@pytest.mark.parametrize("numel", [0, 1, 5, 20_001])
def test_all_reduce(size: int, op: Reduction, numel: int) -> None:
    def work(p2p: PointToPoint) -> list[tuple[torch.Tensor, list[bytes]]]:
        transport = P2PTransport(p2p, range(size), SUBJECT)
        results = []
        for dtype in DTYPES:
            tensor = ((torch.arange(numel) + p2p.rank) % 3 + 1).to(dtype)
            results.append((tensor, transport.all_reduce(tensor, b"trailer of %d" % p2p.rank, op)))
        return results

    combine = {
        Reduction.SUM: torch.Tensor.sum,
        Reduction.MIN: torch.Tensor.amin,
        Reduction.MAX: torch.Tensor.amax,
        Reduction.PRODUCT: torch.Tensor.prod,
    }[op]
    with p2p_group(size) as everybody:
        for results in in_threads(size, lambda rank: work(everybody[rank])):
            for dtype, (tensor, trailers) in zip(DTYPES, results, strict=True):
                parts = torch.stack([(torch.arange(numel) + rank) % 3 + 1 for rank in range(size)])
                assert torch.equal(tensor, combine(parts, 0).to(dtype))
                assert trailers == [b"trailer of %d" % rank for rank in range(size)]


def test_some_ranks_in_another_order_gather_and_broadcast() -> None:
    ranks = [2, 0]

    def work(p2p: PointToPoint) -> None:
        transport = P2PTransport(p2p, ranks, SUBJECT)
        place = ranks.index(p2p.rank)
        assert (transport.rank, transport.size) == (place, 2)
        assert transport.all_gather(bytes([p2p.rank]) * (p2p.rank + 1)) == [b"\2\2\2", b"\0"]
        tensor = torch.full((70_000,), float(p2p.rank))
        transport.broadcast(tensor, 0)
        assert tensor.unique().tolist() == [2.0]
        transport.barrier()
        with pytest.raises(ValueError, match="source must be a rank from 0 to 1, got 2"):
            transport.broadcast(tensor, 2)

    with p2p_group(3) as everybody:
        in_threads(2, lambda number: work(everybody[ranks[number]]))


def test_parts_go_to_those_that_want_them() -> None:
    """Rank a sends 10 a + b bytes to rank b; nothing from rank 1 to rank 0."""

    def size_of(source: int, target: int) -> int:
        return 0 if (source, target) == (1, 0) else 10 * source + target

    def work(p2p: PointToPoint) -> None:
        transport, rank = P2PTransport(p2p, range(3), SUBJECT), p2p.rank
        for _ in range(2):
            given = [torch.full((size_of(rank, target),), 10 * rank + target, dtype=torch.uint8) for target in range(3)]
            outputs = [torch.zeros(size_of(source, rank), dtype=torch.uint8) for source in range(3)]
            transport.deliver(given, outputs)
            for source, each in enumerate(outputs):
                assert each.tolist() == [10 * source + rank] * size_of(source, rank)

    with p2p_group(3) as everybody:
        in_threads(3, lambda rank: work(everybody[rank]))


def test_a_part_of_another_size_is_a_mismatch() -> None:
    def work(p2p: PointToPoint) -> None:
        transport, part = P2PTransport(p2p, range(2), SUBJECT), torch.zeros(5, dtype=torch.uint8)
        if p2p.rank:
            transport.deliver([part, part], [part[:0], part])
            return
        with pytest.raises(CollectiveMismatch, match="rank 1 has sent 5 bytes to rank 0, which expects 4"):
            transport.deliver([part, part[:0]], [part.clone(), part[:4]])

    with p2p_group(2) as everybody:
        in_threads(2, lambda rank: work(everybody[rank]))


def test_ranks_in_different_operations_are_told() -> None:
    def work(p2p: PointToPoint) -> None:
        transport = P2PTransport(p2p, range(2), SUBJECT)
        with pytest.raises(CollectiveMismatch, match="all ranks of a group must make the same calls"):
            transport.barrier() if p2p.rank else transport.all_reduce(torch.ones(3))

    with p2p_group(2) as everybody:
        in_threads(2, lambda rank: work(everybody[rank]))
