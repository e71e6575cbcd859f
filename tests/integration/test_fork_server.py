"""Workers that a fork server makes are as any others, and the server's end harms none of them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from farandole.base.events.event import Event
from farandole.base.events.worker_events import ForkServerLost, ForkServerReady
from farandole.job.agent.fork_server import ForkServer
from farandole.job.agent.guard import Guard
from farandole.job.agent.process import WorkerProcess, reap_group
from farandole.job.agent.spawner import Spawner, make_spawner
from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob, all_training
from tests.support.jobs import ELASTIC_JOB, SCRIPTS, check_job, processes_with

DEADLINE_S = 60.0
SCRIPT = str(SCRIPTS / "forked.py")
DOINGS = ("tell", "fail", "fail_in_hook", "interrupted", "message", "signal", "0", "3")


@dataclass
class Ended:
    """What became of a worker."""

    pid: int
    exit_code: int = 0
    was_forked: bool = False
    lines: list[tuple[str, str]] = field(default_factory=list)

    def said(self, stream: str = "stdout") -> list[str]:
        return [line for where, line in self.lines if where == stream]


class Workers:
    """Starts workers with one of the ways there are."""

    def __init__(self, spawner: Spawner, environment: dict[str, str]) -> None:
        self._spawner, self._environment = spawner, environment

    async def run(self, what: str, **variables: str) -> Ended:
        ended = Ended(0)
        own = {"FARANDOLE_TEST": what, "FARANDOLE_AGENT_PID": str(os.getpid()), **variables}
        child = await self._spawner.spawn({**self._environment, **own})
        ended.was_forked = is_forked(child.pid)
        process = WorkerProcess(child, lambda stream, line: ended.lines.append((stream, line.decode())))
        try:
            ended.pid, ended.exit_code = process.pid, await asyncio.wait_for(process.wait(), DEADLINE_S)
        finally:
            process.kill()
            await process.wait_for_output()
            await reap_group(process.pid)
        return ended


class Served:
    """A spawner with a fork server, and a plain one, for the same command."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.events: list[Event] = []
        self._guard, self._command = Guard(folder), command
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}

    async def __aenter__(self) -> Served:
        self._guard.start()
        self._spawners = [
            make_spawner(use, self._command, self.environment, self._guard, self.events.append) for use in ("off", "on")
        ]
        self.plain, self.forked = (Workers(spawner, self.environment) for spawner in self._spawners)
        return self

    async def __aexit__(self, *_: object) -> None:
        for spawner in self._spawners:
            await spawner.close()
        self._guard.stop()

    @property
    def server(self) -> int:
        (ready,) = (event for event in self.events if isinstance(event, ForkServerReady))
        return ready.pid


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How each doing ended, "plain" and "forked", by these words and its own. One server has made all the forked."""
    results: dict[str, Ended] = {}

    async def run_all() -> None:
        command = [sys.executable, "-W", "error::ResourceWarning", "-Xutf8", SCRIPT, "an argument", "--flag"]
        async with Served(tmp_path_factory.mktemp("scratch"), command) as served:
            for what in DOINGS:
                results[f"forked {what}"] = await served.forked.run(what)
                results[f"plain {what}"] = await served.plain.run(what)
            for what in ("load", "draw", "leave_orphans"):
                results[f"forked {what}"] = await served.forked.run(what)
            results["again draw"] = await served.forked.run("draw")
            for name in ("OMP_NUM_THREADS", "HOROVOD_RANK"):
                results[f"with {name}"] = await served.forked.run("0", **{name: "7"})
            results["server"] = Ended(served.server)
            assert not [event for event in served.events if isinstance(event, ForkServerLost)]
        assert not Path(f"/proc/{served.server}").exists()

    asyncio.run(run_all())
    return results


@pytest.mark.parametrize("what", DOINGS)
def test_a_forked_worker_cannot_tell_that_it_is_one(ended: dict[str, Ended], what: str) -> None:
    plain, forked = ended[f"plain {what}"], ended[f"forked {what}"]
    assert forked.said() == plain.said()
    assert forked.said("stderr") == plain.said("stderr")
    assert forked.exit_code == plain.exit_code


def test_all_of_them_were_forked(ended: dict[str, Ended]) -> None:
    assert ended["forked signal"].exit_code == -signal.SIGSEGV
    assert ended["forked interrupted"].exit_code == -signal.SIGINT
    assert len({result.pid for result in ended.values()}) == len(ended)


def test_loader_workers_of_every_kind_work_in_a_forked_worker(ended: dict[str, Ended]) -> None:
    load = ended["forked load"]
    assert load.said() == ["fork 15", "spawn 15", "forkserver 15", "False 27000000.0"], load.said("stderr")


def test_no_two_forked_workers_draw_the_same_random_numbers(ended: dict[str, Ended]) -> None:
    first, second = ended["forked draw"].said(), ended["again draw"].said()
    assert len(first) == len(second) == 4
    assert not set(first) & set(second)


def test_what_escapes_from_a_forked_worker_does_not_become_a_child_that_the_agent_never_reaps(
    ended: dict[str, Ended],
) -> None:
    assert ended["forked leave_orphans"].said() == ["False"] * 5


def is_forked(pid: int) -> bool:
    return b"fork_server_process.py" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_what_a_library_may_have_read_makes_a_worker_start_in_the_plain_way(ended: dict[str, Ended]) -> None:
    assert ended["forked 3"].was_forked
    assert ended["with HOROVOD_RANK"].was_forked
    assert not ended["with OMP_NUM_THREADS"].was_forked
    assert ended["with OMP_NUM_THREADS"].exit_code == 0


def test_a_server_that_is_stopped_is_told_of_and_workers_start_without_it(tmp_path: Path) -> None:
    async def run_both() -> None:
        async with Served(tmp_path, [sys.executable, "-m", "tests.scripts.forked", "an argument"]) as served:
            forked, plain = await served.forked.run("tell"), await served.plain.run("tell")
            assert (forked.was_forked, plain.was_forked) == (True, False)
            assert (forked.said(), forked.exit_code) == (plain.said(), plain.exit_code)
            os.kill(served.server, signal.SIGSTOP)
            assert (await served.forked.run("3")).exit_code == 3
            (lost,) = (event for event in served.events if isinstance(event, ForkServerLost))
            assert lost.line().startswith("the fork server is lost (")

    asyncio.run(run_both())


def test_a_server_that_cannot_import_is_told_of_and_workers_start_without_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('not here')")
    script = tmp_path / "script.py"
    script.write_text("print('here')")

    async def run_one() -> None:
        async with Served(tmp_path / "scratch", [sys.executable, str(script)]) as served:
            worker = await served.forked.run("0")
            assert (worker.exit_code, worker.said()) == (0, ["here"])
            (lost,) = served.events
            assert "ImportError: not here" in lost.line()

    asyncio.run(run_one())


# Whole jobs ----------------------------------------------------------------------------------------------


class ForkingJob(RunningJob):
    """Trains until finish() is called."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.output, self._stop = folder / "output", folder / "stop"
        # Slowly: what starts meanwhile finds the cores free.
        words = ["--epochs", "1000000", "--stop", str(self._stop), "--item-ms", "2"]
        super().__init__(["-np", "2", "--verbose", *flags], ELASTIC_JOB, words, folder, self.output)

    def wait_for_line(self, text: str) -> None:
        self.wait_until(lambda _: text in self.output.read_text(), DEADLINE_S)

    def server(self) -> int:
        text = self.output.read_text()
        return int(text.partition("the fork server (process ")[2].partition(")")[0])

    def lose(self, rank: int) -> int:
        """Kill a worker, and give the process that replaces it."""
        latest = self.wait_until(all_training(2), DEADLINE_S)
        before = {record["pid"] for record in latest.values()}
        self.kill(latest[rank]["pid"])
        latest = self.wait_until(
            lambda latest: all_training(2)(latest) and {r["pid"] for r in latest.values()} != before, DEADLINE_S
        )
        (new,) = {record["pid"] for record in latest.values()} - before
        return int(new)

    def finish(self) -> None:
        self._stop.touch()
        assert self.wait(DEADLINE_S) == 0, self.output.read_text()


