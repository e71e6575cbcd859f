"""The diagram of the current step (state/step.py): every transition from every status, and whole ways through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from farandole.errors import StepError
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.step import StepStatus

pytestmark = pytest.mark.core

NONE, OPEN, REDUCED, ABORTED, DECIDED = StepStatus
GLOBAL_BATCH = GlobalBatch(epoch=0, start=0, stop=8, low=0, high=8, micro_batches=2)
FIRST, LAST = Batch(GLOBAL_BATCH, 0, 4, 0), Batch(GLOBAL_BATCH, 4, 8, 1)


@pytest.fixture(autouse=True)
def _no_step() -> Iterator[None]:
    step.close()
    step.on_decided(None)
    yield
    step.close()
    step.on_decided(None)


def nothing() -> None:
    pass


def decide() -> None:
    step.open(LAST)
    step.mark_reduced()
    step.decide()


REACH: dict[StepStatus, Callable[[], object]] = {
    NONE: nothing,
    OPEN: lambda: step.open(LAST),
    REDUCED: lambda: (step.open(LAST), step.mark_reduced()),
    ABORTED: lambda: (step.open(LAST), step.abort()),
    DECIDED: decide,
}

TRANSITIONS: dict[str, Callable[[], object]] = {
    "open": lambda: step.open(FIRST),
    "open, of a rehearsal": lambda: step.open(FIRST, is_rehearsal=True),
    "pad": lambda: step.pad(LAST.padding()),
    "mark_reduced": step.mark_reduced,
    "abort": step.abort,
    "take_back": step.take_back,
    "decide": step.decide,
    "close": step.close,
}

# One row for each transition, one column for each status before it; None: it is refused.
TABLE: dict[str, dict[StepStatus, StepStatus | None]] = {
    "open": dict.fromkeys(StepStatus, OPEN),
    "open, of a rehearsal": dict.fromkeys(StepStatus, ABORTED),
    "pad": {NONE: None, OPEN: None, REDUCED: REDUCED, ABORTED: None, DECIDED: None},
    "mark_reduced": {NONE: None, OPEN: REDUCED, REDUCED: REDUCED, ABORTED: None, DECIDED: REDUCED},
    "abort": {NONE: None, OPEN: ABORTED, REDUCED: ABORTED, ABORTED: ABORTED, DECIDED: ABORTED},
    "take_back": {NONE: None, OPEN: ABORTED, REDUCED: ABORTED, ABORTED: ABORTED, DECIDED: ABORTED},
    "decide": {NONE: NONE, OPEN: None, REDUCED: DECIDED, ABORTED: None, DECIDED: DECIDED},
    "close": dict.fromkeys(StepStatus, NONE),
}


@pytest.mark.parametrize("before", StepStatus)
@pytest.mark.parametrize("name", TRANSITIONS)
def test_each_transition_leads_where_the_diagram_says_or_is_refused(name: str, before: StepStatus) -> None:
    REACH[before]()
    assert step.status() is before
    after = TABLE[name][before]
    if after is not None:
        TRANSITIONS[name]()
        assert step.status() is after
    else:
        with pytest.raises(StepError, match=f"is '{before.value}', and .*possible only while it is"):
            TRANSITIONS[name]()
        assert step.status() is before, "a refused transition changes nothing"


@pytest.mark.parametrize("before", StepStatus)
def test_a_step_is_undecided_while_its_batch_can_come_again(before: StepStatus) -> None:
    REACH[before]()
    assert step.is_undecided() == (before in (OPEN, REDUCED, ABORTED))
    assert step.is_aborted() == (before is ABORTED)
    assert (step.batch() is None) == (before is NONE)


class Decisions:
    """A state that counts its steps, and what it was told (step.Observer)."""

    def __init__(self, *optimizers: object) -> None:
        self.decided: list[Batch | None] = []
        self.told: list[str] = []
        step.on_decided(self.decided.append, self)
        step.track(optimizers)

    def before_applying(self) -> None:
        self.told.append("before applying")

    def aborted(self) -> None:
        self.told.append("aborted")

    def trust(self, parameters: Sequence[torch.Tensor]) -> None:
        self.told.append(f"trust {len(parameters)}")


class Undo:
    """The undo of one optimizer (step.Undoable)."""

    def __init__(self) -> None:
        self.parameters = [torch.zeros(1)]
        self.is_undone = False

    def put_back(self) -> None:
        self.is_undone = True


class Part:
    """An optimizer's part in the step (step.Participant)."""

    def __init__(self) -> None:
        self.told: list[str] = []
        step.take_part(self)

    def begin_micro_batch(self) -> None:
        self.told.append("micro-batch")

    def begin_padding(self) -> None:
        self.told.append("padding")

    def end_overlap(self, reason: str) -> None:
        self.told.append(reason)


