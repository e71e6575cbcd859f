"""From an agent's hello to its session, which begins, goes on, or begins anew after the journal was lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import msgspec

from farandole.base.config import LONGEST_NAME, MOST_AGENTS, MOST_SLOTS, MOST_WORKERS
from farandole.base.machine import different_software, installed_software
from farandole.base.wire.channel import HANDSHAKE_DEADLINE_S, Channel
from farandole.base.wire.frames import CALL_RECEIVED
from farandole.base.wire.function_call import send_call
from farandole.base.wire.message_log import MessageLog
from farandole.base.wire.messages import (
    AgentHello,
    AgentLeaving,
    AgentMessage,
    Refused,
    Resumed,
    Resumption,
    SessionOver,
    TellWorkers,
    WorkersTold,
)
from farandole.errors import ProtocolError
from farandole.job.coordinator.agents import Agents
from farandole.job.coordinator.journal import AgentSession
from farandole.job.coordinator.rebuilding import ToldAgent, why_not_believed
from farandole.job.coordinator.reception import Reception
from farandole.job.coordinator.store_server import Store
from farandole.job.coordinator.transition import AgentReported


class AgentGreeting:
    """Greets the agents of a job that `reception` has let in; `store` is the job's."""

    def __init__(self, agents: Agents, reception: Reception, store: Store) -> None:
        self._agents, self._decisions, self._outbox = agents, agents.decisions, agents.outbox
        self._welcome, self._function = agents.welcome, agents.function
        self._reception, self._store = reception, store

    async def greet(self, channel: Channel[AgentMessage], hello: AgentHello) -> None:
        """Let the agent into its session on this connection.

        Raises:
            ProtocolError: It may not join, or its session is over; it was told so.
            ConnectionError: It, or the journal, took too long. It connects again.
        """
        async with _handshake_deadline("the state of the job was not written"):
            await self._outbox.begun()
        if hello.resumes is None:
            await self._begin(channel, hello)
        elif self._decisions.retelling.reason and self._has_not_told(hello, hello.resumes):
            await self._begin_anew(channel, hello, hello.resumes)
        else:
            await self._resume(channel, hello, hello.resumes)

    async def _begin(self, channel: Channel[AgentMessage], hello: AgentHello) -> None:
        """Begin a session with an agent that has no workers yet."""
        self._refuse_if_necessary(channel, hello)
        if hello.is_apart and self._function is not None:
            self._reception.introduced(is_awaited=False)  # the end of the job does not wait for it
            await send_call(channel.expecting(CALL_RECEIVED), self._function.call)
            self._refuse_if_necessary(channel, hello)  # another one has joined meanwhile
        self._reception.introduced(is_awaited=True)
        self._admit(channel.peer_host)
        if hello.agent in self._agents.by_agent:
            self._agents.lose(hello.agent, "it connected again")
            self._decisions.settle()  # no order to the lost agent may reach the one that has come
        if hello.is_apart and self._welcome is not None:
            heartbeat_id = self._agents.heartbeats.begin(hello.agent)
            channel.send(
                msgspec.structs.replace(
                    self._welcome,
                    heartbeat_id=heartbeat_id,
                    heartbeat_port=self._agents.heartbeats.udp_port,
                    store_port=self._store.address.port,
                    epoch=self._decisions.job.coordinator_epoch,
                )
            )
        session = AgentSession(hello.process, hello.is_apart, MessageLog(), protocol=channel.version)
        self._agents.join(hello, session, channel)

    async def _resume(self, channel: Channel[AgentMessage], hello: AgentHello, resumes: Resumption) -> None:
        """Continue the session of an agent, whose workers run, on a new connection."""
        self._check_epoch(hello, resumes)
        session = self._agents.by_agent.get(hello.agent)
        if session is not None and session.process == hello.process:
            self._agents.record_life(hello.agent, HANDSHAKE_DEADLINE_S)  # it may have to wait for the journal
            if (former := self._agents.channels.pop(hello.agent, None)) is not None:
                former.abort()  # no more of its messages is handled
        # The agent forgets what it is told was handled, so the journal must have it.
        self._decisions.settle()
        async with _handshake_deadline("the state of the job was not written"):
            await self._outbox.caught_up()
        session, reason = self._agents.by_agent.get(hello.agent), ""
        if session is None or session.process != hello.process or resumes.epoch < session.epoch:
            reason = f"the coordinator has lost agent {hello.agent}, and continues without its workers"
        else:
            try:
                unhandled = session.log.after(resumes.handled)
            except ProtocolError as error:
                reason = f"the coordinator's state is not that which agent {hello.agent} knows: {error}"
                self._agents.lose(hello.agent, reason)
        if session is None or reason:
            channel.send(SessionOver(reason))
            raise ProtocolError(reason)
        session.log.confirm(resumes.handled)
        session.confirmed, session.protocol = session.log.handled, channel.version
        self._continue_on(channel, hello.agent, session)
        for message in unhandled:
            self._outbox.add(channel, message)
        self._outbox.flush()

    def _has_not_told(self, hello: AgentHello, resumes: Resumption) -> bool:
        """Return whether this agent, whose workers run, has not told of them, or does not know that it has."""
        session = self._agents.by_agent.get(hello.agent)
        return session is None or (session.process == hello.process and resumes.epoch < session.epoch)

    async def _begin_anew(self, channel: Channel[AgentMessage], hello: AgentHello, resumes: Resumption) -> None:
        """Let an agent whose workers run tell of them, and begin another session with it."""
        self._check_epoch(hello, resumes)
        channel.send(TellWorkers(self._decisions.job.coordinator_epoch))
        async with _handshake_deadline("it told nothing"):
            told = await channel.receive()
        if not isinstance(told, WorkersTold):
            raise ProtocolError(f"it sent {type(told).__name__} instead of WorkersTold")
        others = {name: each.hello.slots for name, each in self._decisions.retelling.told.items()}
        reason = why_not_admitted(hello, others) or why_not_believed(
            self._decisions.job.job_id, hello, told, self._decisions.retelling.told
        )
        if not self._decisions.retelling.reason:
            reason = "the job was rebuilt without it, and continues without its workers"
        if reason:
            channel.send(SessionOver(reason))
            raise ProtocolError(reason)
        self._decisions.retelling.told[hello.agent] = ToldAgent(hello, told)
        session = AgentSession(hello.process, hello.is_apart, MessageLog(), protocol=channel.version)
        session.epoch = self._decisions.job.coordinator_epoch
        self._continue_on(channel, hello.agent, session)
        if told.leaving:
            self._decisions.report(AgentReported(hello.agent, AgentLeaving(told.leaving)))

    def _check_epoch(self, hello: AgentHello, resumes: Resumption) -> None:
        epoch = self._decisions.job.coordinator_epoch
        if resumes.epoch > epoch:
            raise ProtocolError(
                f"agent {hello.agent} serves a coordinator of epoch {resumes.epoch}, which has replaced this one of "
                f"epoch {epoch}"
            )

    def _continue_on(self, channel: Channel[AgentMessage], agent: str, session: AgentSession) -> None:
        self._reception.introduced(is_awaited=True)
        self._admit(channel.peer_host)
        self._agents.connect(agent, session, channel)
        heartbeats = self._agents.heartbeats
        heartbeat_id = heartbeats.begin(agent) if session.is_apart else b""
        channel.send(
            Resumed(
                self._decisions.job.coordinator_epoch,
                session.log.handled,
                heartbeat_id,
                heartbeats.udp_port if session.is_apart else 0,
                self._store.address.port,
            )
        )

    def _admit(self, host: str) -> None:
        self._agents.hosts.add(host)
        self._store.admit(host)

    def _refuse_if_necessary(self, channel: Channel[AgentMessage], hello: AgentHello) -> None:
        """Tell an agent of another machine that it may not join. Raises ProtocolError then."""
        if hello.is_apart and (refused := self._why_refused(hello)) is not None:
            channel.send(refused)
            raise ProtocolError(refused.reason)

    def _why_refused(self, hello: AgentHello) -> Refused | None:
        if self._welcome is None:
            return Refused(
                "this job does not accept agents of other machines (farandole run --token-file)", is_final=True
            )
        known = self._decisions.job.agents
        others = {agent: known[agent].slots for agent in self._agents.channels if agent in known}
        if reason := why_not_admitted(hello, others):
            return Refused(reason, is_final=True)
        if different := different_software(hello.software, installed_software()):
            return Refused(different, is_final=True)
        session = self._agents.by_agent.get(hello.agent)
        if session is not None and session.process != hello.process:
            return Refused(f"host {hello.agent} already has an agent", is_final=False)
        return None


