"""Runs one body with one case of faults, and says what of the contract was broken."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gallery import jobs, verdict
from tests.gallery.catalogue import Body
from tests.gallery.jobs import Ended
from tests.gallery.plan import Case, Hits
from tests.gallery.worker import COUNTED, FAULTS, HERE
from tests.support.launching import ROOT

DEADLINE_S = 40.0
_SLOW_S = 180.0
_BUDGET_S, _BUDGET_OF_STOPS_S, _STEP_TIMEOUT_S = 2.0, 0.7, 4.0
_SHARED_MEMORY = Path("/dev/shm")
_MOST_PADDED = 8  # of two epochs: workers - 1 in the last batch of each worker's, in each of them
_FORK_SERVER_LOST = "the fork server is lost"
_ERROR = re.compile(
    r"^(?:\[\w+\] )?(?:[\w.]*(?:Error|Lost|Ended|Mismatch|Exception|Interrupt|Outdated)\b.*)$", re.MULTILINE
)
_SAID = re.compile(r"^\[farandole\] .*(?:failed|violat|diverge|differ|hung|ends).*$", re.MULTILINE)


@dataclass
class Outcome:
    """violations  in words; none: all is well
    happened    the faults that came about
    """

    violations: list[str] = field(default_factory=list)
    happened: int = 0
    seconds: float = 0.0
    generations: int = 0
    folder: Path | None = None


@dataclass(frozen=True)
class Peace:
    """What a body does when nothing happens to it.

    record   of a worker at its end; None: it was refused
    hits     how often each worker reaches each line
    problems what is wrong with it already
    """

    record: Mapping[str, Any] | None
    hits: Hits
    problems: list[str]


_DECIDING = ("catalogue", "record", "worker")  # files of the gallery that decide what is found


class Gallery:
    """Runs jobs one after the other, and knows what bodies do undisturbed. With `shards` in strict mode, with so many:
    then all values are those of one worker to the last bit."""

    def __init__(self, shards: int = 0) -> None:
        self._shards = shards
        self._known: dict[str, Peace] = {}
        self._cache = Path(tempfile.gettempdir()) / "farandole-gallery"
        self._library = _digest((ROOT / "src" / "farandole").rglob("*.py"))

    def peace(self, body: Body) -> Peace:
        """How it is with three workers, and that one worker does the same."""
        if body.name not in self._known:
            gallery = _digest(
                map(Path, (body.path, HERE / "bodies" / "problem.py", *(HERE / f"{name}.py" for name in _DECIDING)))
            )
            samples = os.environ.get("GALLERY_SAMPLES", "")
            path = self._cache / f"{body.name}-{samples}-{self._shards}-{self._library}-{gallery}.json"
            if path.exists():
                self._known[body.name] = Peace(**json.loads(path.read_text()))
            else:
                found = self._known[body.name] = self._peace(body)
                self._cache.mkdir(exist_ok=True)
                new = path.with_suffix(f".{os.getpid()}")
                new.write_text(json.dumps({"record": found.record, "hits": found.hits, "problems": found.problems}))
                new.rename(path)
        return self._known[body.name]

    def _peace(self, body: Body) -> Peace:
        nothing = Case(3, "shm", 0, ())
        folder, ended = self._start(body, nothing, {COUNTED: "library"})
        try:
            said = (folder / "output").read_text(errors="replace")
            if refused := self._refused(body):
                is_right = ended.code != 0 and not ended.late and re.search(refused, said)
                return Peace(
                    None, {}, [] if is_right else [f"it was not refused with {refused!r}: {_reason(ended, said)}"]
                )
            if ended.code != 0:
                return Peace(None, {}, [f"undisturbed: {_reason(ended, said)}"])
            records = _records(folder)
            hits = {path.stem.removeprefix("hits-"): json.loads(path.read_text()) for path in folder.glob("hits-*")}
            problems = [f"undisturbed: {each}" for each in self._findings(body, records, None)]
        finally:
            shutil.rmtree(folder)
        if (body.is_exact or self._shards) and body.alone:
            folder, ended = self._start(body, Case(1, "tcp", 1, ()), {})
            try:
                if ended.code != 0:
                    problems.append(f"alone: {_reason(ended, (folder / 'output').read_text(errors='replace'))}")
                else:
                    alone = next(iter(_records(folder).values()))
                    unlike = verdict.unlike(records, alone, self._without(body), self._tolerance)
                    problems += [f"3 workers and 1: {each}" for each in unlike]
            finally:
                shutil.rmtree(folder)
        return Peace(records["w0"], hits, problems)

    def run(self, body: Body, case: Case) -> Outcome:
        """What the job wrote is kept in outcome.folder if it broke the contract."""
        peace = self.peace(body)
        outcome = Outcome(list(peace.problems))
        if peace.record is None:
            return outcome
        faults = json.dumps([fault.as_json() for fault in case.faults])
        folder, ended = self._start(body, case, {FAULTS: faults})
        said = (folder / "output").read_text(errors="replace")
        outcome.seconds = ended.seconds
        outcome.happened = len(list(folder.glob("did-*")))
        outcome.generations = len(re.findall(r"generation \d+ starts", said))
        outcome.violations += [f"a process is left: {each}" for each in ended.left]
        outcome.violations += [f"left in shared memory: {each}" for each in _left_in_memory(folder)]
        if left := sorted(
            path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor_")
        ):
            outcome.violations.append(f"temporary files are left: {left}")
        outcome.violations += re.findall("remark: (a newcomer does not train .*)", said)
        if ended.code != 0 or ended.late:
            outcome.violations.append(_reason(ended, said))
        else:
            outcome.violations += self._findings(body, _records(folder), peace.record)
        if outcome.violations:
            outcome.folder = folder
        else:
            shutil.rmtree(folder)
        return outcome

    def _start(self, body: Body, case: Case, environment: Mapping[str, str]) -> tuple[Path, Ended]:
        folder = Path(tempfile.mkdtemp(prefix="gallery-"))
        for name in ("tmp", "out"):
            (folder / name).mkdir()
        most = max([case.workers, *(int(f.kind.split()[1]) for f in case.faults if f.kind.startswith("join"))])
        flags = ["-np", str(case.workers), "--restarts", str(case.restarts), "--verbose"]
        flags += ["--spares", str(case.spares)] if case.spares else ["--max-np", str(most), "-H", f"localhost:{most}"]
        flags += ["--transport", case.transport, "--fork-server", "on"]
        flags += ["--shards", str(self._shards)] if self._shards else []
        kinds = {fault.kind for fault in case.faults}
        budget_s = _BUDGET_OF_STOPS_S if "stop" in kinds else _BUDGET_S
        flags += ["--detection-budget", str(budget_s), "--events", str(folder / "events")]
        if "hang" in kinds:
            flags += ["--step-timeout", str(_STEP_TIMEOUT_S)]
        script = [sys.executable, str(HERE / "worker.py"), body.path, *body.arguments]
        deadline_s = _SLOW_S if body.is_slow else DEADLINE_S
        variables = {"TMPDIR": str(folder / "tmp"), **environment}
        horovod = ["--horovod"] if body.horovod else []
        ended = jobs.run(["run", *flags, *horovod, *script], folder, variables, deadline_s)
        if _FORK_SERVER_LOST in (folder / "output").read_text(errors="replace"):
            shutil.rmtree(folder)  # its workers were started in the plain way, which takes longer than a job may
            return self._start(body, case, environment)
        return folder, ended

    @property
    def _tolerance(self) -> float:
        return 0.0 if self._shards else verdict.TOLERANCE

    def _refused(self, body: Body) -> str:
        return body.refused or (body.refused_in_strict_mode if self._shards else "")

    def _without(self, body: Body) -> tuple[str, ...]:
        return (*body.own, *body.local, *(body.by_run if self._shards else ()))

    def _findings(self, body: Body, records: Mapping[str, Any], undisturbed: Mapping[str, Any] | None) -> Iterator[str]:
        if not records:
            yield "no worker came to its end"
            return
        yield from verdict.unequal(records, (*body.local, *(body.by_run if self._shards else ())))
        if body.witness is not None:
            yield from verdict.miscounted(records, body.witness, _MOST_PADDED if body.is_padded else 0)
        if undisturbed is not None and (body.is_exact or self._shards):
            yield from verdict.unlike(records, undisturbed, self._without(body), self._tolerance)
        elif undisturbed is not None:
            counters = {name: {"steps": each["steps"]} for name, each in records.items() if "steps" in each}
            yield from verdict.unlike(counters, {"steps": undisturbed.get("steps")})


def _records(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem.removeprefix("record-"): json.loads(path.read_text()) for path in folder.glob("record-*.json")}


def _reason(ended: Ended, said: str) -> str:
    how = "it did not end" if ended.late else f"exit code {ended.code}"
    errors = list(dict.fromkeys(re.sub(r"^\[\w+\] ", "", found[0]) for found in _ERROR.finditer(said)))
    errors = errors[:2] or [found[0] for found in _SAID.finditer(said)][-2:]
    return f"{how}: {' | '.join(errors)[:700]}"


def _left_in_memory(folder: Path) -> list[str]:
    pids = {path.name.removeprefix("pid-") for path in folder.glob("pid-*")}
    found = (re.match(r"(?:torch_|farandole-)(\d+)", path.name) for path in _SHARED_MEMORY.iterdir())
    return [match.string for match in found if match is not None and match[1] in pids]


def _digest(paths: Iterable[Path]) -> str:
    """Of the library or of the gallery: what was found with another one means nothing."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
