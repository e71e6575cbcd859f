"""Horovod's way of values from workers to the callbacks of an executor, which do not exist here: log() warns, once,
unless the script has set a queue of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from warnings import warn


class RayLogger:
    """What puts values into a queue, such as a ray.util.queue.Queue, once there is one."""

    def __init__(self) -> None:
        self._queue: Any = None
        self._has_warned = False

    def configure(self, queue: Any) -> None:
        """Let log() put its values into a queue."""
        self._queue = queue

    def log(self, info_dict: Mapping[str, Any]) -> None:
        """Put values into the queue of configure()."""
        if self._queue is not None:
            self._queue.put(info_dict)
        elif not self._has_warned:
            self._has_warned = True
            warn(
                "ray_logger.log() has no effect: the executors have no callbacks; send values to the caller in the "
                "result of the function, or write them to a file",
                stacklevel=2,
            )


_of_process = RayLogger()
configure, log = _of_process.configure, _of_process.log
