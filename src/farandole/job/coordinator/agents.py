"""The agents of a job: their sessions over one connection after the other, what they report, and their silence."""

from __future__ import annotations

from collections.abc import Callable

from farandole.base.config import JobConfig
from farandole.base.membership import Address
from farandole.base.wire.channel import Channel
from farandole.base.wire.function_call import FunctionJob, PartReceived, ReturnPart
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
from farandole.job.coordinator.decision_loop import DecisionLoop
from farandole.job.coordinator.hang_detection import HangDetector
from farandole.job.coordinator.heartbeat_port import AgentHeartbeats
from farandole.job.coordinator.host_offers import HostOffers
from farandole.job.coordinator.inputs import AgentConnected, AgentLost, AgentReported
from farandole.job.coordinator.journal import AgentSession, CoordinatorState
from farandole.job.coordinator.outbox import Outbox
from farandole.job.coordinator.silence import Silence


class Agents:
    """The end of an agent's connection counts as silence: it may resume its session on another one. The arguments are
    parts of the coordinator, or as there.

    Attributes:
        by_agent: The sessions of the agents that are connected or were until just now.
        channels: The connections of those that are connected.
        returning: Agents of the former coordinator that have not come yet.
        hosts: The addresses from which agents have connected.
        heartbeats: Of the agents on other machines.
    """

    def __init__(
        self,
        config: JobConfig,
        token: bytes,
        *,
        decisions: DecisionLoop,
        outbox: Outbox,
        offers: HostOffers,
        hang_detector: HangDetector,
        clients: Clients,
        welcome: Welcome | None,
        function: FunctionJob | None,
        on_output: Callable[[str, OutputMessage | None], None],
        returning_s: float,
    ) -> None:
        self._decisions, self._outbox, self._offers = decisions, outbox, offers
        self._hang_detector, self._clients = hang_detector, clients
        self._welcome, self._function, self._on_output = welcome, function, on_output
        self._returning_s = returning_s
        self.by_agent: dict[str, AgentSession] = {}
        self.channels: dict[str, Channel[AgentMessage]] = {}
        self.returning: set[str] = set()
        self.hosts: set[str] = set()
        self._silence = Silence(config.detection_budget_s)
        self.look_every_s = self._silence.look_every_s
        now_s = self._now_s = decisions.clock.now_s
        self.heartbeats = AgentHeartbeats(token, config.detection_budget_s, now_s, self._silence.record)

    async def open(self, address: Address) -> None:
        """Receive heartbeats as datagrams at this address, too, if agents of other machines may join."""
        if self._welcome is not None:
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
        if (offered := self._offers.join(hello.agent, hello.host, hello.slots)) is not None:
            self._decisions.decide(offered)
        self._decisions.report(AgentConnected(hello.agent, hello.host, hello.slots))

    def disconnected(self, agent: str, channel: Channel[AgentMessage]) -> None:
        """Forget a connection that has ended, unless another one has replaced it."""
        if self.channels.get(agent) is channel:
            del self.channels[agent]

    def record_life(self, agent: str, after_s: float = 0.0) -> None:
        """Count the silence of an agent from now, or later. The launcher's own agents cannot be cut off from a
        coordinator on the same machine, and are silent while the launcher is stopped, as in a debugger; their silence
        counts only where workers of other hosts could go on without them."""
        sessions = self.by_agent
        is_own = not sessions[agent].is_apart and self._outbox.has_journal
        if not is_own or any(each.is_apart for each in sessions.values()):
            self._silence.record(agent, self._now_s() + after_s)
        else:
            self._silence.forget(agent)

    def silent(self) -> dict[str, float]:
        """Return the agents whose silence has lasted for the budget, and for how many seconds: as Silence.look."""
        return self._silence.look(self._now_s())

    def lease_end_s(self, agent: str) -> float | None:
        """Return until when the workers of an agent that is lost now may run; None: it is not on another machine. An
        agent that has seen the end of its connection waits for the next coordinator, and keeps its workers meanwhile.
        Where another one may take over from this one, so does an agent that hears nothing any more.
        """
        end_s = self.heartbeats.lease_end_s(agent)
        if end_s is None or self._welcome is None:
            return end_s
        waits = agent not in self.channels or self._welcome.outlives_silence
        return end_s + (self._welcome.patience_s if waits else 0.0)

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
            self._outbox.add(channel, message)

    def send_heartbeats(self, every_s: float) -> None:
        """Send heartbeats, and tell the agents how many of their messages were handled. They are to send theirs
        `every_s`."""
        self.heartbeats.heartbeat(self.send, every_s)
        for agent, channel in self.channels.items():
            session = self.by_agent[agent]
            handled = session.journaled if self._outbox.has_journal else session.log.handled
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
            if self._function is not None:
                self._function.on_return(message)
            self.send(agent, PartReceived(message.worker))
            self._outbox.commit()
        elif isinstance(message, StacksWritten):
            self._clients.stacks.on_written(message)
        else:
            if isinstance(message, WorkerExited | WorkerDying):
                self._decisions.report_steps()
            self._decisions.report(AgentReported(agent, message))

    def lose(self, agent: str, reason: str, lease_end_s: float | None = None, silent_s: float = 0.0) -> None:
        """Report that an agent is lost, with its workers, and forget it.

        Args:
            agent: Its name.
            reason: Why.
            lease_end_s: Until when its workers may run; None: they are gone.
            silent_s: For how long nothing came from it, where that is the reason.
        """
        self._decisions.settle_reports()  # what it reported before counts
        self._decisions.report_steps()
        self._hang_detector.forget(agent)
        self._clients.telemetry.pop(agent, None)
        self._forget(agent)
        self._on_output(agent, None)
        if self._decisions.retelling.told.pop(agent, None) is None:  # else it counts as one that has told nothing
            self._decisions.report(AgentLost(agent, reason, lease_end_s, silent_s))
        if (offered := self._offers.leave(agent)) is not None:
            self._decisions.decide(offered)

    def _on_heartbeat(self, agent: str, message: Heartbeat) -> None:
        if agent in self.heartbeats:
            self.heartbeats.record(agent, message.sequence, message.received or 0)
        else:
            self.record_life(agent)
        if message.workers is not None:
            self._hang_detector.record(agent, message.workers, self._now_s())
        if message.telemetry is not None:
            self._clients.telemetry[agent] = message.telemetry

    def _forget(self, agent: str) -> None:
        """End the session of an agent that is lost, and its connection."""
        self._silence.forget(agent)
        self.heartbeats.forget(agent)
        self.by_agent.pop(agent, None)
        self.returning.discard(agent)
        if (channel := self.channels.pop(agent, None)) is not None:
            channel.abort()
