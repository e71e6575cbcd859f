"""The coordinator as the launcher sees it: a process of its own, which is started again when it has died, and continues
from its journal. The workers train on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from farandole.base.events.event import Event
from farandole.base.events.host_events import CoordinatorRestarted
from farandole.base.machine import now_s
from farandole.base.membership import Address
from farandole.base.wire.message_log import MessageLog
from farandole.base.wire.messages import OutputMessage
from farandole.base.wire.sockets import listening_sockets
from farandole.errors import ConfigError, FarandoleError
from farandole.job.coordinator.control_requests import JobSummary
from farandole.job.coordinator.coordinator_factory import (
    CoordinatorFactory,
    FactoryLost,
    ForkedCoordinator,
    SoftwareChanged,
)
from farandole.job.coordinator.decision_loop import JobClock
from farandole.job.coordinator.heartbeat_port import Silence
from farandole.job.coordinator.journal import JournalFiles, files_in_memory
from farandole.job.coordinator.launcher_link import (
    Call,
    Copied,
    Copy,
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
from farandole.job.coordinator.sentences import format_exit
from farandole.job.coordinator.server import CoordinatorSetup
from farandole.job.coordinator.store_server import StoreServer
from farandole.job.coordinator.transition import Outcome
from farandole.job.launch.job_state import CopiesFailed, StateCopies

_RESTARTS = 5
"""Restarts within the time below that are too many: the next coordinator would die of the same cause."""
_WITHIN_S = 10.0

_START_S = 60.0  # from its start until its event loop runs
_REPORTED_S = 1.0  # from the end of its link until its factory has reported the end of its process
_HUNG_WITHIN_S = 60.0


class CoordinatorFailed(FarandoleError):
    """The coordinator has ended again and again, or cannot continue."""


def hang_deadline_s(detection_budget_s: float) -> float:
    """Return after how many seconds a coordinator whose event loop does not run is replaced: before agents on other
    machines, whose lease is nearly the budget, end their workers."""
    return max(1.0, detection_budget_s / 2)


class HangWatch:
    """Judges from signs of life whether one coordinator hangs. The time in which the launcher itself could not run does
    not count: Ctrl-Z stops both, and signs of life that have come wait to be read.

    deadline_s  as hang_deadline_s
    clock       in seconds
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float] = now_s) -> None:
        self.deadline_s, self.has_begun = deadline_s, False
        self.look_every_s = deadline_s / 20
        self._silence = Silence(deadline_s)
        self._clock = JobClock(clock, tolerance_s=deadline_s / 4)

    def record(self) -> None:
        """Note a sign of life."""
        self.has_begun = True
        self._silence.record("coordinator", self._clock.now_s())

    def hangs(self) -> bool:
        """Return whether it hangs; to be called every `look_every_s` seconds."""
        self._clock.notice_stall()
        is_silent = bool(self._silence.look(self._clock.now_s()))
        self._clock.expect_look(self.look_every_s)
        return is_silent


