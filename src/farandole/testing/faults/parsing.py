"""The parser from text to a fault plan. Pure; fault_plan.py has the grammar."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

from farandole.testing.faults.fault_plan import (
    HOST_ACTIONS,
    PHASES,
    WHO,
    WORKER_ACTIONS,
    Action,
    AddWorker,
    After,
    AtLastStepOf,
    AtStep,
    During,
    Fault,
    FaultPhase,
    HostAction,
    OneWay,
    Plan,
    ToHost,
    ToWorkers,
    Trigger,
    Who,
    WorkerAction,
)

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

    Raises ValueError, which names the fault that cannot be parsed, and the possible forms.
    """
    lines = [line.partition("#")[0] for line in text.splitlines()]
    faults = [" ".join(fault.split()) for line in lines for fault in line.split(";")]
    return Plan(tuple(_fault(fault, number) for number, fault in enumerate(filter(None, faults), start=1)))


def _fault(text: str, number: int) -> Fault:
    when, colon, what = (part.strip() for part in text.partition(":"))
    where = f"fault {number}, {text!r}"
    if not colon:
        raise ValueError(f"{where}: it takes a trigger, a colon, and what is done, as in 'at step 40: kill rank 0'")
    found = _LATE.fullmatch(when)
    when, late_ms = (found[1], float(found[2])) if found else (when, 0.0)
    trigger, action = _trigger(when), _action(what)
    if trigger is None:
        raise ValueError(
            f"{where}: {when!r} is no trigger; there are 'at step N', 'at last step of epoch N', 'after N s' and "
            f"'during' {_list(PHASES)}, each with '+ N ms' after it if you like"
        )
    if action is None:
        raise ValueError(
            f"{where}: {what!r} is nothing that can be done; there are 'add a worker', 'one way host N to host N', "
            f"{_list(WORKER_ACTIONS)} with 'rank N', {_list(WHO)}, and {_list(HOST_ACTIONS)} with 'host N'; "
            "'slow' takes 'to N mbit', and 'lose' takes 'N percent'"
        )
    if number == 1 and isinstance(trigger, After):
        raise ValueError(f"{where}: 'after' is counted from the fault before, and this is the first one")
    if number == 1 and isinstance(action, ToWorkers) and action.whom == "the same":
        raise ValueError(f"{where}: 'the same' is who was hit by the fault before, and this is the first one")
    return Fault(trigger, action, late_ms)


def _trigger(text: str) -> Trigger | None:
    for pattern, make in _TRIGGERS:
        found = re.fullmatch(pattern, text)
        if found:
            return make(found[1])
    return None


def _action(text: str) -> Action | None:
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


def _list(words: tuple[str, ...]) -> str:
    return ", ".join(f"'{word}'" for word in words)
