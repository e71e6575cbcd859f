"""A coroutine that is run in a thread of its own: its result, its error, and a Ctrl-C meanwhile."""

from __future__ import annotations

import _thread
import asyncio
import threading

import pytest

from farandole.job.launch.run_function import in_thread


def test_the_result_comes_from_another_thread_also_while_a_loop_runs_in_this_one() -> None:
    async def name_of_the_thread() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    async def notebook() -> str:
        return in_thread(name_of_the_thread())

    assert in_thread(name_of_the_thread()) == "farandole-job"
    assert asyncio.run(notebook()) == "farandole-job"


def test_an_error_is_raised_in_the_thread_that_waits() -> None:
    async def fail() -> None:
        raise TimeoutError("too late")

    with pytest.raises(TimeoutError, match="too late"):
        in_thread(fail())


def test_an_interrupt_cancels_the_coroutine_and_waits_until_it_has_cleaned_up() -> None:
    steps = []

    async def work() -> None:
        await asyncio.sleep(0.1)  # the main thread waits by then
        _thread.interrupt_main()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            steps.append("cleaned up")
            raise

    with pytest.raises(KeyboardInterrupt):
        in_thread(work())
    assert steps == ["cleaned up"]
