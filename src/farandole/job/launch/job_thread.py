"""A coroutine run by ordinary code, also where an event loop runs already: in a notebook, in a server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

_LOOK_S = 0.5  # Python passes a Ctrl-C on between two waits, at the latest


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
