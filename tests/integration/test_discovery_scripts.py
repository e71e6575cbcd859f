"""Discovery scripts that do not end as they should, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from farandole.job.engines.discovery import DiscoveryFailed, ScriptDiscovery
from farandole.job.engines.host_list import HostScript, HostSlots
from tests.support.jobs import processes_with
from tests.support.waiting import DEADLINE_S, run


class Lasting:
    """A command for scripts, `sleep` with a mark in its environment that nobody else has, and what is left of it."""

    def __init__(self) -> None:
        self._mark = f"farandole-test-{uuid.uuid4().hex}"
        self.command = f"env MARK={self._mark} sleep 60"

    def comes_to(self, number: int) -> bool:
        """Whether so many processes are left, at the latest when the kernel has freed what was killed. One that is
        just becoming another program has no words at all for a moment."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            if len(processes_with(self._mark)) == number:
                return True
            Event().wait(0.01)
        return False

    def kill(self) -> None:
        for pid in processes_with(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def lasting() -> Iterator[Lasting]:
    made = Lasting()
    yield made
    made.kill()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def fails_by_time(command: str) -> None:
    """Twice: asyncio makes things of its own the first time."""
    before = -1
    for _ in range(2):
        with pytest.raises(DiscoveryFailed, match=r"did not end within 0.3 s and was killed"):
            await ScriptDiscovery(HostScript(command), time_limit_s=0.3).find()
        assert before in (-1, descriptors())
        before = descriptors()


@pytest.mark.parametrize("command", ["{}", "{} & echo localhost:2", "{} & wait"])
def test_a_script_that_is_late_is_killed_with_all_that_it_has_started(command: str, lasting: Lasting) -> None:
    run(fails_by_time(command.format(lasting.command)))
    assert lasting.comes_to(0)


def test_a_process_that_has_left_the_scripts_group_costs_no_descriptors(lasting: Lasting) -> None:
    run(fails_by_time(f"setsid {lasting.command} & echo localhost:2"))


def test_a_script_is_killed_when_nobody_wants_to_know_any_more(tmp_path: Path, lasting: Lasting) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")

    async def test() -> None:
        asking = asyncio.ensure_future(ScriptDiscovery(HostScript(f"{lasting.command} & echo runs > {fifo}")).find())
        assert await asyncio.to_thread(fifo.read_text) == "runs\n"
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert asking.cancelled()

    run(test())
    assert lasting.comes_to(0)


def test_what_a_script_leaves_in_the_background_with_an_output_of_its_own_may_live_on(lasting: Lasting) -> None:
    found = run(ScriptDiscovery(HostScript(f"{lasting.command} >/dev/null 2>&1 & echo localhost:2")).find())
    assert found == (HostSlots("localhost", 2),)
    assert lasting.comes_to(1)


@pytest.mark.parametrize("command", ["yes", "yes >&2", "yes localhost:2 & wait"])
def test_a_script_that_writes_without_end_is_killed_before_it_fills_the_memory(command: str) -> None:
    with pytest.raises(DiscoveryFailed, match=r"more than \d+ bytes to its standard (output|error) and was killed"):
        run(ScriptDiscovery(HostScript(command)).find())


def test_what_a_script_says_about_itself_is_shortened() -> None:
    with pytest.raises(DiscoveryFailed) as caught:
        run(ScriptDiscovery(HostScript("seq 100000 >&2; exit 3")).find())
    assert "exit code 3: " in str(caught.value)
    assert str(caught.value).endswith("100000")
    assert len(str(caught.value)) < 1000
    with pytest.raises(DiscoveryFailed, match="at most 253 characters") as caught:
        run(ScriptDiscovery(HostScript("head -c 1000000 /dev/zero | tr '\\0' a")).find())
    assert len(str(caught.value)) < 1000


def test_more_hosts_and_slots_than_a_job_may_have_are_refused() -> None:
    with pytest.raises(DiscoveryFailed, match="at most 4096 slots, got 1000000000"):
        run(ScriptDiscovery(HostScript("echo a:1000000000")).find())
    with pytest.raises(DiscoveryFailed, match="a job may have 32768 hosts and 65536 slots"):
        run(ScriptDiscovery(HostScript("seq -f 'a%g:4000' 20")).find())
