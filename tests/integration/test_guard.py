"""No worker outlives its agent, however that ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from farandole.launch.guard import Guard

DEADLINE_S = 10.0

# An agent with two workers; one has a child, as a loader. Says the three pids and waits to be killed.
AGENT = """
import os, signal, subprocess, sys
from farandole.launch.guard import Guard
guard = Guard()
guard.start()
code = "import os, signal; print(os.getpid(), os.fork(), flush=True); signal.pause()"
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


def test_a_kill_9_of_the_agent_takes_the_watched_workers_and_their_children_along() -> None:
    with subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        worker, child, released, guard = map(int, agent.stdout.readline().split())
        descriptors = {pid: os.pidfd_open(pid) for pid in (worker, child, guard)}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(guard, number)  # nothing that a terminal or a batch system sends ends it early
        agent.kill()
        assert all(ends_in_time(descriptor) for descriptor in descriptors.values())
        os.killpg(released, signal.SIGKILL)  # still there


def test_a_clean_stop_kills_nobody(sleeper: subprocess.Popen[bytes]) -> None:
    guard = Guard()
    guard.start()
    guard.watch(sleeper.pid)
    guard.stop()
    guard.stop()
    assert sleeper.poll() is None


def test_a_guard_that_was_killed_is_replaced_and_its_groups_are_watched_again(
    sleeper: subprocess.Popen[bytes],
) -> None:
    guard = Guard()
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


def test_workers_do_not_inherit_the_guards_pipe() -> None:
    guard = Guard()
    guard.start()
    assert guard._process is not None
    assert guard._process.stdin is not None
    assert not os.get_inheritable(guard._process.stdin.fileno())
    guard.stop()
