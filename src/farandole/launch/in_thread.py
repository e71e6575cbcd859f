"""A job run by ordinary code, also where an event loop runs already: in a notebook, in a server. Used by
run_function.py and by the alias `horovod`."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, TypeVar

from farandole.config import JobConfig
from farandole.coordinator.server import Outcome
from farandole.env import CheckpointEnv
from farandole.events import Event
from farandole.launch.checkpoint_place import Beginning, beginning
from farandole.launch.discovery import HostDiscovery
from farandole.launch.host_list import HostSlots
from farandole.launch.local import run_local
from farandole.launch.output import OutputOptions
from farandole.launch.report import Loudness, Report

T = TypeVar("T")

_LOOK_S = 0.5  # Python passes a Ctrl-C on between two waits, at the latest


def run_job(
    config: JobConfig,
    command: Sequence[str],
    *,
    hosts: tuple[HostSlots, ...] | HostDiscovery | None = None,
    output: OutputOptions | None = None,
    is_verbose: bool = False,
    environment: Mapping[str, str] | None = None,
    checkpoint: CheckpointEnv | None = None,
) -> Outcome:
    """Run `command` as the workers of a job, and wait until it has ended. The workers' output goes to sys.stdout and
    sys.stderr; the launcher's own, only when `is_verbose` or when it is a warning.

    Raises what run_local and, with a `checkpoint`, beginning() raise. A KeyboardInterrupt ends the job first, with the
    workers' grace period.
    """
    report = Report(sys.stderr, Loudness.VERBOSE if is_verbose else Loudness.QUIET)

    def job(begun: Beginning) -> Coroutine[Any, Any, Outcome]:
        def on_event(event: Event) -> None:
            report.on_event(event)
            begun.watch(event)

        return run_local(
            config,
            command,
            hosts=hosts,
            host="127.0.0.1",
            port=0,
            output=output or OutputOptions(),
            on_event=on_event,
            extra_environment={**(environment or {}), **begun.environment},
            origin=begun.origin,
        )

    try:
        with beginning(checkpoint) as begun:
            for note in begun.notes:
                report.note(note)
            return in_thread(lambda: job(begun))
    finally:
        report.close()


def in_thread(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return the result of the coroutine, run on its own event loop in its own thread. An exception in this thread
    meanwhile, such as KeyboardInterrupt, cancels the coroutine, waits for it, and propagates."""
    looper: _Looper[T] = _Looper(make)
    thread = threading.Thread(target=looper.run, name="farandole-job", daemon=True)
    thread.start()
    try:
        # Not the thread's join(): before Python 3.13 an interrupted join() marks the thread as ended from then on.
        while not looper.has_ended.wait(_LOOK_S):
            pass
    except BaseException:
        looper.cancel()
        # Without a deadline: a cancelled job kills the remaining processes after its grace period.
        looper.has_ended.wait()
        raise
    if looper.error is not None:
        raise looper.error
    return looper.results[0]


class _Looper(Generic[T]):
    """A coroutine on an event loop, and its result."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None
        self.results: list[T] = []
        self.error: BaseException | None = None
        self.has_ended = threading.Event()

    def run(self) -> None:
        try:
            self.results.append(asyncio.run(self._main()))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self.error = error
        finally:
            with self._lock:
                self._loop = None
            self.has_ended.set()

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._loop is not None and self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)

    async def _main(self) -> T:
        with self._lock:
            if self._is_cancelled:
                raise asyncio.CancelledError
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await self._make()
