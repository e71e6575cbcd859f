"""The grammar of fault plans: action, victims and trigger; and its parser. Pure.

    at step 40: kill rank 0
    during regroup + 2 ms: kill any
    at last step of epoch 1: kill all but one
    at step 90: cut host 2
    after 2 s: heal host 2

Each object prints in the form in which it is parsed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

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


FaultAction: TypeAlias = ToWorkers | ToHost | OneWay | AddWorker


@dataclass(frozen=True)
class Fault:
    """A fault of a plan: an action, and its trigger.

    See the example of `parse`.

    Attributes:
        trigger: The event after which it happens.
        action: The action, on workers, hosts or the network.
        late_ms: Milliseconds after the trigger.
    """

    trigger: Trigger
    action: FaultAction
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
    """A sequence of faults, one after the other.

    See the example of `parse`.

    Attributes:
        faults: The faults, in their order.
    """

    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.faults))

    def kinds(self) -> Counter[str]:
        """Return how often each kind of fault is in the plan."""
        return Counter(fault.kind for fault in self.faults)


# The parser -----------------------------------------------------------------------------------------------------------

_NUMBER = r"(\d+(?:\.\d+)?)"
_LATE = re.compile(rf"(.*?) *\+ *{_NUMBER} *ms")
_TRIGGERS: tuple[tuple[str, Callable[[str], Trigger]], ...] = (
    (r"at step (\d+)", lambda number: AtStep(int(number))),
    (r"at last step of epoch (\d+)", lambda number: AtLastStepOf(int(number))),
    (rf"during ({'|'.join(PHASES)})", lambda phase: During(cast(FaultPhase, phase))),
    (rf"after {_NUMBER} ?s", lambda number: After(float(number))),
)
_TO_WORKERS = re.compile(rf"({'|'.join(WORKER_ACTIONS)}) (?:rank (\d+)|({'|'.join(WHO)}))")
_TO_HOST = re.compile(rf"({'|'.join(HOST_ACTIONS)}) host (\d+)(?: to {_NUMBER} ?mbit| {_NUMBER} ?percent)?")
_ONE_WAY = re.compile(r"one way host (\d+) to host (\d+)")


def parse(text: str) -> Plan:
    """Parse a plan. Faults are on separate lines, or separated by semicolons; the rest of a line after # is a comment.

    Args:
        text: The plan: a fault is `trigger: action`, for example `at step 40: kill rank 0`.

    Returns:
        The plan; str() prints it in the same form.

    Raises:
        ValueError: A fault cannot be parsed; it is named, with the possible forms.

    Examples:
        >>> from farandole.testing.faults import parse
        >>> plan = parse("at step 40: kill rank 0; after 2 s: add a worker")
        >>> len(plan.faults)
        2
        >>> str(plan.faults[0])
        'at step 40: kill rank 0'
    """
    lines = [line.partition("#")[0] for line in text.splitlines()]
    faults = [" ".join(fault.split()) for line in lines for fault in line.split(";")]
    return Plan(tuple(_fault(fault, number) for number, fault in enumerate(filter(None, faults), start=1)))


def _fault(text: str, number: int) -> Fault:
    when, colon, what = (part.strip() for part in text.partition(":"))
    where = f"fault {number}, {text!r}"
    if not colon:
        raise ValueError(f"{where}: it needs a trigger, a colon and an action, as in 'at step 40: kill rank 0'")
    found = _LATE.fullmatch(when)
    when, late_ms = (found[1], float(found[2])) if found else (when, 0.0)
    trigger, action = _trigger(when), _action(what)
    if trigger is None:
        raise ValueError(
            f"{where}: {when!r} is not a trigger; triggers are 'at step N', 'at last step of epoch N', 'after N s' and "
            f"'during' {_list(PHASES)}, each optionally followed by '+ N ms'"
        )
    if action is None:
        raise ValueError(
            f"{where}: {what!r} is not an action; actions are 'add a worker', 'one way host N to host N', "
            f"{_list(WORKER_ACTIONS)} with 'rank N', {_list(WHO)}, and {_list(HOST_ACTIONS)} with 'host N'; "
            "'slow' needs 'to N mbit', and 'lose' needs 'N percent'"
        )
    if number == 1 and isinstance(trigger, After):
        raise ValueError(f"{where}: 'after' is counted from the previous fault, and this is the first one")
    if number == 1 and isinstance(action, ToWorkers) and action.whom == "the same":
        raise ValueError(f"{where}: 'the same' are the victims of the previous fault, and this is the first one")
    return Fault(trigger, action, late_ms)


def _trigger(text: str) -> Trigger | None:
    for pattern, make in _TRIGGERS:
        found = re.fullmatch(pattern, text)
        if found:
            return make(found[1])
    return None


def _action(text: str) -> FaultAction | None:
    if text == "add a worker":
        return AddWorker()
    if found := _TO_WORKERS.fullmatch(text):
        verb, rank, who = found.groups()
        return ToWorkers(cast(WorkerAction, verb), int(rank) if rank else cast(Who, who))
    if found := _ONE_WAY.fullmatch(text):
        return OneWay(int(found[1]), int(found[2]))
    if found := _TO_HOST.fullmatch(text):
        verb, host, mbit, percent = found.groups()
        # Each of the two takes its own amount, all others none.
        if (mbit is not None) == (verb == "slow") and (percent is not None) == (verb == "lose"):
            return ToHost(cast(HostAction, verb), int(host), float(mbit or percent or 0))
    return None


def _list(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names)
