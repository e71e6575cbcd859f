"""Reductions that run while the main thread computes: one after the other, in one thread of the process.

Gradients of a DistributedOptimizer and of a DistributedDataParallel use it where they are reduced during backward().
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import cache, partial

from farandole.base.liveness.status_reporting import WaitingForPeers
from farandole.training.collectives.transport import Transport


class Background:
    """A sequence of tasks of one owner, run in the order in which they are added. After a task that raised, no further
    task is run."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting = 0
        self._error: BaseException | None = None

    def add(self, task: Callable[[], object]) -> None:
        with self._condition:
            self._waiting += 1
        _queue().put(partial(self._run, task))

    def wait(self) -> None:
        """Wait until no task is left. The error of a task is kept for finish()."""
        with self._condition:
            if self._waiting:
                with WaitingForPeers():
                    self._condition.wait_for(lambda: self._waiting == 0)

    def finish(self) -> BaseException | None:
        """Wait for all tasks. Returns the error of a task, if any."""
        self.wait()
        error, self._error = self._error, None
        return error

    def land(self, transport: Transport) -> None:
        """Wait for all tasks, which use `transport`. Raises the error of a task. An interruption of the main thread
        ends the transport, since the tasks must not write any more when it is raised."""
        try:
            error = self.finish()
        except BaseException as interruption:
            transport.abort(f"a step was interrupted by {type(interruption).__name__}")
            self.finish()
            raise
        if error is not None:
            raise error

    def _run(self, task: Callable[[], object]) -> None:
        try:
            if self._error is None:
                task()
        except BaseException as error:  # noqa: BLE001 - finish() returns it
            self._error = error
        with self._condition:
            self._waiting -= 1
            self._condition.notify_all()


of_gradients = Background()
"""Reductions of gradients over the transport of all ranks. Every other operation of that transport waits for them, so
that all ranks have the same order."""


@cache
def _queue() -> queue.SimpleQueue[Callable[[], object]]:
    """Return the queue of the thread, which is started at its first use and lives as long as the process."""
    tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    threading.Thread(target=_work, args=(tasks,), name="farandole-gradients", daemon=True).start()
    return tasks


def _work(tasks: queue.SimpleQueue[Callable[[], object]]) -> None:
    while True:
        tasks.get()()
