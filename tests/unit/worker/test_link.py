"""A worker's link, without an agent's process: the other end of its connection is in the test's hands."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from farandole.base.env import WorkerEnv
from farandole.base.machine import now_s
from farandole.base.membership import DataAddress, GenerationId, Peer, Placement, Progress
from farandole.base.wire import frames
from farandole.base.wire.link_messages import (
    Abort,
    Hello,
    Leaving,
    Left,
    MayPublish,
    Newcomer,
    Prepare,
    Probe,
    PublishAnswer,
    Released,
    Start,
    Stop,
    ToWorker,
    WorkerMessage,
)
from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.errors import JobEnded
from farandole.training.worker.link import Link
from farandole.training.worker.worker_recovery import AbortRegistry

DEADLINE_S = 10.0


class Aborts(AbortRegistry):
    """Records what is aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[int | None, str]] = []

    def abort_below(self, number: int, reason: str) -> None:
        self.called.append((number, reason))

    def abort_all(self, reason: str) -> None:
        self.called.append((None, reason))


class Agent:
    """The other end of the connection of one link."""

    def __init__(self) -> None:
        name = f"farandole-test-{os.getpid()}-{id(self)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{name}")
        listener.listen()
        self.aborts = Aborts()
        env = WorkerEnv(f"@{name}", "w1", "secret", 0, "127.0.0.1")
        self.link = Link(env, self.aborts)
        self._connection, _ = listener.accept()
        listener.close()
        self._connection.settimeout(DEADLINE_S)
        self._frames = frames.FrameBuffer(frames.WORKER_FRAME_LIMIT)
        self._received: list[WorkerMessage] = []
        self._looks = threading.Semaphore(0)
        self.link.on_look = self._looks.release
        self.link.open(env, DataAddress("127.0.0.1", 7))

    def sends(self, *messages: ToWorker) -> None:
        self._connection.sendall(b"".join(frames.frame(frames.encode(message)) for message in messages))

    def says(self, *messages: ToWorker) -> None:
        """Send messages, and wait until the link has obeyed them."""
        self.sends(*messages)
        probed = threading.Event()
        self.link.on_probe = lambda number: probed.set() if number == -1 else None
        self._connection.sendall(frames.frame(frames.encode(Probe(-1))))
        assert probed.wait(DEADLINE_S)

    def hears(self) -> WorkerMessage:
        while not self._received:
            for payload in self._frames.feed(self._connection.recv(1 << 16)):
                self._received.append(frames.decode(frames.WORKER_MESSAGES, payload))
        return self._received.pop(0)

    def close(self) -> None:
        self.link.close()
        self._connection.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


def start(number: int) -> Start:
    peer = Peer("w1", 0, DataAddress("127.0.0.1", 7))
    return Start(GenerationId(1, 1, number, "nonce"), Placement(0, 1, 0, 1, 0, 1), peer, peer, bootstrap=False)


def waiting(function: Callable[[], Any]) -> Callable[[], Any]:
    """Call it in a thread; the result is a function that waits for its value, or raises its error."""
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # noqa: BLE001 - for the test
            outcome.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(DEADLINE_S)
        assert outcome, "it still waits"
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    return result


def test_it_says_who_it_is(agent: Agent) -> None:
    assert agent.hears() == Hello("w1", "secret", os.getpid(), PROTOCOL_VERSION, DataAddress("127.0.0.1", 7))


def test_an_agent_that_does_not_answer_is_named() -> None:
    env = WorkerEnv("@farandole-test-nobody", "w1", "secret", 0, "127.0.0.1")
    with pytest.raises(JobEnded, match="does not answer at @farandole-test-nobody"):
        Link(env, Aborts())


# Orders --------------------------------------------------------------------------------------------------------------


def test_an_abort_ends_what_belongs_to_older_generations(agent: Agent) -> None:
    agent.says(Abort(2, "w3 is lost"))
    assert (agent.link.ordered, agent.aborts.called) == (2, [(2, "w3 is lost")])
    assert agent.link.aborted_s > 0


