"""What a worker of the gallery runs: the script of a loop body, a fault at a line of it, and at the end a record of all
that it tracks. The script knows nothing of this. Started as `python worker.py BODY.py ARGUMENTS`.

A fault is done by a trace function when a line is reached for the k-th time, so each line of the body, its callbacks,
its data set and the library is a place where it can happen. Lines count while the elastic function runs; all bodies
call it `train`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BODIES = HERE / "bodies"
LIBRARY = str(HERE.parents[1] / "src" / "farandole")
INSIDE = tuple(f"{LIBRARY}/{folder}/" for folder in ("optim", "data", "state", "worker"))
FAULTS, COUNTED = "GALLERY_FAULTS", "GALLERY_COUNTED"
_HARMLESS = ("await", "pause", "scale", "join")  # a fault of another kind ends a worker
_ANSWER_S = 10.0
_NEWCOMER_S = 20.0
_IS_LONG = bool(os.environ.get("GALLERY_SAMPLES"))


def _is_warming_up() -> bool:
    """Whether this is a newcomer before its admission. Long jobs count its lines from then on, as its steps."""
    import farandole as fd

    return fd.is_initialized() and fd.generation() == 0


def main() -> None:
    path, *arguments = sys.argv[1:]
    folder = Path.cwd()
    (folder / f"pid-{os.getpid()}").touch()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    sys.argv = [path, *arguments]
    sys.path[0] = str(BODIES)
    script = types.ModuleType("__main__")
    script.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = script
    worker = os.environ.get("FARANDOLE_WORKER", "alone")
    tracer = Tracer(path, worker, folder)
    code = compile(Path(path).read_text(), path, "exec", dont_inherit=True)
    sys.settrace(tracer.on_call)
    try:
        exec(code, script.__dict__)
    finally:
        sys.settrace(None)
        if tracer.counted:
            tracer.write_hits()
    from tests.gallery.record import record

    written = folder / f"record-{worker}.new"
    written.write_text(json.dumps(record(script.__dict__, path)))
    written.rename(folder / f"record-{worker}.json")


class Tracer:
    """Counts lines and does what the environment says at one of them: GALLERY_FAULTS is a list of
    {worker, place: "file:line", hit, kind}."""

    def __init__(self, path: str, worker: str, folder: Path) -> None:
        faults = json.loads(os.environ.get(FAULTS, "[]"))
        self._faults = {(each["place"], each["hit"]): each["kind"] for each in faults if each["worker"] == worker}
        self.counted = os.environ.get(COUNTED, "")
        self._body, self._worker, self._folder = path, worker, folder
        self._hits: Counter[str] = Counter()
        self._names: dict[str, str] = {}
        self._is_inside = False
        self._awaited = 0  # newcomers to wait for as soon as so many workers are lost
        self._postponed = ""  # a loss that would come before the one before is made up for
        wanted = {place.rpartition(":")[0] for place, _ in self._faults}
        self._sees_library = self.counted == "library" or any("/" in name for name in wanted)

    def on_call(self, frame: types.FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        if code.co_filename == self._body and code.co_name == "train":
            self._is_inside = True
            return self._in_train
        return self._on_line if self._is_inside and self._name(code.co_filename) else None

    def _name(self, filename: str) -> str:
        name = self._names.get(filename)
        if name is None:
            if filename.startswith(f"{BODIES}/"):
                name = os.path.basename(filename)
            elif self._sees_library and filename.startswith(INSIDE):
                name = os.path.relpath(filename, LIBRARY)
            else:
                name = ""
            self._names[filename] = name
        return name

    def _in_train(self, frame: types.FrameType, event: str, argument: object) -> Any:
        self._on_line(frame, event, argument)
        if event == "return" and not frame.f_code.co_flags & 0x20:
            self._is_inside = False
        return self._in_train

    def _on_line(self, frame: types.FrameType, event: str, argument: object) -> Any:
        if event == "line" and not (_IS_LONG and _is_warming_up()):
            place = f"{self._name(frame.f_code.co_filename)}:{frame.f_lineno}"
            self._hits[place] += 1
            if self._awaited and self._losses() >= self._awaited and self._is_recovered():
                self._awaited = 0
                self._wait_for(self._is_complete, _NEWCOMER_S)
            kind = self._faults.get((place, self._hits[place]))
            if _IS_LONG and (kind in ("kill", "exit") or self._postponed):
                kind = self._postponed or kind
                self._postponed = "" if self._has_all_members() and self._is_recovered() else str(kind)
            if kind is not None and not self._postponed:
                (self._folder / f"did-{self._worker}-{kind}").touch()
                self._do(kind)
        return self._on_line

    def _do(self, kind: str) -> None:
        what, _, amount = kind.partition(" ")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "leave":
            os.kill(os.getpid(), signal.SIGTERM)
        elif what == "hang":
            threading.Event().wait()
        elif what == "exit":
            os._exit(0)
        elif what == "raise":
            raise RuntimeError("a fault of the gallery, in user code")
        elif what == "pause":
            time.sleep(float(amount))
        elif what == "scale":
            self._scale(amount)
        elif what == "join":
            self._scale(amount)
            self._wait_for_newcomers(1)
        elif what == "await":
            self._awaited = int(amount)

    def _losses(self) -> int:
        kinds = (path.name.rpartition("-")[2] for path in self._folder.glob("did-*"))
        return sum(kind.partition(" ")[0] not in _HARMLESS for kind in kinds)

    def _events(self) -> list[dict[str, Any]]:
        lines = (self._folder / "events").read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def _is_recovered(self) -> bool:
        """Whether the first step of the newest generation is done: no worker waits in a regroup for this one."""
        kinds = ("RegroupBegan", "GenerationStarted", "Recovered")
        names = [each["event"] for each in self._events() if each["event"] in kinds]
        return names[-1:] == ["Recovered"] or names == ["GenerationStarted"]

    def _is_complete(self) -> bool:
        """Whether there are as many members as at the start, or a newcomer is about to join."""
        names = [each["event"] for each in self._events() if each["event"] in ("GenerationStarted", "ChangePlanned")]
        return names[-1:] == ["ChangePlanned"] or self._has_all_members()

    def _has_all_members(self) -> bool:
        sizes = [len(each["workers"]) for each in self._events() if each["event"] == "GenerationStarted"]
        return sizes[-1] >= sizes[0]

    def _scale(self, size: str) -> None:
        name = f"{self._worker}-{time.monotonic_ns()}"
        (self._folder / f"new-{name}").write_text(size)
        (self._folder / f"new-{name}").rename(self._folder / f"ask-{name}")
        self._wait_for((self._folder / f"answer-{name}").exists)

    def _wait_for_newcomers(self, count: int) -> None:
        self._wait_for(lambda: (self._folder / "events").read_text().count('"ChangePlanned"') >= count)

    def _wait_for(self, condition: Any, limit_s: float = _ANSWER_S) -> None:
        from farandole.base.liveness.status_reporting import report_progress

        until = time.monotonic() + limit_s
        while not condition() and time.monotonic() < until:
            time.sleep(0.002)
            report_progress()  # the step timeout is not for what the fault asks

    def write_hits(self) -> None:
        written = self._folder / f"hits-{self._worker}.json"
        written.write_text(json.dumps(self._hits))


if __name__ == "__main__":
    main()
