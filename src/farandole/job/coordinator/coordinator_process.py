"""The coordinator as a process of its own, forked by coordinator_factory.py. The launcher
(launch/supervised_coordinator.py) wants it, and wants another one when it has died, which continues from the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from farandole.base.events.event import Event
from farandole.base.membership import Address
from farandole.base.wire.authentication import spoken_versions
from farandole.base.wire.channel import HANDSHAKE_DEADLINE_S
from farandole.base.wire.message import OLDEST_PROTOCOL_VERSION
from farandole.base.wire.message_log import MessageLog
from farandole.base.wire.sockets import listening_sockets
from farandole.errors import ConfigError
from farandole.job.coordinator import launcher_link as frames
from farandole.job.coordinator.job import new_job
from farandole.job.coordinator.journal import (
    SOFTWARE,
    CoordinatorState,
    Journal,
    JournalError,
    JournalFiles,
    StateEncoder,
    decoded,
)
from farandole.job.coordinator.server import Coordinator, CoordinatorSetup

_READ_S = 1.0  # for the launcher to read the last frame; it may be stopped

EPOCHS_OF_A_LAUNCHER = 1_000_000
"""The first coordinator of a launcher that takes over has the next multiple of this as its epoch. So the coordinators
that an older launcher may still start, behind a broken network, never reach it, and agents refuse them."""


class _RemoteStore:
    """The store, which is in the launcher's process, so that it outlives this one."""

    def __init__(self, link: frames.Link) -> None:
        self._link = link
        self._opened: asyncio.Future[frames.StoreOpened] | None = None
        self._address = Address("127.0.0.1", 0)

    async def open(self, *hosts: str) -> None:
        self._opened = asyncio.get_running_loop().create_future()
        self._link.send(frames.OpenStore(hosts))
        opened = await self._opened
        if opened.problem:
            raise ConfigError(opened.problem)
        self._address = Address(hosts[0], opened.port)

    def on_opened(self, opened: frames.StoreOpened) -> None:
        if self._opened is not None and not self._opened.done():
            self._opened.set_result(opened)

    @property
    def address(self) -> Address:
        return self._address

    def admit(self, host: str) -> None:
        self._link.send(frames.Call("admit", (host,)))

    def clear(self) -> None:
        self._link.send(frames.Call("clear", ()))

    def close(self) -> None:
        """Leave it to the launcher."""


