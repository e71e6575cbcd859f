"""SIGTERM and SIGINT at the lines of the run loop: whatever it is doing, the state that is left is a whole one.

A job of one real worker runs in this process, with a lost worker in a loop body and another one behind the batches. It
is run once for each line of the run loop and of the state that it comes to, and a signal arrives at that line: at every
line in the long tests, at some of them otherwise.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.base.checkpoints.folder import CheckpointFolder
from farandole.base.checkpoints.store import open_store
from farandole.errors import ConfigError, JobEnded
from farandole.training.checkpoint.restore import read_newest, restore
from farandole.training.collectives import world
from farandole.training.state import step
from farandole.training.worker import step_loop
from farandole.training.worker.signals import Signals
from farandole.training.worker.step_loop import StepLoop
from tests.support.one_worker import Orders

pytestmark = pytest.mark.core

TRAINING = Path(fd.__file__).parent / "training"
FILES = {
    str(TRAINING / name)
    for name in (
        "state/packed_metadata.py",
        "state/step.py",
        "state/step_state.py",
        "state/watched_tensors.py",
        "worker/bodies_without_effect.py",
        "worker/checkpoints.py",
        "worker/meetings.py",
        "worker/place.py",
        "worker/signals.py",
        "worker/step_loop.py",
    )
}
SAMPLES, GLOBAL_BATCH, EPOCHS = 16, 8, 2
LEFT = 128 + signal.SIGTERM


class EndingOrders(Orders):
    """The coordinator's side of the only worker that is left to save the state."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        link: Any = self.link
        link.is_emergency_writer = True

    def may_publish(self, name: str, progress: object) -> str:
        return ""


@pytest.fixture(autouse=True)
def _default_handlers() -> Iterator[None]:
    kept = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), sys.gettrace()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    sys.settrace(kept[2])
    signal.signal(signal.SIGTERM, kept[0])
    signal.signal(signal.SIGINT, kept[1])
    step.close()
    world.enter(None)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FARANDOLE_CHECKPOINT", str(tmp_path))
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nobody cuts the power of this machine
    return tmp_path


def make_state() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    data = torch.utils.data.TensorDataset(torch.arange(2.0 * SAMPLES).reshape(SAMPLES, 2) / SAMPLES)
    loader = fd.elastic.DataLoader(data, GLOBAL_BATCH, seed=4)
    state = fd.elastic.TorchState(
        model=model,
        optimizer=optimizer,
        loader=loader,
        after_step=[scheduler.step],
        rehearse=False,
        scheduler=scheduler,
        average=torch.nn.Linear(2, 2),
        seen=[],
        ends=[],
    )
    state.is_holder = True
    return state


Fingerprint = tuple[Any, ...]


def fingerprint(state: Any) -> Fingerprint:
    """All that a job which goes on from here would begin with."""
    tensors = [*state.model.state_dict().values(), *state.average.state_dict().values()]
    tensors += [each["momentum_buffer"] for each in state.optimizer.state.values()]
    loader, values = state.loader, (*state.seen, None, *state.ends)
    of_step = (
        state.step,
        loader.epoch,
        loader.cursor,
        state.scheduler.last_epoch,
        state.optimizer.param_groups[0]["lr"],
    )
    return (*of_step, values, torch.cat([each.detach().flatten().double() for each in tensors]).numpy().tobytes())


@dataclass
class Job:
    """The job. `note` is called where the state is whole, `note_end` at the end of the code behind the batches,
    `before_step` in each loop body, `at_signal` before a signal is sent."""

    note: Callable[[Any], None] = lambda state: None
    note_end: Callable[[Any], None] = lambda state: None
    before_step: Callable[[Any], None] | None = None
    at_signal: Callable[[], None] = lambda: None
    is_interrupted: bool = False
    orders: EndingOrders = field(default_factory=EndingOrders)
    state: Any = field(default_factory=make_state)

    def run(self) -> None:
        job: Any = self.orders
        StepLoop(job, self.state).run(self._function)

    def _function(self) -> None:
        state = self.state
        for epoch in state.loader.epochs(EPOCHS):
            for (x,) in state.loader:
                self.note(state)
                self._train(x)
                self.note(state)
            self.note(state)
            self._end_epoch(epoch)

    def _train(self, x: torch.Tensor) -> None:
        state, number = self.state, world.current().id.number
        state.seen.append(x.sum().item())
        with torch.no_grad():
            state.average.weight.lerp_(state.model[0].weight, 0.5)
        if self.before_step is not None:
            self.before_step(state)
        if state.step == 1 and number == 1:
            self.orders.lose_a_worker()
        state.optimizer.zero_grad()
        state.model(x).square().mean().backward()
        state.optimizer.step()

    def _end_epoch(self, epoch: Any) -> None:
        state, number = self.state, world.current().id.number
        epoch.once(self._change)
        self.note(state)
        with torch.no_grad():
            state.model[0].weight.mul_(0.5)
        state.ends.append(int(epoch))
        if epoch == 0 and number == 2:
            self.orders.lose_a_worker()
            fd.mean(0.0)
        self.note_end(state)

    def _change(self) -> None:
        self.state.ends.append("once")
        with torch.no_grad():
            self.state.model[2].weight.mul_(2.0)


