"""From START to a ring: who is let in, who is not, and that nobody is held up or forgotten."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import statistics
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pytest
import torch

from farandole.base.membership import GenerationId
from farandole.base.wire.authentication import Introduction
from farandole.errors import GenerationEnded, PeerLost, ProtocolError
from farandole.training.collectives.data_listener import DataListener
from farandole.training.collectives.ring_builder import RingBuilder
from farandole.training.collectives.transport import Transport
from tests.support.rings import DEADLINE_S, build, hello, in_threads, listeners, make_start, outcomes_in_threads

SHORT_S = 0.3


def start_build(pool: ThreadPoolExecutor, builder: RingBuilder) -> Future[Transport]:
    return pool.submit(builder.build)


def test_a_world_of_one_needs_neither_key_nor_connection() -> None:
    with listeners(1) as opened:
        start = make_start(0, [opened[0].address], key=b"")
        transport = RingBuilder(opened[0], start, "w0", DEADLINE_S).build()
        assert (transport.rank, transport.size) == (0, 1)


def test_a_start_without_a_key_is_refused() -> None:
    with listeners(2) as opened:
        start = make_start(0, [listener.address for listener in opened], key=b"")
        with pytest.raises(ProtocolError, match="no data key"):
            RingBuilder(opened[0], start, "w0", DEADLINE_S).build()


@pytest.mark.parametrize("change", ["key", "number", "nonce", "name"])
def test_a_neighbour_that_cannot_prove_this_generation_is_refused(change: str) -> None:
    hints: list[tuple[str, str, str]] = []
    with listeners(2) as opened:
        addresses = [listener.address for listener in opened]
        good, other = make_start(0, addresses), make_start(1, addresses)
        if change == "key":
            other = make_start(1, addresses, key=b"x" * 32)
        elif change == "number":
            other = make_start(1, addresses, number=2)
        elif change == "nonce":
            other = msgspec.structs.replace(other, id=GenerationId(1, 1, 1, "of another coordinator"))

        def connect(rank: int) -> Transport:
            if rank == 0:
                return RingBuilder(opened[0], good, "w0", SHORT_S, lambda *hint: hints.append(hint)).build()
            worker = "w9" if change == "name" else "w1"
            return RingBuilder(opened[1], other, worker, SHORT_S).build()

        outcomes = outcomes_in_threads(2, connect)
    assert [type(outcome) for outcome in outcomes] == [PeerLost, PeerLost]
    assert (outcomes[0].op, outcomes[0].generation, outcomes[0].rank) == ("connect", 1, 1)  # type: ignore[union-attr]
    assert [(peer, direction) for peer, direction, _ in hints] == [("w1", "connect")]


def test_a_peer_that_is_gone_is_named_with_the_reason() -> None:
    with listeners(2) as opened:
        start = make_start(0, [listener.address for listener in opened])
        opened[1].close()
        with pytest.raises(PeerLost, match=r"w1 at 127\.0\.0\.1:\d+ \(Connection refused\) within 0\.3 s"):
            RingBuilder(opened[0], start, "w0", SHORT_S).build()


def test_strangers_on_the_data_port_hold_nobody_up() -> None:
    """Garbage, half an introduction, and more silent connections than are kept."""
    with listeners(2) as opened:
        greeting = hello(Introduction(GenerationId(1, 1, 1, "guessed"), "w1", "w0"))
        door = (opened[0].address.host, opened[0].address.port)
        strangers = [socket.create_connection(door) for _ in range(100)]
        for stranger, text in zip(
            strangers, [b"GET / HTTP/1.1\r\n\r\n", greeting[:20], greeting, os.urandom(5000)], strict=False
        ):
            stranger.send(text)
        began_s = time.monotonic()
        world = build(opened)
        print(f"built among strangers in {(time.monotonic() - began_s) * 1e3:.1f} ms")
        world.run(lambda transport: transport.barrier())
        assert len(opened[0].callers) <= 64
        for each in [*strangers, *world.transports]:
            each.close()


def test_a_peer_that_heard_of_the_next_generation_first_is_not_forgotten() -> None:
    """w0 dials for generation 2 while w1 still waits for the ring of generation 1."""
    with listeners(2) as opened, ThreadPoolExecutor() as pool:
        addresses = [listener.address for listener in opened]
        old = RingBuilder(opened[1], make_start(1, addresses, number=1), "w1", DEADLINE_S)
        old_build = start_build(pool, old)
        new_build = start_build(pool, RingBuilder(opened[0], make_start(0, addresses, number=2), "w0", DEADLINE_S))
        deadline_s = time.monotonic() + DEADLINE_S
        while not any(caller.introduction for caller in opened[1].callers):
            assert time.monotonic() < deadline_s
        old.abort("replaced by generation 2")
        with pytest.raises(GenerationEnded, match="replaced"):
            old_build.result(DEADLINE_S)
        began_s = time.monotonic()
        transport = RingBuilder(opened[1], make_start(1, addresses, number=2), "w1", DEADLINE_S).build()
        print(f"ring of the next generation after {(time.monotonic() - began_s) * 1e3:.1f} ms")
        transports = [new_build.result(DEADLINE_S), transport]
        in_threads(2, lambda rank: transports[rank].barrier())
        for each in transports:
            each.close()


def test_connections_of_aborted_builds_do_not_disturb_the_next() -> None:
    with listeners(3) as opened:
        addresses = [listener.address for listener in opened]
        for number in range(1, 20):
            builder = RingBuilder(opened[0], make_start(0, addresses, number), "w0", DEADLINE_S)
            with ThreadPoolExecutor() as pool:
                doomed = start_build(pool, builder)
                builder.abort("a fault")
                with pytest.raises(GenerationEnded):
                    doomed.result(DEADLINE_S)
        world = build(opened, number=20)
        world.run(lambda transport: transport.barrier())
        for transport in world.transports:
            transport.close()


def test_an_abort_from_another_thread_ends_a_build_within_5_ms() -> None:
    taken_s = []
    with listeners(2) as opened:
        addresses = [listener.address for listener in opened]
        for number in range(1, 16):
            builder = RingBuilder(opened[0], make_start(0, addresses, number), "w0", DEADLINE_S)
            ended_s: list[float] = []
            entering = threading.Event()

            def doomed(builder: RingBuilder = builder, ended_s: list[float] = ended_s) -> None:
                entering.set()  # noqa: B023 - joined below, in the same round
                with pytest.raises(GenerationEnded, match="a fault"):
                    builder.build()
                ended_s.append(time.monotonic())

            thread = threading.Thread(target=doomed)
            thread.start()
            assert entering.wait(DEADLINE_S)
            aborted_s = time.monotonic()
            builder.abort("a fault")
            thread.join(DEADLINE_S)
            taken_s.append(ended_s[0] - aborted_s)
    print(f"abort of a build: median {statistics.median(taken_s) * 1e3:.2f} ms, worst {max(taken_s) * 1e3:.2f} ms")
    assert min(taken_s) <= 0.005  # no timer and no poll is in the way; under load, the others wait for a core


def test_an_abort_of_the_builder_reaches_the_transport_that_it_built() -> None:
    with listeners(2) as opened:
        addresses = [listener.address for listener in opened]
        builders = [RingBuilder(opened[rank], make_start(rank, addresses), f"w{rank}", DEADLINE_S) for rank in range(2)]
        transports = in_threads(2, lambda rank: builders[rank].build())
        builders[0].abort("a fault")
        with pytest.raises(GenerationEnded, match="a fault"):
            transports[0].barrier()
        for transport in transports:
            transport.close()


def test_what_check_raises_ends_a_build() -> None:
    class LinkIsGone(Exception):
        pass

    def check() -> None:
        raise LinkIsGone

    with listeners(2) as opened:
        start = make_start(0, [listener.address for listener in opened])
        with pytest.raises(LinkIsGone):
            RingBuilder(opened[0], start, "w0", DEADLINE_S, check=check).build()


def test_200_generations_leave_no_descriptor_behind() -> None:
    """Every other one is aborted at one rank while it is built."""
    with listeners(2) as opened:
        counts = []
        for number in range(1, 201):
            if number % 2:
                abort_while_building(opened, number)
            else:
                world = build(opened, number)
                world.run(lambda transport: transport.all_reduce(torch.ones(1)))
                for transport in world.transports:
                    transport.close()
                counts.append(len(os.listdir("/dev/fd")))
    assert counts[-1] <= counts[0] + 1, counts


def abort_while_building(opened: list[DataListener], number: int) -> None:
    addresses = [listener.address for listener in opened]
    builders = [
        RingBuilder(opened[rank], make_start(rank, addresses, number), f"w{rank}", DEADLINE_S) for rank in range(2)
    ]

    def run(rank: int) -> None:
        if rank == 2:
            for builder in builders:
                builder.abort("a fault")
        else:
            builders[rank].build().close()

    outcomes_in_threads(3, run)


def test_a_ring_that_has_failed_goes_with_its_last_reference() -> None:
    """And its sockets, if nobody has closed them: no collection has to come first."""
    with listeners(2) as opened:
        transports = build(opened).transports
        transports[0].close()
        with contextlib.suppress(PeerLost):
            transports[1].barrier()
        transports[1].close()
        failed = weakref.ref(transports[1])
        gc.disable()
        try:
            transports.clear()
            assert failed() is None
        finally:
            gc.enable()
