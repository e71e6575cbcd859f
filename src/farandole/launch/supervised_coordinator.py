"""The coordinator as the launcher sees it: a process of its own, which is started again when it has died, and continues
from its journal. The workers train on meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from farandole.coordinator.job import format_exit
from farandole.coordinator.journal import Journal
from farandole.coordinator.launcher_link import (
    AdmitToStore,
    Call,
    ClearStore,
    CoordinatorSetup,
    Ended,
    FramesHandled,
    Link,
    Listen,
    Listening,
    OpenStore,
    Output,
    Over,
    StoreOpened,
)
from farandole.coordinator.server import Outcome
from farandole.coordinator.store_server import StoreServer
from farandole.errors import ConfigError
from farandole.events import CoordinatorRestarted, Event
from farandole.machine import now_s
from farandole.membership import Address
from farandole.wire.message_log import MessageLog
from farandole.wire.messages import OutputMessage

_RESTARTS = 5
"""Restarts within the time below that are too many: the next coordinator would die of the same cause."""
_WITHIN_S = 10.0


class CoordinatorFailed(RuntimeError):
    """The coordinator has ended by an internal error, or again and again."""


class SupervisedCoordinator:
    """Used as a Coordinator: `await start()`, then `await run()`; everything else on their event loop."""

    def __init__(
        self,
        setup: CoordinatorSetup,
        *,
        on_event: Callable[[Event], None],
        on_output: Callable[[str, OutputMessage | None], None],
    ) -> None:
        self._setup, self._on_event, self._on_output = setup, on_event, on_output
        self._store = StoreServer(on_event)
        self._calls: MessageLog[Call] = MessageLog()
        self._addresses: tuple[Address, ...] = ()
        self._is_over = False
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._listening: asyncio.Future[Listening] | None = None
        self._restarts: list[float] = []
        self._serving: asyncio.Task[Outcome] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the coordinator. Raises ConfigError when it cannot listen."""
        self._journal = Journal.in_memory()
        self._listening = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve())
        await self._has_listened()

    async def listen(self, hosts: Sequence[str]) -> None:
        """Let it listen on further addresses of this machine, on the same port. Raises ConfigError when that fails."""
        self._listening = asyncio.get_running_loop().create_future()
        self._send(Listen(tuple(hosts)))
        await self._has_listened()

    async def _has_listened(self) -> None:
        assert self._listening is not None
        assert self._serving is not None
        waiting: set[asyncio.Future[Any]] = {self._listening, self._serving}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not self._listening.done():
            self._serving.result()
        listening = self._listening.result()
        if listening.problem:
            raise ConfigError(listening.problem)
        self._addresses = listening.addresses

    async def run(self) -> Outcome:
        """Return when the job has ended and its agents have closed their connections. Cancellation ends the
        coordinator. Raises CoordinatorFailed."""
        assert self._serving is not None
        try:
            return await asyncio.shield(self._serving)
        finally:
            await self._close()

    @property
    def address(self) -> Address:
        """The first address to which agents connect."""
        return self._addresses[0]

    @property
    def addresses(self) -> tuple[Address, ...]:
        """All addresses to which agents may connect."""
        return self._addresses

    @property
    def store_port(self) -> int:
        """The port of the job's store, at the same address."""
        return self._store.address.port

    @property
    def pid(self) -> int:
        """The process of the coordinator that runs now; 0: none does."""
        return 0 if self._process is None else self._process.pid

    @property
    def has_ended(self) -> bool:
        """True when the job is over; its agents have been told so."""
        return self._is_over

    def request_stop(self, now: bool, reason: str) -> None:
        """As in Coordinator."""
        self._call("request_stop", now, reason)

    def offer(self, slots: Mapping[str, int], may_change: bool) -> None:
        """As in Coordinator."""
        self._call("offer", dict(slots), may_change)

    def agent_gone(self, agent: str, reason: str, are_workers_gone: bool = True) -> None:
        """As in Coordinator."""
        self._call("agent_gone", agent, reason, are_workers_gone)

    def agent_leaves(self, agent: str, reason: str) -> None:
        """As in Coordinator."""
        self._call("agent_leaves", agent, reason)

    def _call(self, method: str, *arguments: Any) -> None:
        call = Call(method, arguments)
        self._calls.keep(call)
        self._send(call)

    def _send(self, frame: object) -> None:
        if self._link is not None:
            self._link.send(frame)

    # The process, and the next one ------------------------------------------------------------------------

    async def _serve(self) -> Outcome:
        """Run one coordinator after the other, until one has seen the job to its end."""
        while True:
            ended = await self._run_one()
            if ended is None:
                self._note_death()
            elif ended.outcome is None:
                raise CoordinatorFailed(f"the coordinator has ended by an internal error:\n{ended.error}")
            else:
                return ended.outcome

    async def _run_one(self) -> Ended | None:
        """Run one coordinator to its end. None: it has died."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = self._spawn((theirs.fileno(), *self._journal.descriptors))
        link = await Link.over(ours)
        try:
            link.send(replace(self._setup, handled=self._calls.handled))
            while True:
                frame = await link.receive()
                if isinstance(frame, Ended):
                    return frame
                if isinstance(frame, Listening) and self._link is None:
                    self._begin_with(link, frame)
                else:
                    self._handle(link, frame)
        except ConnectionError:
            return None
        finally:
            self._link = None
            link.close()

    def _spawn(self, descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "farandole.coordinator.coordinator_process", *map(str, descriptors)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)

    def _begin_with(self, link: Link, listening: Listening) -> None:
        if not listening.problem:
            self._calls.confirm(listening.handled)
            for call in self._calls.after(listening.handled):
                link.send(call)
            self._link = link
        self._handle(link, listening)

    def _handle(self, link: Link, frame: object) -> None:
        match frame:
            case Event():
                self._count(link)
                self._on_event(frame)
            case Over():
                self._count(link)
                self._is_over = True
            case Output(agent, message):
                self._on_output(agent, message)
            case FramesHandled(count):
                self._calls.confirm(count)
            case Listening():
                if self._listening is not None and not self._listening.done():
                    self._listening.set_result(frame)
            case OpenStore(hosts):
                task = asyncio.create_task(self._open_store(link, hosts))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case AdmitToStore(host):
                self._store.admit(host)
            case ClearStore():
                self._store.clear()

    def _count(self, link: Link) -> None:
        self._calls.handled += 1
        link.send(FramesHandled(self._calls.handled))

    async def _open_store(self, link: Link, hosts: tuple[str, ...]) -> None:
        try:
            if not set(hosts) <= {each.host for each in self._store.addresses}:
                await self._store.open(*hosts)
        except ConfigError as error:
            link.send(StoreOpened(0, str(error)))
        else:
            link.send(StoreOpened(self._store.address.port))

    def _note_death(self) -> None:
        """Report that a coordinator has died. Raises CoordinatorFailed when that has happened too often."""
        assert self._process is not None
        how = format_exit(self._process.wait())
        self._restarts = [each for each in self._restarts if each > now_s() - _WITHIN_S]
        self._restarts.append(now_s())
        if not self._addresses or len(self._restarts) > _RESTARTS:
            raise CoordinatorFailed(f"the coordinator (pid {self._process.pid}) {how}, {len(self._restarts)} times")
        self._on_event(CoordinatorRestarted(self._process.pid, how))

    async def _close(self) -> None:
        assert self._serving is not None
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._store.close()
        if self._process is not None and self._process.poll() is None:
            try:
                await asyncio.to_thread(self._process.wait, 1.0)
            except subprocess.TimeoutExpired:
                os.kill(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._journal.close()
