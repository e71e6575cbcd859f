"""A job run by ordinary code, also where an event loop runs already: in a notebook, in a server. Used by
run_function.py and by the alias `horovod`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

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
            return in_thread(job(begun))
    finally:
        report.close()


def in_thread(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of the coroutine, run on its own event loop in its own thread. An exception in this thread
    meanwhile, such as KeyboardInterrupt, cancels the coroutine, waits for it, and propagates."""
    runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)  # without a factory it sets the loop of this thread
    loop = runner.get_loop()
    task = loop.create_task(coroutine)
    ended: Future[T] = Future()

    def run() -> None:
        try:
            with runner:
                result = loop.run_until_complete(task)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            ended.set_exception(error)
        else:
            ended.set_result(result)

    threading.Thread(target=run, name="farandole-job", daemon=True).start()
    try:
        # Not the thread's join(): before Python 3.13 an interrupted join() marks the thread as ended from then on
        # (CPython 3.11, Lib/threading.py, Thread._wait_for_tstate_lock: the lock is also locked while it runs).
        while not wait([ended], _LOOK_S).done:
            pass
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the coroutine has just ended
            loop.call_soon_threadsafe(task.cancel)
        # Without a deadline: a cancelled job kills the remaining processes after its grace period.
        wait([ended])
        raise
    return ended.result()
