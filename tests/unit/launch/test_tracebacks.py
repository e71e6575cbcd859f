"""A traceback that several workers print is shown once; no other line is lost, changed or put out of order."""

from __future__ import annotations

from hypothesis import given, strategies as st

from farandole.job.launch.tracebacks import HOLD_S, TracebackFolder

SIMPLE = b"""Traceback (most recent call last):
  File "train.py", line 3, in <module>
    train(state)
    ~~~~~^^^^^^^
ValueError: <Net object at 0x7f0012345678> is no good
""".splitlines()
CHAINED = b"""Traceback (most recent call last):
  File "train.py", line 3, in f
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in f
RuntimeError: gave up
""".splitlines()

# All that the folder looks at, in any order, with texts around it.
LINES = st.sampled_from(
    [*CHAINED, b"  [Previous line repeated 996 more times]", b"loss 0.3", b"", b"  indented", b"ValueError: y"]
)


def feed_all(folder: TracebackFolder, worker: str, label: str, lines: list[bytes]) -> list[bytes]:
    shown = [shown for line in lines for shown in folder.feed(worker, label, line, 0.0)]
    return shown + folder.release(worker, label)


@given(st.lists(LINES, max_size=60))
def test_the_lines_of_a_single_worker_stay_as_they_are(lines: list[bytes]) -> None:
    assert feed_all(TracebackFolder(), "w0", "[0]", lines) == lines


@given(st.lists(st.tuples(st.sampled_from(["w0", "w1", "w2"]), LINES), max_size=120))
def test_of_several_workers_only_tracebacks_are_replaced(said: list[tuple[str, bytes]]) -> None:
    folder = TracebackFolder()
    shown: dict[str, list[bytes]] = {worker: [] for worker in ("w0", "w1", "w2")}
    for worker, line in said:
        shown[worker] += folder.feed(worker, worker, line, 0.0)
    for worker, lines in shown.items():
        lines += folder.release(worker, worker)
        rest = iter(line for name, line in said if name == worker)
        for line in lines:
            if line.startswith(b"the same traceback as"):
                assert CHAINED[0] in rest  # after the last lines of a traceback before it, which were replaced, too
                assert line.endswith(b", cut off") or any(other.endswith(line.partition(b": ")[2]) for other in rest)
            else:
                assert any(other == line for other in rest), "each line that is shown was said, in this order"


def test_a_simple_traceback_is_told_in_one_line_by_the_second_worker() -> None:
    folder = TracebackFolder()
    assert feed_all(folder, "w0", "[0]", SIMPLE) == SIMPLE
    elsewhere = [line.replace(b"0x7f0012345678", b"0x7fffffffffff") for line in SIMPLE]
    assert feed_all(folder, "w2", "[2]", elsewhere) == [
        b"the same traceback as [0]: ValueError: <Net object at 0x7fffffffffff> is no good"
    ]


def test_a_traceback_begins_anew_with_each_header() -> None:
    folder = TracebackFolder()
    lines = [SIMPLE[0], *SIMPLE]
    assert feed_all(folder, "w0", "[0]", lines) == lines
    assert feed_all(folder, "w1", "[1]", SIMPLE) == [
        b"the same traceback as [0]: ValueError: <Net object at 0x7f0012345678> is no good"
    ]


def test_a_chained_traceback_is_one_traceback_named_by_its_last_exception() -> None:
    folder = TracebackFolder()
    assert feed_all(folder, "w0", "[0]", CHAINED) == CHAINED
    shown = feed_all(folder, "w1", "[1]", [b"before", *CHAINED, b"behind"])
    assert shown == [b"before", b"the same traceback as [0]: RuntimeError: gave up", b"behind"]


def test_workers_that_print_at_the_same_moment_are_told_apart() -> None:
    folder = TracebackFolder()
    for line in SIMPLE:
        assert folder.feed("w0", "[0]", line, 0.0) == []
        assert folder.feed("w1", "[1]", line, 0.0) == []
    assert folder.release("w1", "[1]") == SIMPLE
    assert folder.release("w0", "[0]") == [b"the same traceback as [1]: " + SIMPLE[-1]]


def test_one_that_was_shown_by_another_worker_of_the_same_rank_is_told_by_its_name() -> None:
    folder = TracebackFolder()
    feed_all(folder, "w1", "[1]", SIMPLE)
    assert feed_all(folder, "w2", "[1]", SIMPLE) == [b"the same traceback as w1: " + SIMPLE[-1]]


def test_different_tracebacks_are_all_shown() -> None:
    folder = TracebackFolder()
    assert feed_all(folder, "w0", "[0]", SIMPLE) == SIMPLE
    assert feed_all(folder, "w1", "[1]", CHAINED) == CHAINED


def test_the_same_worker_may_repeat_itself() -> None:
    folder = TracebackFolder()
    assert feed_all(folder, "w0", "[0]", SIMPLE + SIMPLE) == SIMPLE + SIMPLE


def test_the_next_line_releases_a_complete_traceback() -> None:
    folder = TracebackFolder()
    for line in SIMPLE:
        assert folder.feed("w0", "[0]", line, 0.0) == []
    assert folder.feed("w0", "[0]", b"go on", 0.0) == [*SIMPLE, b"go on"]


def test_a_traceback_that_nothing_follows_is_due_after_a_moment() -> None:
    folder = TracebackFolder()
    assert folder.next_deadline_s() is None
    folder.feed("w0", "[0]", SIMPLE[0], 10.0)
    folder.feed("w0", "[0]", SIMPLE[1], 10.1)
    assert folder.next_deadline_s() == 10.1 + HOLD_S
    assert list(folder.due(10.1)) == []
    assert list(folder.due(10.1 + HOLD_S)) == ["w0"]
    assert folder.release("w0", "[0]") == SIMPLE[:2]
    assert folder.next_deadline_s() is None


def test_an_endless_traceback_is_not_held_for_ever() -> None:
    lines = [SIMPLE[0], *[b"  frame %d" % number for number in range(2000)]]
    folder = TracebackFolder()
    held = [line for line in lines if folder.feed("w0", "[0]", line, 0.0) == []]
    assert len(held) < 1000


def test_a_traceback_that_the_end_of_its_worker_cut_off_is_not_shown_again() -> None:
    folder = TracebackFolder()
    assert feed_all(folder, "w0", "[0]", SIMPLE) == SIMPLE
    for count in range(1, len(SIMPLE)):
        assert feed_all(folder, f"w{count}", f"[{count}]", SIMPLE[:count]) == [b"the same traceback as [0], cut off"]


def test_a_cut_off_traceback_of_something_else_is_shown() -> None:
    folder = TracebackFolder()
    feed_all(folder, "w0", "[0]", SIMPLE)
    assert feed_all(folder, "w1", "[1]", CHAINED[:2]) == CHAINED[:2]
