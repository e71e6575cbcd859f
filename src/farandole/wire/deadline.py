"""Await with a time limit, and await operations that must complete even if the caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(limit_s: float, awaited: Awaitable[T]) -> T:
    """Return the result of `awaited`, or raise asyncio.TimeoutError after `limit_s` seconds; it is cancelled then.

    Replaces asyncio.wait_for(), which before Python 3.12 loses a cancellation of the caller that coincides with the
    result: the caller would go on for ever, and the task that cancelled it would wait for ever.
    """
    task = asyncio.ensure_future(awaited)
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def to_its_end(awaited: Awaitable[T]) -> T:
    """Return the result of `awaited`. A cancellation of the caller does not reach it, and is raised when it has ended.

    For cleanup: a cancelled caller would otherwise leave it unfinished.
    """
    task = asyncio.ensure_future(awaited)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
