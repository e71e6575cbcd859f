"""The agent of one host: it spawns workers on request, reports when they have ended, and carries messages between them
and the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farandole.base.env import WorkerEnv, environment_of, horovod_environment, torchrun_environment
from farandole.base.events.event import Event
from farandole.base.events.host_events import CoordinatorLost
from farandole.base.events.job_events import ConnectionRefused
from farandole.base.events.worker_events import StoppedWorkerKilled
from farandole.base.liveness.heartbeats import Heartbeats, heartbeat_period_s
from farandole.base.machine import now_s, since_boot_s
from farandole.base.membership import LONGEST_BETWEEN_S, Address, Meeting, WorkerStatus, WorkerTelemetry
from farandole.base.wire import messages
from farandole.base.wire.authentication import derive_data_key, derive_key
from farandole.base.wire.channel import Channel, connect
from farandole.base.wire.encryption import Certificates
from farandole.base.wire.frames import TO_AGENT
from farandole.base.wire.function_call import PartReceived, call_file, return_file
from farandole.base.wire.link_messages import Hello, Stop, WorkerMessage
from farandole.base.wire.listening import RefusalReports
from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.errors import AuthenticationError, ProtocolError
from farandole.job.agent.coordinator_session import CoordinatorSession, Reconnecting
from farandole.job.agent.network_addresses import data_hosts
from farandole.job.agent.process import StoppedWatch
from farandole.job.agent.spawner import make_spawner, to_its_end
from farandole.job.agent.stack_dumps import StackDumps
from farandole.job.agent.worker_files import ErrorFiles, Returns
from farandole.job.agent.worker_processes import WorkerProcesses
from farandole.job.agent.worker_server import StatusPages, WorkerServer
from farandole.job.agent.worker_telemetry import TELEMETRY_EVERY_S, TelemetryMeter

if TYPE_CHECKING:
    from farandole.job.agent.remote_agent import Sink

STATUS_EVERY_S = 0.5
"""Shortest time in seconds between two reports of the worker statuses."""

_TIMER_TOLERANCE_S = 0.01
_DUMP_BEFORE_KILL_S = 1.0  # the others wait for the end of this worker


class EndOfService(enum.Enum):
    """The reason why an agent's service is over."""

    JOB_ENDED = "the job has ended"
    LEFT = "the job continues without this host"
    DRAINED = "this host left the job"
    LOST = "the connection to the coordinator is lost, or the coordinator has excluded this agent"


@dataclass(frozen=True)
class Service:
    """The result of a service. `exit_code` is the job's, 0 when the job continues."""

    end: EndOfService
    reason: str
    exit_code: int = 0


@dataclass(frozen=True)
class AgentConfig:
    """One agent.

    slots         workers for which this host has capacity
    job           the facts of the job; `command` is that of this machine, and `environment` all of a worker's, to which
                  the agent adds the variables of init()
    is_apart      the agent is not part of the coordinator's process: it can lose it, and be replaced meanwhile
    error_folder  the folder for the workers' error files, which stay after the job; empty: they are removed
    data_hosts    the addresses of this machine for the other workers; empty: that from which this agent reaches the
                  coordinator, and the others that are not loopback unless that is
    process       the identifier of this process in AgentHello
    tls           the job's certificates, with which its TCP connections are encrypted; None: they are not
    """

    name: str
    host: str
    slots: int
    coordinator: Address
    token: bytes = field(repr=False)
    job: messages.Welcome = field(repr=False)
    is_apart: bool = False
    error_folder: str = ""
    data_hosts: tuple[str, ...] = ()
    process: str = ""
    tls: Certificates | None = field(default=None, repr=False)


