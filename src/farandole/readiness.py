"""Waiting for one descriptor, whatever its number: select() takes those below 1024 only."""

from __future__ import annotations

import select
from typing import Protocol


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def can_read(descriptor: int | HasDescriptor, within_s: float | None) -> bool:
    """Whether there is something to read, or nothing will come any more; waits for up to `within_s` seconds, for ever
    with None. Raises ValueError for a closed one."""
    return _is_ready(descriptor, select.POLLIN, within_s)


def can_write(descriptor: int | HasDescriptor, within_s: float | None) -> bool:
    """Whether a write would not block, or would fail; waits as can_read()."""
    return _is_ready(descriptor, select.POLLOUT, within_s)


def _is_ready(descriptor: int | HasDescriptor, event: int, within_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(None if within_s is None else 1000 * within_s))
