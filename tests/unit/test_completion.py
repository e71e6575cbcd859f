"""Operations that complete although their caller is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from farandole.job.agent.spawner import to_its_end


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