def test_the_way_of_a_step_with_micro_batches_and_padding() -> None:
    state, optimizer = Decisions(), object()
    step.open(FIRST)
    part = Part()
    assert step.expects_micro_batch()
    step.open(LAST)
    assert not step.expects_micro_batch()
    step.mark_reduced()
    step.pad(LAST.padding())
    step.pad(LAST.padding())
    assert (step.status(), part.told) == (REDUCED, ["micro-batch", "padding"])
    step.begin_applying(optimizer)
    step.mark_stepped(optimizer)
    assert (step.status(), len(state.decided), state.told) == (DECIDED, 1, ["before applying"])


def test_the_way_of_two_optimizers_that_decide_together() -> None:
    one, other = object(), object()
    state = Decisions(one, other)
    step.open(LAST)
    for optimizer in (one, other):
        step.mark_reduced()
        assert step.status() is REDUCED
        assert step.awaits_others(optimizer) == (optimizer is one)
        step.mark_stepped(optimizer)
    assert (step.status(), state.decided) == (DECIDED, [LAST])


def test_the_end_of_the_loop_body_decides_what_only_some_optimizers_have_made() -> None:
    one, other = object(), object()
    state = Decisions(one, other)
    step.open(LAST)
    step.end_body()
    assert step.status() is OPEN, "no optimizer has stepped"
    step.mark_reduced()
    step.end_body()
    assert step.status() is REDUCED, "no optimizer has stepped"
    step.mark_stepped(one)
    step.end_body()
    assert (step.status(), state.decided) == (DECIDED, [LAST])


def test_the_way_of_optimizers_that_no_state_has_each_of_which_decides() -> None:
    state = Decisions()
    step.open(LAST)
    for optimizer in (object(), object()):
        step.mark_reduced()
        step.mark_stepped(optimizer)
        assert step.status() is DECIDED
    assert len(state.decided) == 2


def test_a_step_without_a_batch_is_decided_and_leaves_none_open() -> None:
    state = Decisions()
    step.mark_stepped(object())
    assert (step.status(), state.decided) == (NONE, [None])


def test_the_way_of_a_fault_undoes_the_optimizers_that_had_stepped() -> None:
    one, other, undo = object(), object(), Undo()
    state = Decisions(one, other)
    step.open(LAST)
    part = Part()
    step.mark_reduced()
    step.begin_applying(one)
    step.undo_by(one, undo)
    step.mark_stepped(one)
    step.abort()
    assert not undo.is_undone, "the loop body runs on"
    step.take_back()
    assert undo.is_undone
    assert state.told == ["before applying", "aborted", "trust 1"]
    assert part.told[0] == "its step was aborted"
    step.close()
    step.open(LAST)
    assert (step.status(), state.decided) == (OPEN, [])


def test_a_decided_step_is_not_undone() -> None:
    one, undo = object(), Undo()
    Decisions(one)
    step.open(LAST)
    step.undo_by(one, undo)
    step.mark_reduced()
    step.mark_stepped(one)
    step.close()
    assert not undo.is_undone


def test_the_way_of_a_rehearsal_has_no_effect() -> None:
    state = Decisions()
    step.open(FIRST, is_rehearsal=True)
    assert step.is_rehearsal()
    assert step.expects_micro_batch()
    step.open(LAST, is_rehearsal=True)
    assert not step.expects_micro_batch()
    with pytest.raises(StepError):
        step.mark_reduced()
    with pytest.raises(StepError):
        step.decide()
    step.take_back()
    step.close()
    step.open(FIRST)
    assert (step.status(), step.is_rehearsal(), state.decided) == (OPEN, False, [])


def test_a_step_counts_even_when_the_callback_of_its_decision_raises() -> None:
    def fail(_: Batch | None) -> None:
        raise ValueError("a scheduler")

    step.on_decided(fail)
    step.open(LAST)
    step.mark_reduced()
    with pytest.raises(ValueError, match="a scheduler"):
        step.mark_stepped(object())
    assert step.status() is DECIDED


def test_the_table_has_every_transition_and_every_status() -> None:
    assert TABLE.keys() == TRANSITIONS.keys()
    assert all(set(row) == set(StepStatus) for row in TABLE.values())
