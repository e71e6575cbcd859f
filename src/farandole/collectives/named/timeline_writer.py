"""Write a file in Chrome's trace format that is a valid JSON array after each write. timeline.py's thread calls it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TypeAlias

Record: TypeAlias = tuple[int, str, str, str]
"""Nanoseconds since the start; one of the marks below; name of the operation; text (activity, or rank)."""

BEGIN, END, INSTANT, CYCLE = "B", "E", "X", "i"

_END_OF_ARRAY = b"\n]\n"
_NEGOTIATE = "NEGOTIATE_"


class TimelineWriter:
    """Writes one file. Each operation's name is shown as a process of its own, as in Horovod.

    Raises OSError when the file cannot be created or written; the data written before stays.
    """

    def __init__(self, path: str, start_us: int) -> None:
        # Unbuffered: a forked child must not write the content of an inherited buffer again.
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            # A file that cannot be overwritten (a pipe) gets the end of the array when it is closed.
            self._can_seek = self._file.seekable()
            self._processes: dict[str, int] = {}
            self._open: dict[str, list[str]] = {}
            self._last_us = 0
            head = _process(0, "farandole", {"start_time_since_epoch_in_micros": start_us})
            self._write(b"[\n" + b",\n".join(map(_json, head)))
        except BaseException:
            self._file.close()
            raise

    def add(self, records: Iterable[Record], dropped: int = 0) -> None:
        """Write these records, in this order. `dropped` is the number of records lost after them."""
        events: list[Mapping[str, object]] = []
        for time_ns, mark, name, text in records:
            self._last_us = time_ns // 1000
            events += self._events(mark, name, text)
        if dropped:
            events.append(self._marker(f"{dropped} events left out: the disk is too slow"))
            events += [self._end(name) for name, stack in self._open.items() for _ in stack]
            self._open.clear()
        if events:
            self._write(b"".join(b",\n" + _json(event) for event in events))

    def close(self) -> None:
        """End the array, unless that was done before."""
        try:
            if not self._can_seek:
                self._write_all(_END_OF_ARRAY)
        finally:
            self._file.close()

    def _events(self, mark: str, name: str, text: str) -> list[Mapping[str, object]]:
        if mark == CYCLE:
            return [self._marker(text)]
        stack = self._open.setdefault(name, [])
        if mark == END:
            # Its beginning was before the file's: nothing to end.
            return [self._end(name)] if stack and stack.pop() else []
        if mark == BEGIN:
            if text in stack and text.startswith(_NEGOTIATE):
                return []  # the first rank began it; the others are shown when they are ready
            stack.append(text)
        process = self._processes.get(name)
        new: list[Mapping[str, object]] = []
        if process is None:
            process = self._processes[name] = len(self._processes) + 1
            new = [*_process(process, name)]
        event: dict[str, object] = {"ph": mark, "name": text, "ts": self._last_us, "pid": process, "tid": 0}
        if mark == INSTANT:
            event["dur"] = 0
        return [*new, event]

    def _end(self, name: str) -> Mapping[str, object]:
        return {"ph": END, "ts": self._last_us, "pid": self._processes[name], "tid": 0}

    def _marker(self, text: str) -> Mapping[str, object]:
        return {"ph": CYCLE, "name": text, "ts": self._last_us, "pid": 0, "tid": 0, "s": "g"}

    def _write(self, more: bytes) -> None:
        if not self._can_seek:
            self._write_all(more)
            return
        self._write_all(more + _END_OF_ARRAY)
        self._file.seek(-len(_END_OF_ARRAY), 1)

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]


def _process(number: int, name: str, more: Mapping[str, object] | None = None) -> list[Mapping[str, object]]:
    return [
        {"name": "process_name", "ph": "M", "pid": number, "args": {"name": name, **(more or {})}},
        {"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}},
    ]


def _json(event: Mapping[str, object]) -> bytes:
    return json.dumps(event).encode()