@pytest.fixture
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert processes_with(str(tmp_path)) == []


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
def test_replacements_are_forked_until_the_server_is_killed_and_no_worker_goes_with_it(tmp_path: Path) -> None:
    with ForkingJob(tmp_path) as running:
        running.wait_for_line("the fork server (process ")
        assert is_forked(running.lose(1))
        os.kill(running.server(), signal.SIGKILL)
        running.wait_for_line("the fork server is lost (it was killed, or it failed)")
        assert not is_forked(running.lose(1))
        running.finish()
    proof = Proof(tmp_path)
    check_job(proof, samples=600, workers_at_end=2)
    assert list(proof.generations().values()) == [2, 1, 2, 1, 2]


@pytest.mark.usefixtures("nothing_left")
def test_ctrl_c_while_all_workers_wait_for_the_server_ends_the_job_at_once(tmp_path: Path) -> None:
    with ForkingJob(tmp_path, "--fork-server", "on") as running:
        running.wait_for_line("starting w1")
        running.process.send_signal(signal.SIGINT)
        assert running.wait(8) == 130  # less than the workers' grace and the time to reap them


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
def test_a_job_whose_workers_are_all_forked_ends_well_at_ctrl_c(tmp_path: Path) -> None:
    with ForkingJob(tmp_path, "--fork-server", "on") as running:
        latest = running.wait_until(all_training(2), DEADLINE_S)
        assert all(is_forked(record["pid"]) for record in latest.values())
        running.process.send_signal(signal.SIGINT)
        assert running.wait(DEADLINE_S) == 130


