"""Wait for one descriptor, whatever its number: select() accepts only those below 1024."""

from __future__ import annotations

import select
from typing import Protocol


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def can_read(descriptor: int | HasDescriptor, within_s: float | None) -> bool:
    """Return whether a read would not block: there is data, or the end.

    Waits for up to `within_s` seconds, for ever with None. Raises ValueError for a closed descriptor.
    """
    return _is_ready(descriptor, select.POLLIN, within_s)


def can_write(descriptor: int | HasDescriptor, within_s: float | None) -> bool:
    """Return whether a write would not block, or would fail; waits as can_read() does."""
    return _is_ready(descriptor, select.POLLOUT, within_s)


def _is_ready(descriptor: int | HasDescriptor, event: int, within_s: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(None if within_s is None else 1000 * within_s))
