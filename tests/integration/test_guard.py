"""No worker outlives its agent, however that ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farandole.job.agent import guard_process
from farandole.job.agent.guard import Guard
from tests.support.jobs import processes_with

DEADLINE_S = 10.0

# An agent with two workers; one has a child, as a loader. Says the three pids and waits to be killed.
AGENT = """
import os, signal, subprocess, sys
from pathlib import Path
from farandole.job.agent.guard import Guard
guard = Guard(Path(sys.argv[1]))
guard.start()
code = "import os, signal; child = os.fork(); child and print(os.getpid(), child, flush=True); signal.pause()"
workers = [
    subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True, text=True)
    for _ in range(2)
]
guard.watch(workers[0].pid)
guard.watch(workers[1].pid)
guard.release(workers[1].pid)
print(workers[0].stdout.readline().strip(), workers[1].pid, guard._process.pid, flush=True)
signal.pause()
"""


# An agent without workers that is killed while it ends: when it begins to remove its folder. Says the guard's pid.
ENDING_AGENT = """
import asyncio, os, shutil, signal, sys, tempfile
from farandole.job.agent.worker_processes import WorkerProcesses
tempfile.tempdir = sys.argv[1]

class Spawner:
    async def close(self): pass

async def end():
    processes = WorkerProcesses(lambda guard: Spawner(), None, None, None)
    processes.start()
    (processes.scratch / "file").touch()
    print(processes.guard._process.pid, flush=True)
    sys.stdin.readline()
    shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    await processes.end(0.0)

asyncio.run(end())
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


def ends_in_time(descriptor: int) -> bool:
    """Whether the process behind a pidfd ends before the deadline."""
    ready, _, _ = select.select([descriptor], [], [], DEADLINE_S)
    os.close(descriptor)
    return bool(ready)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        os.sched_yield()


def wait_until_ignored(pid: int, number: int) -> None:
    """Wait until the process ignores the signal, as the kernel tells it."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        ignored = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in line)
        if int(ignored.split()[1], 16) >> (number - 1) & 1:
            return
        os.sched_yield()
    raise TimeoutError(f"process {pid} does not ignore signal {number}")


def test_a_kill_9_of_the_agent_takes_the_watched_workers_and_their_children_along(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (scratch / "file").touch()
    with subprocess.Popen([sys.executable, "-c", AGENT, str(scratch)], stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None
            worker, child, released, guard = map(int, agent.stdout.readline().split())
            descriptors = [os.pidfd_open(pid) for pid in (worker, child, guard)]
            shared = [Path(f"/dev/shm/torch_{pid}_1_0") for pid in (worker, child)]
            for path in shared:
                path.touch()
        finally:
            agent.kill()
        assert [ends_in_time(descriptor) for descriptor in descriptors] == [True, True, True]
        os.killpg(released, signal.SIGKILL)  # still there
    assert not scratch.exists()
    assert not any(path.exists() for path in shared)


@pytest.mark.parametrize("is_busy", [False, True])
def test_after_a_kill_9_of_the_agent_a_workers_shared_memory_is_removed_by_its_resource_tracker(
    tmp_path: Path, is_busy: bool
) -> None:
    """Also where the machine is so busy that the tracker does not run for a while."""
    code = """
