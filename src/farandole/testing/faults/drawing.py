"""Random fault plans for a job, from a seed alone: scenarios, each of one or more faults that belong together.

Each scenario leaves a holder of the state, so that the job can always continue. Used by chaos runs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from farandole.testing.faults.fault_plan import (
    AddWorker,
    After,
    AtLastStepOf,
    AtStep,
    During,
    Fault,
    FaultAction,
    FaultPhase,
    HostAction,
    OneWay,
    Plan,
    ToHost,
    ToWorkers,
    Who,
    WorkerAction,
)

MOST_WORKERS = 4
LONG, SHORT = 2.5, 0.25  # a silence that is detected, and one that must not be: in detection budgets


@dataclass(frozen=True)
class Shape:
    """The properties of a job that matter for its plan.

    workers          initial number, on `hosts` hosts; 0 hosts: on this machine, without a lab
    epochs, steps    number of epochs, and of steps in each
    replaces         lost workers are replaced
    budget_s         the detection budget
    spares           workers that wait in addition; then no worker is added, and none is asked to leave
    """

    workers: int
    hosts: int
    epochs: int
    steps: int
    replaces: bool
    budget_s: float
    spares: int = 0


def draw(chance: random.Random, shape: Shape) -> Plan:
    """Return two to four scenarios, in the order of their steps."""
    return _Drawing(chance, shape).plan()


class _Drawing:
    """A plan in progress. `size` workers train after all arrivals and departures."""

    def __init__(self, chance: random.Random, shape: Shape) -> None:
        self._chance, self._shape = chance, shape
        self._size = shape.workers
        self._step = 0

    def plan(self) -> Plan:
        count = self._chance.randint(2, 4)
        last = self._shape.epochs * self._shape.steps - 60
        steps = sorted(self._chance.randrange(5, last) for _ in range(count))
        for index in range(1, count):
            if self._chance.random() < 0.3:  # close together: faults in the middle of a regroup matter most
                steps[index] = steps[index - 1] + self._chance.randint(1, 4)
        faults: list[Fault] = []
        for step in steps:
            self._step = step
            faults += self._scenario()
        if self._chance.random() < 0.2 and not self._shape.hosts and self._size > 1:
            whom: Who = self._chance.choice(["any", "all but one"])
            faults.append(Fault(AtLastStepOf(self._shape.epochs - 1), ToWorkers("kill", whom), self._late(10)))
        return Plan(tuple(faults))

    def _scenario(self) -> Iterator[Fault]:
        scenarios: list[tuple[int, Callable[[], Iterator[Fault]]]] = [
            (2, self._one),
            (3, self._two),
            (3, self._in_the_regroup),
            (3, self._in_the_sync),
            (2, self._all_but_one),
            (2, self._slow),
            (2, self._hang),
        ]
        if self._shape.hosts:
            silences: list[Callable[[], Iterator[Fault]]] = [partial(self._between, each) for each in (LONG, SHORT)]
            host_scenarios = [self._host_gone, *silences, self._one_way, self._slow_network]
            scenarios = [(2, scenario) for scenario in (*host_scenarios, self._agent, self._in_a_phase)] + scenarios[:4]
        elif not self._shape.spares:
            scenarios += [(2, self._leave)]
            scenarios += [(1, self._join), (2, self._in_the_join)] if self._size < MOST_WORKERS else []
        if self._step < (self._shape.epochs - 1) * self._shape.steps:  # the last epoch ends with the job
            scenarios.append((2, self._last_step))
        possible = [scenario for need, scenario in scenarios if self._size >= need]
        return self._chance.choice(possible)()

    # One host --------------------------------------------------------------------------------------------

    def _one(self) -> Iterator[Fault]:
        verb: WorkerAction = self._chance.choice(["kill", "segfault", "abort", "exit", "raise", "starve"])
        whom: int | Who = self._chance.choice([0, "source", "any", "any"])
        yield self._now(ToWorkers(verb, whom))
        self._lose(1)

    def _two(self) -> Iterator[Fault]:
        if self._chance.random() < 0.5:
            yield self._now(ToWorkers("kill", "two"))
        else:
            yield self._now(ToWorkers("kill", "any"))
            yield Fault(After(round(self._chance.uniform(0, 0.05), 3)), ToWorkers("kill", "any"))
        self._lose(2)

    def _in_the_regroup(self) -> Iterator[Fault]:
        yield self._now(ToWorkers("kill", self._whom()))
        yield Fault(During("regroup"), ToWorkers("kill", self._whom()), self._late(8))
        self._lose(2)

    def _in_the_sync(self) -> Iterator[Fault]:
        yield self._now(ToWorkers("kill", self._whom()))
        yield Fault(During("sync"), ToWorkers("kill", self._chance.choice(["source", "any"])), self._late(15))
        self._lose(2)

    def _last_step(self) -> Iterator[Fault]:
        yield Fault(AtLastStepOf(self._step // self._shape.steps), ToWorkers("kill", self._whom()), self._late(10))
        self._lose(1)

    def _all_but_one(self) -> Iterator[Fault]:
        yield self._now(ToWorkers("kill", "all but one"))
        self._lose(self._size - 1)

    def _slow(self) -> Iterator[Fault]:
        if self._chance.random() < 0.5:
            yield self._now(ToWorkers("hold", "any"))
            return
        yield self._now(ToWorkers("stop", "any"))
        yield Fault(After(SHORT * self._shape.budget_s), ToWorkers("continue", "the same"))

    def _hang(self) -> Iterator[Fault]:
        verb: WorkerAction = self._chance.choice(["stop", "hang"])
        yield self._now(ToWorkers(verb, self._whom()))
        self._lose(1)

    def _leave(self) -> Iterator[Fault]:
        yield self._now(ToWorkers("leave", self._whom()))
        self._size -= 1

    def _join(self) -> Iterator[Fault]:
        yield self._now(AddWorker())
        self._size += 1

    def _in_the_join(self) -> Iterator[Fault]:
        """Yield the faults of a join. A newcomer needs longer to join than a step: the step is that of its request."""
        yield self._now(AddWorker())
        self._size += 1
        if self._chance.random() < 0.3:
            yield Fault(During("start"), ToWorkers("kill", "newcomer"), self._late(1500))
        else:
            yield Fault(During("join"), ToWorkers("kill", self._whom()), self._late(20))
        self._lose(1)

    # Several hosts ---------------------------------------------------------------------------------------

    def _host_gone(self) -> Iterator[Fault]:
        host = self._host()
        yield self._now(ToHost("power off", host))
        yield self._later(ToHost("boot", host))

    def _in_a_phase(self) -> Iterator[Fault]:
        """Kill a worker, and while the others recover, or admit its replacement, let them lose a host."""
        phases: list[FaultPhase] = ["regroup", "sync", "start", "join"]
        pairs: list[tuple[HostAction, HostAction]] = [("power off", "boot"), ("cut", "heal"), ("freeze", "thaw")]
        (first, last), host = self._chance.choice(pairs), self._host()
        yield self._now(ToWorkers("kill", self._whom()))
        yield Fault(During(self._chance.choice(phases)), ToHost(first, host), self._late(10))
        yield self._later(ToHost(last, host))

    def _between(self, budgets: float) -> Iterator[Fault]:
        pairs: list[tuple[HostAction, HostAction]] = [("cut", "heal"), ("freeze", "thaw")]
        first, last = self._chance.choice(pairs)
        host = self._host()
        yield self._now(ToHost(first, host))
        yield Fault(After(budgets * self._shape.budget_s), ToHost(last, host))

    def _one_way(self) -> Iterator[Fault]:
        sender, receiver = self._chance.sample(range(self._shape.hosts), 2)
        yield self._now(OneWay(sender, receiver))
        yield self._later(ToHost("heal", sender))

    def _agent(self) -> Iterator[Fault]:
        host = self._host()
        yield self._now(ToHost(self._chance.choice(["kill agent of", "stop agent of"]), host))
        yield self._later(ToHost("boot", host))

    def _slow_network(self) -> Iterator[Fault]:
        host = self._host()
        amount = self._chance.choice([2.0, 8.0])
        slow = ToHost("slow", host, amount) if self._chance.random() < 0.5 else ToHost("lose", host, amount)
        yield self._now(slow)
        yield Fault(After(2.0), ToHost("hurry", host))

    # Helpers ---------------------------------------------------------------------------------------------

    def _now(self, action: FaultAction) -> Fault:
        return Fault(AtStep(self._step), action, self._late(4))

    def _later(self, action: FaultAction) -> Fault:
        return Fault(After(LONG * self._shape.budget_s), action)

    def _late(self, most_ms: float) -> float:
        return round(self._chance.uniform(0, most_ms), 1)

    def _whom(self) -> Who:
        whom: Sequence[Who] = ["source", "any", "any"]
        return self._chance.choice(whom)

    def _host(self) -> int:
        return self._chance.randrange(self._shape.hosts)

    def _lose(self, count: int) -> None:
        self._size -= 0 if self._shape.replaces else count
