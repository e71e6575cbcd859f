"""Functions in threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_thread(
    target: Callable[..., object],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call `target(*args)` in a new thread. `silent`: its exceptions are not shown."""
    _check_tuple(args)

    def quietly() -> None:
        with contextlib.suppress(Exception):
            target(*args)

    thread = threading.Thread(target=quietly, name=name) if silent else threading.Thread(None, target, name, args)
    thread.daemon = daemon
    thread.start()
    return thread


def on_event(
    event: threading.Event | None,
    func: Callable[..., object],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call `func(*args)` in its own thread once `event` is set, unless `stop` is set first. Raises ValueError without
    an event, and for a thread that would never end."""
    if event is None:
        raise ValueError("Event must not be None")
    _check_tuple(args)
    if stop is None and not daemon:
        raise ValueError("Stop event must be given for non-daemon event thread")

    def wait() -> None:
        while not event.wait(None if stop is None else check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(wait, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call `fn` once with each list of arguments, in threads. Return the result of each call, by its place in the list,
    or None at once when not blocking. Raises the first exception that a call raised."""
    pool = ThreadPoolExecutor(max(1, min(max_concurrent_executions, len(args_list))))
    calls = [pool.submit(fn, *args) for args in args_list]
    pool.shutdown(wait=block_until_all_done)
    return {place: call.result() for place, call in enumerate(calls)} if block_until_all_done else None


def _check_tuple(args: object) -> None:
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}, for a single argument use (arg,)")
