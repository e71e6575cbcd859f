"""Worker processes: their exits are seen at once, and nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from farandole.job.agent.guard_process import is_resource_tracker
from farandole.job.agent.process import DRAIN_S, WorkerProcess, start_child, worker_variables
from tests.support.waiting import run

# A worker that forks a child as a loader would; both then wait for ever.
WITH_CHILD = "import os, signal; child = os.fork(); child and print(child); signal.pause()"


class Printed:
    """The lines of a worker; a test can wait for one."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, bytes]] = []
        self._more = asyncio.Event()

    def __call__(self, stream: str, line: bytes) -> None:
        self.lines.append((stream, line))
        self._more.set()

    async def wait_for(self, wanted: Callable[[bytes], bool]) -> bytes:
        while True:
            for _, line in self.lines:
                if wanted(line):
                    return line
            self._more.clear()
            await self._more.wait()


@contextlib.asynccontextmanager
async def worker(argv: Sequence[str], printed: Printed, **env: str) -> AsyncIterator[WorkerProcess]:
    process = WorkerProcess(start_child(argv, worker_variables({**os.environ, **env})), printed)
    try:
        yield process
    finally:
        process.kill()
        await process.wait()
        await process.wait_for_output()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def runs_as_tracker(pid: int) -> None:
    """Wait until a resource tracker has begun its program: the worker does not."""
    while not is_resource_tracker(pid):
        await asyncio.sleep(0.01)


async def is_gone(pid: int) -> None:
    """Wait until a process that is not our child is gone, or a zombie."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        descriptor = os.pidfd_open(pid)
        gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, gone.set)
        try:
            await gone.wait()
        finally:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)


def test_lines_of_both_streams_arrive_and_the_last_ones_are_kept_at_the_exit() -> None:
    async def test() -> None:
        printed = Printed()
        code = "import sys; print('out'); print('a\\nb', file=sys.stderr); sys.stderr.write('no end'); sys.exit(3)"
        async with worker(python(code), printed) as process:
            assert await process.wait() == 3
            assert process.last_lines == ("a", "b", "no end")
            await process.wait_for_output()
            assert [line for stream, line in printed.lines if stream == "stdout"] == [b"out"]
            assert [line for stream, line in printed.lines if stream == "stderr"] == [b"a", b"b", b"no end"]

    run(test())


def test_output_of_any_size_arrives_whole() -> None:
    async def test() -> None:
        printed = Printed()
        async with worker(python("for i in range(100000): print(i)"), printed) as process:
            assert await process.wait() == 0
            await process.wait_for_output()
            assert [int(line) for _, line in printed.lines] == list(range(100000))

    run(test())


def test_a_worker_has_a_session_of_its_own_no_stdin_and_unbuffered_output() -> None:
    async def test() -> None:
        printed = Printed()
        code = "import os, sys; print(os.getsid(0) == os.getpid(), sys.stdin.read(), os.environ['PYTHONUNBUFFERED'])"
        for environment in ({}, {"PYTHONUNBUFFERED": ""}):
            async with worker(python(code), printed, **environment) as process:
                assert await process.wait() == 0
        assert [line for _, line in printed.lines] == [b"True  1", b"True  "]

    run(test())


def test_a_command_that_cannot_be_started_is_an_oserror() -> None:
    with pytest.raises(FileNotFoundError):
        start_child(["/no/such/command"], {})


def test_an_exit_is_seen_within_milliseconds_although_a_loader_holds_the_pipes() -> None:
    async def test() -> list[float]:
        latencies = []
        for _ in range(5):
            printed = Printed()
            async with worker(python(WITH_CHILD), printed) as process:
                child = int(await printed.wait_for(bool))
                start_s = time.monotonic()
                os.kill(process.pid, signal.SIGKILL)
                assert await process.wait() == -signal.SIGKILL
                latencies.append(time.monotonic() - start_s)
                await is_gone(child)
                await process.wait_for_output()
        return latencies

    latencies = run(test())
    print(f"exit seen after {1000 * statistics.median(latencies):.2f} ms (median), {1000 * max(latencies):.2f} ms")
    assert min(latencies) < 0.05  # under load, the others wait for a core


def test_without_pidfds_exits_are_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")

    async def test() -> None:
        async with worker(python("raise SystemExit(5)"), Printed()) as process:
            assert await process.wait() == 5
            await process.wait_for_output()

    run(test())


def test_a_process_that_escaped_from_the_group_holds_up_nobody() -> None:
    """It keeps the pipes open for as long as it lives."""

    async def test() -> None:
        printed = Printed()
        code = "import os, signal\nif os.fork() == 0: os.setsid(); print(os.getpid(), flush=True)\nsignal.pause()"
        async with worker(python(code), printed) as process:
            escaped = int(await printed.wait_for(bool))
            try:
                process.kill()
                start_s = time.monotonic()
                assert await process.wait() == -signal.SIGKILL
                await process.wait_for_output()
                assert time.monotonic() - start_s < DRAIN_S + 5
            finally:
                os.kill(escaped, signal.SIGKILL)

    run(test())


# A worker that says when it is asked to end, and ends unless it is stubborn; perhaps with a child, as a loader.
TERM_TELLER = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
name = b"loader" if os.environ.get("FORKS") and os.fork() == 0 else b"worker"
os.write(1, b"ready %d\\n" % os.getpid())  # in one piece: they share the pipe
while True:
    signal.sigwait({signal.SIGTERM})
    os.write(1, b"%s got SIGTERM\\n" % name)
    if not os.environ.get("STUBBORN"):
        os._exit(0)
"""


