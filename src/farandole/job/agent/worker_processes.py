"""The worker processes of one agent, from spawn to reaped."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.base.liveness.exit_notice import is_main_thread_ending
from farandole.job.agent.guard import Guard
from farandole.job.agent.guard_process import remove_shared_memory
from farandole.job.agent.process import WorkerProcess, reap_group
from farandole.job.agent.spawner import Spawner

if TYPE_CHECKING:
    from farandole.job.agent.remote_agent import Sink


_REAP_DEADLINE_S = 10.0  # from SIGKILL to the exit: the kernel has to free the memory first


class WorkerProcesses:
    """The worker processes, used on one event loop. `make_spawner` returns the spawner that starts them; its processes
    are under the guard. `on_exit(worker, exit_code, last_lines, pid)` is called once a process is reaped and its
    process group was killed, `on_spawn_failed(worker, error)` when it could not be started at all.

    silence_limit_s  the workers are killed when `guard.heartbeat` was not called for this time; None: it need not be
    """

    def __init__(
        self,
        make_spawner: Callable[[Guard], Spawner],
        sink: Sink,
        on_exit: Callable[[str, int, tuple[str, ...], int], Awaitable[None]],
        on_spawn_failed: Callable[[str, str], None],
        silence_limit_s: float | None = None,
    ) -> None:
        self._make_spawner, self._sink = make_spawner, sink
        self._on_exit, self._on_spawn_failed = on_exit, on_spawn_failed
        self._silence_limit_s = silence_limit_s
        self._running: dict[str, WorkerProcess] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._callers: dict[str, int] = {}
        self._grace_s: dict[str, float] = {}  # of workers that are to end, also while they are being spawned
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the error when this class itself failed; its workers may be unwatched then."""

    def start(self, last_message: tuple[int, bytes] | None = None) -> None:
        """Prepare to spawn. `last_message`: as in Guard. Raises OSError when no folder, or no further process, can be
        created."""
        self.scratch = Path(tempfile.mkdtemp(prefix="farandole-"))
        """Folder for the files that killed workers would otherwise leave in the temp folder; removed with the job."""
        self.guard = Guard(self.scratch, self._silence_limit_s, last_message)
        try:
            self.guard.start()
        except OSError:
            self.scratch.rmdir()
            raise
        self.spawner = self._make_spawner(self.guard)

    def pids(self) -> dict[str, int]:
        """Return the processes that run and have not been asked to end, by worker."""
        return {name: process.pid for name, process in self._running.items() if name not in self._grace_s}

    def callers(self) -> dict[str, int]:
        """Return the processes that called init(), and of other workers those that were started, by worker."""
        return {name: self._callers.get(name, process.pid) for name, process in self._running.items()}

    def stopped(self) -> dict[str, bool]:
        """Return, for the same workers, whether a signal has stopped the process, or the one below it that called
        init()."""
        return {worker: self._running[worker].is_stopped(self._callers.get(worker)) for worker in self.pids()}

    def spawn(self, worker: str, environment: Mapping[str, str]) -> None:
        """Start the command in this environment. Its end, or a failure to start, is reported by a callback."""
        life = asyncio.create_task(self._live(worker, dict(environment)))
        self._lives[worker] = life
        life.add_done_callback(partial(self._on_life_over, worker))

    def note_children(self) -> None:
        """Remember the current processes of the workers; call it regularly."""
        for worker, process in self._running.items():
            process.note_children(self._callers.get(worker, process.pid))

    def called_init(self, worker: str, pid: int) -> None:
        """Note that `pid`, often that of the worker's process itself, called init(): it gets the SIGTERM."""
        self._callers[worker] = pid

    def kill(self, worker: str, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL after `grace_s` seconds; at once when it is 0."""
        if worker not in self._lives:
            return  # Outdated: it has ended already.
        self._grace_s[worker] = grace_s
        if (process := self._running.get(worker)) is None:
            self.spawner.wait_no_longer()
            return  # It is being spawned; _live kills it.
        process.terminate(grace_s, self._callers.get(worker))

    def end_if_dying(self, worker: str) -> bool:
        """Check, after a hint, whether the process that called init() is ending, and the worker with it. The rest of
        its group is killed then. Returns False for a process that runs below another one, such as a shell, which may
        have more to do."""
        process = self._running.get(worker)
        if process is None or self._callers.get(worker) != process.pid or not is_main_thread_ending(process.pid):
            return False
        process.kill()
        return True

    def caller(self, worker: str) -> int | None:
        """Return the process that called init(); None: it runs no more, or none has called it."""
        process, pid = self._running.get(worker), self._callers.get(worker)
        return pid if process is not None and pid is not None and process.has_member(pid) else None

    def kill_all(self, grace_s: float) -> None:
        for worker in list(self._lives):
            self.kill(worker, grace_s)

    async def end(self, grace_s: float) -> None:
        """End all running workers; none is left then."""
        self.kill_all(grace_s)
        await self.spawner.close()
        if self._lives:
            await asyncio.wait(self._lives.values(), timeout=grace_s + _REAP_DEADLINE_S)
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.guard.stop()  # last: it removes the folder if this process is killed meanwhile

    async def _live(self, worker: str, environment: dict[str, str]) -> None:
        try:
            child = await self.spawner.spawn(environment)
        except OSError as error:
            self._on_spawn_failed(worker, str(error))
            return
        process = WorkerProcess(child, partial(self._sink.line, worker))
        self.guard.watch(process.pid)
        self._running[worker] = process
        if (grace_s := self._grace_s.get(worker)) is not None:
            self.kill(worker, grace_s)
        exit_code = await process.wait()
        del self._running[worker]
        self.guard.release(process.pid)
        await self._on_exit(worker, exit_code, process.last_lines, process.pid)
        await process.wait_for_output()
        self._sink.closed(worker)
        remove_shared_memory(process.children)
        await reap_group(process.pid)

    def _on_life_over(self, worker: str, life: asyncio.Task[None]) -> None:
        del self._lives[worker]
        self._callers.pop(worker, None)
        self._grace_s.pop(worker, None)
        if not life.cancelled() and (error := life.exception()) is not None and not self.broken.done():
            self.broken.set_exception(error)  # an internal error: the caller that serves the job must learn of it
