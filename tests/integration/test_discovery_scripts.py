"""Discovery scripts that do not end as they should, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from threading import Event

import pytest

from farandole.launch.discovery import DiscoveryFailed, ScriptDiscovery
from farandole.launch.hosts import HostSlots
from tests.jobs import processes_with
from tests.waiting import DEADLINE_S, run

MARK = f"farandole-test-{os.getpid()}"
LIVES_ON = f"env MARK={MARK} sleep 60"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def are_gone() -> bool:
    """Whether nothing is left, at the latest when the kernel has freed what was killed."""
    return are_left(0)


def are_left(number: int) -> bool:
    """Whether so many are. One that is just becoming another program has no words at all for a moment."""
    deadline_s = time.monotonic() + DEADLINE_S
    while len(processes_with(MARK)) != number and time.monotonic() < deadline_s:
        Event().wait(0.01)
    return len(processes_with(MARK)) == number


async def fails_by_time(command: str) -> None:
    """Twice: asyncio makes things of its own the first time."""
    before = -1
    for _ in range(2):
        with pytest.raises(DiscoveryFailed, match=r"did not end within 0.3 s and was killed"):
            await ScriptDiscovery(command, time_limit_s=0.3).find()
        assert before in (-1, descriptors())
        before = descriptors()


@pytest.mark.parametrize("command", [LIVES_ON, f"{LIVES_ON} & echo localhost:2", f"{LIVES_ON} & wait"])
def test_a_script_that_is_late_is_killed_with_all_that_it_has_started(command: str) -> None:
    run(fails_by_time(command))
    assert are_gone()


def test_a_process_that_has_left_the_scripts_group_costs_no_descriptors() -> None:
    try:
        run(fails_by_time(f"setsid {LIVES_ON} & echo localhost:2"))
    finally:
        for pid in processes_with(MARK):
            os.kill(pid, signal.SIGKILL)


def test_a_script_is_killed_when_nobody_wants_to_know_any_more(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")

    async def test() -> None:
        asking = asyncio.ensure_future(ScriptDiscovery(f"{LIVES_ON} & echo runs > {fifo}").find())
        assert await asyncio.to_thread(fifo.read_text) == "runs\n"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert asking.cancelled()

    run(test())
    assert are_gone()


def test_what_a_script_leaves_in_the_background_with_an_output_of_its_own_may_live_on() -> None:
    try:
        found = run(ScriptDiscovery(f"{LIVES_ON} >/dev/null 2>&1 & echo localhost:2").find())
        assert found == (HostSlots("localhost", 2),)
        assert are_left(1)
    finally:
        for pid in processes_with(MARK):
            os.kill(pid, signal.SIGKILL)