import signal
from multiprocessing import shared_memory
print(shared_memory.SharedMemory(create=True, size=1).name, flush=True)
signal.pause()
"""
    guard = Guard(tmp_path)
    guard.start()
    assert guard._process is not None
    assert guard._process.stdin is not None
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, text=True) as worker:
        assert worker.stdout is not None
        block = Path("/dev/shm", worker.stdout.readline().strip())
        assert block.exists()
        wait_until(lambda: any(map(guard_process.is_resource_tracker, guard_process.members_of([worker.pid]))))
        [tracker] = filter(guard_process.is_resource_tracker, guard_process.members_of([worker.pid]))
        if is_busy:
            os.kill(tracker, signal.SIGSTOP)
        guard.watch(worker.pid)
        guard._process.stdin.close()  # as if this process had ended
        assert worker.wait(DEADLINE_S) == -signal.SIGKILL
    if is_busy:
        time.sleep(1.0)
        os.kill(tracker, signal.SIGCONT)
    guard._process.wait(DEADLINE_S)
    assert not block.exists()


def test_a_kill_9_of_an_agent_that_is_ending_leaves_no_folder_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDING_AGENT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        guard = os.pidfd_open(int(agent.stdout.readline()))
        assert len(list(tmp_path.iterdir())) == 1
        agent.communicate("end\n", timeout=DEADLINE_S)
        assert agent.returncode == -signal.SIGKILL
        assert ends_in_time(guard)
    assert list(tmp_path.iterdir()) == []


def test_nothing_that_a_terminal_or_a_batch_system_sends_ends_the_guard_early(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-I", "-S", guard_process.__file__, str(tmp_path), "0"], stdin=subprocess.PIPE
    ) as guard:
        assert guard.stdin is not None
        guard.stdin.write(b"watch %d\n" % sleeper.pid)
        guard.stdin.flush()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            wait_until_ignored(guard.pid, number)  # each: under nohup SIGHUP is ignored from the start
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            guard.send_signal(number)
        guard.stdin.close()
        assert sleeper.wait(DEADLINE_S) == -signal.SIGKILL
        assert guard.wait(DEADLINE_S) == 0


def test_a_clean_stop_kills_nobody(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    guard = Guard(tmp_path)
    guard.start()
    guard.watch(sleeper.pid)
    guard.stop()
    guard.stop()
    assert sleeper.poll() is None


def test_a_guard_that_was_killed_is_replaced_and_its_groups_are_watched_again(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    guard = Guard(tmp_path)
    guard.start()
    guard.watch(sleeper.pid)
    first = guard._process
    assert first is not None
    first.kill()
    first.wait()
    guard.watch(1 << 30)  # notices
    second = guard._process
    assert second is not None
    assert second is not first
    assert second.stdin is not None
    second.stdin.close()  # as if this process had ended
    assert sleeper.wait(DEADLINE_S) == -signal.SIGKILL
    second.wait(DEADLINE_S)


def test_when_the_agent_is_gone_its_last_message_is_sent_and_after_a_stop_it_is_not(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    for is_clean in (True, False):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            guard = Guard(tmp_path, last_message=(theirs.fileno(), b"\0the agent has died"))
            guard.start()
            theirs.close()
            process = guard._process
            assert process is not None
            assert process.stdin is not None
            guard.watch(sleeper.pid)
            if is_clean:
                guard.stop()
            else:
                process.stdin.close()  # as if this process had ended
            ours.settimeout(DEADLINE_S)
            assert ours.recv(100) == (b"" if is_clean else b"\0the agent has died")
            process.wait(DEADLINE_S)
    assert sleeper.wait(DEADLINE_S) == -signal.SIGKILL


def test_workers_do_not_inherit_the_guards_pipe(tmp_path: Path) -> None:
    guard = Guard(tmp_path)
    guard.start()
    assert guard._process is not None
    assert guard._process.stdin is not None
    assert not os.get_inheritable(guard._process.stdin.fileno())
    guard.stop()


def test_a_guard_that_was_stopped_is_not_renewed(tmp_path: Path) -> None:
    """An agent whose job ends may be opening the connection on which another guard would send its last message."""
    guard = Guard(tmp_path)
    guard.start()
    guard.stop()
    guard.renew(None)
    assert processes_with(str(tmp_path)) == []


def test_only_the_shared_memory_of_dead_processes_is_removed(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait(DEADLINE_S)
    files = {pid: tmp_path / f"torch_{pid}_1_0" for pid in (sleeper.pid, dead.pid)}
    for path in files.values():
        path.touch()
    guard_process.remove_shared_memory(files, tmp_path)
    assert files[sleeper.pid].exists()
    assert not files[dead.pid].exists()
