"""Await operations that must complete even if the caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(awaited: Awaitable[T]) -> T:
    """Return the result of `awaited`. A cancellation of the caller does not reach it, and is raised when it has ended.

    For cleanup: a cancelled caller would otherwise leave it unfinished. asyncio.shield() protects `awaited`, too, but
    does not wait for it.
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
