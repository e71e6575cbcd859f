"""Writing in the background keeps the order, never waits, and says what it had to drop."""

from __future__ import annotations

import threading

from farandole.job.launch.output import BackgroundWriter, write_all

DEADLINE_S = 10.0


class BlockedTarget:
    """Takes nothing until `free` is set."""

    def __init__(self) -> None:
        self.entered, self.free = threading.Event(), threading.Event()
        self.written: list[tuple[str, bytes]] = []
        self.dropped: list[int] = []

    def write(self, target: str, data: bytes) -> None:
        self.entered.set()
        assert self.free.wait(DEADLINE_S)
        self.written.append((target, data))


def test_pieces_come_in_order_and_neighbours_are_joined() -> None:
    blocked = BlockedTarget()
    writer = BackgroundWriter("test", blocked.write, blocked.dropped.append)
    writer.put("a", b"1")
    assert blocked.entered.wait(DEADLINE_S)
    for target, data in (("a", b"2"), ("a", b"3"), ("b", b"4"), ("a", b"5")):
        writer.put(target, data)
    blocked.free.set()
    assert writer.close(DEADLINE_S)
    assert blocked.written == [("a", b"1"), ("a", b"23"), ("b", b"4"), ("a", b"5")]
    assert blocked.dropped == []


def test_a_reader_that_has_stopped_holds_up_nobody_and_what_is_dropped_is_said() -> None:
    blocked = BlockedTarget()
    writer = BackgroundWriter("test", blocked.write, blocked.dropped.append, backlog_bytes=10)
    writer.put("a", b"first")
    assert blocked.entered.wait(DEADLINE_S)
    for _ in range(4):
        writer.put("a", b"four")  # two of them fit
    assert not writer.close(timeout_s=0.0), "close gives up, too"
    blocked.free.set()
    assert writer.close(DEADLINE_S)
    assert blocked.written == [("a", b"first"), ("a", b"fourfour")]
    assert blocked.dropped == [8]


def test_a_file_that_takes_a_few_bytes_at_a_time_gets_all_of_them() -> None:
    class Slow:
        taken = b""

        def write(self, data: memoryview) -> int:
            self.taken += bytes(data[:3])
            return min(3, len(data))

    slow = Slow()
    write_all(slow, b"hello world")  # type: ignore[arg-type]
    assert slow.taken == b"hello world"
