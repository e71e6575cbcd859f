"""A time limit for what is awaited, and what must come to its end whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(limit_s: float, awaited: Awaitable[T]) -> T:
    """What `awaited` gives, or asyncio.TimeoutError after `limit_s` seconds; it is cancelled then.

    In place of asyncio.wait_for(), which before Python 3.12 loses a cancellation of the caller that comes together
    with the result: the caller would go on for ever, and whoever cancelled it would wait for ever.
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
    """What `awaited` gives. A cancellation of the caller does not reach it, and is raised when it has ended.

    For cleaning up: who is cancelled while it does so would leave the rest behind.
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
