"""The two sockets of a rank, with the test holding their other ends."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from farandole.errors import CollectiveMismatch
from farandole.training.collectives import connection_pair
from farandole.training.collectives.connection_pair import Broken, ConnectionPair


class Neighbours:
    """The far ends: where the next rank would read, and where the previous one would write."""

    def __init__(self, may_spin: bool = False) -> None:
        to_next, self.next = socket.socketpair()
        from_previous, self.previous = socket.socketpair()
        self.pair = ConnectionPair(to_next, from_previous, None, may_spin)

    def close(self) -> None:
        self.pair.close()
        self.next.close()
        self.previous.close()


@pytest.fixture
def neighbours() -> Iterator[Neighbours]:
    made = Neighbours()
    yield made
    made.close()


def outgoing(*texts: bytes) -> deque[memoryview]:
    return deque(memoryview(text) for text in texts)


def wanting(buffer: bytearray) -> Iterator[memoryview]:
    return iter([memoryview(buffer)])


def test_bytes_go_to_the_next_and_come_from_the_previous(neighbours: Neighbours) -> None:
    received = bytearray(5)
    neighbours.previous.send(b"hello")
    out = outgoing(b"good ", b"", b"bye")
    assert neighbours.pair.move(out, wanting(received), is_done_when_received=True) is None
    assert (received, neighbours.next.recv(100)) == (b"hello", b"good bye")


def test_data_that_had_arrived_counts_although_both_neighbours_are_gone(neighbours: Neighbours) -> None:
    received = bytearray(5)
    neighbours.previous.send(b"hello")
    neighbours.previous.close()
    neighbours.next.close()
    broken = neighbours.pair.move(outgoing(b"bye"), wanting(received), is_done_when_received=True)
    assert broken is None
    assert received == b"hello"
    assert neighbours.pair.cannot_send


def test_data_that_had_arrived_counts_although_an_abort_came(neighbours: Neighbours) -> None:
    received = bytearray(5)
    neighbours.previous.send(b"hello")
    neighbours.pair.shut_down()
    broken = neighbours.pair.move(outgoing(b"bye"), wanting(received), is_done_when_received=True)
    assert broken is None
    assert received == b"hello"


def test_a_rank_whose_part_is_to_send_is_not_done_while_it_cannot(neighbours: Neighbours) -> None:
    neighbours.next.close()
    broken = neighbours.pair.move(outgoing(b"bye"), iter(()), is_done_when_received=False)
    assert broken is not None
    assert broken.direction == "send"


def test_a_previous_rank_that_stops_in_the_middle_is_a_failure(neighbours: Neighbours) -> None:
    neighbours.previous.send(b"hel")
    neighbours.previous.close()
    broken = neighbours.pair.move(outgoing(), wanting(bytearray(5)), is_done_when_received=True)
    assert broken == ("receive", "end of file")


def test_a_next_rank_that_leaves_while_there_is_more_to_send_is_a_failure(neighbours: Neighbours) -> None:
    """The previous rank is alive and silent, so nothing else would end the wait."""
    neighbours.next.close()
    much = bytes(10_000_000)
    broken = neighbours.pair.move(outgoing(much), wanting(bytearray(5)), is_done_when_received=True)
    assert broken is not None
    assert broken.direction == "send"


@pytest.mark.parametrize("has_previous_left", [False, True])
def test_the_next_ranks_last_word_is_passed_on(neighbours: Neighbours, has_previous_left: bool) -> None:
    neighbours.next.send(b"rank 3 is elsewhere")
    if has_previous_left:
        neighbours.previous.close()
    with pytest.raises(CollectiveMismatch, match="rank 3 is elsewhere"):
        neighbours.pair.move(outgoing(b"x"), wanting(bytearray(5)), is_done_when_received=True)


def test_a_word_reaches_the_previous_rank_even_when_everything_is_closed_at_once(
    neighbours: Neighbours,
) -> None:
    neighbours.pair.send_reason("rank 3 is elsewhere")
    neighbours.pair.close()
    assert neighbours.previous.recv(100) == b"rank 3 is elsewhere"


class Looks:
    """Counts how often a rank looks for bytes and finds none, and how often it sleeps. The bytes are sent when it has
    looked a thousand times, or is about to sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, neighbours: Neighbours) -> None:
        self.in_vain = self.sleeps = 0
        receive, wait = ConnectionPair._receive, ConnectionPair._wait

        def looked(pair: ConnectionPair, wanted: memoryview) -> int | str:
            received = receive(pair, wanted)
            self.in_vain += received == 0
            if self.in_vain == 1000:
                neighbours.previous.send(b"hello")
            return received

        def slept(pair: ConnectionPair, **what: bool) -> None:
            self.sleeps += 1
            neighbours.previous.send(b"hello")
            wait(pair, **what)

        monkeypatch.setattr(ConnectionPair, "_receive", looked)
        monkeypatch.setattr(ConnectionPair, "_wait", slept)


@pytest.mark.parametrize(("may_spin", "is_main", "sleeps"), [(True, True, 0), (True, False, 1), (False, True, 1)])
def test_who_may_spin_looks_before_it_sleeps(
    may_spin: bool, is_main: bool, sleeps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the main thread: any other would take the interpreter from it."""
    monkeypatch.setattr(connection_pair, "_SPINS", 10**9)
    neighbours = Neighbours(may_spin)
    looks = Looks(monkeypatch, neighbours)

    def receive() -> Broken | None:
        return neighbours.pair.move(outgoing(), wanting(bytearray(5)), is_done_when_received=True)

    with ThreadPoolExecutor(1) as pool:
        assert (receive() if is_main else pool.submit(receive).result()) is None
    assert looks.sleeps == sleeps
    neighbours.close()


def test_spinning_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, spinning := Neighbours(may_spin=True))
    assert spinning.pair.move(outgoing(), wanting(bytearray(5)), is_done_when_received=True) is None
    assert (looks.in_vain, looks.sleeps) == (connection_pair._SPINS + 1, 1)
    spinning.close()


def test_a_neighbour_that_goes_while_one_spins_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pair, "_SPINS", 10**9)
    neighbours = Neighbours(may_spin=True)
    threading.Timer(0.05, neighbours.previous.close).start()
    broken = neighbours.pair.move(outgoing(), wanting(bytearray(5)), is_done_when_received=True)
    assert broken == Broken("receive", "end of file")
    neighbours.close()
