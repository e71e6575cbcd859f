"""Who waits at a data listener, and how long: strangers fill no queue, and push out nobody who has something to say."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farandole.base.machine import now_s
from farandole.base.membership import DataAddress, GenerationId
from farandole.base.wire.authentication import Introduction, ListenerHandshake, Purpose
from farandole.errors import GenerationEnded, ProtocolError
from farandole.testing.running_job import all_training
from farandole.training.collectives.data_listener import Caller, DataListener
from farandole.training.collectives.dialer import Dialer
from farandole.training.collectives.point_to_point import CHANNEL, Incoming
from farandole.training.collectives.ring_builder import Acceptor, RingBuilder
from farandole.training.worker.link import find_answering
from tests.support.jobs import ELASTIC_JOB, RunningJob
from tests.support.rings import CHALLENGE_BYTES, DEADLINE_S, KEY, build, hello, in_threads, listeners, make_start

GENERATION = GenerationId(1, 1, 1, "nonce of 1")
KEPT = 64


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = now_s() + DEADLINE_S
    while not condition():
        assert now_s() < deadline_s
        os.sched_yield()


def call(address: DataAddress, text: bytes = b"") -> socket.socket:
    sock = socket.create_connection((address.host, address.port), DEADLINE_S)
    sock.sendall(text)
    return sock


def look_in(address: DataAddress) -> None:
    """As port scanners and monitors do."""
    call(address).close()


def is_hung_up_on(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:  # before all was read that had been said
        return True


def introduction(dialer: str = "w1", channel: int = 0) -> bytes:
    return hello(Introduction(GENERATION, dialer, "w0", channel))


@contextlib.contextmanager
def listening() -> Iterator[DataListener]:
    listener = DataListener()
    try:
        yield listener
    finally:
        listener.close()


# Between builds ----------------------------------------------------------------------------------------------


def test_strangers_that_look_in_and_go_never_make_a_worker_look_unreachable() -> None:
    with listening() as listener:
        for _ in range(30):  # the queue has room for 1024
            for _ in range(100):
                look_in(listener.address)
            listener.tidy()
        assert not listener.callers
        assert find_answering({listener.address}, DEADLINE_S) == {listener.address}


def test_a_thread_that_holds_the_interpreter_for_long_is_looked_in_at_hundreds_of_times() -> None:
    with listening() as listener:
        for _ in range(1000):
            look_in(listener.address)
        assert find_answering({listener.address}, DEADLINE_S) == {listener.address}


def test_who_talks_something_else_or_has_gone_is_hung_up_on_and_of_the_others_the_newest_are_kept() -> None:
    with listening() as listener, contextlib.ExitStack() as sockets:
        early = sockets.enter_context(call(listener.address, introduction()[:20]))
        listener.tidy()
        assert len(listener.callers) == 1
        web = sockets.enter_context(call(listener.address, b"GET / HTTP/1.1\r\n\r\n"))
        good = [sockets.enter_context(call(listener.address, introduction())) for _ in range(KEPT)]
        for _ in range(KEPT):
            look_in(listener.address)
        listener.tidy()
        assert [caller.sock.getpeername() for caller in listener.callers] == [each.getsockname() for each in good]
        assert is_hung_up_on(web)
        assert is_hung_up_on(early)
        good.pop().close()
        good.pop().sendall(b"more than an introduction" * 100)
        listener.tidy()
        # It cannot be seen yet that the first of the two has gone: what it said has not been read.
        assert len(listener.callers) == KEPT - 1


def test_a_peer_that_was_taken_in_before_anybody_built_is_found_by_the_build() -> None:
    with listeners(2) as opened:
        addresses = [listener.address for listener in opened]
        early = RingBuilder(opened[0], make_start(0, addresses), "w0", DEADLINE_S)
        built = []
        thread = threading.Thread(target=lambda: built.append(early.build()))
        thread.start()

        def is_taken_in() -> bool:
            opened[1].tidy()
            return bool(opened[1].callers)

        wait_until(is_taken_in)
        (caller,) = opened[1].callers
        late = RingBuilder(opened[1], make_start(1, addresses), "w1", DEADLINE_S).build()
        thread.join(DEADLINE_S)
        in_threads(2, lambda rank: (built[0], late)[rank].barrier())
        assert caller.is_answered, "it was not made to dial again"
        for each in (*built, late):
            each.close()


def test_rings_are_built_while_their_listeners_are_tidied_all_the_time() -> None:
    with listeners(3) as opened:
        has_ended = threading.Event()

        def tidy() -> None:
            while not has_ended.is_set():
                for listener in opened:
                    listener.tidy()

        thread = threading.Thread(target=tidy)
        thread.start()
        try:
            for number in range(1, 31):
                look_in(opened[0].address)
                world = build(opened, number)
                world.run(lambda transport: transport.barrier())
                for transport in world.transports:
                    transport.close()
        finally:
            has_ended.set()
            thread.join(DEADLINE_S)


def test_a_listener_that_is_closed_is_tidied_in_vain() -> None:
    with listening() as listener:
        look_in(listener.address)
    listener.tidy()
    assert not listener.callers


class Sockets:
    """What the kernel tells of this machine's TCP sockets."""

    def __init__(self) -> None:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        self.listening = {row[9]: int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
        self.connected = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "01"}
        self.queues = {int(row[1].rpartition(":")[2], 16): int(row[4][9:], 16) for row in rows if row[3] == "0A"}

    def of(self, pid: int) -> set[int]:
        """The ports at which this process listens, and has been called."""
        ports = set()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                name = os.readlink(link)
                if name.startswith("socket:["):
                    ports.add(self.listening.get(name[8:-1], 0))
        return ports & self.connected


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no /proc")
def test_in_a_job_that_trains_the_queue_of_who_looked_in_is_emptied(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    words = ["--epochs", "1000000", "--stop", str(stop)]
    with RunningJob(["-np", "2"], ELASTIC_JOB, words, tmp_path, tmp_path / "output") as running:
        latest = running.wait_until(all_training(2), 60)
        (port,) = Sockets().of(latest[0]["pid"])
        for _ in range(300):
            look_in(DataAddress("127.0.0.1", port))
        wait_until(lambda: not Sockets().queues[port])
        stop.touch()
        assert running.wait(60) == 0


# Who was answered and proves nothing --------------------------------------------------------------------------


@contextlib.contextmanager
def p2p_for(listener: DataListener, dialers: int) -> Iterator[None]:
    """Connections of as many dialers are taken in."""
    ranks = {f"w{rank}": rank for rank in range(dialers)}
    incoming = Incoming(listener, GENERATION, "w0", ranks, KEY, lambda _message: None, lambda _rank: None)
    thread = threading.Thread(target=incoming.serve)
    thread.start()
    try:
        yield
    finally:
        incoming.stop()
        thread.join(DEADLINE_S)


@contextlib.contextmanager
def build_of(listener: DataListener) -> Iterator[None]:
    """w0 waits for its neighbours, which do not come."""
    with listening() as deaf:
        builder = RingBuilder(listener, make_start(0, [listener.address, deaf.address]), "w0", DEADLINE_S)

        def wait() -> None:
            with contextlib.suppress(GenerationEnded):
                builder.build()

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            yield
        finally:
            builder.abort("the test is over")
            thread.join(DEADLINE_S)


def waiting_at(kind: str, listener: DataListener) -> contextlib.AbstractContextManager[None]:
    return p2p_for(listener, 2) if kind == "p2p" else build_of(listener)


def channel_of(kind: str) -> int:
    return CHANNEL if kind == "p2p" else 0


@pytest.mark.parametrize("kind", ["p2p", "ring"])
def test_of_callers_that_were_answered_only_the_newest_are_kept(kind: str) -> None:
    with listening() as listener, waiting_at(kind, listener), contextlib.ExitStack() as sockets:
        for _ in range(3 * KEPT):
            last = sockets.enter_context(call(listener.address, introduction(channel=channel_of(kind))))
            assert len(last.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        wait_until(lambda: len(listener.callers) <= KEPT)
        assert listener.callers[-1].sock.getpeername() == last.getsockname()


@pytest.mark.parametrize("kind", ["p2p", "ring"])
def test_who_was_answered_and_does_not_go_on_is_hung_up_on_after_5_s(kind: str) -> None:
    with (
        listening() as listener,
        waiting_at(kind, listener),
        call(listener.address, introduction(channel=channel_of(kind))) as sock,
    ):
        assert len(sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
        (caller,) = listener.callers
        caller.answered_s -= 5.1
        sock.settimeout(DEADLINE_S)
        assert is_hung_up_on(sock)


def test_who_was_answered_is_pushed_out_by_nobody_that_was_not_and_a_proof_that_has_come_is_never_too_late() -> None:
    with listening() as listener, contextlib.ExitStack() as sockets:
        peer = sockets.enter_context(call(listener.address, introduction()))
        listener.tidy()
        (caller,) = listener.callers
        caller.receive()
        caller.answer(KEY)
        for _ in range(2 * KEPT):
            sockets.enter_context(call(listener.address, introduction()))
        while listener.accept() is not None:
            pass
        assert listener.surplus() == listener.callers[1 : 1 + KEPT]
        assert listener.surplus(dialers=2 * KEPT) == []
        caller.answered_s -= 5.1
        assert listener.surplus(dialers=2 * KEPT) == [caller]
        peer.sendall(b"a part of a proof")
        assert listener.surplus(dialers=2 * KEPT) == []


def test_a_dialer_that_was_given_up_while_it_could_not_run_dials_again() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        selectors.DefaultSelector() as selector,
        contextlib.closing(
            Dialer(selector, DataAddress(*server.getsockname()), Introduction(GENERATION, "w0", "w1"), KEY)
        ) as dialer,
    ):
        assert dialer.run(DEADLINE_S)
        with server.accept()[0] as sock:
            listener = ListenerHandshake(Purpose.DATA)
            while listener.subject is None:
                listener.feed(sock.recv(listener.missing))
            sock.sendall(listener.challenge(KEY))
        assert dialer.run(DEADLINE_S)
        assert not dialer.is_done
        assert dialer.failure.endswith(" (the other side closed the connection)")
        assert dialer.retry_at_s is not None


def test_an_error_in_a_connection_that_is_in_use_is_not_lost_in_its_release() -> None:
    class Reading(Acceptor):
        """Reads at once what has come behind the proof, as messages may."""

        def _use(self, caller: Caller, proof: bytes) -> None:
            super()._use(caller, proof)
            raise ProtocolError("a message is too long")

    introduction = Introduction(GENERATION, "w0", "w1")
    with (
        contextlib.closing(DataListener()) as listener,
        selectors.DefaultSelector() as selector,
        contextlib.closing(Dialer(selector, listener.address, introduction, KEY)) as dialer,
        contextlib.closing(Reading(selector, listener, introduction, KEY)),
    ):

        def connect() -> None:
            deadline_s = time.monotonic() + DEADLINE_S
            while time.monotonic() < deadline_s:
                dialer.run(0.01)

        with pytest.raises(ProtocolError, match="a message is too long"):
            connect()


# Several addresses --------------------------------------------------------------------------------------------


def test_of_several_addresses_the_one_that_answers_is_found_and_tried_first_from_then_on() -> None:
    """Nothing answers at the first one, nobody listens at the second one; the third is of IPv6."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(contextlib.closing(DataListener("127.0.0.1", "::1", "203.0.113.1")))
        assert listener.address.hosts == ("127.0.0.1", "::1"), "where it cannot listen is left out"
        full = sockets.enter_context(socket.create_server(("127.0.0.2", listener.address.port), backlog=0))
        for _ in range(3):  # the kernel drops what comes
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        hosts = ("127.0.0.2", "127.0.0.3", "::1")
        address = DataAddress(hosts[0], listener.address.port, hosts[1:])
        tried, again = connect(listener, address), connect(listener, address)
    assert [host in tried for host in hosts] == [True, True, True]
    assert [host in again for host in hosts] == [False, False, True]


def connect(listener: DataListener, address: DataAddress) -> str:
    """Connect w0 to w1, at the listener, and return the addresses that were tried."""
    introduction = Introduction(GENERATION, "w0", "w1")
    began_s = time.monotonic()
    with (
        selectors.DefaultSelector() as selector,
        contextlib.closing(Dialer(selector, address, introduction, KEY, address)) as dialer,
        contextlib.closing(Acceptor(selector, listener, introduction, KEY)) as acceptor,
    ):
        while not (dialer.is_done and acceptor.is_done):
            assert time.monotonic() < began_s + DEADLINE_S, dialer.failure
            dialer.run(0.01)
        for end in (dialer, acceptor):
            end.take().close()
        return dialer.failure


# Idle connections ---------------------------------------------------------------------------------------------


def test_the_connections_of_a_ring_are_kept_alive_while_they_are_idle() -> None:
    with listeners(2) as opened:
        world = build(opened)
        for transport in world.transports:
            pair = transport._connections  # type: ignore[attr-defined]
            for sock in (pair._to_next, pair._from_previous):
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
                    if hasattr(socket, name):
                        assert sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value
                if hasattr(socket, "TCP_USER_TIMEOUT"):
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
            transport.close()