def test_what_has_come_is_obeyed_before_the_main_thread_goes_on(agent: Agent) -> None:
    for number in range(1, 300):
        agent.sends(Abort(number, "w3 is lost"))
        agent.link.catch_up()
        assert agent.link.ordered == number


def test_a_callback_that_takes_long_does_not_keep_the_main_thread(agent: Agent) -> None:
    may_end = threading.Event()
    agent.link.on_prepare = lambda _: may_end.wait(DEADLINE_S)
    agent.sends(Prepare(2, "more hosts"))
    began_s = now_s()
    agent.link.catch_up()
    assert now_s() - began_s < DEADLINE_S / 2
    may_end.set()


def test_an_abort_that_a_newer_one_has_overtaken_changes_nothing(agent: Agent) -> None:
    agent.says(Abort(3, "first"), Abort(3, "again"), Abort(2, "late"))
    assert (agent.link.ordered, agent.aborts.called) == (3, [(3, "first")])


def test_a_planned_change_is_known_until_an_abort_or_a_start_overtakes_it(agent: Agent) -> None:
    told: list[int] = []
    agent.link.on_prepare = lambda prepare: told.append(prepare.number)
    agent.says(Prepare(2, "more hosts"))
    assert (agent.link.prepared, told) == (2, [2])
    agent.says(Abort(2, "w3 is lost"))
    assert agent.link.prepared == 0
    agent.says(Prepare(2, "late"))
    assert (agent.link.prepared, told) == (0, [2])
    agent.says(Prepare(3, "more hosts"))
    assert (agent.link.prepared, told) == (3, [2, 3])
    agent.says(start(3))
    assert agent.link.prepared == 0


def test_a_probe_is_passed_on(agent: Agent) -> None:
    probed = threading.Event()
    agent.says()
    agent.link.on_probe = lambda number: probed.set() if number == 4 else None
    agent._connection.sendall(frames.frame(frames.encode(Probe(4))))
    assert probed.wait(DEADLINE_S)


def test_it_looks_around_while_nothing_is_said(agent: Agent) -> None:
    agent.link.look_every_s = 0.001
    agent.says()
    for _ in range(5):
        assert agent._looks.acquire(timeout=DEADLINE_S)


# Waiting -------------------------------------------------------------------------------------------------------------


def test_a_start_is_waited_for_and_taken_once(agent: Agent) -> None:
    found = waiting(lambda: agent.link.wait_for_start(above=0))
    agent.says(start(1))
    assert found() == start(1)
    again = waiting(lambda: agent.link.wait_for_start(above=0))
    agent.says(Abort(2, "w3 is lost"))
    assert again() == 2


def test_a_start_that_an_abort_has_overtaken_is_no_answer(agent: Agent) -> None:
    agent.says(start(2), Abort(3, "w3 is lost"))
    assert agent.link.wait_for_start(above=2) == 3
    agent.says(start(3))
    assert agent.link.wait_for_start(above=3) == start(3)


def test_a_start_of_the_generation_that_an_abort_has_asked_for_counts(agent: Agent) -> None:
    agent.says(Abort(3, "w3 is lost"), start(3))
    assert agent.link.wait_for_start(above=2) == start(3)


def test_an_abort_that_is_known_already_is_not_waited_for(agent: Agent) -> None:
    agent.says(Abort(3, "w3 is lost"))
    found = waiting(lambda: agent.link.wait_for_start(above=3))
    agent.says(start(3))
    assert found() == start(3)
    assert agent.link.wait_for_abort(above=2) == 3
    later = waiting(lambda: agent.link.wait_for_abort(above=3))
    agent.says(Abort(4, "w4 is lost"))
    assert later() == 4


def test_the_first_start_admits_a_worker_of_the_beginning(agent: Agent) -> None:
    found = waiting(agent.link.wait_for_admission)
    agent.says(start(1))
    assert found() == start(1)
    assert not agent.link.is_newcomer