async def _ready(printed: Printed, count: int) -> list[int]:
    await printed.wait_for(lambda _: sum(line.startswith(b"ready") for _, line in printed.lines) == count)
    return [int(line.split()[1]) for _, line in printed.lines if line.startswith(b"ready")]


# A worker with a block of shared memory, whose tracker is the last of its children; its first child has left the group.
SHARING = """
import os, signal, sys
from multiprocessing import resource_tracker, shared_memory
resource_tracker.ensure_running()
escaped = sys.argv[1:] and os.fork()
if escaped == 0:
    os.setsid()
    signal.pause()
block = shared_memory.SharedMemory(create=True, size=1)
children = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()
tracker = next(pid for pid in children if int(pid) != escaped)
print(os.getpid(), tracker, block.name, escaped or 0)
signal.pause()
"""


@pytest.mark.parametrize("is_killed_by_us", [True, False])
def test_a_killed_workers_shared_memory_is_removed_by_its_resource_tracker(is_killed_by_us: bool) -> None:
    async def test() -> None:
        printed = Printed()
        async with worker(python(SHARING), printed) as process:
            pid, tracker, block, _ = (await printed.wait_for(bool)).split()
            await runs_as_tracker(int(tracker))
            process.note_children(int(pid))
            if is_killed_by_us:
                process.kill()
            else:
                os.kill(process.pid, signal.SIGKILL)
            assert await process.wait() == -signal.SIGKILL
            await is_gone(int(tracker))
            assert not Path("/dev/shm", block.decode()).exists()

    run(test())


def test_a_resource_tracker_that_an_escaped_process_keeps_alive_is_killed_too() -> None:
    async def test() -> None:
        printed = Printed()
        async with worker([*python(SHARING), "escape"], printed) as process:
            pid, tracker, block, escaped = (await printed.wait_for(bool)).split()
            await runs_as_tracker(int(tracker))
            process.note_children(int(pid))
            os.kill(process.pid, signal.SIGKILL)
            await process.wait()
            await is_gone(int(tracker))
            os.kill(int(escaped), signal.SIGKILL)
            # The block was in use, as far as anybody could tell, unless the tracker was faster than its end.
            Path("/dev/shm", block.decode()).unlink(missing_ok=True)

    run(test())


def test_only_the_process_that_called_init_is_asked_to_end() -> None:
    async def test() -> None:
        printed = Printed()
        async with worker(python(TERM_TELLER), printed, FORKS="1") as process:
            await _ready(printed, 2)
            process.terminate(30.0, worker_pid=process.pid)
            assert await process.wait() == 0
            await process.wait_for_output()
            assert [line for _, line in printed.lines[2:]] == [b"worker got SIGTERM"]

    run(test())


def test_a_worker_inside_a_shell_is_reached_and_the_shell_waits_for_it() -> None:
    async def test() -> None:
        printed = Printed()
        argv = ["sh", "-c", '"$0" -c "$1"; echo shell goes on', sys.executable, TERM_TELLER]
        async with worker(argv, printed) as process:
            (inner,) = await _ready(printed, 1)
            assert inner != process.pid
            process.terminate(30.0, inner)
            assert await process.wait() == 0
            await process.wait_for_output()
            assert [line for _, line in printed.lines[1:]] == [b"worker got SIGTERM", b"shell goes on"]

    run(test())


def test_before_init_every_process_is_asked_to_end() -> None:
    async def test() -> None:
        printed = Printed()
        async with worker(python(TERM_TELLER), printed, FORKS="1") as process:
            await _ready(printed, 2)
            process.terminate(30.0)
            assert await process.wait() == 0

    run(test())


def test_who_does_not_end_in_time_is_killed() -> None:
    async def test() -> None:
        printed = Printed()
        async with worker(python(TERM_TELLER), printed, STUBBORN="1") as process:
            await _ready(printed, 1)
            process.terminate(60.0, process.pid)
            process.terminate(0.05, process.pid)  # the shorter grace counts
            process.terminate(60.0, process.pid)
            assert await process.wait() == -signal.SIGKILL
            process.terminate(1.0)
            process.kill()  # old news
            await process.wait_for_output()

    run(test())


def test_no_descriptor_is_left_behind() -> None:
    async def one() -> None:
        async with worker(python("print('x')"), Printed()):
            pass

    def descriptors() -> set[str]:
        return {entry.name for entry in Path("/proc/self/fd").iterdir()}

    async def test() -> None:
        await one()
        before = descriptors()
        await one()
        assert descriptors() == before

    run(test())