# The lines -----------------------------------------------------------------------------------------------------------

HOOKS = {
    "_enter",
    "reach_boundary",
    "leave_batches",
    "reach_epoch_end",
    "begin_epoch",
    "once",
    "_regroup",
    "_has_finished",
    "_save_in_emergency",
}
"""What the loader, or the frame around the script, calls in StepLoop."""


@dataclass(frozen=True)
class Line:
    """A line of the run loop, or of the state, and the hook of StepLoop in which it is run."""

    file: str
    number: int
    hook: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number} in {self.hook}"


class Lines:
    """Calls `at` with each line of the run loop that is run in one of the hooks, and the signal is handled there."""

    def __init__(self, number: int, at: Callable[[Line], None], only: Line | None = None) -> None:
        self._number, self._at, self._only = number, at, only

    def __enter__(self) -> None:
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        is_looked_at = name == self._only.file if self._only is not None else name in FILES
        return self._line if is_looked_at else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and (self._only is None or frame.f_lineno == self._only.number) and not is_of_with(frame):
            hook = hook_of(frame)
            if hook in HOOKS and callable(signal.getsignal(self._number)):
                self._at(Line(frame.f_code.co_filename, frame.f_lineno, hook))
        return self._line


def is_of_with(frame: FrameType) -> bool:
    """Whether the line is a `with` statement: it is traced again in front of __exit__(), where Python itself handles no
    signals."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def hook_of(frame: FrameType) -> str:
    """The outermost function of StepLoop, apart from those around the script."""
    found, each = "", frame.f_back
    if frame.f_code.co_filename.endswith("step_loop.py"):
        found = frame.f_code.co_name
    while each is not None:
        name = each.f_code.co_name
        if each.f_code.co_filename.endswith("step_loop.py") and name not in ("_run", "run", "installed"):
            found = name
        each = each.f_back
    return found


def lines_of(job: Job, number: int, begins: Callable[[], bool] = lambda: True) -> list[Line]:
    """Run the job, and return its lines, each once."""
    found: dict[Line, None] = {}

    def at(line: Line) -> None:
        if begins():
            found.setdefault(line)

    with Lines(number, at), contextlib.suppress(JobEnded):
        job.run()
    return list(found)


def run_with_a_signal(
    job: Job, number: int, line: Line, begins: Callable[[], bool] = lambda: True
) -> BaseException | None:
    """Run the job, and send the signal at this line. Returns what ended it."""

    def at(here: Line) -> None:
        if here == line and begins():
            sys.settrace(None)
            job.is_interrupted = True
            job.at_signal()
            signal.raise_signal(number)

    try:
        with Lines(number, at, line):
            job.run()
    except BaseException as error:  # noqa: BLE001 - what a signal raises is none
        return error
    finally:
        step.close()
        torch.set_grad_enabled(True)  # an exception at the beginning of the __exit__() of torch's leaves it off
    return None


def whole_states(has_ends: bool = False) -> set[Fingerprint]:
    """The states with which a job can go on. `has_ends`: also those of a script that has not come to the next epoch."""
    found: set[Fingerprint] = set()

    def note(state: Any) -> None:
        found.add(fingerprint(state))

    job = Job(note, note if has_ends else lambda state: None)
    job.run()
    return {*found, fingerprint(job.state)}


def saved_state(folder: Path) -> Fingerprint | None:
    """What a job that goes on from the newest checkpoint begins with, which is removed; None: there is none."""
    try:
        found, value = read_newest(CheckpointFolder(open_store(str(folder))), print)
    except ConfigError:
        return None
    state = make_state()
    state.capture()
    restore(state, found, value, 1)
    shutil.rmtree(found.place)
    return fingerprint(state)


def job_that_is_over_at_the_signal() -> Job:
    job = Job()

    def end() -> None:
        job.orders.link.has_ended = True

    job.at_signal = end
    return job


def job_that_ends_in_a_body() -> Job:
    job = Job()

    def end(state: Any) -> None:
        job.orders.link.has_ended |= state.step == 2

    job.before_step = end
    return job


def lines_that_tear(
    folder: Path, job_of: Callable[[], Job], lines: Iterable[Line], whole: set[Fingerprint]
) -> list[str]:
    """The lines at which SIGTERM, in a job that is over, leaves no whole checkpoint, or another exit code."""
    torn = []
    for line in lines:
        job = job_of()
        begins = (lambda job=job: job.orders.link.has_ended) if job.before_step is not None else (lambda: True)
        ended = run_with_a_signal(job, signal.SIGTERM, line, begins)
        is_end = isinstance(ended, JobEnded) or (isinstance(ended, SystemExit) and ended.code == LEFT)
        saved = saved_state(folder)
        if not (job.is_interrupted and is_end and saved in whole):
            torn.append(f"{line}: {job.is_interrupted} {ended!r}, {'whole' if saved in whole else 'torn'}")
    return torn


every = pytest.mark.parametrize("every", [27, pytest.param(1, marks=pytest.mark.long)])


@every
def test_sigterm_in_a_job_that_is_over_leaves_a_whole_checkpoint(folder: Path, every: int) -> None:
    whole, lines = whole_states(), lines_of(Job(), signal.SIGTERM)
    assert {each.hook for each in lines} == HOOKS - {"_save_in_emergency"}
    assert lines_that_tear(folder, job_that_is_over_at_the_signal, lines[::every], whole) == []


@every
def test_sigterm_while_the_state_is_saved_does_not_cut_it_short(folder: Path, every: int) -> None:
    whole, job = whole_states(), job_that_ends_in_a_body()
    lines = lines_of(job, signal.SIGTERM, lambda: job.orders.link.has_ended)
    assert {each.hook for each in lines} == {"reach_boundary", "_save_in_emergency"}
    saved_state(folder)
    assert lines_that_tear(folder, job_that_ends_in_a_body, lines[::every], whole) == []


@every
def test_sigterm_while_the_job_goes_on_changes_nothing(every: int) -> None:
    undisturbed, disturbed = Job(), []
    undisturbed.run()
    for line in lines_of(Job(), signal.SIGTERM)[::every]:
        job = Job()
        ended = run_with_a_signal(job, signal.SIGTERM, line)
        is_same = fingerprint(job.state) == fingerprint(undisturbed.state)
        if not (ended is None and is_same and job.orders.link.was_asked_to_leave):
            disturbed.append(f"{line}: {ended!r}")
    assert disturbed == []


def is_before_regroup(line: Line) -> bool:
    """Whether a regroup is called, and has not begun: the error may have ended a function of the script that has
    changed a part of its values."""
    enter = type(Signals(None).waiting).__enter__.__code__
    return line.hook == "_regroup" and line.file == enter.co_filename and line.number == enter.co_firstlineno + 1


@every
def test_sigint_waits_until_the_state_is_whole(every: int) -> None:
    whole, torn = whole_states(has_ends=True), []
    for line in lines_of(Job(), signal.SIGINT)[::every]:
        job = Job()
        ended = run_with_a_signal(job, signal.SIGINT, line)
        is_whole = is_before_regroup(line) or fingerprint(job.state) in whole
        if not (isinstance(ended, KeyboardInterrupt) and is_whole):
            torn.append(f"{line}: {ended!r}")
    assert torn == []


class LetsThrough:
    """A section of code in which signals do not wait."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def raise_behind(self, error: BaseException) -> None:
        raise error


class SignalsThatDoNotWait(Signals):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.waiting: Any = LetsThrough()


def test_signals_that_do_not_wait_tear_the_state_so_that_these_tests_can_fail(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "Signals", SignalsThatDoNotWait)
    whole = whole_states()
    lines = [each for each in lines_of(Job(), signal.SIGTERM) if each.hook == "once" and "watched" in each.file]
    assert lines_that_tear(folder, job_that_is_over_at_the_signal, lines, whole) != []


def interrupt_twice(signals: Signals) -> None:
    with signals.waiting:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one has waited, too")


def test_a_second_sigint_does_not_wait() -> None:
    signals = Signals(None)
    with signals, pytest.raises(KeyboardInterrupt):
        interrupt_twice(signals)


def test_the_handlers_are_those_of_python_again_behind_the_function() -> None:
    Job().run()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
