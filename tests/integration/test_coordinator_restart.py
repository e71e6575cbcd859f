"""The coordinator is killed while workers train: another one takes over, and no worker notices."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from farandole.base.config import JobConfig
from farandole.base.events.event import Event
from farandole.base.events.host_events import CoordinatorRestarted
from farandole.job.coordinator.coordinator_process import EPOCHS_OF_A_LAUNCHER
from farandole.job.coordinator.journal import Journal, JournalFiles, decoded, files_in_memory
from farandole.job.coordinator.server import CoordinatorSetup
from farandole.job.launch.supervised_coordinator import CoordinatorFailed, SupervisedCoordinator
from farandole.testing.lab import Lab, why_not
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training, factories_below
from tests.support.jobs import check_job
from tests.support.joined import AGENT
from tests.support.lasting_job import LastingJob, further

SAMPLES, LONG_S = 600, 60.0


@pytest.mark.timeout(150)
def test_a_coordinator_that_is_killed_again_and_again_costs_no_step_and_no_worker(tmp_path: Path) -> None:
    with LastingJob(tmp_path, "-np", "3") as job:
        first = job.wait_until(all_training(3), LONG_S)
        for _ in range(4):
            job.kill_coordinator()
            job.wait_until(further(job.latest()), LONG_S)
        last = job.latest()
        job.finish()
    assert {each["pid"] for each in last.values()} == {each["pid"] for each in first.values()}
    assert len(job.events("CoordinatorRestarted")) == 4
    assert len(job.events("GenerationStarted")) == 1
    check_job(Proof(tmp_path), SAMPLES, workers_at_end=3)


@pytest.mark.timeout(150)
def test_a_worker_that_dies_together_with_the_coordinator_is_replaced_by_the_next_one(tmp_path: Path) -> None:
    with LastingJob(tmp_path, "-np", "3") as job:
        latest = job.wait_until(all_training(3), LONG_S)
        pid, _ = job.coordinator()
        os.kill(pid, signal.SIGKILL)
        job.kill(latest[1]["pid"])
        job.forget(latest[1])
        job.wait_until(lambda now: all_training(3)(now) and now[0]["generation"] >= 3, LONG_S)
        job.kill_coordinator()
        latest = job.latest()
        job.kill(latest[0]["pid"])  # decided by a coordinator that knows of the first one from the journal only
        job.forget(latest[0])
        job.wait_until(lambda now: all_training(3)(now) and now[0]["generation"] >= 5, LONG_S)
        job.finish()
    check_job(Proof(tmp_path), SAMPLES, workers_at_end=3)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_network_that_is_gone_keeps_no_coordinator_from_taking_over(tmp_path: Path) -> None:
    """The job listens at an address of a network that is taken away while it runs."""
    with Lab(hosts=1) as lab:
        gone = lab.network.driver.address
        with LastingJob(
            tmp_path, "-np", "1", "--token-file", str(tmp_path / "token"), "--job-file", str(tmp_path / "job")
        ) as job:
            job.wait_until(all_training(1), LONG_S)
            assert gone in (tmp_path / "job").read_text()
            lab.network.close()
            job.kill_coordinator()
            job.wait_until(further(job.latest()), LONG_S)
            job.finish()
    assert len(job.events("CoordinatorRestarted")) == 1


@pytest.mark.timeout(150)
def test_an_agent_of_another_machine_keeps_its_workers_and_their_lines(tmp_path: Path) -> None:
    token = tmp_path / "token"
    flags = ["-np", "2", "--local-slots", "1", "--token-file", str(token), "--job-file", str(tmp_path / "job")]
    with LastingJob(tmp_path, *flags) as job, ExitStack() as cleanup:
        while not (tmp_path / "job").exists():
            time.sleep(0.02)
        agent = cleanup.enter_context(
            subprocess.Popen(
                [*AGENT, "--job-file", str(tmp_path / "job"), "--host", "other"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        )
        cleanup.callback(agent.kill)
        first = job.wait_until(all_training(2), LONG_S)
        for number in (signal.SIGKILL, signal.SIGSTOP):  # a dead one, and one that hangs
            job.kill_coordinator(number)
            job.wait_until(further(job.latest()), LONG_S)
        assert {each["pid"] for each in job.latest().values()} == {each["pid"] for each in first.values()}
        job.finish()
        _, error = agent.communicate(timeout=LONG_S)
    assert agent.returncode == 0, error
    assert b"its workers continue" in error
    assert len(job.events("GenerationStarted")) == 1
    output = (tmp_path / "output").read_text()
    assert "rank 0 is through" in output
    assert "rank 1 is through" in output
    check_job(Proof(tmp_path), SAMPLES, workers_at_end=2)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_kill_9_of_the_launcher_leaves_neither_coordinator_nor_workers(tmp_path: Path) -> None:
    with LastingJob(tmp_path, "-np", "2") as job:
        job.wait_until(all_training(2), LONG_S)
        processes = [job.coordinator()[0], *factories_below(job.process.pid)]
        job.process.kill()
        job.process.wait(LONG_S)
        deadline_s = time.monotonic() + LONG_S
        while any(map(is_running, processes)):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


@pytest.mark.timeout(150)
def test_a_factory_of_coordinators_that_is_killed_or_stopped_costs_the_start_of_another_one(tmp_path: Path) -> None:
    with LastingJob(tmp_path, "-np", "2") as job:
        first = job.wait_until(all_training(2), LONG_S)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            (factory,) = factories_below(job.process.pid)
            opened = {os.readlink(each) for each in Path(f"/proc/{factory}/fd").iterdir()}
            assert len([each for each in opened if each.startswith("socket:")]) == 1  # to the launcher
            assert not [each for each in opened if "memfd" in each]
            pid, epoch = job.coordinator()
            os.kill(factory, number)
            job.wait_until(further(job.latest()), LONG_S)
            os.kill(pid, signal.SIGKILL)
            assert job.coordinator()[1] == epoch + 1
            job.wait_until(further(job.latest()), LONG_S)
        last = job.latest()
        job.finish()
    assert {each["pid"] for each in last.values()} == {each["pid"] for each in first.values()}
    assert len(job.events("GenerationStarted")) == 1


@pytest.mark.parametrize(
    ("is_forked", "reason"),
    [(True, r"the coordinator \(pid [1-9]"), (False, "could not be started: process .* has ended")],
    ids=["forked", "executed"],
)
def test_a_coordinator_that_dies_at_once_ends_the_job_with_the_reason(is_forked: bool, reason: str) -> None:
    """As where the machine has no memory for it."""
    program = (
        "import os, sys; from farandole.job.coordinator import coordinator_factory as c; "
        "c.sys.executable = '/bin/false'; "
        f"c.run_coordinator = lambda *_: os._exit(1); c._thread_count = lambda: {1 if is_forked else 2}; "
        "from farandole.job.launch.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    words = ["run", "-np", "1", sys.executable, "-c", "pass"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode != 0
    assert re.search(reason, done.stderr)


# Without a job: its process under the launcher's eyes -----------------------------------------------------------------


class Launcher:
    """A supervised coordinator without agents, and its events."""

    def __init__(self, name: str = "", journal: JournalFiles | None = None) -> None:
        self.events: list[Event] = []
        setup = CoordinatorSetup(JobConfig(1), b"t" * 32, "job", ("127.0.0.1",), 0, None, None, False, launcher=name)
        self.coordinator = SupervisedCoordinator(
            setup, on_event=self.events.append, on_output=lambda *_: None, journal=journal
        )

    @asynccontextmanager
    async def runs(self) -> AsyncIterator[asyncio.Task[object]]:
        await self.coordinator.start()
        serving = asyncio.create_task(self.coordinator.run())
        try:
            yield serving
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def test_one_that_is_stopped_is_replaced_at_the_same_address_and_its_job_can_be_ended() -> None:
    async def check() -> None:
        launcher = Launcher()
        async with launcher.runs() as serving:
            pid, address = launcher.coordinator.pid, launcher.coordinator.address
            os.kill(pid, signal.SIGSTOP)
            launcher.coordinator.request_stop(False, "a test")  # to the one that is stopped: the next one does it
            async with asyncio.timeout(60):
                outcome = await serving
            assert "a test" in str(outcome)
            (restarted,) = (each for each in launcher.events if isinstance(each, CoordinatorRestarted))
            assert (restarted.pid, restarted.how) == (pid, "did not respond for 1.5 s, and was killed")
            assert launcher.coordinator.address == address

    asyncio.run(check())


def test_the_coordinator_of_a_launcher_that_takes_over_cannot_be_outdone_by_those_of_the_former_one() -> None:
    """The former one, whose coordinators end in silence, still starts some."""

    async def check() -> None:
        files = files_in_memory()
        former = Launcher("a", files)
        async with former.runs() as serving:
            assert epoch_in(files) == 1
            former.coordinator.abandon("a test")
            with pytest.raises(CoordinatorFailed, match="a test"):
                await serving
        port = former.coordinator.address.port
        later = Launcher("b", files)
        async with later.runs() as serving:
            assert epoch_in(files) == EPOCHS_OF_A_LAUNCHER
            assert later.coordinator.address.port == port
            later.coordinator.request_stop(True, "the second one")
            async with asyncio.timeout(60):
                assert "the second one" in str(await serving)
        last = Launcher("c", files)  # the former one has died before it could forget the job
        async with last.runs() as serving, asyncio.timeout(60):
            assert "the second one" in str(await serving)
            assert last.coordinator.has_ended

    asyncio.run(check())


def epoch_in(files: JournalFiles) -> int:
    data = Journal(files, "job").read()
    assert data is not None
    return decoded(data)[0].job.coordinator_epoch


def test_a_journal_that_is_damaged_ends_the_job_with_the_reason() -> None:
    async def check() -> None:
        launcher = Launcher()
        async with launcher.runs() as serving:
            for descriptor in launcher.coordinator.journal_files:
                os.ftruncate(descriptor, 10)
                os.pwrite(descriptor, b"0123456789", 0)
            os.kill(launcher.coordinator.pid, signal.SIGKILL)
            with pytest.raises(CoordinatorFailed, match=r"no other coordinator can take over: .* is damaged"):
                async with asyncio.timeout(60):
                    await serving

    asyncio.run(check())