@pytest.mark.long
def test_kill_9_of_the_agent_leaves_neither_the_server_nor_what_it_forked(tmp_path: Path) -> None:
    with ForkingJob(tmp_path, "--fork-server", "on") as running:
        running.wait_until(all_training(2), DEADLINE_S)
        os.kill(running.server(), signal.SIGSTOP)  # it cannot see that the agent is gone
        running.process.kill()
        running.process.wait(DEADLINE_S)
    wait_until_gone(str(tmp_path))


def wait_until_gone(needle: str) -> None:
    async def gone() -> None:
        while processes_with(needle):
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(gone(), DEADLINE_S))


@pytest.fixture
def slow_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs take long to begin, as where cores are scarce."""
    begin = ForkServer._begin

    def late(*arguments: Any) -> Any:
        time.sleep(0.3)
        return begin(*arguments)

    monkeypatch.setattr(ForkServer, "_begin", late)


@pytest.mark.usefixtures("slow_programs")
def test_an_agent_can_say_its_beats_while_its_server_begins(tmp_path: Path) -> None:
    async def say(heartbeats: list[float]) -> None:
        while True:
            heartbeats.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def test() -> None:
        heartbeats: list[float] = []
        async with Served(tmp_path, [sys.executable, SCRIPT]) as served:
            saying = asyncio.create_task(say(heartbeats))
            assert (await served.forked.run("0")).was_forked
            saying.cancel()
        assert sum(later - sooner > 0.25 for sooner, later in itertools.pairwise(heartbeats)) == 0

    asyncio.run(test())


@pytest.mark.usefixtures("slow_programs")
def test_a_server_that_is_just_beginning_ends_with_its_agent(tmp_path: Path) -> None:
    async def test() -> None:
        async with Served(tmp_path, [sys.executable, SCRIPT, str(tmp_path)]) as served:
            spawning = asyncio.create_task(served.forked.run("0"))
            await asyncio.sleep(0.05)
        with pytest.raises(OSError, match="the agent is ending its workers"):
            await spawning
        assert processes_with(str(tmp_path)) == []

    asyncio.run(test())


def test_without_a_server_that_can_begin_workers_are_started_in_the_plain_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no more processes")

    async def test() -> None:
        async with Served(tmp_path, [sys.executable, SCRIPT]) as served:
            monkeypatch.setattr(ForkServer, "_begin", fail)
            ended = await served.forked.run("3")
        assert (ended.was_forked, ended.exit_code) == (False, 3)
        assert [event.line() for event in served.events if isinstance(event, ForkServerLost)]

    asyncio.run(test())
