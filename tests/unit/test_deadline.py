"""A time limit, and cancellations that must not get lost in it."""

from __future__ import annotations

import asyncio

import pytest

from farandole.wire.deadline import to_its_end, within


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


def test_cleaning_up_goes_on_when_the_caller_is_cancelled_and_then_it_is_told() -> None:
    async def main() -> list[str]:
        begun, allowed, done = asyncio.Event(), asyncio.Event(), []

        async def clean_up() -> None:
            begun.set()
            await allowed.wait()
            done.append("cleaned up")

        caller = asyncio.create_task(to_its_end(clean_up()))
        await begun.wait()
        for _ in range(2):  # the second one does no harm either
            caller.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not caller.done()
        allowed.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        return done

    assert asyncio.run(main()) == ["cleaned up"]


def test_what_comes_of_it_is_given() -> None:
    async def main() -> int:
        return await to_its_end(asyncio.sleep(0, 7))

    async def fail() -> None:
        raise ValueError("broken")

    assert asyncio.run(main()) == 7
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(to_its_end(fail()))
