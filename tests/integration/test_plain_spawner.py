"""Workers that are started in the plain way."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from farandole.job.agent.spawner import Spawner
from tests.support.jobs import processes_with
from tests.support.waiting import run


def test_an_agent_can_say_its_beats_while_a_program_begins() -> None:
    """On a machine with much else to do that took seconds, and the agent was given up for its silence."""

    async def test() -> None:
        said: list[str] = []
        asyncio.get_running_loop().call_soon(said.append, "a heartbeat")
        child = await Spawner(["true"]).spawn(os.environ)
        assert said == ["a heartbeat"]
        assert await asyncio.to_thread(child.wait) == 0
        child.stdout.close()
        child.stderr.close()

    run(test())


def test_a_program_that_cannot_begin_is_an_error_as_before() -> None:
    async def test() -> None:
        with pytest.raises(FileNotFoundError):
            await Spawner(["/no/such/program"]).spawn(os.environ)

    run(test())


def test_what_is_being_started_for_nobody_ends(tmp_path: Path) -> None:
    async def test() -> None:
        # One process: only a group's leader is waited for, and its children take a moment to die.
        command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)", str(tmp_path)]
        spawning = asyncio.create_task(Spawner(command).spawn(os.environ))
        await asyncio.sleep(0)
        spawning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spawning
        assert processes_with(str(tmp_path)) == []

    run(test())
