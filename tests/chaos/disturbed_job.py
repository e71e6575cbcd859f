"""Runs one case: the job, the faults that happen to it, and what of its promises it broke."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farandole.testing.faults.backends import LabBackend, ThisMachine
from farandole.testing.faults.bringing import Bringer, Pace, Triggers
from farandole.testing.faults.fault_plan import AtLastStepOf, OneWay
from farandole.testing.lab import Lab, LabError
from farandole.testing.lab.lab import remains
from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob
from tests.chaos import invariants
from tests.chaos.case import Case
from tests.scripts.chaos_job import EPOCHS, STEPS, STEPS_PER_EPOCH
from tests.support import jobs
from tests.support.jobs import SCRIPTS

SCRIPT, BODY_SCRIPT = SCRIPTS / "chaos_job.py", SCRIPTS / "chaos_body.py"
DEADLINE_S = 60.0
_FINISHED = "All workers finished the training, but afterwards"
STEP_TIMEOUT_S = 5.0  # far above what any step takes, also on a busy machine


@dataclass
class Outcome:
    """violations  of the promises, in words; none: all is well
    happened    how often each kind of fault was brought about
    """

    violations: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    generations: int = 0
    redone: int = 0
    deaths: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Place:
    """What a job writes, in `folder`."""

    folder: Path

    @property
    def records(self) -> Path:
        return self.folder / "records"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    @property
    def output(self) -> Path:
        return self.folder / "output"


def run_case(case: Case, folder: Path, kind: type[RunningJob] = RunningJob) -> Outcome:
    """`folder` is empty; what the job wrote stays there.

    kind  how it is started; without one, as users start it
    """
    place = Place(folder)
    for each in (place.records, place.temporary):
        each.mkdir()
    _ = undisturbed_record(case.body) if case.body else undisturbed_weights(case.width)
    outcome, began = Outcome(), time.monotonic()
    tidiness = invariants.Tidiness(place.records, place.temporary)
    staying: range | None = None
    try:
        staying = _run(case, place, outcome, kind)
    except (AssertionError, LabError, TimeoutError, subprocess.TimeoutExpired) as error:
        outcome.violations.append(f"{type(error).__name__}: {error}")
    outcome.seconds = time.monotonic() - began
    outcome.violations += [*tidiness.left(), *_findings(case, place, outcome, staying)]
    return outcome


@functools.cache
def undisturbed_weights(width: int) -> list[float]:
    """What comes of the job when nothing happens to it. Raises AssertionError when that is no good itself."""
    with tempfile.TemporaryDirectory(prefix="farandole-peace-") as name:
        folder = Path(name)
        with jobs.RunningJob(["-np", "1"], SCRIPT, ["--width", str(width)], folder, folder / "output") as job:
            assert job.wait(DEADLINE_S) == 0, (folder / "output").read_text()
        proof = Proof(folder)
        weights: list[float] = proof.ends()[0]["weights"]
        assert not [*invariants.training(proof, weights), *invariants.counters(proof, 0)]
        return weights


@functools.cache
def undisturbed_record(body: str) -> dict[str, Any]:
    """What a body of the gallery comes to when nothing happens to it, alone."""
    with tempfile.TemporaryDirectory(prefix="farandole-peace-") as name:
        folder = Path(name)
        with jobs.RunningJob(["-np", "1"], BODY_SCRIPT, ["--body", body], folder, folder / "output") as job:
            assert job.wait(DEADLINE_S) == 0, (folder / "output").read_text()
        proof = Proof(folder)
        record: dict[str, Any] = proof.ends()[0]["record"]
        assert not [*invariants.of_body(proof, body, record), *invariants.counters(proof, 0)]
        return record


@contextlib.contextmanager
def _machine(case: Case, place: Place) -> Iterator[tuple[ThisMachine, list[str]]]:
    """The job's workers are on this machine."""
    backend = ThisMachine(place.folder / "hosts")
    backend.offer(case.shape.workers)
    with contextlib.closing(backend):
        if case.shape.spares:  # they need slots of their own, which nobody else may take
            yield backend, _spares(case)
        else:
            yield backend, ["--max-np", "9", "--host-discovery-script", f"cat {backend.hosts_file}"]


