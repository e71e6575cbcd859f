"""Streams of bytes become lines, as a terminal would have shown them."""

from __future__ import annotations

from hypothesis import given, strategies as st

from farandole.job.agent.process import LONGEST_LINE_BYTES, REDRAW_S, LineSplitter

CHUNKS = st.lists(st.binary(max_size=20).map(lambda data: data.replace(b"\r", b"")))


def split(chunks: list[bytes], every_s: float = 0.0) -> list[bytes]:
    splitter = LineSplitter()
    lines = [line for index, chunk in enumerate(chunks) for line in splitter.feed(chunk, index * every_s)]
    return lines + splitter.end()


@given(CHUNKS)
def test_nothing_is_lost_or_changed_however_the_stream_is_cut(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    expected = whole.split(b"\n")
    assert split(chunks) == (expected if expected[-1] else expected[:-1])


@given(st.lists(st.binary(max_size=5)))
def test_carriage_returns_anywhere_neither_stall_nor_invent_anything(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    assert all(line in whole for line in split(chunks))


@given(st.integers(0, 12))
def test_lines_that_end_as_on_windows_come_without_their_ends(cut: int) -> None:
    whole = b"one\r\ntwo\r\nab"
    assert split([whole[:cut], whole[cut:]]) == [b"one", b"two", b"ab"]


def test_a_progress_bar_shows_at_once_then_every_few_seconds_and_when_it_is_complete() -> None:
    bars = [b"\r%d%%" % percent for percent in range(100)] + [b"\r100%\n"]
    assert split(bars, every_s=REDRAW_S / 20) == [b"0%", b"20%", b"40%", b"60%", b"80%", b"100%"]


def test_a_bar_that_is_wiped_out_leaves_no_empty_line() -> None:
    assert split([b"\r     \r", b"\r     \r", b"loss 0.3\n"]) == [b"loss 0.3"]


def test_a_line_without_an_end_is_handed_on_in_pieces_and_whole() -> None:
    data = b"x" * (3 * LONGEST_LINE_BYTES + 7)
    for lines in (split([data]), split([data + b"\n"])):
        assert b"".join(lines) == data
        assert max(map(len, lines)) == LONGEST_LINE_BYTES


def test_the_unfinished_line_can_be_asked_for_and_stays() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"last wor", 0.0) == []
    assert splitter.unfinished == b"last wor"
    assert splitter.feed(b"ds\n", 0.0) == [b"last words"]
    assert splitter.end() == []
