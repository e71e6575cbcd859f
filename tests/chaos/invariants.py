"""What must hold after every job, whatever happened to it. Each function says what is violated, if anything."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from farandole.testing.proof import Proof
from farandole.training.ledger.check import check
from farandole.training.ledger.proving import Folder
from tests.gallery import verdict
from tests.gallery.catalogue import BODIES
from tests.scripts import chaos_body
from tests.scripts.chaos_job import BATCH, EPOCHS, SAMPLES, SEED, STEPS
from tests.support.pure_order import global_batches

_LOST = re.compile(r"^\[farandole\] lost (w\d+) .*$", re.MULTILINE)
_REGROUP = re.compile(r"^\[farandole\] regrouping for generation", re.MULTILINE)
_GONE_S = 5.0  # until what was killed is gone, and what cleans up has done so
_SHARED_MEMORY = Path("/dev/shm")
TOLERANCE = 1e-9


def training(proof: Proof, weights: Sequence[float]) -> Iterator[str]:
    """Each sample once in each epoch, each step with the samples of an undisturbed job, and its parameters."""
    epochs = proof.epochs(SAMPLES)
    if not epochs.is_exact:
        yield f"samples lost {epochs.lost}, repeated {epochs.repeated}"
    if epochs.complete != EPOCHS:
        yield f"{epochs.complete} of {EPOCHS} epochs were trained"
    expected, trained = global_batches(SAMPLES, BATCH, SEED, EPOCHS), proof.samples_by_step()
    different = sorted(step for step in expected.keys() | trained.keys() if expected.get(step) != trained.get(step))
    if different:
        yield f"steps that did not train the samples of an undisturbed job: {different[:10]}"
    ends = proof.ends()
    if len({end["parameters"] for end in ends}) != 1:
        yield f"workers ended with different parameters: {sorted({end['parameters'][:8] for end in ends})}"
    for end in ends:
        if {end["end"], end["scheduler_last_epoch"], end["seen"], end["result"]} != {STEPS}:
            said = {name: end[name] for name in ("end", "scheduler_last_epoch", "seen", "result")}
            yield f"rank {end['rank']} ended with {said} instead of {STEPS} steps"
        off = max(abs(a - b) for a, b in zip(end["weights"], weights, strict=True))
        if not off <= TOLERANCE:
            yield f"rank {end['rank']} ended with weights that are off by {off:g}"


def means(folder: Path) -> Iterator[str]:
    """All workers had the same results of fd.mean(). Those that were lost have not written theirs: they may have
    received the result of a call that the others had to complete without them."""
    by_step: dict[int, set[float]] = defaultdict(set)
    for path in folder.glob("means-*.json"):
        for step, mean in json.loads(path.read_text()).items():
            by_step[int(step)].add(mean)
    if unequal := sorted(step for step, values in by_step.items() if len(values) > 1):
        yield f"fd.mean() had another value on some workers than on others behind steps {unequal[:10]}"


def of_body(proof: Proof, name: str, undisturbed: Mapping[str, Any]) -> Iterator[str]:
    """The same of a job that runs a body of the gallery, and everything that it tracks."""
    body, samples = BODIES[name], chaos_body.SAMPLES
    epochs = proof.epochs(samples)
    if not epochs.is_exact or epochs.complete != chaos_body.EPOCHS:
        yield f"{epochs.complete} epochs; samples lost {epochs.lost}, repeated {epochs.repeated}"
    expected = global_batches(samples, chaos_body.BATCH, chaos_body.SEED, chaos_body.EPOCHS)
    if proof.samples_by_step() != expected:
        yield "not every step trained the samples of an undisturbed job"
    records = {f"rank {end['rank']}": end["record"] for end in proof.ends()}
    yield from verdict.unequal(records, body.local)
    yield from verdict.unlike(records, undisturbed, (*body.own, *body.local), TOLERANCE)


def counters(proof: Proof, faults: int) -> Iterator[str]:
    """No worker does a step again that it has applied, or leaves one out; a fault costs one step at most."""
    by_worker: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for record in proof.records:
        by_worker[record["host"], record["pid"]].append(record)
    for worker, records in by_worker.items():
        applied = [record["after"] for record in records if "after" in record]
        for one, other in itertools.pairwise(applied):
            if other <= one:
                yield f"worker {worker} applied step {other} after step {one}"
        begun = [record["before"] for record in records if "before" in record]
        for one, other in itertools.pairwise(begun):
            if not one - 1 <= other:
                yield f"worker {worker} went back from step {one} to {other}"
    if proof.redone() > faults:
        yield f"{proof.redone()} steps were done again, and there were {faults} faults"


def regroups(output: str) -> int:
    """How often survivors had to get over a fault."""
    return len(_REGROUP.findall(output))


def verdicts(output: str, deaths: int) -> Iterator[str]:
    """Who was only slow was not declared lost."""
    lost = [found[0] for found in _LOST.finditer(output)]
    if len(lost) > deaths:
        yield f"{len(lost)} workers were declared lost, and {deaths} were ended: {lost}"


def ledger(folder: Path) -> Iterator[str]:
    """What the job's own ledger proves."""
    findings = check(Folder(folder))
    if not findings.is_exact or (findings.steps, findings.whole_epochs()) != (STEPS, EPOCHS):
        yield f"the sample ledger is not exact: {findings}"


class Tidiness:
    """Made before a job: sees afterwards what is left of it.

    folder     part of the command line or environment of all its processes
    temporary  its TMPDIR
    """

    def __init__(self, folder: Path, temporary: Path) -> None:
        self._folder, self._temporary = str(folder), temporary
        self._before = set(_shared_memory())

    def left(self) -> list[str]:
        """Processes, files in shared memory, files in the temporary folder; some seconds are theirs to go."""
        deadline = time.monotonic() + _GONE_S
        while (found := list(self._left())) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _left(self) -> Iterator[str]:
        if processes := self._processes():
            yield f"processes were left: {processes}"
        if files := set(_shared_memory()) - self._before:
            yield f"files of dead processes were left in shared memory: {sorted(files)}"
        # torch's compiler has a cache of its own there, for all programs of the user that are to come.
        if left := sorted(p.name for p in self._temporary.iterdir() if not p.name.startswith("torchinductor_")):
            yield f"temporary files were left: {left}"

    def _processes(self) -> dict[int, str]:
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if entry.name.isdigit():
                    command = (entry / "cmdline").read_bytes()
                    if self._folder.encode() in command + (entry / "environ").read_bytes():
                        found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        return found


def _shared_memory() -> Iterator[str]:
    """Files whose name says that a process made them that is dead: others may be of jobs beside this one."""
    for path in _SHARED_MEMORY.iterdir() if _SHARED_MEMORY.exists() else ():
        pid = re.match(r"(?:torch_|farandole-)(\d+)", path.name)
        if pid is not None and not Path(f"/proc/{pid[1]}").exists():
            yield path.name
