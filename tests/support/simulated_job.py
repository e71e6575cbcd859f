"""A whole job in one thread, without processes, sockets or waiting. For property tests and benchmarks.

The coordinator's decisions are the real ones; agents and workers are simulated, with random delays and
faults. The same seed gives the same run.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from farandole.base.config import JobConfig
from farandole.base.events.event import Event
from farandole.base.membership import Origin
from farandole.base.wire.control import Accepted, AskDrain, AskScale, AskUndrain
from farandole.base.wire.link_messages import LinkBroken, WorkerMessage
from farandole.base.wire.messages import (
    AgentLeaving,
    AgentMessage,
    Dismissed,
    ForwardToWorkers,
    FromWorker,
    Kill,
    Spawn,
    SpawnFailed,
    StartWorkers,
    ToAgent,
    WorkerDying,
    WorkerExited,
)
from farandole.job.coordinator.control_requests import judge
from farandole.job.coordinator.decide import decide, next_deadline
from farandole.job.coordinator.job import Job, new_job
from farandole.job.coordinator.transition import (
    Action,
    AgentConnected,
    AgentLost,
    AgentReported,
    HostsOffered,
    Input,
    Log,
    Outcome,
    SendAgent,
    StepsStalled,
    StopRequested,
    Tick,
)
from tests.support.membership_invariants import MembershipInvariants
from tests.support.simulated_generation import SimulatedGeneration, TrainingInvariants
from tests.support.simulated_worker import SimulatedWorker

_LONGEST_RUN_S = 1e6


@dataclass(frozen=True)
class Habits:
    """The behaviour of the simulated script and machines; probabilities from 0 to 1.

    is_elastic       the script enters an elastic function
    calls_init       it calls init()
    agrees           members agree on boundaries as real ones do; else each decides for itself, which the
                     coordinator must survive as well
    hangs, crashes   how often a start hangs, or fails with an exit code
    fails_late       how often a released worker ends with a failure
    repeats          how often a message reaches the coordinator twice, the second time after later ones
    gathers_s        for so long the coordinator gathers inputs before it decides; 0: each is decided alone
    """

    is_elastic: bool = True
    calls_init: bool = True
    agrees: bool = True
    hangs: float = 0.0
    crashes: float = 0.0
    fails_late: float = 0.0
    repeats: float = 0.0
    gathers_s: float = 0.0


class SimulatedJob:
    """The simulation: `connect()` agents, schedule faults with `after(delay_s, ...)`, then `run()` until no event is
    left."""

    def __init__(
        self, config: JobConfig, seed: int, habits: Habits | None = None, origin: Origin | None = None
    ) -> None:
        self.random = random.Random(seed)
        self._hints = random.Random(-seed)
        self.habits = habits or Habits()
        self.job: Job = new_job(config, f"job{seed}", origin=origin)
        self.invariants = MembershipInvariants(config)
        self._inbox: list[Input] = []
        self._will_decide = False
        self._deadline_s = next_deadline(self.job)
        self.now_s = 0.0
        self.history: list[tuple[float, Input]] = []
        self.logged: list[Event] = []
        self.workers: dict[str, SimulatedWorker] = {}  # all workers so far
        self.generations: dict[int, SimulatedGeneration] = {}
        self.training = TrainingInvariants()
        self.bad_links: set[frozenset[str]] = set()
        self.silent_links: set[frozenset[str]] = (
            set()
        )  # between workers, or agents: no message arrives, and no error is reported
        self.is_training_over = False
        self.spares_admitted = 0  # in the regroup that a loss began
        self.end: Outcome | None = None
        self.offered: dict[str, int] | None = None
        self._agents: set[str] = set()
        self._slots: dict[str, int] = {}
        self.drained: set[str] = set()  # agents of hosts that the user drained: none is started again meanwhile
        self.draining: set[str] = set()  # agents that were asked to end, and have not been dismissed yet
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._last_arrival: dict[tuple[str, str], float] = {}

    # Time ------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        """Schedule an action."""
        self._at(self.now_s + delay_s, do)

    def _at(self, time_s: float, do: Callable[[], None]) -> None:
        """Schedule at a time. Actions of the same time happen in the order in which they were scheduled."""
        self._sequence += 1
        heapq.heappush(self._events, (time_s, self._sequence, do))

    def in_order(self, connection: tuple[str, str], do: Callable[[], None]) -> None:
        """Schedule an arrival: after a random delay, never before an earlier one on the same connection."""
        arrival_s = max(self.now_s + self.delay_s(), self._last_arrival.get(connection, 0.0))
        self._last_arrival[connection] = arrival_s
        self._at(arrival_s, do)

    def delay_s(self) -> float:
        """Return a delay, mostly under a millisecond, sometimes a tenth of a second."""
        return 10 ** self.random.uniform(-4.0, -3.0 if self.random.random() < 0.8 else -0.7)

    def run(self) -> None:
        """Run until no event is pending and the coordinator waits for nothing."""
        while self.now_s < _LONGEST_RUN_S:
            deadline_s = self._deadline_s
            if self._events and (deadline_s is None or self._events[0][0] <= deadline_s):
                at_s, _, do = heapq.heappop(self._events)
                self.now_s = max(self.now_s, at_s)
                do()
            elif deadline_s is not None:
                self.now_s = max(self.now_s, deadline_s)
                self.feed(Tick())
                after_s = self._deadline_s
                assert after_s is None or after_s > self.now_s, "a Tick at the deadline must move the deadline"
            else:
                return
        raise AssertionError("the job never comes to rest")

    def report(self, happened: Input) -> None:
        """Let an input arrive. It is decided at once, or together with those that arrive soon after."""
        gathers_s = self.gathers_s()
        if not gathers_s:
            self.feed(happened)
            return
        self._inbox.append(happened)
        if not self._will_decide:
            self._will_decide = True
            self.after(gathers_s, self._decide)

    def gathers_s(self) -> float:
        """Return for how long the coordinator gathers inputs from now on; 0: it decides at once."""
        return self.habits.gathers_s

    def feed(self, happened: Input) -> None:
        """Decide on an input now, together with those that have arrived before."""
        self._inbox.append(happened)
        self._decide()

    def _decide(self) -> None:
        self._will_decide = False
        inputs, self._inbox = self._inbox, []
        if inputs:
            self._settle(inputs)

    def _settle(self, inputs: list[Input]) -> None:
        """Make one decision, check it, and execute it."""
        self.history += [(self.now_s, happened) for happened in inputs]
        before = self.job
        self.job, actions, self._deadline_s = self.decide(before, inputs)
        self._count_spares(before)
        self.check(inputs, actions)
        for action in actions:
            if isinstance(action, SendAgent):
                self._note_starts(action.message)
                self.in_order(("down", action.agent), partial(self._obey, action.agent, action.message))
            elif isinstance(action, Log):
                self.logged.append(action.event)
            elif isinstance(action, Outcome):
                self.end = action

    def decide(self, job: Job, inputs: list[Input]) -> tuple[Job, list[Action], float | None]:
        """Call the real decision code, and return the next deadline, too. Benchmarks measure this call."""
        after, actions = decide(job, inputs, self.now_s)
        return after, actions, next_deadline(after)

    def check(self, inputs: list[Input], actions: list[Action]) -> None:
        """Check the invariants."""
        self.invariants.watch(inputs, actions, self.now_s)

    def _count_spares(self, before: Job) -> None:
        old, new = before.generation, self.job.generation
        if old is None or new is None or old is new or before.change is None or before.change.is_planned:
            return
        if len(new.members) == len(old.members) and self.job.config.spares:
            self.spares_admitted += len(set(new.members).difference(old.members))

    # Agents ----------------------------------------------------------------------------------------------

    def connect(self, agent: str, slots: int, host: str | None = None) -> None:
        """Let an agent join."""
        self._agents.add(agent)
        self._slots[agent] = slots
        self.report(AgentConnected(agent, host or f"host-of-{agent}", slots))

    def offer(self, slots: dict[str, int], may_change: bool = True) -> None:
        """Set the current hosts. Hosts without an agent get one, of the same name, after a while."""
        self.offered = slots
        self.drained &= slots.keys()
        self.feed(HostsOffered(slots, may_change))
        for host in slots:
            self.after(self.delay_s(), partial(self._connect_offered, host))

    def _connect_offered(self, host: str) -> None:
        is_wanted = self.offered and host in self.offered and host not in self.drained
        if self.offered and is_wanted and host not in self._agents and self.end is None:
            self.connect(host, self.offered[host], host)

    def lose_agent(self, agent: str, lease_s: float | None = None) -> None:
        """Power off a host; or, with a `lease_s`, cut it off, so that it may train for that time. An agent that is
        offered, or joins by itself, comes back, empty."""
        if agent in self._agents:
            self._agents.discard(agent)
            self.draining.discard(agent)
            for worker in self.alive():
                if worker.agent == agent:
                    worker.die()
            self._decide()
            lease_end_s = None if lease_s is None else self.now_s + lease_s
            self.feed(AgentLost(agent, "its host is silent", lease_end_s))
            again_s = max(1.0, lease_s or 0.0)
            self.after(again_s, partial(self._connect_offered, agent))
            if self.job.config.takes_agents:
                self.after(again_s, partial(self._connect_again, agent))

    def drain_agent(self, agent: str) -> None:
        """Send SIGTERM to an agent. When it has ended, it may be started anew."""
        if agent in self._agents:
            self.draining.add(agent)
            self.tell(agent, AgentLeaving("SIGTERM was received"))

    def drain_host(self, agent: str) -> None:
        """Drain a host on the user's request. The host, and its one agent, stay out until `undrain_host`, if the
        request is accepted."""
        known = self.job.agents.get(agent)
        if known is not None and agent in self._agents and self._ask(AskDrain(known.host)):
            self.drained.add(agent)

    def undrain_host(self, agent: str) -> None:
        """Take a drained host back on the user's request. If its agent has ended already, there will be another one."""
        if agent in self.drained and self._ask(AskUndrain(self.job.agents[agent].host)):
            self.drained.discard(agent)
            again = self._connect_again if self.offered is None else self._connect_offered
            self.after(self.delay_s(), partial(again, agent))

    def _ask(self, request: AskDrain | AskUndrain) -> bool:
        is_accepted = isinstance(judge(self.job, request), Accepted)
        if is_accepted:
            self.feed(request)
        return is_accepted

    def _on_dismissed(self, agent: str) -> None:
        assert all(worker.agent != agent for worker in self.alive()), f"{agent} is dismissed and has workers"
        self._agents.discard(agent)
        if agent in self.draining:
            self.draining.discard(agent)
            if self.offered is None and agent not in self.drained and self.random.random() < 0.5:
                self.after(1.0, partial(self._connect_again, agent))
        self.after(self.delay_s(), partial(self._connect_offered, agent))

    def _connect_again(self, agent: str) -> None:
        if agent not in self._agents | self.drained and self.end is None:
            self.connect(agent, self._slots[agent])

    def tell(self, agent: str, message: AgentMessage) -> None:
        """Send a message from an agent to the coordinator."""

        def arrive() -> None:
            if agent in self._agents:
                self.report(AgentReported(agent, message))

        self.in_order(("up", agent), arrive)
        if self.habits.repeats and self._hints.random() < self.habits.repeats:
            self.after(self._hints.uniform(0.0, 1.0), lambda: self.in_order(("up", agent), arrive))

    def say(self, worker: SimulatedWorker, message: WorkerMessage) -> None:
        """Send a message from a worker through its agent to the coordinator."""
        carried = FromWorker(worker.name, message)
        self.in_order(("up", worker.name), lambda: self.tell(worker.agent, carried))

    def exit(self, worker: SimulatedWorker, exit_code: int) -> None:
        """End a worker's process. Its last messages and its exit may reach the agent in either order."""
        if worker.is_alive:
            worker.die()
            exited = WorkerExited(worker.name, exit_code)
            if self._hints.random() < 0.5:  # the kernel frees its memory before its exit is known
                self.after(self.delay_s(), lambda: self.tell(worker.agent, WorkerDying(worker.name)))
                self.after(self.delay_s() + self._hints.uniform(0.0, 0.2), lambda: self.tell(worker.agent, exited))
            else:
                self.after(self.delay_s(), lambda: self.tell(worker.agent, exited))
            for peer in self.peers_of(worker):
                if self.random.random() < 0.7:
                    hint = LinkBroken(peer.current, worker.name, "receive", "end of file")
                    self.say(peer, hint)

    def hang(self, worker: SimulatedWorker) -> None:
        """Make a worker's own code hang for ever. Observers report it regularly."""
        if worker.is_alive and worker.current and worker.is_elastic:
            worker.hangs = True
            self.after(self.job.config.step_timeout_s or 5.0, self._tell_of_hung)

    def tell_that_all_wait(self) -> None:
        """Report that all members seem to wait for each other."""
        members = tuple(worker.name for worker in self.job.survivors())
        self.feed(StepsStalled(self.job.number, 5.0, self.job.number, (), members))

    def _tell_of_hung(self) -> None:
        members = [worker.name for worker in self.job.survivors()]
        hung = tuple(name for name in members if self.workers[name].hangs)
        if hung and self.end is None:
            waiting = tuple(name for name in members if name not in hung)
            self.feed(StepsStalled(self.job.number, 5.0, self.job.number, hung, waiting))
            self.after(5.0, self._tell_of_hung)

    def _obey(self, agent: str, message: ToAgent) -> None:
        if agent not in self._agents:
            return
        match message:
            case Spawn(name, slot, _, attempt):
                if self.job.config.max_restarts is not None:
                    beside = [worker.name for worker in self.alive() if worker.attempt != attempt]
                    assert not beside, f"{name} of attempt {attempt} is started beside {beside} of another one"
                worker = self.workers[name] = SimulatedWorker(self, name, agent, slot, attempt)
                if self.random.random() < self.habits.crashes / 4:
                    worker.is_alive = False
                    self.tell(agent, SpawnFailed(name, "no such file"))
                else:
                    worker.boot()
            case Kill(name, grace_s):
                self._kill(name, grace_s)
            case Dismissed():
                self._on_dismissed(agent)
            case ForwardToWorkers(names, told):
                for name in names:
                    self._pass_on(name, told)
            case StartWorkers(starts):
                for name, start in starts.items():
                    self._pass_on(name, start)

    def _pass_on(self, name: str, message: object) -> None:
        worker = self.workers[name]
        self.in_order(("down", name), lambda: worker.hear(message) if worker.is_alive else None)

    def _kill(self, name: str, grace_s: float) -> None:
        worker = self.workers[name]
        delay_s = self.random.uniform(0.0, grace_s) if grace_s else 0.0
        self.after(delay_s, lambda: self.exit(worker, -15 if grace_s else -9))

    def _note_starts(self, message: ToAgent) -> None:
        if isinstance(message, StartWorkers):
            generation = self.job.generation
            if generation is not None and generation.number not in self.generations:
                is_bootstrap = next(iter(message.starts.values())).bootstrap
                simulated = SimulatedGeneration(generation.number, generation.members, is_bootstrap)
                self.generations[generation.number] = simulated

    # Queries ---------------------------------------------------------------------------------------------

    def alive(self) -> list[SimulatedWorker]:
        return [worker for worker in self.workers.values() if worker.is_alive]

    def peers_of(self, worker: SimulatedWorker) -> list[SimulatedWorker]:
        """Return the living neighbours of a worker on the ring of its generation."""
        generation = worker.generation
        around = () if generation is None else sorted(generation.neighbours(worker.name))
        return [self.workers[name] for name in around if self.workers[name].is_alive]

    def is_silent(self, one: SimulatedWorker, other: SimulatedWorker) -> bool:
        """Return whether packets between the two get lost."""
        ends = frozenset((one.name, other.name)), frozenset((one.agent, other.agent))
        return not self.silent_links.isdisjoint(ends)

    def is_stuck(self, number: int) -> bool:
        """Return whether some ring of a generation has a connection without progress: all of its members wait."""
        if not self.silent_links or number not in self.generations:
            return False
        members = [self.workers[name] for name in self.generations[number].members]
        return any(self.is_silent(members[place - 1], each) for place, each in enumerate(members))

    # Faults ----------------------------------------------------------------------------------------------

    def finish_training(self) -> None:
        """Make the workers' elastic functions return from now on."""
        self.is_training_over = True
        for worker in self.alive():
            worker.look()

    def silence(self, one: str, other: str, for_s: float) -> None:
        """Drop all messages between two workers, or two agents, for a while."""
        link = frozenset((one, other))
        self.silent_links.add(link)
        for worker in self.alive():
            worker.wait_for_bytes()

        def heal() -> None:
            self.silent_links.discard(link)
            for worker in self.alive():
                worker.look()

        self.after(for_s, heal)

    def scale(self, size: int) -> None:
        self.feed(AskScale(size))

    def stop(self, now: bool = False) -> None:
        self.feed(StopRequested(now, "Stopped by Ctrl-C."))
