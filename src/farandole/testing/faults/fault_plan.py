"""The grammar of fault plans: action, victims and trigger. Pure; parsing.py reads it.

    at step 40: kill rank 0
    during regroup + 2 ms: kill any
    at last step of epoch 1: kill all but one
    at step 90: cut host 2
    after 2 s: heal host 2

Each object prints in the form in which it is parsed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

FaultPhase: TypeAlias = Literal["start", "join", "regroup", "sync"]
WorkerAction: TypeAlias = Literal[
    "kill", "segfault", "abort", "exit", "raise", "starve", "stop", "continue", "hold", "hang", "leave"
]
HostAction: TypeAlias = Literal[
    "power off", "boot", "cut", "heal", "freeze", "thaw", "slow", "hurry", "lose", "kill agent of", "stop agent of"
]
Who: TypeAlias = Literal["any", "source", "newcomer", "two", "all but one", "the same"]

PHASES: tuple[str, ...] = get_args(FaultPhase)
WORKER_ACTIONS: tuple[str, ...] = get_args(WorkerAction)
HOST_ACTIONS: tuple[str, ...] = get_args(HostAction)
WHO: tuple[str, ...] = get_args(Who)

DEADLY: frozenset[str] = frozenset({"kill", "segfault", "abort", "exit", "raise", "starve", "hang"})
"""Actions that end a worker at once; `hang` after the step timeout. `stop` does when it lasts as long as the detection
budget; `leave` is not a fault."""


@dataclass(frozen=True)
class AtStep:
    """A trigger: some worker has begun this step."""

    step: int

    def __str__(self) -> str:
        return f"at step {self.step}"


@dataclass(frozen=True)
class AtLastStepOf:
    """A trigger: some worker has begun the last step of this epoch, the first of which is 0."""

    epoch: int

    def __str__(self) -> str:
        return f"at last step of epoch {self.epoch}"


@dataclass(frozen=True)
class During:
    """A trigger: this phase has begun since the fault before.

    start    a new worker is started
    join     workers were asked to admit newcomers
    regroup  survivors of a fault regroup
    sync     a generation starts: its workers connect, and copy the state from the source
    """

    phase: FaultPhase

    def __str__(self) -> str:
        return f"during {self.phase}"


@dataclass(frozen=True)
class After:
    """A trigger: this time after the fault before."""

    delay_s: float

    def __str__(self) -> str:
        return f"after {self.delay_s:g} s"


Trigger: TypeAlias = AtStep | AtLastStepOf | During | After


@dataclass(frozen=True)
class ToWorkers:
    """Actions on workers, and their victims.

    kill     SIGKILL; `segfault` and `abort` are SIGSEGV and SIGABRT
    exit     os._exit(0), at any point
    raise    an exception in user code
    starve   it wants more memory than there is, and the kernel kills it
    stop     SIGSTOP, `continue` SIGCONT
    hold     a thread holds the GIL for a second: slow, not dead
    hang     user code waits for ever; needs a job with --step-timeout
    leave    SIGTERM: it is asked to leave

    whom     a rank, or: any; source, the lowest rank of the workers with the most progress; newcomer, which has not
             trained yet; two; all but one; the same, the victim of the fault before
    """

    verb: WorkerAction
    whom: int | Who

    def __str__(self) -> str:
        return f"{self.verb} {f'rank {self.whom}' if isinstance(self.whom, int) else self.whom}"


@dataclass(frozen=True)
class ToHost:
    """Actions on hosts.

    power off, boot     boot: also its agent
    cut, heal           all packets from and to it are dropped
    freeze, thaw        none of its processes runs
    slow, hurry         packets to it wait for a cable of `amount` megabits a second
    lose                `amount` percent of the packets to it are lost; `hurry` repairs that, too
    kill agent of, stop agent of
    """

    verb: HostAction
    host: int
    amount: float = 0.0

    def __str__(self) -> str:
        unit = {"slow": " to {:g} mbit", "lose": " {:g} percent"}.get(self.verb, "")
        return f"{self.verb} host {self.host}{unit.format(self.amount)}"


@dataclass(frozen=True)
class OneWay:
    """Packets from one host to another are dropped."""

    sender: int
    receiver: int

    def __str__(self) -> str:
        return f"one way host {self.sender} to host {self.receiver}"


@dataclass(frozen=True)
class AddWorker:
    """The job gets a slot for one more worker."""

    verb: Literal["add a worker"] = "add a worker"

    def __str__(self) -> str:
        return self.verb


Action: TypeAlias = ToWorkers | ToHost | OneWay | AddWorker


@dataclass(frozen=True)
class Fault:
    """A fault. `late_ms`: milliseconds after the trigger."""

    trigger: Trigger
    action: Action
    late_ms: float = 0.0

    def __str__(self) -> str:
        late = f" + {self.late_ms:g} ms" if self.late_ms else ""
        return f"{self.trigger}{late}: {self.action}"

    @property
    def kind(self) -> str:
        """The kind for counts: the action, and the phase when that matters."""
        what: str = "one way" if isinstance(self.action, OneWay) else self.action.verb
        if isinstance(self.action, ToWorkers) and self.action.whom in ("two", "all but one", "newcomer", "source"):
            what += f" {self.action.whom}"
        if isinstance(self.trigger, During):
            what += f" during {self.trigger.phase}"
        return what + " at the end of an epoch" * isinstance(self.trigger, AtLastStepOf)


@dataclass(frozen=True)
class Plan:
    """A sequence of faults, one after the other."""

    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.faults))

    def kinds(self) -> Counter[str]:
        """Return how often each kind of fault is in the plan."""
        return Counter(fault.kind for fault in self.faults)
