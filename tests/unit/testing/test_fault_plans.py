"""The language of fault plans: what is printed can be read, what cannot be read says why, what is drawn can be done."""

from __future__ import annotations

import random

import pytest

from farandole.testing.faults import Fault, Plan, parse
from farandole.testing.faults.drawing import MOST_WORKERS, Shape, draw
from farandole.testing.faults.fault_plan import (
    AddWorker,
    After,
    AtLastStepOf,
    AtStep,
    During,
    OneWay,
    ToHost,
    ToWorkers,
)

TEXT = """
# a job that has a bad day
at step 40: kill rank 0
during regroup + 2.5 ms: segfault any
at last step of epoch 1: kill all but one
during join: cut host 2; after 2 s: heal host 2     # on one line
at step 60: slow host 1 to 8 mbit
after 0.5 s: lose host 0 2.5 percent
at step 70: one way host 0 to host 1
at step 80: kill agent of host 1
at step 90: add a worker
at step 95: stop source
after 0.2 s: continue the same
"""
FAULTS = (
    Fault(AtStep(40), ToWorkers("kill", 0)),
    Fault(During("regroup"), ToWorkers("segfault", "any"), 2.5),
    Fault(AtLastStepOf(1), ToWorkers("kill", "all but one")),
    Fault(During("join"), ToHost("cut", 2)),
    Fault(After(2), ToHost("heal", 2)),
    Fault(AtStep(60), ToHost("slow", 1, 8)),
    Fault(After(0.5), ToHost("lose", 0, 2.5)),
    Fault(AtStep(70), OneWay(0, 1)),
    Fault(AtStep(80), ToHost("kill agent of", 1)),
    Fault(AtStep(90), AddWorker()),
    Fault(AtStep(95), ToWorkers("stop", "source")),
    Fault(After(0.2), ToWorkers("continue", "the same")),
)


def test_a_plan_is_read() -> None:
    assert parse(TEXT) == Plan(FAULTS)
    assert parse("") == Plan(())


def test_what_is_printed_can_be_read() -> None:
    assert parse(str(Plan(FAULTS))) == Plan(FAULTS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill rank 0", "fault 1, 'kill rank 0': it needs a trigger, a colon and an action"),
        (
            "at step 1: kill any; at noon: kill any",
            "fault 2, 'at noon: kill any': 'at noon' is not a trigger; triggers are",
        ),
        ("during lunch: kill any", "'during lunch' is not a trigger; .*'during' 'start', 'join', 'regroup', 'sync'"),
        ("at step 1: tickle any", "'tickle any' is not an action; .*'segfault'"),
        ("at step 1: kill everybody", "'kill everybody' is not an action; .*'all but one'"),
        ("at step 1: kill rank -1", "is not an action"),
        ("at step 1: slow host 1", "'slow' needs 'to N mbit'"),
        ("at step 1: cut host 1 to 5 mbit", "'slow' needs 'to N mbit'"),
        ("after 2 s: kill any", "'after' is counted from the previous fault, and this is the first one"),
        ("at step 2: continue the same", "'the same' are the victims of the previous fault, and this is the first one"),
    ],
)
def test_what_cannot_be_read_says_why(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(text)


def test_kinds_are_counted_with_the_phase_they_hit() -> None:
    plan = parse(
        "at step 1: kill any; during sync: kill any; during sync: kill source; at last step of epoch 0: exit any"
    )
    assert plan.kinds() == {
        "kill": 1,
        "kill during sync": 1,
        "kill source during sync": 1,
        "exit at the end of an epoch": 1,
    }


def shapes() -> list[Shape]:
    everywhere = [(workers, 0, replaces) for workers in (2, 3, 4) for replaces in (True, False)] + [(3, 3, True)]
    return [Shape(workers, hosts, 3, 150, replaces, 2.0) for workers, hosts, replaces in everywhere]


@pytest.mark.parametrize("shape", shapes())
def test_the_same_seed_draws_the_same_plan_and_it_can_be_read_back(shape: Shape) -> None:
    for seed in range(300):
        plan = draw(random.Random(seed), shape)
        assert plan == draw(random.Random(seed), shape) == parse(str(plan))
        assert len(plan.faults) >= 2
        assert all(fault.trigger.step < 450 for fault in plan.faults if isinstance(fault.trigger, AtStep))


@pytest.mark.parametrize("shape", [shape for shape in shapes() if not shape.replaces])
def test_a_drawn_plan_leaves_a_worker_where_nobody_is_replaced(shape: Shape) -> None:
    """It is counted a second time here, from the words alone."""
    for seed in range(300):
        size, faults = shape.workers, draw(random.Random(seed), shape).faults
        for fault, following in zip(faults, [*faults[1:], None], strict=True):
            action = fault.action
            if isinstance(action, AddWorker):
                size += 1
            elif isinstance(action, ToWorkers) and action.verb not in ("continue", "hold"):
                goes_on = following is not None and str(following.action) == "continue the same"
                size -= 0 if goes_on else {"two": 2, "all but one": size - 1}.get(str(action.whom), 1)
            assert 1 <= size <= MOST_WORKERS, (seed, str(fault))


def test_nobody_is_added_or_asked_to_leave_where_there_are_spares() -> None:
    shape = Shape(3, 0, 3, 150, True, 2.0, spares=1)
    words = " ".join(str(draw(random.Random(seed), shape)) for seed in range(300))
    assert "kill" in words
    assert "add a worker" not in words
    assert "leave" not in words


@pytest.mark.parametrize("hosts", [0, 3])
def test_every_kind_of_fault_is_drawn_some_time(hosts: int) -> None:
    shape = Shape(4, hosts, 3, 150, True, 2.0)
    drawn = {fault.kind for seed in range(2000) for fault in draw(random.Random(seed), shape).faults}
    expected = {"kill", "segfault", "abort", "exit", "raise", "starve", "kill two", "kill all but one", "stop", "hold"}
    expected |= {"continue", "kill during regroup", "kill source during sync", "kill at the end of an epoch"}
    if hosts:
        expected |= {"power off", "boot", "cut", "heal", "freeze", "thaw", "one way", "slow", "lose", "hurry"}
        expected |= {"kill agent of", "stop agent of"} - {"continue", "stop", "hold"}
        expected -= {"continue", "stop", "hold", "kill all but one", "kill at the end of an epoch"}
    assert drawn >= expected
