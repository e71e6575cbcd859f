"""A pool of threads that compute the parts of one batch at the same time.

data_parallel.py and autograd_bridge.py submit work to it.
"""

from __future__ import annotations

import contextvars
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class ThreadPool:
    """A pool of `size` threads, including the calling one. The others start when they are first needed, and end with
    this object. Tasks see the caller's grad mode, inference mode, autocast and context variables. While several run,
    the threads that torch uses within one operation are divided among them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._queues: list[queue.SimpleQueue[_PlacedTask[Any] | None]] = []
        self._process = os.getpid()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[ThreadPool], tuple[int]]:
        return ThreadPool, (self.size,)  # a copy has threads of its own

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Return the result of each task. At most `size` tasks; the first one runs in the calling thread. Returns when
        all have ended. If some raised, the first one's exception is raised, with a note that names the task."""
        if len(tasks) == 1:
            return [tasks[0]()]
        before = torch.get_num_threads()
        each = max(1, before // len(tasks))
        call_here, answers = captured_context(), queue.SimpleQueue[int]()
        jobs = [_PlacedTask(task, place, each, call_here, answers) for place, task in enumerate(tasks)]
        for job, inbox in zip(jobs[1:], self._inboxes(), strict=False):
            inbox.put(job)
        interruption: BaseException | None = None
        try:
            _use_threads(each)
            jobs[0].run()
        finally:
            for _ in jobs[1:]:
                interruption = _waited(answers) or interruption
            # Unconditionally: the setting of the others is the default of threads that begin later.
            torch.set_num_threads(before)
        if interruption is not None:
            raise interruption
        return [job.result() for job in jobs]

    def _inboxes(self) -> list[queue.SimpleQueue[_PlacedTask[Any] | None]]:
        with self._lock:
            if self._process != os.getpid():  # a fork has only the thread that forked
                self._queues, self._process = [], os.getpid()
            if not self._queues:
                self._queues = [queue.SimpleQueue() for _ in range(self.size - 1)]
                for place, inbox in enumerate(self._queues, 1):
                    name = f"farandole-replica-{place}"
                    threading.Thread(target=_serve, args=(inbox,), name=name, daemon=True).start()
                weakref.finalize(self, _dismiss, self._queues)
            return self._queues


def captured_context() -> Callable[[Callable[[], Any]], Any]:
    """Return a function that calls a task in another thread, with the torch state and the context variables of this
    one."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    enabled = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    casts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) for kind in enabled]
    variables = contextvars.copy_context()

    def call(task: Callable[[], Any]) -> Any:
        with ExitStack() as stack:
            if inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype, caches in casts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=caches))
            return variables.copy().run(task)

    return call


@dataclass
class _PlacedTask(Generic[T]):
    task: Callable[[], T]
    place: int
    threads: int
    call_here: Callable[[Callable[[], T]], T]
    answers: queue.SimpleQueue[int]
    returned: T | None = None
    raised: BaseException | None = None

    def run(self) -> None:
        """Run the task in the calling thread, which has the context."""
        try:
            self.returned = self.task()
        except BaseException as error:  # noqa: BLE001 - raised by result(), when the others have ended
            self.raised = error

    def run_elsewhere(self) -> None:
        try:
            _use_threads(self.threads)
            self.returned = self.call_here(self.task)
        except BaseException as error:  # noqa: BLE001 - raised by result(), in the thread that asked
            self.raised = error
        self.answers.put(self.place)

    def result(self) -> T:
        if self.raised is None:
            return self.returned  # type: ignore[return-value]
        error, self.raised = self.raised, None  # otherwise error and traceback keep each other alive
        error.add_note(f"raised in replica {self.place}")
        raise error


def _serve(inbox: queue.SimpleQueue[_PlacedTask[Any] | None]) -> None:
    while True:
        job = inbox.get()
        if job is None:
            return
        job.run_elsewhere()
        del job  # it keeps a batch alive


def _dismiss(queues: Sequence[queue.SimpleQueue[_PlacedTask[Any] | None]]) -> None:
    for inbox in queues:
        inbox.put(None)


def _use_threads(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _waited(answers: queue.SimpleQueue[int]) -> BaseException | None:
    """Wait for one answer, whatever happens: no thread may compute on after the caller has gone on. Returns an
    interruption, if there was one."""
    interruption = None
    while True:
        try:
            answers.get()
        except KeyboardInterrupt as error:
            interruption = error
        else:
            return interruption
