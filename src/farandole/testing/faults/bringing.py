"""The execution of a fault plan in a running job: it waits for each trigger, chooses the victims, and acts on them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farandole.testing.faults.backends import Backend, WorkerId
from farandole.testing.faults.fault_plan import (
    DEADLY,
    AddWorker,
    After,
    AtLastStepOf,
    AtStep,
    Fault,
    FaultAction,
    OneWay,
    Plan,
    ToHost,
    ToWorkers,
    Trigger,
)
from farandole.testing.running_job import RunningJob

_POLL_S = 0.001
_SIGNALS = {
    "kill": signal.SIGKILL,
    "segfault": signal.SIGSEGV,
    "abort": signal.SIGABRT,
    "stop": signal.SIGSTOP,
    "continue": signal.SIGCONT,
    "leave": signal.SIGTERM,
}
_SLOW_MS = 3000.0  # a step, while the job waits for workers that the next fault takes
_SLOW_AT_END_MS = 8000.0  # the same near the end: on a busy machine a newcomer's imports take half a minute
_BEFORE_END = 3  # steps in which workers can still join
_NEAR_END = 40  # steps


class Pace:
    """The duration of a step of the job: `fast_ms`, but longer and longer towards one that must not come too early. The
    last one, of `steps`, must not come before all faults have."""

    def __init__(self, file: Path, fast_ms: float, steps: int) -> None:
        self._file, self._fast_ms, self._steps = file, fast_ms, steps
        self._pace_ms: float | None = None
        self.full_speed()

    def full_speed(self) -> None:
        self._set_pace(self._fast_ms)

    def towards(self, step: int | None, now: int, *, can_happen: bool) -> None:
        """Set the duration of the next step. `can_happen`: all that the fault at this step needs exists except the
        step."""
        ms = self._fast_ms
        if step is not None and can_happen and step - now <= 1:
            ms = max(ms, 10.0)  # before the next one: long enough for the fault to happen in this very step
        if step is not None and not can_happen:
            ms = max(ms, _SLOW_MS / max(1, step - now))
        to_end = self._steps - _BEFORE_END - now
        if to_end < _NEAR_END and not (step is not None and can_happen):
            ms = max(ms, _SLOW_AT_END_MS / max(1, to_end))
        self._set_pace(ms)

    def _set_pace(self, ms: float) -> None:
        if ms != self._pace_ms:
            new = self._file.with_suffix(".new")
            new.write_text(str(ms))
            new.rename(self._file)
            self._pace_ms = ms


class Bringer:
    """Executes a plan. `job`'s script calls Orders and Records; it begins with `workers`, and `replaces` lost ones.
    Faults that are over within `budget_s`, its detection budget, end no worker.

    wanted    workers that train after all arrivals and departures
    gone      workers that were ended, or asked to leave
    deaths    workers that were ended, at most
    happened  number of faults of each kind
    """

    def __init__(
        self,
        plan: Plan,
        job: RunningJob,
        backend: Backend,
        triggers: Triggers,
        pace: Pace,
        *,
        workers: int,
        replaces: bool,
        budget_s: float,
        chance: random.Random,
        deadline_s: float,
    ) -> None:
        self._plan, self._job, self._backend, self._triggers, self._pace = plan, job, backend, triggers, pace
        self._replaces, self._budget_s, self._chance, self._deadline_s = replaces, budget_s, chance, deadline_s
        self.wanted = self._slots = workers
        self.gone: set[WorkerId] = set()
        self.deaths = 0
        self.happened: Counter[str] = Counter()
        self._last: list[WorkerId] = []

    def run(self) -> None:
        """Execute all faults of the plan. Raises TimeoutError, which names the fault that was not triggered."""
        faults = self._plan.faults
        for index, fault in enumerate(faults):
            following = faults[index + 1] if index + 1 < len(faults) else None
            victims = self._wait_for(fault)
            self._pause(fault.late_ms / 1e3)
            self._triggers.begin()
            self._bring(fault.action, victims, lasts=not _is_undone(following, within_s=self._budget_s))
            self.happened[fault.kind] += 1
        self._pace.full_speed()

    def settle(self) -> None:
        """Wait until all expected workers have come and train, before the end of the job. Raises TimeoutError."""
        deadline = time.monotonic() + self._deadline_s
        while not self._is_settled(latest := self._job.latest()):
            if time.monotonic() > deadline or self._job.process.poll() is not None:
                raise TimeoutError(f"not all of the {self.wanted} expected workers train; {self._situation(latest)}")
            self._pace.towards(None, farthest(latest), can_happen=False)
            time.sleep(_POLL_S)
        self._pace.full_speed()

    # Waiting ---------------------------------------------------------------------------------------------

    def _wait_for(self, fault: Fault) -> list[WorkerId]:
        """Wait for the trigger and return the victims."""
        deadline, has_come = time.monotonic() + self._deadline_s, False
        step = self._triggers.step_of(fault.trigger)
        while time.monotonic() < deadline and self._job.process.poll() is None:
            latest = self._job.latest()
            has_come = has_come or self._triggers.has_come(fault.trigger, latest)
            victims = self._victims(fault.action, latest)
            if has_come and victims is not None:
                return victims
            self._pace.towards(step, farthest(latest), can_happen=victims is not None)
            time.sleep(_POLL_S)
        come = "it was triggered" if has_come else "it was not triggered"
        raise TimeoutError(f"{str(fault)!r} could not be executed: {come}; {self._situation(self._job.latest())}")

    def _situation(self, latest: Latest) -> str:
        steps = {rank: (*_worker(record), progress(record), record["generation"]) for rank, record in latest.items()}
        return (
            f"exit code {self._job.process.poll()}, gone {sorted(self.gone)}, worker, step, generation by rank: {steps}"
        )

    def _victims(self, action: FaultAction, latest: Latest) -> list[WorkerId] | None:
        """Return the victims; None: not all of them exist, or no holder of the state would be left."""
        if isinstance(action, AddWorker):
            return []
        training = {rank: who for rank, record in sorted(latest.items()) if (who := _worker(record)) not in self.gone}
        if isinstance(action, ToHost | OneWay):
            hit = _hosts_hit(action)
            there = [worker for worker in training.values() if worker[0] in hit]
            if isinstance(action, OneWay):  # one of the two ends is declared lost, not both
                return there if len({host for host, _ in training.values()}) > 1 else None
            return there if not hit or len(there) < len(training) else None
        if action.whom == "the same":
            return self._last
        if action.whom == "newcomer":
            starting = sorted(self._starting())
            return [self._chance.choice(starting)] if starting and training else None
        chosen = self._choose(action, training, latest)
        if not chosen or (action.verb != "hold" and len(chosen) >= len(training)):
            return None
        return chosen

    def _choose(self, action: ToWorkers, training: dict[int, WorkerId], latest: Latest) -> list[WorkerId]:
        everyone = list(training.values())
        if isinstance(action.whom, int):
            return [training[action.whom]] if action.whom in training else []
        if not everyone:
            return []
        if action.whom == "source":
            return [training[min(training, key=lambda rank: (-progress(latest[rank]), rank))]]
        count = {"any": 1, "two": 2, "all but one": max(1, len(everyone) - 1)}[action.whom]
        return self._chance.sample(everyone, count) if count <= len(everyone) else []

    def _starting(self) -> set[WorkerId]:
        """Return the workers that have not begun a step yet."""
        files = self._job.folder.glob("worker-*.jsonl")
        names = [file.stem.split("-", 2) for file in files if file.stat().st_size == 0]
        return {(host, int(pid)) for _, pid, host in names} - self.gone

    def _is_settled(self, latest: Latest) -> bool:
        are_all = len(latest) == self.wanted and all(record["size"] == self.wanted for record in latest.values())
        return are_all and not any(_worker(record) in self.gone for record in latest.values())

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._job.process.poll() is None:
            time.sleep(min(_POLL_S, max(0.0, until - time.monotonic())))

    # Actions ---------------------------------------------------------------------------------------------

    def _bring(self, action: FaultAction, victims: list[WorkerId], *, lasts: bool) -> None:
        if isinstance(action, ToHost | OneWay):
            self._backend.disturb(action)
            if lasts:
                # Workers that have just been started end, too, and cannot be counted.
                self.deaths += sum(self._backend.slots_of(host) for host in _hosts_hit(action))
            if lasts and isinstance(action, ToHost):  # of one way, either end may be declared lost
                self.gone.update(victims)
            return
        if isinstance(action, AddWorker):
            self._slots += 1
            self.wanted += 1
            self._backend.offer(self._slots)
            return
        for worker in victims:
            self._do(action.verb, worker)
            if action.verb == "leave":
                self._lose(worker, replaced=False)
            elif action.verb in DEADLY or (action.verb == "stop" and lasts):
                self.deaths += 1
                self._lose(worker, replaced=self._replaces)
        self._last = victims

    def _do(self, verb: str, worker: WorkerId) -> None:
        host, pid = worker
        with contextlib.suppress(ProcessLookupError, ConnectionError):  # it has ended by itself meanwhile
            if verb in _SIGNALS:
                self._backend.signal(worker, _SIGNALS[verb])
            elif verb == "starve" and not self._backend.starve(worker):
                self._backend.signal(worker, signal.SIGKILL)  # as the kernel does
            else:
                give_order(self._job.folder, pid, host, verb)

    def _lose(self, worker: WorkerId, *, replaced: bool) -> None:
        self.gone.add(worker)
        self.wanted -= not replaced


_UNDOING = frozenset({"continue", "heal", "thaw"})
_ENDING = frozenset({"power off", "cut", "freeze", "kill agent of", "stop agent of"})


def _is_undone(following: Fault | None, within_s: float) -> bool:
    """Return whether the following fault undoes this one before it can be noticed."""
    if following is None or not isinstance(following.trigger, After):
        return False
    action = following.action
    is_undoing = isinstance(action, ToWorkers | ToHost) and action.verb in _UNDOING
    return is_undoing and following.trigger.delay_s < within_s


def _hosts_hit(action: ToHost | OneWay) -> set[str]:
    """Return the hosts that a fault may take out; a slow or a lossy cable takes out none."""
    if isinstance(action, OneWay):
        return {f"host{action.sender}", f"host{action.receiver}"}
    return {f"host{action.host}"} if action.verb in _ENDING else set()


def _worker(record: object) -> WorkerId:
    assert isinstance(record, dict)
    return record["host"], record["pid"]


# Triggers, from the job's events and its workers' records (step_records.py) -------------------------------------------

Latest = Mapping[int, Mapping[str, Any]]
"""By rank, the last record of each worker of the newest generation."""

_OUTPUT_LINES = {
    "start": re.compile(rb"\[farandole\] starting w"),
    "join": re.compile(rb"\[farandole\] generation \d+ is planned"),
    "regroup": re.compile(rb"\[farandole\] regrouping for generation"),
    "sync": re.compile(rb"\[farandole\] generation \d+ starts"),
}


class Triggers:
    """Detects triggers.

    output           of the job, which has to report all its events (--verbose)
    steps_per_epoch  of the job
    """

    def __init__(self, output: Path, steps_per_epoch: int) -> None:
        self._output, self._steps_per_epoch = output, steps_per_epoch
        self._place, self._since = 0, time.monotonic()

    def begin(self) -> None:
        """Mark the time of a fault: the next trigger counts only after it."""
        self._place, self._since = self._output.stat().st_size, time.monotonic()

    def step_of(self, trigger: Trigger) -> int | None:
        if isinstance(trigger, AtStep):
            return trigger.step
        if isinstance(trigger, AtLastStepOf):
            return (trigger.epoch + 1) * self._steps_per_epoch - 1
        return None

    def has_come(self, trigger: Trigger, latest: Latest) -> bool:
        step = self.step_of(trigger)
        if step is not None:
            return farthest(latest) >= step
        if isinstance(trigger, After):
            return time.monotonic() >= self._since + trigger.delay_s
        assert not isinstance(trigger, AtStep | AtLastStepOf)
        with self._output.open("rb") as output:
            output.seek(self._place)
            return _OUTPUT_LINES[trigger.phase].search(output.read()) is not None


def farthest(latest: Latest) -> int:
    """Return the last step that some worker has begun or applied; -1 before the first."""
    return max((progress(record) for record in latest.values()), default=-1)


def progress(record: Mapping[str, Any]) -> int:
    """Return the last step that a worker has begun or applied."""
    return int(record.get("before", record.get("after", record.get("end", 0))))


# Orders: faults that a worker can only cause in itself, on request; its script calls this -----------------------------

STARVED_BYTES = 256 << 20
HOLD_S = 1


class Orders:
    """Receives orders. Create it first of all in a script: a worker that may be killed during its start has to be known
    from then on.

    It creates an empty file worker-PID-HOST.jsonl in `folder`, for records (step_records.py), and a named pipe
    order-PID-HOST, which is read in a separate thread.
    """

    def __init__(self, folder: str | Path) -> None:
        who = f"{os.getpid()}-{socket.gethostname()}"
        self._raise, self._hang = threading.Event(), threading.Event()
        self._pipe = Path(folder) / f"order-{who}"
        os.mkfifo(self._pipe)
        threading.Thread(target=self._obey, name="orders", daemon=True).start()
        (Path(folder) / f"worker-{who}.jsonl").touch()

    def check(self) -> None:
        """Execute an order; call it in each step. Raises RuntimeError, or never returns, when ordered to."""
        if self._hang.is_set():
            threading.Event().wait()
        if self._raise.is_set():
            self._raise.clear()
            raise RuntimeError("this worker was ordered to raise an exception")

    def _obey(self) -> None:
        while True:
            order = self._pipe.read_text()  # one writer, one order
            if order == "exit":
                os._exit(0)
            elif order == "raise":
                self._raise.set()
            elif order == "hang":
                self._hang.set()
            elif order == "hold":
                ctypes.PyDLL(None).sleep(HOLD_S)  # it keeps the GIL, as few functions do
            elif order == "starve":
                wanted = bytearray(STARVED_BYTES)
                del wanted  # memory was not short after all


def give_order(folder: Path, pid: int, host: str, order: str) -> None:
    """Send an order to the worker with this process id on this host. Raises ProcessLookupError when it is gone."""
    try:
        pipe = os.open(folder / f"order-{pid}-{host}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:  # without a reader
            raise
        raise ProcessLookupError(f"there is no worker {pid} on {host}") from error
    try:
        os.write(pipe, order.encode())
    finally:
        os.close(pipe)
