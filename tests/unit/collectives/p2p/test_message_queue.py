"""Which message goes to whom."""

from __future__ import annotations

from farandole.training.collectives.point_to_point import MessageQueue, P2PMessage


def message(source: int, subject: bytes, content: bytes = b"") -> P2PMessage:
    return P2PMessage(source, subject, bytearray(content))


def test_a_letter_that_came_before_it_was_asked_for_is_kept() -> None:
    messages = MessageQueue()
    messages.deliver(message(1, b"a", b"text"))
    expected = messages.expect(1, b"a")
    assert expected.message == message(1, b"a", b"text")
    assert messages.expect(1, b"a").message is None


def test_letters_of_one_sender_and_subject_keep_their_order_on_both_sides() -> None:
    messages = MessageQueue()
    waiting = [messages.expect(1, b"a") for _ in range(2)]
    for content in (b"1", b"2", b"3", b"4"):
        messages.deliver(message(1, b"a", content))
    late = [messages.expect(1, b"a") for _ in range(2)]
    assert [each.message.content for each in (*waiting, *late) if each.message] == [b"1", b"2", b"3", b"4"]


def test_other_senders_and_subjects_do_not_match() -> None:
    messages = MessageQueue()
    expected = messages.expect(1, b"a")
    messages.deliver(message(2, b"a"))
    messages.deliver(message(1, b"b"))
    assert expected.message is None
    messages.deliver(message(1, b"a"))
    assert expected.message == message(1, b"a")
    assert messages.expect(2, b"a").message == message(2, b"a")
    assert messages.expect(1, b"b").message == message(1, b"b")


def test_whoever_takes_a_letter_from_anybody_takes_the_first_one() -> None:
    messages = MessageQueue()
    messages.deliver(message(2, b"a"))
    messages.deliver(message(1, b"a"))
    assert messages.expect(None, b"a").message == message(2, b"a")
    assert messages.expect(None, b"a").message == message(1, b"a")
    anybody, one = messages.expect(None, b"a"), messages.expect(3, b"a")
    messages.deliver(message(3, b"a"))
    assert (anybody.message, one.message) == (message(3, b"a"), None)