@contextlib.asynccontextmanager
async def _handshake_deadline(problem: str) -> AsyncIterator[None]:
    """Give the block the time of a handshake. The agent connects again."""
    try:
        async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
            yield
    except TimeoutError:
        raise ConnectionError(f"{problem} within {HANDSHAKE_DEADLINE_S:g} s") from None


def why_not_admitted(hello: AgentHello, others: Mapping[str, int]) -> str:
    """Return why an agent must not join; empty if it may: each slot and each agent costs the coordinator memory, and
    time in each decision. `others`: by name, the slots of the agents that are connected."""
    for what, name, most in (("agent", hello.agent, 2 * LONGEST_NAME), ("host", hello.host, LONGEST_NAME)):
        if not 0 < len(name) <= most:
            return f"the name of its {what} has {len(name)} characters, it needs 1 to {most}"
    if not 1 <= hello.slots <= MOST_SLOTS:
        return f"it offers {hello.slots} slots, an agent may offer 1 to {MOST_SLOTS}"
    before = {name: slots for name, slots in others.items() if name != hello.agent}
    if len(before) >= MOST_AGENTS:
        return f"{len(before)} agents have joined, and a job may have {MOST_AGENTS}"
    if sum(before.values()) + hello.slots > MOST_WORKERS:
        return (
            f"it offers {hello.slots} slots beside {sum(before.values())} of other agents, and a job may have "
            f"{MOST_WORKERS}"
        )
    return ""
