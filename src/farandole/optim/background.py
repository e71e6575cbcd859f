"""Reductions that go on while the main thread computes: one after the other, in one thread of the process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial

from farandole.status_reporting import WaitingForPeers

_tasks: queue.SimpleQueue[Callable[[], object]] | None = None


class Background:
    """Tasks of one owner, carried out in the order in which they are added; after one that raised, none is."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting = 0
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        return self._waiting > 0

    def add(self, task: Callable[[], object]) -> None:
        with self._condition:
            self._waiting += 1
        _queue().put(partial(self._run, task))

    def finish(self) -> BaseException | None:
        """Wait for all of them; what one has raised."""
        with self._condition:
            if self._waiting:
                with WaitingForPeers():
                    self._condition.wait_for(lambda: self._waiting == 0)
            error, self._error = self._error, None
        return error

    def _run(self, task: Callable[[], object]) -> None:
        try:
            if self._error is None:
                task()
        except BaseException as error:  # noqa: BLE001 - finish() returns it
            self._error = error
        with self._condition:
            self._waiting -= 1
            self._condition.notify_all()


def _queue() -> queue.SimpleQueue[Callable[[], object]]:
    """Of the thread, which is started when it is first needed, and lives as long as the process."""
    global _tasks
    if _tasks is None:
        _tasks = queue.SimpleQueue()
        threading.Thread(target=_work, args=(_tasks,), name="farandole-gradients", daemon=True).start()
    return _tasks


def _work(tasks: queue.SimpleQueue[Callable[[], object]]) -> None:
    while True:
        tasks.get()()
