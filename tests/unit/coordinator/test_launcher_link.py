"""The link between the launcher and the coordinator's process, at its end."""

from __future__ import annotations

import asyncio
import socket

import pytest

from farandole.job.coordinator.launcher_link import FramesHandled, Link
from tests.support.waiting import DEADLINE_S, run


async def pair() -> tuple[Link, Link]:
    ours, theirs = socket.socketpair()
    return await Link.over(ours), await Link.over(theirs)


def test_the_last_frame_arrives_though_frames_of_the_other_side_were_not_read() -> None:
    async def test() -> None:
        coordinator, launcher = await pair()
        for number in range(10):
            launcher.send(FramesHandled(number))
        coordinator.send("the outcome")
        ending = asyncio.create_task(coordinator.wait_for_end(DEADLINE_S))
        ending.add_done_callback(lambda _: coordinator.close())
        await asyncio.sleep(0.1)  # the launcher is busy
        assert await launcher.receive() == "the outcome"
        launcher.close()
        await asyncio.wait_for(ending, DEADLINE_S)

    run(test())


def test_a_launcher_that_is_stopped_is_not_waited_for_for_ever() -> None:
    async def test() -> None:
        coordinator, launcher = await pair()
        await coordinator.wait_for_end(0.05)
        coordinator.close()
        with pytest.raises(ConnectionError):
            await launcher.receive()
        launcher.close()

    run(test())
