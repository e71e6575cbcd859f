"""Workers that try their neighbours anew: whom the kernel answers for, who does not answer, and when they try."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from farandole.base.machine import now_s
from farandole.base.membership import DataAddress, Peer
from farandole.base.wire.link_messages import Probed
from farandole.training.collectives.data_listener import DataListener
from farandole.training.worker.link import ATTEMPTS, Connections, LinkProbe, find_answering
from tests.support.waiting import DEADLINE_S


@contextlib.contextmanager
def listening() -> Iterator[DataAddress]:
    """Nobody ever accepts: the process is busy with something else."""
    listener = DataListener()
    try:
        yield listener.address
    finally:
        listener.close()


@contextlib.contextmanager
def dropping() -> Iterator[DataAddress]:
    """The kernel drops what comes, as on a link that is broken: the queue of those who wait is full."""
    with contextlib.ExitStack() as sockets:
        full = sockets.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(3):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield DataAddress(*full.getsockname())


def closed() -> DataAddress:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return DataAddress(*sock.getsockname())


def test_a_listener_that_nobody_looks_at_answers_and_so_does_a_kernel_without_one() -> None:
    with listening() as busy:
        here = {busy, closed()}
        assert find_answering(here, DEADLINE_S) == here


def test_where_packets_get_lost_nobody_answers_and_that_takes_as_long_as_was_said() -> None:
    with listening() as busy, dropping() as lost:
        begin = now_s()
        assert find_answering({busy, lost}, 0.2) == {busy}
        assert 0.2 <= now_s() - begin < DEADLINE_S


def test_an_answer_that_has_come_counts_also_when_there_is_no_time_left() -> None:
    with listening() as busy:
        assert find_answering({busy}, 0.0) == {busy}


def test_a_process_that_stalls_again_and_again_and_never_looks_at_its_queue_answers_always() -> None:
    with listening() as busy:
        for _ in range(2000):  # the queue has room for 1,024
            assert find_answering({busy}, DEADLINE_S) == {busy}


def test_nobody_to_ask_is_answered_at_once() -> None:
    assert find_answering(set(), DEADLINE_S) == set()
    assert ATTEMPTS >= 3  # more than one packet may be lost where nothing is broken


class Situation:
    """A link probe, what it is told of its worker's connections, and what it tells."""

    def __init__(self, budget_s: float, *addresses: DataAddress) -> None:
        self.peers = frozenset(Peer(f"w{index}", index, address) for index, address in enumerate(addresses))
        self.number = 7
        self.still_since_s: float | None = None
        self.told: queue.Queue[Probed] = queue.Queue()
        self.link_probe = LinkProbe(budget_s, self._connections, self.told.put)

    def _connections(self) -> Connections | None:
        return Connections(self.number, self.peers, self.still_since_s) if self.number else None

    def heard(self) -> Probed:
        return self.told.get(timeout=DEADLINE_S)

    def looks(self) -> bool:
        """Whether a look leads to a probe, which then is waited for."""
        if not self.link_probe.look():
            return False
        self.heard()
        return True


def test_after_half_a_budget_without_a_byte_the_neighbours_are_probed() -> None:
    with listening() as busy, dropping() as lost:
        situation = Situation(1.0, busy, lost)
        assert not situation.looks()
        situation.still_since_s = now_s()
        assert not situation.looks()
        situation.still_since_s -= 0.6
        situation.link_probe.look()
        assert situation.heard() == Probed(7, ("w0",), ("w1",))


def test_who_waits_on_is_probed_more_and_more_rarely_and_anew_after_a_byte() -> None:
    with listening() as busy:
        situation = Situation(1000.0, busy)
        situation.still_since_s = now_s() - 501.0
        assert situation.looks()
        assert not situation.looks()
        situation.still_since_s = now_s()
        assert not situation.looks()
        situation.still_since_s -= 501.0
        assert situation.looks()


@pytest.mark.parametrize(("number", "is_probed"), [(7, True), (6, False), (8, False)])
def test_when_it_is_asked_to_it_probes_at_once_if_the_generation_is_the_one(number: int, is_probed: bool) -> None:
    with listening() as busy:
        situation = Situation(1000.0, busy)
        situation.link_probe.probe(number)
        if is_probed:
            assert situation.heard() == Probed(7, ("w0",), ())
        assert situation.told.empty()


def test_between_generations_and_in_a_world_of_one_there_is_nobody_to_probe() -> None:
    situation = Situation(1.0)
    situation.link_probe.probe(7)
    situation.number = 0
    situation.link_probe.probe(7)
    assert not situation.looks()


def test_where_no_thread_can_be_started_the_next_look_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as busy:
        situation = Situation(1.0, busy)
        situation.still_since_s = now_s() - 1.0
        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", fail_to_start)
            situation.link_probe.probe(7)
            assert not situation.looks()
        assert situation.looks()


def fail_to_start(thread: threading.Thread) -> None:
    """As Python does where the system allows no more of them."""
    raise RuntimeError("can't start new thread")
