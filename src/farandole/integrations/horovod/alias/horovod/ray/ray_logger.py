"""Horovod's way of values from workers to the callbacks of an executor, which do not exist here: log() warns, once,
unless the script has set a queue of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol
from warnings import warn


class Queue(Protocol):
    """What takes the values, such as a ray.util.queue.Queue."""

    def put(self, item: Any) -> object: ...


_queue: Queue | None = None
_has_warned = False


def configure(queue: Queue | None) -> None:
    """Let log() put its values into a queue."""
    global _queue
    _queue = queue


def log(info_dict: Mapping[str, Any]) -> None:
    """Put values into the queue of configure()."""
    global _has_warned
    if _queue is not None:
        _queue.put(info_dict)
    elif not _has_warned:
        _has_warned = True
        warn(
            "ray_logger.log() has no effect: the executors have no callbacks; send values to the caller in the result "
            "of the function, or write them to a file",
            stacklevel=2,
        )