class _Process:
    """This process: `await run()`."""

    def __init__(self, link: frames.Link, journal: JournalFiles) -> None:
        self._link, self._journal_files = link, journal
        self._frames: MessageLog[object] = MessageLog()
        self._unsent: list[object] = []
        self._encoder = StateEncoder()
        self._store = _RemoteStore(link)
        self._is_over = self._is_listening = self._is_stopping = False
        self._tasks: set[asyncio.Task[bool]] = set()
        self._copied: asyncio.Future[None] | None = None

    async def run(self) -> None:
        setup: CoordinatorSetup = await self._link.receive()
        self._setup = setup
        self._journal = Journal(self._journal_files, setup.job_id, is_durable=bool(setup.launcher))
        try:
            restored, is_moved = self._restore()
        except JournalError as damage:
            self._link.send(frames.Listening((), 0, str(damage)))
            await self._link.drain()
            return
        if restored is not None:
            setup = replace(setup, **self._addresses(restored, is_moved))
        self._coordinator = Coordinator(
            setup,
            on_event=self._on_event,
            on_output=lambda agent, message: self._link.send(frames.Output(agent, message)),
            store=self._store,
            journal=self._write,
            restored=restored,
            returning_s=HANDSHAKE_DEADLINE_S if is_moved else 0.0,
        )
        listening = asyncio.create_task(self._listen(self._start(is_moved)))
        obedience, beating = asyncio.create_task(self._obey()), asyncio.create_task(self._show_life())
        if not await listening:
            return
        outcome, error = None, ""
        serving = asyncio.create_task(self._coordinator.run())
        try:
            await asyncio.wait((serving, obedience), return_when=asyncio.FIRST_COMPLETED)
            if obedience.done():
                obedience.result()
            outcome = await serving
        except Exception as raised:  # noqa: BLE001 - the launcher reports it
            import traceback

            error = "".join(traceback.format_exception(raised))
        with contextlib.suppress(OSError):  # it would be the error already
            self._commit_events()
        await self._coordinator.outbox.caught_up()
        self._link.send(frames.Ended(outcome, error))
        await self._link.drain()
        for task in (obedience, beating, serving):
            task.cancel()
        await asyncio.wait((obedience, beating, serving))
        await self._link.wait_for_end(_READ_S)
        self._link.close()

    async def _show_life(self) -> None:
        while True:
            for _ in range(round(frames.SUMMARY_EVERY_S / frames.ALIVE_EVERY_S)):
                self._link.send(frames.Alive())
                await asyncio.sleep(frames.ALIVE_EVERY_S)
            if self._setup.wants_summaries and self._is_listening:
                self._link.send(self._coordinator.clients.summary())

    def _restore(self) -> tuple[CoordinatorState | None, bool]:
        """Return the state from which to continue, and whether it is that of another launcher's coordinator. The frames
        on a link are numbered from the start of its launcher."""
        data = self._journal.read()
        if data is None:
            return (None, False) if not self._setup.lost else (self._unknown_state(), True)
        state, beside = decoded(data)
        _check_protocol(state)
        kept = msgspec.msgpack.decode(beside, type=frames.KeptFrames)
        if kept.launcher != self._setup.launcher:
            epoch = (state.job.coordinator_epoch // EPOCHS_OF_A_LAUNCHER + 1) * EPOCHS_OF_A_LAUNCHER
            return replace(state, job=replace(state.job, coordinator_epoch=epoch - 1)), True
        self._frames = kept.log()
        self._frames.confirm(self._setup.handled)
        for frame in self._frames.after(self._setup.handled):
            self._link.send(frame)
        return state, False

    def _unknown_state(self) -> CoordinatorState:
        """Return the state of a coordinator that only knows that there is a job."""
        setup = self._setup
        epoch = setup.number * EPOCHS_OF_A_LAUNCHER - 1
        job = new_job(setup.config, setup.job_id, epoch, setup.origin, setup.first_hosts)
        return CoordinatorState(job, 0.0, 0, {}, {}, {}, frozenset(), (), lost=setup.lost)

    def _addresses(self, restored: CoordinatorState, is_moved: bool) -> dict[str, Any]:
        """Return `hosts` and `port` at which to listen: those of the former coordinator, or after a move those of this
        machine, if possible with the same port."""
        port = restored.addresses[0].port if restored.addresses else self._setup.port
        if not is_moved:
            return {"hosts": tuple(each.host for each in restored.addresses), "port": port}
        if self._setup.port:
            return {}
        try:
            for each in listening_sockets(self._setup.hosts, port):
                each.close()
        except OSError:  # used by another program
            port = 0
        return {"port": port}

    async def _start(self, is_moved: bool) -> None:
        await self._coordinator.start()
        if is_moved:
            self._coordinator.lose_own_agents("the launcher in which it ran has died")

    def _write(self, state: CoordinatorState) -> asyncio.Future[None] | None:
        if state.job.ending is not None and state.job.ending.is_done and not self._is_over:
            self._is_over = True
            self._keep(frames.Over())
        self._journal.write(self._encoder.encode(state, frames.KeptFrames.of(self._setup.launcher, self._frames)))
        unsent, self._unsent = self._unsent, []
        handled = self._frames.handled
        if not self._setup.is_copied:
            self._tell(unsent, handled)
            return None
        self._copied = asyncio.get_running_loop().create_future()
        self._copied.add_done_callback(lambda _: self._tell(unsent, handled))
        self._link.send(frames.Copy())
        return self._copied

    def _tell(self, unsent: Sequence[object], handled: int) -> None:
        for frame in unsent:
            self._link.send(frame)
        self._link.send(frames.FramesHandled(handled))

    def _on_event(self, event: Event) -> None:
        """Keep an event for the launcher. Those of a decision are sent with it, others soon."""
        self._keep(event)
        asyncio.get_running_loop().call_soon(self._commit_events)

    def _commit_events(self) -> None:
        if self._unsent:
            self._coordinator.outbox.commit()

    def _keep(self, frame: object) -> None:
        self._frames.keep(frame)
        self._unsent.append(frame)

    async def _obey(self) -> None:
        """Do what the launcher wants. When it is gone, the job ends at once: nobody would start its agents again, or
        show what the workers print. Where another launcher may take over, only this process ends: agents of other
        machines see the end of their connections, and wait."""
        try:
            while True:
                self._do(await self._link.receive())
        except ConnectionError:
            may_continue = bool(self._setup.launcher) and not self._is_stopping
            if may_continue or not self._is_listening:  # else there are no agents yet
                os._exit(1)
            self._coordinator.request_stop(now=True, reason="the launcher has ended")

    def _do(self, frame: object) -> None:
        match frame:
            case frames.Call(method, arguments):
                self._frames.handled += 1
                self._is_stopping |= method == "request_stop"
                getattr(self._coordinator, method)(*arguments)
            case frames.Listen(hosts):
                task = asyncio.create_task(self._listen(self._coordinator.listen(hosts)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case frames.StoreOpened():
                self._store.on_opened(frame)
            case frames.Copied():
                if self._copied is not None and not self._copied.done():
                    self._copied.set_result(None)
            case frames.FramesHandled(count):
                self._frames.confirm(count)

    async def _listen(self, opening: Awaitable[None]) -> bool:
        try:
            await opening
        except ConfigError as error:
            number = (error.__cause__.errno or 0) if isinstance(error.__cause__, OSError) else 0
            self._link.send(frames.Listening((), self._frames.handled, str(error), number))
            await self._link.drain()
            return False
        self._link.send(frames.Listening(self._coordinator.addresses, self._frames.handled))
        self._is_listening = True
        return True


def _check_protocol(state: CoordinatorState) -> None:
    """Raise JournalError when agents of the job speak versions of the protocol that are too old for this release."""
    for agent, session in state.sessions.items():
        if session.protocol < OLDEST_PROTOCOL_VERSION:
            raise JournalError(
                f"agent {agent} uses version {session.protocol} of the protocol, and this release, {SOFTWARE}, speaks "
                f"{spoken_versions()}: continue with the release that the agent has, and let the job end there"
            )


def run_coordinator(link: int, journal: JournalFiles) -> None:
    """Run the coordinator of the launcher at the other end of `link`, the descriptor of a connected socket, until the
    job has ended."""

    async def run() -> None:
        await _Process(await frames.Link.over(socket.socket(fileno=link)), journal).run()

    asyncio.run(run())