def test_a_newcomer_is_admitted_later_and_knows_how_many_members_there_are(agent: Agent) -> None:
    found = waiting(agent.link.wait_for_admission)
    agent.says(Newcomer(members=3))
    assert found() is None
    assert (agent.link.is_newcomer, agent.link.members) == (True, 3)


def test_the_release_of_a_generation_ends_its_barrier_and_an_abort_breaks_it(agent: Agent) -> None:
    agent.says(Abort(2, "w3 is lost"))
    found = waiting(lambda: agent.link.wait_for_release(2))
    agent.says(Released(1))
    agent.says(Released(2))
    assert found() is True
    broken = waiting(lambda: agent.link.wait_for_release(3))
    agent.says(Abort(4, "w4 is lost"))
    assert broken() is False


def test_a_release_counts_though_the_job_ends_right_after_it(agent: Agent) -> None:
    agent.says(Released(2), Stop("all is done"))
    assert agent.link.wait_for_release(2) is True
    with pytest.raises(JobEnded, match="all is done"):
        agent.link.wait_for_release(3)


# Checkpoints ---------------------------------------------------------------------------------------------------------


def ask(agent: Agent, name: str) -> Callable[[], Any]:
    return waiting(lambda: agent.link.may_publish(MayPublish(name, Progress()), DEADLINE_S))


def test_the_answer_about_a_checkpoint_is_that_for_its_name(agent: Agent) -> None:
    assert isinstance(agent.hears(), Hello)
    first, second = ask(agent, "a"), ask(agent, "b")
    assert {agent.hears(), agent.hears()} == {MayPublish("a", Progress()), MayPublish("b", Progress())}
    agent.says(PublishAnswer("b", "older than the newest"))
    assert second() == "older than the newest"
    agent.says(PublishAnswer("a", ""))
    assert first() == ""
    assert "did not answer within 0 s" in agent.link.may_publish(MayPublish("a", Progress()), 0.0), "it was taken"


def test_at_the_end_of_the_job_only_the_emergency_writer_waits_for_an_answer(agent: Agent) -> None:
    agent.says(Stop("too few workers"))
    assert agent.link.may_publish(MayPublish("a", Progress()), DEADLINE_S) == "the job is over for this worker"
    agent.says(Stop("too few workers", saves=True))
    answer = ask(agent, "a")
    agent.says(PublishAnswer("a", ""))
    assert answer() == ""


# The end -------------------------------------------------------------------------------------------------------------


def test_a_stop_ends_every_wait_and_every_collective(agent: Agent) -> None:
    waits = [
        waiting(lambda: agent.link.wait_for_start(above=0)),
        waiting(agent.link.wait_for_admission),
        waiting(lambda: agent.link.wait_for_abort(above=0)),
        waiting(lambda: agent.link.wait_for_release(1)),
    ]
    assert not agent.link.is_over
    agent.link.raise_if_over()
    agent.says(Stop("too few workers", saves=True))
    for each in waits:
        with pytest.raises(JobEnded, match="too few workers"):
            each()
    assert agent.link.is_over
    assert agent.link.is_emergency_writer
    assert agent.aborts.called == [(None, "too few workers")]


def test_sigterm_asks_to_leave_and_a_worker_that_has_left_ends_with_code_0(agent: Agent) -> None:
    assert isinstance(agent.hears(), Hello)
    agent.link.ask_to_leave()
    assert agent.hears() == Leaving()
    agent.says(Left())
    assert agent.link.is_over
    with pytest.raises(SystemExit) as ended:
        agent.link.raise_if_over()
    assert ended.value.code == 0


def test_what_is_sent_after_the_end_of_the_connection_raises_nothing_and_close_may_be_repeated(agent: Agent) -> None:
    agent.says(Left())
    agent.link.close()
    agent.link.close()
    agent.link.send(Leaving())