@contextlib.contextmanager
def _lab(case: Case, place: Place, outcome: Outcome) -> Iterator[tuple[LabBackend, list[str]]]:
    """They are on hosts; as many slots as workers and spares, so that each is needed."""
    slots, hosts = case.shape.workers + case.shape.spares, case.shape.hosts
    slots_by_host = [slots // hosts + (index < slots % hosts) for index in range(hosts)]
    with (
        Lab(hosts, own_clocks=True) as lab,
        contextlib.closing(LabBackend(lab, slots_by_host, place.folder)) as backend,
    ):
        yield backend, backend.flags + _spares(case)
        outcome.violations += backend.left()
    outcome.violations += [f"{name} is left of the lab" for name in remains(lab.name)]


def _spares(case: Case) -> list[str]:
    return ["--spares", str(case.shape.spares)] if case.shape.spares else []


def _run(case: Case, place: Place, outcome: Outcome, kind: type[RunningJob]) -> range:
    """To the end of the job; between how many and how many workers are to come to it."""
    shape = case.shape
    pace = Pace(place.folder / "pace", case.pace_ms, STEPS)
    flags = ["-np", str(shape.workers), "--restarts", "1000" if shape.replaces else "0", "--verbose"]
    flags += [
        "--detection-budget",
        str(shape.budget_s),
        "--transport",
        case.transport,
        "--step-timeout",
        str(STEP_TIMEOUT_S),
    ]
    flags += ["--sample-ledger", str(place.folder / "ledger")] if case.has_ledger else []
    words = ["--pace", str(place.folder / "pace")]
    if case.body:
        words += ["--body", case.body]
    else:
        words += ["--num-workers", str(case.num_workers), "--width", str(case.width)]
        words += ["--mean-each-step"] * case.mean_each_step
    environment = {**os.environ, "TMPDIR": str(place.temporary)}
    with contextlib.ExitStack() as stack:
        around = _lab(case, place, outcome) if shape.hosts else _machine(case, place)
        backend, more = stack.enter_context(around)
        script = BODY_SCRIPT if case.body else SCRIPT
        job = kind(flags + more, script, words, place.records, place.output, environment=environment)
        stack.enter_context(job)
        if isinstance(backend, LabBackend):
            backend.start_agents()
        bringer = Bringer(
            case.plan,
            job,
            backend,
            Triggers(place.output, STEPS_PER_EPOCH),
            pace,
            workers=shape.workers,
            replaces=shape.replaces,
            budget_s=shape.budget_s,
            chance=random.Random(case.seed),
            deadline_s=DEADLINE_S,
        )
        try:
            bringer.run()
            at_end = case.plan.faults[-1].trigger == AtLastStepOf(EPOCHS - 1)
            if not at_end:
                bringer.settle()
        finally:
            outcome.happened, outcome.deaths = bringer.happened, bringer.deaths
        code = job.wait(DEADLINE_S)
        # A fault in the last step of all may come when all have finished: then that is what the job has to say.
        came_too_late = at_end and _FINISHED in place.output.read_text(errors="replace")
        assert code == (1 if came_too_late else 0), f"the job ended with exit code {code}"
        # Who is lost in the last step of all is not replaced any more, or had come to the end before.
        most = bringer.wanted + (bringer.deaths if came_too_late else 0)
        return range(1 if at_end else bringer.wanted, most + 1)


def _findings(case: Case, place: Place, outcome: Outcome, staying: range | None) -> Iterator[str]:
    proof = Proof(place.records)
    outcome.generations, outcome.redone = len(proof.generations()), proof.redone()
    said = place.output.read_text(errors="replace")
    if any(isinstance(fault.action, OneWay) for fault in case.plan.faults):
        # As long as two hosts cannot talk, one or the other may be given up again and again.
        yield from invariants.counters(proof, invariants.regroups(said))
    else:
        yield from invariants.counters(proof, outcome.deaths)
        yield from invariants.verdicts(said, outcome.deaths)
    if staying is None:
        return  # it did not come to its end, and so did not train everything
    if case.body:
        yield from invariants.of_body(proof, case.body, undisturbed_record(case.body))
    else:
        yield from invariants.training(proof, undisturbed_weights(case.width))
        yield from invariants.means(place.records)
    if len(proof.ends()) not in staying:
        yield f"{len(proof.ends())} workers came to the end, and it should be {staying.start} to {staying.stop - 1}"
    if case.has_ledger:
        yield from invariants.ledger(place.folder / "ledger")
