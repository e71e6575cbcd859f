"""A simulated job whose coordinator loses its journal, and rebuilds the job from what the simulated agents tell."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.base.wire.messages import AgentHello, AgentMessage, Spawn, SpawnFailed, ToAgent
from farandole.job.agent.coordinator_session import SessionRecords
from farandole.job.coordinator.job import Job, new_job
from farandole.job.coordinator.rebuilding import ToldAgent, is_enough, rebuilt, why_not_believed
from farandole.job.coordinator.transition import Action, AgentLost, AgentReported, Input, Tick
from tests.support.simulated_job import SimulatedJob

TELLING_S, PATIENCE_S = 10.0, 60.0


class ForgetfulJob(SimulatedJob):
    """`lose_journal()`: the coordinator dies, and with it all that it knew and all that was on its way. The agents find
    the next one after a while and tell it what they know; it decides some seconds later.

    rebuilds, regroups  how often the job was rebuilt, and how often that took a regroup
    """

    rebuilds = regroups = 0
    is_asking = False
    _epoch = 1
    _asked_s = 0.0
    _rebuilt: tuple[Job, list[Action]] | None = None

    def lose_journal(self) -> None:
        """Lose it, unless the job ends."""
        if self.end is not None or self.is_asking or self.job.ending is not None:
            return
        unheard, self._inbox = self._inbox, []
        self.invariants.watch([each for each in unheard if isinstance(each, AgentReported)], [], self.now_s)
        self.is_asking, self._epoch, self._asked_s = True, self._epoch + 1_000_000, self.now_s
        self._waiting: list[Input] = []
        self._told: dict[str, ToldAgent] = {}
        self._away = set(self._agents)
        self._deadline_s = None
        for agent in sorted(self._away):
            self.after(self.random.uniform(0.0, TELLING_S), partial(self._tell_all, agent))
        self.after(TELLING_S, self._conclude)

    def _tell_all(self, agent: str) -> None:
        if not self.is_asking or agent not in self._away:
            return
        self._away.discard(agent)
        hello = AgentHello(agent, f"host-of-{agent}", self._slots[agent], PROTOCOL_VERSION, is_apart=True)
        one = ToldAgent(hello, self._records[agent].told(self.job.job_id))
        assert not why_not_believed(self.job.job_id, hello, one.told, self._told)
        self._told[agent] = one

    def _conclude(self) -> None:
        is_time = is_enough(self._told, self.job.config.num_proc) or self.now_s >= self._asked_s + PATIENCE_S
        if not is_time:
            self.after(1.0, self._conclude)
            return
        for agent in [*self._away]:  # it is told that its session is over, and joins again
            self._lose_silently(agent)
        self.is_asking = False
        self.rebuilds += 1
        job = new_job(self.job.config, self.job.job_id, self._epoch)
        self._rebuilt = rebuilt(job, self._told, "a test", self.now_s)
        self.regroups += self._rebuilt[0].change is not None
        self._correct_invariants(self._rebuilt[0])
        self._settle([*self._waiting, Tick()])

    def _correct_invariants(self, job: Job) -> None:
        """The invariants count what was sent. What of it has reached nobody has not happened."""
        self.invariants.released &= job.is_released
        if job.generation is None or job.change is not None:
            self.invariants.members = () if job.generation is None else job.generation.members

    def decide(self, job: Job, inputs: list[Input]) -> tuple[Job, list[Action], float | None]:
        if self._rebuilt is None:
            return super().decide(job, inputs)
        after, actions, deadline_s = super().decide(self._rebuilt[0], inputs)
        return after, [*self._rebuilt[1], *actions], deadline_s

    def check(self, inputs: list[Input], actions: list[Action]) -> None:
        rebuilding = [] if self._rebuilt is None else self._rebuilt[1]  # before the inputs that have waited
        self._rebuilt = None
        self.invariants.watch([], actions[: len(rebuilding)], self.now_s)
        super().check(inputs, actions[len(rebuilding) :])

    def _settle(self, inputs: list[Input]) -> None:
        if self.is_asking:
            self._waiting += inputs
        else:
            super()._settle(inputs)

    # Agents ----------------------------------------------------------------------------------------------

    @property
    def _records(self) -> dict[str, SessionRecords]:
        records: dict[str, SessionRecords] = self.__dict__.setdefault("_of_agents", {})
        return records

    def connect(self, agent: str, slots: int, host: str | None = None) -> None:
        self._records[agent] = SessionRecords()
        super().connect(agent, slots, host)

    def lose_agent(self, agent: str, lease_s: float | None = None) -> None:
        if self.is_asking and (agent in self._away or agent in self._told):
            self._lose_silently(agent)
        else:
            super().lose_agent(agent, lease_s)

    def _lose_silently(self, agent: str) -> None:
        """Lose an agent of which the coordinator does not know, or will not know any more."""
        self._away.discard(agent)
        self._told.pop(agent, None)
        self._agents.discard(agent)
        for worker in self.alive():
            if worker.agent == agent:
                worker.die()
        self.invariants.watch([AgentLost(agent, "it tells nothing")], [], self.now_s)
        self.after(1.0, partial(self._connect_again, agent))

    def tell(self, agent: str, message: AgentMessage) -> None:
        if agent in self._agents:
            self._records[agent].note_sent(message)
        super().tell(agent, message)

    def _obey(self, agent: str, message: ToAgent) -> None:
        if agent in self._agents:
            self._records[agent].note_received(message)
        super()._obey(agent, message)

    def in_order(self, connection: tuple[str, str], do: Callable[[], None]) -> None:
        """Let it arrive, unless the coordinator has died since then, or the agent has not reached the next one yet. The
        invariants are about what has happened, so they hear of it."""
        if connection[1] not in self._slots:
            super().in_order(connection, do)
            return
        epoch, is_away = self._epoch, self.is_asking and connection[1] in self._away

        def arrive() -> None:
            if epoch == self._epoch and not is_away:
                do()
            elif isinstance(do, partial) and isinstance(do.args[-1], Spawn):
                lost = AgentReported(connection[1], SpawnFailed(do.args[-1].worker, "nobody was told to start it"))
                self.invariants.watch([lost], [], self.now_s)
            elif connection[0] == "up":
                self._hear_of(do)

        super().in_order(connection, arrive)

    def _hear_of(self, do: Callable[[], None]) -> None:
        facts: list[Input] = []
        self.report = facts.append  # type: ignore[method-assign]
        try:
            do()
        finally:
            del self.__dict__["report"]
        self.invariants.watch(facts, [], self.now_s)
