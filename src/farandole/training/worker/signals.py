"""SIGTERM and SIGINT while an elastic function runs: they do not end the main thread in the middle of a change of the
state."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from farandole.errors import JobEnded
from farandole.training.collectives import world
from farandole.training.worker.worker_job import WorkerJob

Handler = Callable[[int, FrameType | None], None]

_LEFT = 128 + signal.SIGTERM


class Signals:
    """The handlers of an elastic function, while it is entered as a context. On the main thread only; a handler of the
    script stays in its place.

    SIGTERM, with a job   preemption notices come so: leave at the next boundary, without loss of work. Where the job
                          is over: SystemExit, once
    SIGINT                KeyboardInterrupt

    Within `with signals.waiting:`, which may be nested, neither is raised, but behind it. A second SIGINT does not
    wait: whoever sends it may not want to know why the first one has no effect.

    Args:
        job: The job of this worker; None: it is none of a coordinator.
        is_whole: Called when the job is over, elsewhere than within `waiting`: whether the main thread may be
            interrupted. Otherwise it finds out by itself.
    """

    def __init__(self, job: WorkerJob | None, is_whole: Callable[[], bool] = lambda: True) -> None:
        self._job, self._is_whole = job, is_whole
        self._installed: dict[signal.Signals, Handler] = {}
        self.waiting = _Waiting()

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            if self._job is not None and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                self._install(signal.SIGTERM, self._on_sigterm)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._install(signal.SIGINT, self._on_sigint)

    def _install(self, number: signal.Signals, handler: Handler) -> None:
        signal.signal(number, handler)
        self._installed[number] = handler

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._installed.items():
            if signal.getsignal(number) == handler:  # the script may have set its own meanwhile
                is_int = number is signal.SIGINT
                signal.signal(number, signal.default_int_handler if is_int else signal.SIG_DFL)

    def _on_sigterm(self, number: int, _frame: FrameType | None) -> None:
        assert self._job is not None
        if world.is_forked_child():  # not the worker is asked to leave: the child ends, as without this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self._job.link.is_over:
            self._job.link.ask_to_leave()
        elif self._is_whole():
            self.waiting.raise_behind(SystemExit(_LEFT))

    def _on_sigint(self, _number: int, _frame: FrameType | None) -> None:
        if world.is_forked_child():
            raise KeyboardInterrupt
        self.waiting.raise_behind(KeyboardInterrupt())


class _Waiting:
    """A section of code, as a reentrant context, behind which the exceptions of signals are raised."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_ending = False  # the exception that ends this worker is on its way: no other one takes its place
        self._waits: BaseException | None = None

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, (JobEnded, SystemExit)):
            self._is_ending = True
        self._depth -= 1
        if self._waits is not None and not self._depth and kind is None:
            self._raise(self._waits)

    def raise_behind(self, error: BaseException) -> None:
        """Raise the exception, or where the main thread is in a section, behind it. Called by handlers of signals."""
        is_second = isinstance(error, KeyboardInterrupt) and isinstance(self._waits, KeyboardInterrupt)
        if not self._depth or is_second:
            self._raise(error)
        elif not isinstance(self._waits, SystemExit):  # the end of the job counts more than an interruption
            self._waits = error

    def _raise(self, error: BaseException) -> None:
        self._waits = None
        if isinstance(error, SystemExit):
            if self._is_ending:
                return
            self._is_ending = True
        raise error
