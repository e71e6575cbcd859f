"""The agents of a job: their sessions over one connection after the other, what they report and offer, and their
silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from farandole.base.config import JobConfig
from farandole.base.liveness.heartbeats import heartbeat_period_s
from farandole.base.membership import Address
from farandole.base.wire.channel import Channel
from farandole.base.wire.function_call import FunctionJob, PartReceived, ReturnPart
from farandole.base.wire.listening import RefusalReports
from farandole.base.wire.message_log import is_counted
from farandole.base.wire.messages import (
    AgentHello,
    AgentMessage,
    Handled,
    Heartbeat,
    OutputMessage,
    StacksWritten,
    ToAgent,
    Welcome,
    WorkerDying,
    WorkerExited,
    WorkerPrinted,
    WorkerRanked,
    WorkerSilent,
    WorkersTold,
)
from farandole.errors import ProtocolError
from farandole.job.coordinator.command_server import Clients
from farandole.job.coordinator.decision_loop import DecisionLoop, Outbox
from farandole.job.coordinator.hang_detection import HangDetector
from farandole.job.coordinator.heartbeat_port import AgentHeartbeats, Silence
from farandole.job.coordinator.journal import AgentSession, CoordinatorState
from farandole.job.coordinator.transition import AgentConnected, AgentLost, AgentReported, HostsOffered, Tick


class Agents:
    """The end of an agent's connection counts as silence: it may resume its session on another one. The arguments are
    parts of the coordinator, or as there.

    Attributes:
        by_agent: The sessions of the agents that are connected or were until just now.
        channels: The connections of those that are connected.
        returning: Agents of the former coordinator that have not come yet.
        hosts: The addresses from which agents have connected.
        silence, heartbeats: Of the agents; the latter of those on other machines.
        offers: The hosts that the job may use.
        decisions, outbox, hang_detector, welcome, function: As given.
    """

    def __init__(
        self,
        config: JobConfig,
        token: bytes,
        *,
        decisions: DecisionLoop,
        outbox: Outbox,
        hang_detector: HangDetector,
        clients: Clients,
        welcome: Welcome | None,
        function: FunctionJob | None,
        on_output: Callable[[str, OutputMessage | None], None],
        offers_joined: bool,
        returning_s: float,
    ) -> None:
        self.decisions, self.outbox, self.hang_detector = decisions, outbox, hang_detector
        self.welcome, self.function, self.offers = welcome, function, HostOffers(offers_joined)
        self._clients, self._on_output, self._returning_s = clients, on_output, returning_s
        self.by_agent: dict[str, AgentSession] = {}
        self.channels: dict[str, Channel[AgentMessage]] = {}
        self.returning: set[str] = set()
        self.hosts: set[str] = set()
        self.silence = Silence(config.detection_budget_s)
        self.look_every_s = self.silence.look_every_s
        now_s = self._now_s = decisions.clock.now_s
        self.heartbeats = AgentHeartbeats(token, config.detection_budget_s, now_s, self.silence.record)

    async def open(self, address: Address) -> None:
        """Receive heartbeats as datagrams at this address, too, if agents of other machines may join."""
        if self.welcome is not None:
            await self.heartbeats.open(address)

    def restore(self, state: CoordinatorState) -> None:
        """Continue the sessions of the former coordinator. Their agents will resume them."""
        self.hosts |= state.agent_hosts
        for agent, session in state.sessions.items():
            self.by_agent[agent] = session
            self.returning.add(agent)
            if session.is_apart:
                self.heartbeats.begin(agent)

    def expect_returns(self) -> None:
        """Count the silence of the agents that return from now on: they are answered."""
        for agent in self.returning:
            self.record_life(agent, self._returning_s)

    def connect(self, agent: str, session: AgentSession, channel: Channel[AgentMessage]) -> None:
        """Begin a session, or continue it, on this connection."""
        if (former := self.channels.pop(agent, None)) is not None:
            former.abort()
        self.by_agent[agent], self.channels[agent] = session, channel
        self.returning.discard(agent)
        self.record_life(agent)

    def join(self, hello: AgentHello, session: AgentSession, channel: Channel[AgentMessage]) -> None:
        """Begin the session of an agent that has no workers yet."""
        self.connect(hello.agent, session, channel)
        if (offered := self.offers.join(hello.agent, hello.host, hello.slots)) is not None:
            self.decisions.decide(offered)
        self.decisions.report(AgentConnected(hello.agent, hello.host, hello.slots))

    def disconnected(self, agent: str, channel: Channel[AgentMessage]) -> None:
        """Forget a connection that has ended, unless another one has replaced it."""
        if self.channels.get(agent) is channel:
            del self.channels[agent]

    def record_life(self, agent: str, after_s: float = 0.0) -> None:
        """Count the silence of an agent from now, or later. The launcher's own agents cannot be cut off from a
        coordinator on the same machine, and are silent while the launcher is stopped, as in a debugger; their silence
        counts only where workers of other hosts could go on without them."""
        sessions = self.by_agent
        is_own = not sessions[agent].is_apart and self.outbox.has_journal
        if not is_own or any(each.is_apart for each in sessions.values()):
            self.silence.record(agent, self._now_s() + after_s)
        else:
            self.silence.forget(agent)

    def lease_end_s(self, agent: str) -> float | None:
        """Return until when the workers of an agent that is lost now may run; None: it is not on another machine. An
        agent that has seen the end of its connection waits for the next coordinator, and keeps its workers meanwhile.
        Where another one may take over from this one, so does an agent that hears nothing any more.
        """
        end_s = self.heartbeats.lease_end_s(agent)
        if end_s is None or self.welcome is None:
            return end_s
        waits = agent not in self.channels or self.welcome.outlives_silence
        return end_s + (self.welcome.patience_s if waits else 0.0)

    def send(self, agent: str, message: ToAgent) -> None:
        """Send a message; one that must not be lost is kept until the agent has confirmed it, and waits for the
        journal."""
        channel = self.channels.get(agent)
        if not is_counted(message):
            if channel is not None:
                channel.send(message)
            return
        if (session := self.by_agent.get(agent)) is not None:
            session.log.keep(message)
        if channel is not None:
            self.outbox.add(channel, message)

    def send_heartbeats(self, every_s: float) -> None:
        """Send heartbeats, and tell the agents how many of their messages were handled. They are to send theirs
        `every_s`."""
        self.heartbeats.heartbeat(self.send, every_s)
        for agent, channel in self.channels.items():
            session = self.by_agent[agent]
            handled = session.journaled if self.outbox.has_journal else session.log.handled
            if handled > session.confirmed:
                session.confirmed = handled
                channel.send(Handled(handled))

    def handle(self, agent: str, channel: Channel[AgentMessage], message: AgentMessage) -> None:
        """Handle a message that has come on this connection. Raises ProtocolError."""
        if self.channels.get(agent) is not channel:
            return  # Outdated: the agent was declared lost, or has connected again.
        if isinstance(message, Heartbeat):  # first, because they are most messages of a large job
            self._on_heartbeat(agent, message)
            return
        if isinstance(message, AgentHello):
            raise ProtocolError(f"agent {agent} sent AgentHello twice")
        if isinstance(message, WorkersTold):
            raise ProtocolError(f"agent {agent} sent WorkersTold without a request")
        log = self.by_agent[agent].log
        if isinstance(message, Handled):
            log.confirm(message.count)
            return
        if is_counted(message):
            log.handled += 1
        if agent not in self.heartbeats:
            self.record_life(agent)
        if isinstance(message, WorkerPrinted | WorkerRanked | WorkerSilent):
            self._on_output(agent, message)
        elif isinstance(message, ReturnPart):
            if self.function is not None:
                self.function.on_return(message)
            self.send(agent, PartReceived(message.worker))
            self.outbox.commit()
        elif isinstance(message, StacksWritten):
            self._clients.stacks.on_written(message)
        else:
            if isinstance(message, WorkerExited | WorkerDying):
                self.decisions.report_steps()
            self.decisions.report(AgentReported(agent, message))

    def lose(self, agent: str, reason: str, lease_end_s: float | None = None, silent_s: float = 0.0) -> None:
        """Report that an agent is lost, as in AgentLost, and forget it."""
        self.decisions.settle_reports()  # what it reported before counts
        self.decisions.report_steps()
        self.hang_detector.forget(agent)
        self._clients.telemetry.pop(agent, None)
        self._forget(agent)
        self._on_output(agent, None)
        if self.decisions.retelling.told.pop(agent, None) is None:  # else it counts as one that has told nothing
            self.decisions.report(AgentLost(agent, reason, lease_end_s, silent_s))
        if (offered := self.offers.leave(agent)) is not None:
            self.decisions.decide(offered)

    def _on_heartbeat(self, agent: str, message: Heartbeat) -> None:
        if agent in self.heartbeats:
            self.heartbeats.record(agent, message.sequence, message.received or 0)
        else:
            self.record_life(agent)
        if message.workers is not None:
            self.hang_detector.record(agent, message.workers, self._now_s())
        if message.telemetry is not None:
            self._clients.telemetry[agent] = message.telemetry

    def _forget(self, agent: str) -> None:
        self.silence.forget(agent)
        self.heartbeats.forget(agent)
        self.by_agent.pop(agent, None)
        self.returning.discard(agent)
        if (channel := self.channels.pop(agent, None)) is not None:
            channel.abort()


class HostOffers:
    """`counts_joined`: whether the host of an agent that has joined by itself counts as long as the agent stays.

    Attributes:
        offered: Slots by host.
        joined: Slots of the agents that have joined beside those: an agent on another machine has the name of its host.
    """

    def __init__(self, counts_joined: bool) -> None:
        self._counts_joined = counts_joined
        self.offered: dict[str, int] = {}
        self.joined: dict[str, int] = {}

    def offer(self, slots: Mapping[str, int], may_change: bool) -> HostsOffered:
        """Replace what is offered. Return all hosts."""
        self.offered = dict(slots)
        return self._all(may_change)

    def join(self, agent: str, host: str, slots: int) -> HostsOffered | None:
        """Count the host of an agent that has joined. Return all hosts if there is one more."""
        if not self._counts_joined or host in self.offered:
            return None
        self.joined[agent] = slots
        return self._all(may_change=True)

    def leave(self, agent: str) -> HostsOffered | None:
        """Count the host of this agent no more. Return all hosts if there is one less."""
        return None if self.joined.pop(agent, None) is None else self._all(may_change=True)

    def _all(self, may_change: bool) -> HostsOffered:
        return HostsOffered({**self.offered, **self.joined}, may_change)


class Watch:
    """The regular look at what nobody reports: agents that have become silent, steps that have stalled. It also sends
    the heartbeats. Used on one event loop: `start`, then `close`."""

    def __init__(self, budget_s: float, agents: Agents, refused: RefusalReports) -> None:
        self._budget_s, self._agents, self._refused = budget_s, agents, refused
        self._next_heartbeat_s = self._next_hang_look_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look now, and from now on."""
        self._look()
        self._agents.decisions.clock.expect_look(self._agents.look_every_s)
        self._timer = asyncio.get_running_loop().call_later(self._agents.look_every_s, self.start)

    def close(self) -> None:
        """Look no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        agents, decisions, hang_detector = self._agents, self._agents.decisions, self._agents.hang_detector
        self._refused.flush()
        decisions.notice_stall()
        for agent, silent_s in agents.silence.look(decisions.clock.now_s()).items():
            reason = f"nothing was received from it for {silent_s:.2f} s (--detection-budget {self._budget_s:g})"
            agents.lose(agent, reason, agents.lease_end_s(agent), silent_s)
        if decisions.retelling.reason and decisions.may_rebuild():
            decisions.decide(Tick())
        now_s = decisions.clock.now_s()
        if now_s >= self._next_hang_look_s:
            self._next_hang_look_s = now_s + hang_detector.look_every_s
            if (stalled := hang_detector.look(decisions.job, now_s)) is not None:
                decisions.decide(stalled)
        if now_s >= self._next_heartbeat_s:
            every_s = heartbeat_period_s(self._budget_s, len(agents.channels))
            hang_detector.heartbeat_s = every_s
            self._next_heartbeat_s = now_s + every_s - agents.look_every_s / 2
            agents.send_heartbeats(every_s)