class SupervisedCoordinator:
    """Used as a Coordinator: `await start()`, then `await run()`; everything else on their event loop.

    journal  the files of a journal that the launcher has opened; None: it has its own, in memory
    copies   writes a copy of each state before its decision is told; None: the journal's files are enough
    factory  forks the coordinators; it is closed at the end. None: one is started when it is needed, as after its death
    on_summary  called with a summary of the job about once a second; None: none is made
    """

    def __init__(
        self,
        setup: CoordinatorSetup,
        *,
        on_event: Callable[[Event], None],
        on_output: Callable[[str, OutputMessage | None], None],
        factory: CoordinatorFactory | None = None,
        journal: JournalFiles | None = None,
        copies: StateCopies | None = None,
        on_summary: Callable[[JobSummary], None] | None = None,
    ) -> None:
        self._factory = factory
        self._on_summary = on_summary
        self._given_journal = journal
        self._abandoned = ""  # why it is
        self._copies = copies
        self._setup = replace(setup, wants_summaries=on_summary is not None, is_copied=copies is not None)
        self._on_event, self._on_output = on_event, on_output
        self._store = StoreServer(on_event)
        self._calls: MessageLog[Call] = MessageLog()
        self._addresses: tuple[Address, ...] = ()
        self._is_over = False
        self._process: ForkedCoordinator | None = None
        self._link: Link | None = None
        self._listening: asyncio.Future[Listening] | None = None
        self._restarts: list[float] = []
        self._hung: list[float] = []  # times at which one was replaced because it hung
        self._problem = ""  # why the newest one could not begin
        self._how = ""  # why it was killed
        self._reserved: dict[Address, socket.socket] = {}
        self._serving: asyncio.Task[Outcome] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the coordinator. Raises ConfigError when it cannot listen, and CoordinatorFailed."""
        self.journal_files = self._given_journal or files_in_memory()
        self._listening = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve())
        try:
            await self._has_listened()
        except BaseException:
            await self._close()
            raise

    async def listen(self, hosts: Sequence[str]) -> None:
        """Let it listen on further addresses of this machine, on the same port. Raises ConfigError when that fails."""
        while True:
            asked = self._process
            self._listening = asyncio.get_running_loop().create_future()
            self._send(Listen(tuple(hosts)))
            await self._has_listened()
            if self._process is asked:  # else the answer is that of the next one, which has not been asked
                return

    async def _has_listened(self) -> None:
        assert self._listening is not None
        assert self._serving is not None
        waiting: set[asyncio.Future[Any]] = {self._listening, self._serving}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not self._listening.done():
            self._serving.result()
        listening = self._listening.result()
        if listening.problem:
            cause = OSError(listening.errno, os.strerror(listening.errno)) if listening.errno else None
            raise ConfigError(listening.problem) from cause
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
        """As in Coordinator. Where nothing can be decided, because its state cannot be written, `now` ends the launcher
        alone."""
        if now and self._copies is not None and self._copies.problem:
            self.abandon(
                f"{reason}, and the state of the job cannot be written ({self._copies.problem}), so that nobody can be "
                "told that the job ends: agents of other machines continue with the next launcher (--state), or end "
                "their workers after --patience"
            )
            return
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

    def remember(self, event: Event) -> None:
        """As in Coordinator."""
        self._call("remember", event)

    def abandon(self, reason: str) -> None:
        """End in silence: another launcher has taken the job over, or may do so. run() raises CoordinatorFailed."""
        self._abandoned = reason
        if self._process is not None:
            self._process.kill()

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
            try:
                ended = await self._run_one()
            except SoftwareChanged as changed:
                raise CoordinatorFailed(
                    f"no other coordinator can take over: {changed}, so {self._what_now()}"
                ) from None
            except FactoryLost as lost:
                self._note_death(0, f"could not be started: {lost}")
                continue
            if self._abandoned:
                raise CoordinatorFailed(self._abandoned)
            if ended is None:
                await self._note_end()
            elif ended.outcome is None:
                raise RuntimeError(f"the coordinator has ended by an internal error:\n{ended.error}")
            else:
                return ended.outcome

    async def _run_one(self) -> Ended | None:
        """Run one coordinator to its end. None: it has died."""
        ours, theirs = socket.socketpair()
        try:
            self._process = await self._fork(theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        link = await Link.over(ours)
        life = HangWatch(self._hang_deadline_s())
        watching = asyncio.create_task(self._watch(self._process, life))
        self._problem, self._how = "", ""
        try:
            link.send(replace(self._setup, handled=self._calls.handled))
            while True:
                frame = await link.receive()
                life.record()
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
            watching.cancel()
            link.close()

    def _hang_deadline_s(self) -> float:
        """Return the deadline for the next one. On a machine that is too slow for it, it grows."""
        self._hung = [each for each in self._hung if each > now_s() - _HUNG_WITHIN_S]
        return hang_deadline_s(self._setup.config.detection_budget_s) * 2.0 ** len(self._hung)

    async def _watch(self, process: ForkedCoordinator, life: HangWatch) -> None:
        """Kill a coordinator that hangs, which ends its link."""
        try:
            async with asyncio.timeout(_START_S):
                while not life.has_begun:
                    await asyncio.sleep(life.look_every_s)
        except TimeoutError:
            self._how = f"did not begin within {_START_S:g} s, and was killed"
        else:
            while not life.hangs():
                await asyncio.sleep(life.look_every_s)
            self._how = f"did not respond for {life.deadline_s:g} s, and was killed"
        self._hung.append(now_s())
        process.kill()

    async def _fork(self, link: int) -> ForkedCoordinator:
        """Return another coordinator, from another factory if this one is lost. Raises FactoryLost."""
        if self._factory is not None:
            try:
                return await self._factory.fork_coordinator(link, self.journal_files)
            except FactoryLost:
                self._factory.close()
        self._factory = CoordinatorFactory.executed()
        return await self._factory.fork_coordinator(link, self.journal_files)

    def _begin_with(self, link: Link, listening: Listening) -> None:
        if listening.problem:
            self._problem = listening.problem
            if not self._addresses:
                self._handle(link, listening)
                raise CoordinatorFailed(f"the coordinator cannot begin: {listening.problem}")
            if not listening.errno:
                raise CoordinatorFailed(f"no other coordinator can take over: {listening.problem}")
        else:
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
            case JobSummary():
                if self._on_summary is not None:
                    self._on_summary(frame)
            case Listening():
                if self._listening is not None and not self._listening.done():
                    self._listening.set_result(frame)
            case OpenStore(hosts):
                self._spawn(self._open_store(link, hosts))
            case Copy():
                self._spawn(self._copy(link))
            case Call(method, arguments):
                getattr(self._store, method)(*arguments)

    def _count(self, link: Link) -> None:
        self._calls.handled += 1
        link.send(FramesHandled(self._calls.handled))

    def _spawn(self, task: Coroutine[None, None, None]) -> None:
        spawned = asyncio.create_task(task)
        self._tasks.add(spawned)
        spawned.add_done_callback(self._tasks.discard)

    async def _copy(self, link: Link) -> None:
        assert self._copies is not None
        try:
            await self._copies.write(self.journal_files, self._setup.job_id)
        except CopiesFailed as error:
            self.abandon(f"{error}; {self._what_now()}")
        else:
            link.send(Copied())

    async def _open_store(self, link: Link, hosts: tuple[str, ...]) -> None:
        try:
            if not set(hosts) <= {each.host for each in self._store.addresses}:
                await self._store.open(*hosts)
        except ConfigError as error:
            link.send(StoreOpened(0, str(error)))
        else:
            link.send(StoreOpened(self._store.address.port))

    async def _note_end(self) -> None:
        """Report the end of the newest coordinator. Raises CoordinatorFailed as _note_death does."""
        assert self._process is not None
        await asyncio.wait([self._process.ended], timeout=_REPORTED_S)
        code = self._process.ended.result() if self._process.ended.done() else None
        how = self._how or ("has ended" if code is None else format_exit(code))
        if self._problem:
            how += f": {self._problem}"
        self._note_death(self._process.pid, how)

    def _note_death(self, pid: int, how: str) -> None:
        """Report that a coordinator has died. Raises CoordinatorFailed when that has happened too often."""
        self._restarts = [each for each in self._restarts if each > now_s() - _WITHIN_S]
        self._restarts.append(now_s())
        if len(self._restarts) > _RESTARTS:
            raise CoordinatorFailed(
                f"the coordinator (pid {pid}) {how}; it is the {len(self._restarts)}th one within "
                f"{_WITHIN_S:g} s, so {self._what_now()}"
            )
        self._reserve()
        restarted = CoordinatorRestarted(pid, how)
        self._on_event(restarted)
        self.remember(restarted)  # the next coordinator does not know of it

    def _what_now(self) -> str:
        if self._setup.launcher:
            return (
                "this launcher ends. Start it again: the agents of other machines wait for it, and the job continues "
                "(--state)"
            )
        return "the job ends. Start it again; it continues from its last checkpoint, if it has one (--checkpoint)"

    def _reserve(self) -> None:
        """Keep the ports from connections and listeners of other programs until the next coordinator listens there. A
        bound socket that does not listen is no obstacle to one that does, where both have SO_REUSEADDR."""
        for address in self._addresses:
            if address not in self._reserved:
                with contextlib.suppress(OSError):
                    (self._reserved[address],) = listening_sockets([address.host], address.port)

    async def _close(self) -> None:
        assert self._serving is not None
        if self._setup.launcher and not self._is_over and not self._abandoned:
            # A launcher that ends, unlike one that is killed, ends the job.
            self._call("request_stop", True, "the launcher has ended")
        for task in (self._serving, *self._tasks):
            task.cancel()
        await asyncio.gather(self._serving, *self._tasks, return_exceptions=True)
        self._store.close()
        if self._process is not None:
            await asyncio.wait([self._process.ended], timeout=_REPORTED_S)
            self._process.kill()
        if self._factory is not None:
            self._factory.close()
        for descriptor in () if self._given_journal else self.journal_files:
            os.close(descriptor)
        for reserved in self._reserved.values():
            reserved.close()