class Agent:
    """The agent. Create and run it on one event loop: `await run()`. When that returns or raises, no worker is left.

    session  that of an agent that was welcomed already; None: it begins one, as an agent of the launcher
    call     the call of farandole.run(), for the workers; empty: they run another program
    """

    def __init__(
        self,
        config: AgentConfig,
        sink: Sink,
        on_event: Callable[[Event], None],
        session: CoordinatorSession | None = None,
        call: bytes = b"",
    ) -> None:
        self._config, self._sink, self._on_event = config, sink, on_event
        self._job = job = config.job
        self._refused = RefusalReports(on_event)
        self._joined, self._call = session, call
        self._returns = Returns()
        self._is_abandoned = False
        self._server = WorkerServer(self._on_message, lambda who, why: self._refused(ConnectionRefused(who, why)))
        self._heartbeats = Heartbeats(since_boot_s())
        self._heartbeat_every_s = heartbeat_period_s(self._job.detection_budget_s)
        self._reported: dict[str, WorkerStatus] = {}
        self._reported_s = self._look_at_statuses_s = self._measure_s = now_s()
        self._meter = TelemetryMeter()
        self._processes = WorkerProcesses(
            lambda guard: make_spawner(job.fork_server, job.command, job.environment, guard, on_event),
            sink,
            self._on_exit,
            self._on_spawn_failed,
            # A stopped agent cannot enforce its own lease, so the guard process does.
            silence_limit_s=0.9 * self._job.detection_budget_s if config.is_apart else None,
        )
        self._pages = StatusPages(self._on_exit_notice)
        self._stacks = StackDumps(self._pages.by_worker.get, self._processes.caller)
        self._last_stacks: dict[str, str] = {}  # of workers that are being killed, for their WorkerExited
        self._is_stopping = False
        self._tasks: set[asyncio.Task[None]] = set()  # besides those of run()
        self._store_port = self._job.store_port

    async def run(self) -> Service:
        """Serve the job until it has ended, continues without this host, or has no coordinator any more. Raises what
        `connect` raises."""
        config = self._config
        self._session = await self._begin_session() if self._joined is None else self._joined
        self._session.on_resumed = self._on_resumed
        self._guards_channel = await self._dial_for_guard() if config.is_apart else None
        await self._open_datagrams(self._job.heartbeat_id, self._job.heartbeat_port)
        # From here to the try block nothing is awaited: whatever is started is also ended.
        self._server.start()
        self._died = None if self._guards_channel is None else self._guards_channel.hand_over(messages.AgentDied())
        self._processes.start(self._died)
        error_folder = Path(config.error_folder) if config.error_folder else self._processes.scratch / "errors"
        self._errors = ErrorFiles(error_folder, lasts=bool(config.error_folder))
        self._pages.start()
        obedience, lease = asyncio.create_task(self._obey()), asyncio.create_task(self._hold_lease())
        heartbeats, watch = (asyncio.create_task(each) for each in (self._heartbeat(), self._look_at_processes()))
        grace_s = self._job.grace_s
        try:
            # The later ones end only by an internal error, which must not be silent: without its heartbeats an agent is
            # declared lost, and without the watch a stopped worker blocks the others.
            ends = (obedience, self._processes.broken, watch, heartbeats)
            await asyncio.wait((*ends, lease), return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                if end.done():
                    end.result()
            service = obedience.result() if obedience.done() else lease.result()
            if config.is_apart and service.end is EndOfService.LOST:
                grace_s = 0.0  # the others may continue without them by now
                self._session.abort()  # their exits are not failures of theirs
            return service
        finally:
            self._returns.stop_waiting()  # the coordinator's messages are not read any more
            lease.cancel()
            obedience.cancel()  # an order to spawn that came from now on would start a worker that nothing ends
            try:
                await to_its_end(self._processes.end(grace_s))
            finally:
                if self._is_abandoned and self._died is not None:
                    with contextlib.suppress(OSError):  # the coordinator is gone, too
                        os.write(*self._died)  # as the guard does, which has ended
                for task in (heartbeats, watch, *self._tasks):
                    task.cancel()
                self._server.stop()
                self._pages.stop()
                self._session.close()
                if self._guards_channel is not None:
                    self._guards_channel.close()

    async def _begin_session(self) -> CoordinatorSession:
        config = self._config
        hello = messages.AgentHello(config.name, config.host, config.slots, PROTOCOL_VERSION, process=config.process)
        channel = await self._dial()
        channel.send(hello)
        reconnecting = Reconnecting(self._job.job_id, hello, self._dial, self._job.patience_s, self._on_event)
        return CoordinatorSession(channel, reconnecting=reconnecting if self._job.patience_s else None)

    async def _dial(self) -> Channel[messages.ToAgent]:
        config, address = self._config, self._config.coordinator
        return await connect(address.host, address.port, config.token, self._job.job_id, TO_AGENT, config.tls)

    async def _dial_for_guard(self) -> Channel[messages.ToAgent] | None:
        """Return a second connection, on which the guard will report the end of this process. None: it cannot be
        opened; the coordinator will notice that end by the agent's silence."""
        config, first = self._config, self._session.channel
        try:
            channel = await connect(
                first.peer_host, first.peer_port, config.token, self._job.job_id, TO_AGENT, config.tls
            )
        except (ConnectionError, AuthenticationError, ProtocolError):
            return None
        channel.send(messages.GuardHello(config.name, config.process, PROTOCOL_VERSION))
        return channel

    def kill_workers(self) -> None:
        """End all workers at once, also those that are in their grace period."""
        self._processes.kill_all(grace_s=0.0)

    def abandon(self) -> None:
        """End all workers at once, and report the end of this agent when they are gone: its engine is gone."""
        self._is_abandoned = True
        self.kill_workers()

    def leave(self, reason: str, within_s: float = 0.0) -> None:
        """Drain this host: workers leave at their next boundary, and then the agent. The remaining ones are killed
        after the grace period, or `within_s` if that is longer."""
        self._session.send(messages.AgentLeaving(reason))
        asyncio.get_running_loop().call_later(max(self._job.grace_s, within_s), self.kill_workers)

    # When the coordinator is back --------------------------------------------------------------------------

    def _on_resumed(self, resumed: messages.Resumed) -> None:
        """Begin to count heartbeats anew, as the coordinator does, and renew what depends on the connection."""
        self._heartbeats = Heartbeats(since_boot_s())
        self._store_port = resumed.store_port
        if self._config.is_apart:
            self._start_task(self._renew(resumed))

    async def _renew(self, resumed: messages.Resumed) -> None:
        """Open the socket of the datagrams, and the connection of the guard, to the coordinator of now."""
        await self._open_datagrams(resumed.heartbeat_id, resumed.heartbeat_port)
        old, self._guards_channel = self._guards_channel, await self._dial_for_guard()
        if old is not None:
            old.abort()
        if self._guards_channel is not None:
            self._died = self._guards_channel.hand_over(messages.AgentDied())
            with contextlib.suppress(OSError):  # the one that runs watches, and can only not report
                self._processes.guard.renew(self._died)

    async def _open_datagrams(self, heartbeat_id: bytes, port: int) -> None:
        await self._session.open_datagrams(self._config.token, heartbeat_id, port, self._record_heartbeat)

    def _record_heartbeat(self, sequence: int, received: int) -> None:
        self._heartbeats.record(sequence, received)

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        """Run `work` beside the service, at most until its end."""
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)

    # From the coordinator ---------------------------------------------------------------------------------

    async def _obey(self) -> Service:
        """Execute the coordinator's orders until it needs nothing more. Then the workers are told, and have their grace
        period."""
        try:
            if self._call:
                await asyncio.to_thread(call_file(self._processes.scratch).write_bytes, self._call)
            while not isinstance(order := await self._session.receive(), messages.JobOver | messages.Dismissed):
                self._do(order)
            service = _service(order)
        except (ConnectionError, AuthenticationError, ProtocolError) as error:
            self._on_event(CoordinatorLost(self._config.name, str(error)))
            service = Service(EndOfService.LOST, f"the connection to the coordinator is lost: {error}")
        self._stop_workers(service)
        return service

    def _stop_workers(self, service: Service) -> None:
        self._is_stopping = True
        self._server.send_to(self._processes.pids(), Stop(service.reason))

    def _do(self, order: messages.ToAgent) -> None:
        if isinstance(order, messages.ForwardToWorkers):
            self._server.send_to(order.workers, order.message)
            self._is_stopping |= isinstance(order.message, Stop)
        elif isinstance(order, messages.StartWorkers):
            self._start_workers(order)
        elif isinstance(order, messages.Spawn):
            worker_env = WorkerEnv(
                agent_address=self._server.address,
                worker=order.worker,
                secret=self._server.expect(order.worker),
                slot=order.slot,
                data_addresses=",".join(self._config.data_hosts or data_hosts(self._session.channel.own_host)),
                scratch_folder=str(self._processes.scratch),
                detection_budget_s=self._job.detection_budget_s,
                status_page=self._pages.add(order.worker),
                store=str(self._store or ""),
                group_secret=derive_key(self._config.token, b"groups", self._job.job_id.encode()).hex(),
                tls="" if self._config.tls is None else self._config.tls.folder,
            )
            added = environment_of(worker_env)
            if order.expected is not None:
                self._sink.expected(order.worker, order.expected.rank)
                added |= horovod_environment(order.expected, self._config.host, self._job.is_elastic)
                error_file = self._errors.prepare(order.worker, order.attempt, order.expected.rank)
                if self._store is not None:
                    added |= torchrun_environment(
                        order.expected,
                        self._store,
                        self._job.environment.get("TORCHELASTIC_RUN_ID", self._job.job_id),
                        group_rank=order.group_rank,
                        group_size=order.group_size,
                        attempt=order.attempt,
                        max_restarts=self._job.max_restarts,
                        role=self._job.environment.get("ROLE_NAME", "default"),
                        error_file=str(error_file or ""),
                    )
            self._processes.spawn(order.worker, {**self._job.environment, **added})
        elif isinstance(order, messages.Kill):
            if order.dumps_stacks:
                self._start_task(self._dump_and_kill(order))
            else:
                self._processes.kill(order.worker, order.grace_s)
        elif isinstance(order, messages.WriteStacks):
            self._start_task(self._write_stacks(order))
        elif isinstance(order, PartReceived):
            self._returns.on_received(order.worker)
        elif isinstance(order, messages.CoordinatorHeartbeat):
            self._record_heartbeat(order.sequence, order.received)
            self._heartbeat_every_s = order.every_s or self._heartbeat_every_s

    @property
    def _store(self) -> Address | None:
        """The address of the job's store, at the address by which this agent reaches the coordinator; None: there is
        none."""
        return Address(self._session.channel.peer_host, self._store_port) if self._store_port else None

    async def _dump_and_kill(self, order: messages.Kill) -> None:
        self._last_stacks[order.worker] = ""
        dump = await self._stacks.dump(order.worker, within_s=_DUMP_BEFORE_KILL_S)
        if order.worker in self._last_stacks:  # else it has exited meanwhile
            self._last_stacks[order.worker] = dump.text
        self._processes.kill(order.worker, order.grace_s)

    async def _write_stacks(self, order: messages.WriteStacks) -> None:
        dump = await self._stacks.dump(order.worker)
        self._session.send(messages.StacksWritten(order.number, order.worker, dump.text, dump.problem))

    def _start_workers(self, order: messages.StartWorkers) -> None:
        for worker, start in order.starts.items():
            data_key = derive_data_key(self._config.token, start.id)
            self._server.send_to([worker], msgspec.structs.replace(start, data_key=data_key))
        for worker, start in order.starts.items():
            self._sink.placed(worker, start.placement.rank)
        self._processes.spawner.training_begins()

    # From the workers and their processes -----------------------------------------------------------------

    def _on_message(self, worker: str, message: WorkerMessage) -> None:
        if isinstance(message, Hello):
            self._processes.called_init(worker, message.pid)
        self._session.send(messages.FromWorker(worker, message))

    def _on_exit_notice(self, worker: str) -> None:
        """Handle a worker whose main thread has apparently ended. If so, the process ends in any case, and its group is
        killed first: its other processes must not continue. The exit follows when the kernel has freed its memory."""
        if self._processes.end_if_dying(worker):
            self._server.read_rest(worker)
            self._session.send(messages.WorkerDying(worker))

    async def _on_exit(self, worker: str, exit_code: int, last_lines: tuple[str, ...], pid: int) -> None:
        self._report_meetings()
        stacks, page = self._last_stacks.pop(worker, None), self._pages.by_worker.get(worker)
        if stacks == "" and page is not None:  # the worker has exited before they were read
            stacks = page.stacks()
        self._pages.remove(worker)
        self._server.dismiss(worker)  # first its last messages: Finished must not arrive after the exit
        error = self._errors.take(worker)
        if self._call:
            await self._returns.send(worker, return_file(self._processes.scratch, worker), self._session.send)
        self._session.send(messages.WorkerExited(worker, exit_code, last_lines, stacks or "", pid, error))

    def _on_spawn_failed(self, worker: str, error: str) -> None:
        self._pages.remove(worker)
        self._server.dismiss(worker)
        self._session.send(messages.SpawnFailed(worker, error))

    # Timers -----------------------------------------------------------------------------------------------

    async def _heartbeat(self) -> None:
        while True:
            self._refused.flush()
            sequence, statuses = self._heartbeats.next(since_boot_s()), self._changed_statuses()
            received = self._heartbeats.received if self._config.is_apart else None
            self._session.send(messages.Heartbeat(sequence, received, statuses, self._telemetry()))
            self._session.confirm()
            self._session.send_datagram(sequence, self._heartbeats.received)
            self._processes.guard.heartbeat()
            await asyncio.sleep(self._heartbeat_every_s)

    async def _hold_lease(self) -> Service:
        """Wait until the coordinator may have declared this agent lost: its workers must not run then. Never returns in
        the coordinator's own process, nor where workers outlive the silence: the session looks for the next coordinator
        then, and its patience has the limit.

        The time of a stall of this process counts: a host that was frozen has been replaced. The lease must appear over
        at two consecutive looks, because messages that have arrived are read between two looks.
        """
        if not self._config.is_apart:
            await asyncio.get_running_loop().create_future()
        budget_s, looks = self._job.detection_budget_s, 0
        while looks < 2:
            await asyncio.sleep(budget_s / 20)
            silent_s = since_boot_s() - self._heartbeats.reached_s
            # The end of the connection says that the coordinator has ended: then the session has the limit.
            looks = looks + 1 if silent_s >= 0.9 * budget_s and self._session.is_connected else 0
            if looks == 2 and self._job.outlives_silence:
                self._session.disconnect(silent_s)
                looks = 0
        service = Service(EndOfService.LOST, f"the coordinator has not answered for {silent_s:.2f} s")
        self._on_event(CoordinatorLost(self._config.name, service.reason))
        self._stop_workers(service)
        return service

    async def _look_at_processes(self) -> None:
        """Record the workers' loader processes, and kill a worker that is stopped: it would block the others for ever.
        While the job ends it has its grace period instead."""
        budget_s = self._job.detection_budget_s
        every_s = budget_s / 20
        watch = StoppedWatch(limit_s=budget_s - 2 * every_s)
        while True:
            await asyncio.sleep(every_s)
            self._processes.note_children()
            for worker in [] if self._is_stopping else watch.look(self._processes.stopped(), now_s()):
                self._on_event(StoppedWorkerKilled(worker, budget_s))
                self._processes.kill(worker, grace_s=0.0)

    def _changed_statuses(self) -> dict[str, WorkerStatus] | None:
        """Return the statuses of the workers if it is time to report them.

        They include workers that hold the interpreter's lock or are stopped.
        """
        time_s = now_s()
        if time_s < self._look_at_statuses_s:
            return None
        self._look_at_statuses_s = time_s + STATUS_EVERY_S - _TIMER_TOLERANCE_S
        self._report_meetings()
        seen = self._pages.look()
        if seen == self._reported and time_s < self._reported_s + LONGEST_BETWEEN_S:
            return None
        self._reported, self._reported_s = seen, time_s
        return seen

    def _telemetry(self) -> dict[str, WorkerTelemetry] | None:
        """Return the measurements of the workers if it is time to send them."""
        time_s = now_s()
        if time_s < self._measure_s:
            return None
        self._measure_s = time_s + TELEMETRY_EVERY_S - _TIMER_TOLERANCE_S
        return self._meter.measure(self._pages.by_worker, self._processes.callers(), time_s)

    def _report_meetings(self) -> None:
        """Report the workers of which it has become known since the last call whether they have met the others."""
        for worker, meeting in self._pages.new_meetings().items():
            self._session.send(messages.WorkerMet(worker, meeting is Meeting.MET))


def _service(order: messages.JobOver | messages.Dismissed) -> Service:
    if isinstance(order, messages.JobOver):
        return Service(EndOfService.JOB_ENDED, order.reason, order.exit_code)
    return Service(EndOfService.DRAINED if order.is_drained else EndOfService.LEFT, order.reason)
