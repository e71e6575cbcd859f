"""Each counted message of a session is handled once and in its order, over one connection after the other."""

from __future__ import annotations

import pickle
import random
from collections import deque

import pytest

from farandole.base.wire.message_log import MessageLog, is_counted
from farandole.base.wire.messages import CoordinatorHeartbeat, Kill, WorkerExited, WorkerPrinted
from farandole.errors import ProtocolError


def log_of(*messages: str) -> MessageLog[str]:
    log = MessageLog[str]()
    for message in messages:
        log.keep(message)
    return log


def test_messages_are_kept_until_they_are_confirmed() -> None:
    log = log_of("a", "b", "c")
    log.confirm(2)
    assert log.sent == 3
    assert log.after(2) == ("c",)
    log.confirm(3)
    assert log.after(3) == ()


def test_a_confirmation_that_comes_again_or_late_changes_nothing() -> None:
    log = log_of("a", "b")
    log.confirm(2)
    log.confirm(1)
    assert (log.sent, log.after(2)) == (2, ())


def test_more_than_was_sent_cannot_be_confirmed() -> None:
    log = log_of("a", "b")
    with pytest.raises(ProtocolError, match="3 messages were confirmed, 2 were sent"):
        log.confirm(3)
    assert log.after(0) == ("a", "b")


@pytest.mark.parametrize("count", [0, 4])
def test_messages_that_are_not_kept_cannot_be_sent_again(count: int) -> None:
    log = log_of("a", "b", "c")
    log.confirm(1)
    with pytest.raises(ProtocolError, match=f"messages after {count} were requested, 1 to 3 are kept"):
        log.after(count)


def test_a_log_survives_in_a_journal() -> None:
    log = log_of("a", "b")
    log.confirm(1)
    log.handled = 7
    again = pickle.loads(pickle.dumps(log))
    assert (again.handled, again.sent, again.after(1)) == (7, 2, ("b",))


def test_orders_and_what_cannot_be_observed_again_are_counted_and_reports_that_are_replaced_are_not() -> None:
    assert is_counted(Kill("w0", 0.0, "a test"))
    assert is_counted(WorkerExited("w0", 1, (), "", 1))
    assert not is_counted(CoordinatorHeartbeat(1, 1))
    assert not is_counted(WorkerPrinted("w0", "stdout", ()))


@pytest.mark.parametrize("seed", range(20))
def test_over_connections_that_break_and_a_receiver_that_dies_all_arrives_once_and_in_order(seed: int) -> None:
    """The receiver confirms only what its journal holds, and what the journal does not hold is handled again by the
    next receiver: the state that counts is that of the journal."""
    drawn = random.Random(seed)
    sender, wire = MessageLog[int](), deque[int]()
    journal: list[int] = []
    handled: list[int] = []
    for number in range(200):
        sender.keep(number)
        wire.append(number)
        match drawn.choice(["deliver", "deliver", "write", "confirm", "break", "die"]):
            case "deliver":
                while wire and drawn.random() < 0.9:
                    handled.append(wire.popleft())
            case "write":
                journal = [*handled]
            case "confirm":
                sender.confirm(len(journal))
            case "break" | "die" as how:
                if how == "die":
                    handled = [*journal]
                wire = deque(sender.after(len(handled)))
    handled += wire
    assert handled == list(range(200))
