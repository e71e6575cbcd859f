"""A time limit, and cancellations that must not get lost in it."""

from __future__ import annotations

import asyncio

import pytest

from farandole.deadline import within


def test_what_comes_in_time_is_given() -> None:
    async def soon() -> int:
        await asyncio.sleep(0)
        return 7

    assert asyncio.run(within(5, soon())) == 7


def test_what_is_raised_in_time_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(within(5, fail()))


def test_what_comes_too_late_is_cancelled() -> None:
    async def main() -> bool:
        late = asyncio.get_running_loop().create_future()
        with pytest.raises(asyncio.TimeoutError):
            await within(0.01, late)
        return late.cancelled()

    assert asyncio.run(main())


def test_a_cancellation_that_comes_together_with_the_result_is_not_lost() -> None:
    async def main() -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(within(5, future))
        await asyncio.sleep(0)
        future.set_result(7)
        await asyncio.sleep(0)  # the result is on its way to the one that waits
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_who_is_cancelled_cancels_what_it_awaits() -> None:
    async def main() -> bool:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(within(5, future))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        return future.cancelled() and task.cancelled()

    assert asyncio.run(main())
