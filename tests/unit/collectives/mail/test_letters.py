"""Which letter goes to whom."""

from __future__ import annotations

from farandole.collectives.mail.letters import Letter, Letters


def letter(source: int, subject: bytes, content: bytes = b"") -> Letter:
    return Letter(source, subject, bytearray(content))


def test_a_letter_that_came_before_it_was_asked_for_is_kept() -> None:
    letters = Letters()
    letters.deliver(letter(1, b"a", b"text"))
    expected = letters.expect(1, b"a")
    assert expected.letter == letter(1, b"a", b"text")
    assert letters.expect(1, b"a").letter is None


def test_letters_of_one_sender_and_subject_keep_their_order_on_both_sides() -> None:
    letters = Letters()
    waiting = [letters.expect(1, b"a") for _ in range(2)]
    for content in (b"1", b"2", b"3", b"4"):
        letters.deliver(letter(1, b"a", content))
    late = [letters.expect(1, b"a") for _ in range(2)]
    assert [each.letter.content for each in (*waiting, *late) if each.letter] == [b"1", b"2", b"3", b"4"]


def test_other_senders_and_subjects_do_not_match() -> None:
    letters = Letters()
    expected = letters.expect(1, b"a")
    letters.deliver(letter(2, b"a"))
    letters.deliver(letter(1, b"b"))
    assert expected.letter is None
    letters.deliver(letter(1, b"a"))
    assert expected.letter == letter(1, b"a")
    assert letters.expect(2, b"a").letter == letter(2, b"a")
    assert letters.expect(1, b"b").letter == letter(1, b"b")


def test_whoever_takes_a_letter_from_anybody_takes_the_first_one() -> None:
    letters = Letters()
    letters.deliver(letter(2, b"a"))
    letters.deliver(letter(1, b"a"))
    assert letters.expect(None, b"a").letter == letter(2, b"a")
    assert letters.expect(None, b"a").letter == letter(1, b"a")
    anybody, one = letters.expect(None, b"a"), letters.expect(3, b"a")
    letters.deliver(letter(3, b"a"))
    assert (anybody.letter, one.letter) == (letter(3, b"a"), None)
