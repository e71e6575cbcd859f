"""The start of an agent's workers: in the plain way, or by a fork server that has imported torch already. agent.py does
not know which.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from farandole.base.config import ForkServerUse
from farandole.base.env import differs_for_all
from farandole.base.events.event import Event
from farandole.base.events.worker_events import ForkServerLost, ForkServerReady
from farandole.job.agent.fork_server import ForkServer, PythonCommand, python_command
from farandole.job.agent.guard import Guard
from farandole.job.agent.process import Child, can_adopt_orphans, start_child, worker_variables

# Seconds after which the first workers have finished their imports; short jobs end before.
WARM_UP_AFTER_S = 5.0
# A tenth of a core next to a computing worker: 2 s of imports take some 20 s then.
_NICE = 10
_MOST_SERVERS = 3
_IMPORT_S = 60.0  # on a busy machine
_FIRST = asyncio.FIRST_COMPLETED


class Spawner:
    """Starts workers, in the plain way. Create and use it on one event loop."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    async def spawn(self, environment: Mapping[str, str]) -> Child:
        """Start a new worker. Raises OSError when that fails."""
        # Not on the loop's thread, which has heartbeats to send: where cores are scarce, a program takes long to start.
        starting = asyncio.ensure_future(asyncio.to_thread(start_child, self._command, worker_variables(environment)))
        try:
            return await to_its_end(starting)
        except asyncio.CancelledError:
            if starting.exception() is None:  # no other code holds the child
                child = starting.result()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                await asyncio.to_thread(child.wait)
                child.stdout.close()
                child.stderr.close()
            raise

    def training_begins(self) -> None:
        """Note that a generation has been started: from now on workers may have to be replaced."""

    def wait_no_longer(self) -> None:
        """Start all requested workers now, in any way: a worker that is being started has to end."""

    async def close(self) -> None:
        """Close the spawner; workers live on, and no further workers are started."""


class ForkingSpawner(Spawner):
    """Forks workers with a fork server. It starts a worker in the plain way while no server is ready, and when the
    worker's environment differs from the server's in a variable that a library may have read when it was loaded.

    guard   ends the server if the agent is killed
    """

    def __init__(
        self,
        command: Sequence[str],
        python: PythonCommand,
        environment: Mapping[str, str],
        guard: Guard,
        on_event: Callable[[Event], None],
        at_once: bool,
    ) -> None:
        super().__init__(command)
        self._python, self._environment = python, worker_variables(environment)
        self._guard, self._on_event, self._at_once = guard, on_event, at_once
        self._loop = asyncio.get_running_loop()
        self._servers: list[ForkServer] = []  # the last one may be usable, the others were lost
        self._starting = set[asyncio.Task[None]]()
        self._warm_up: asyncio.TimerHandle | None = None
        self._patience: asyncio.Future[None] = self._loop.create_future()  # completed when it is over
        self._is_closed = False

    async def spawn(self, environment: Mapping[str, str]) -> Child:
        variables = worker_variables(environment)
        if self._at_once and not self._servers:
            self._start_server(nice=0)
        server = self._servers[-1] if self._servers else None
        if server is not None and self._at_once:
            await asyncio.wait({server.settled, self._patience}, timeout=_IMPORT_S, return_when=_FIRST)
        if server is not None and server.is_ready and not differs_for_all(variables, server.environment):
            child = await server.fork(variables)
            if child is not None:
                return child
        if self._is_closed:
            raise OSError("the agent is ending its workers")  # while this one waited for the server
        return await super().spawn(environment)

    def training_begins(self) -> None:
        has_one = bool(self._servers) and (self._servers[-1].is_ready or not self._servers[-1].settled.done())
        if self._warm_up is None and not has_one and len(self._servers) < _MOST_SERVERS:
            self._warm_up = self._loop.call_later(WARM_UP_AFTER_S, self._start_server, _NICE)

    def wait_no_longer(self) -> None:
        if not self._patience.done():
            self._patience.set_result(None)

    async def close(self) -> None:
        self._is_closed = True
        self.wait_no_longer()
        if self._warm_up is not None:
            self._warm_up.cancel()
        if self._starting:
            await asyncio.wait(self._starting)
        for server in self._servers:
            if server.is_started:
                self._guard.release(server.pid)
                await server.stop()

    def _start_server(self, nice: int) -> None:
        self._warm_up = None
        server = ForkServer(self._python, self._environment, self._on_end)
        self._servers.append(server)
        server.settled.add_done_callback(lambda _: self._on_settled(server))
        starting = self._loop.create_task(self._start(server, nice))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)

    async def _start(self, server: ForkServer, nice: int) -> None:
        try:
            await server.start(nice)
        except OSError as error:
            self._on_end(str(error))
        else:
            self._guard.watch(server.pid)

    def _on_settled(self, server: ForkServer) -> None:
        if server.is_ready:
            self._on_event(ForkServerReady(server.pid))

    def _on_end(self, reason: str) -> None:
        self._on_event(ForkServerLost(reason))


def make_spawner(
    use: ForkServerUse,
    command: Sequence[str],
    environment: Mapping[str, str],
    guard: Guard,
    on_event: Callable[[Event], None],
) -> Spawner:
    """Return the spawner of one agent, for workers whose environments begin with this one."""
    python = forkable(command) if use != "off" else None
    if python is None or not can_adopt_orphans():
        return Spawner(command)
    return ForkingSpawner(command, python, environment, guard, on_event, at_once=use == "on")


def forkable(command: Sequence[str]) -> PythonCommand | None:
    """Return the command that a fork server has to run; None when it cannot. It must run under the Python that runs
    Farandole: other interpreters, or programs of that name, are unknown."""
    python = python_command(command)
    if python is None or (program := shutil.which(python.python)) is None:
        return None
    own = Path(sys.executable)
    is_own = Path(program).parent.resolve() == own.parent.resolve() and Path(program).resolve() == own.resolve()
    return python if is_own else None


# Operations that must complete even if the caller is cancelled --------------------------------------------------------

T = TypeVar("T")


async def to_its_end(awaited: Awaitable[T]) -> T:
    """Return the result of `awaited`. A cancellation of the caller does not reach it, and is raised when it has ended.

    For cleanup: a cancelled caller would otherwise leave it unfinished. asyncio.shield() protects `awaited`, too, but
    does not wait for it.
    """
    task = asyncio.ensure_future(awaited)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
