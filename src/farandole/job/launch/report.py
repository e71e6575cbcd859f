"""The launcher's messages to the user: a line for each event, and the result at the end. Used by launcher.py."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TextIO, TypeAlias

from farandole.base.config import JobConfig
from farandole.base.events.event import Event, count
from farandole.base.events.generation_events import ChangePlanned, GenerationStarted, Recovered, TransportChosen
from farandole.base.events.host_events import AgentJoined
from farandole.base.events.job_events import (
    JobEnds,
    JobRemarked,
    TrainingCutShort,
    TrainingFinished,
    WorkerMetOthers,
    WorkerTrainsAlone,
)
from farandole.base.events.worker_events import (
    AllWorkersRestart,
    ForkServerReady,
    StatesDiverged,
    UserCodeFailed,
    WorkerEnded,
    WorkerFailed,
    WorkerLost,
    WorkerSpawned,
)
from farandole.base.machine import now_s
from farandole.job.coordinator.control_requests import JobSummary
from farandole.job.launch.output import OWN_PREFIX, BackgroundWriter, unbuffered, write_all
from farandole.job.launch.progress_line import Part, ProgressLine
from farandole.job.launch.terminal_line import TerminalLine

_LAST_LINES = 5  # of a lost worker's stderr; all of them when verbose
_NO_HOROVOD = "ModuleNotFoundError: No module named 'horovod'"
_TRACEBACK = "Traceback (most recent call last):"
# Only when verbose; `ended` reports the end.
_DETAILS = (
    AgentJoined,
    ForkServerReady,
    WorkerSpawned,
    WorkerEnded,
    WorkerFailed,
    ChangePlanned,
    TransportChosen,
    TrainingFinished,
    JobEnds,
)


class Loudness(IntEnum):
    """QUIET: warnings and the end. NORMAL: each generation too. VERBOSE: every event."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


_Target: TypeAlias = tuple[Part, ...] | None
"""The parts of the line below, to be drawn; empty: it is erased for good. None: lines above it."""


class Report:
    """Writes to `stream`, without waiting for it before `close`. Call `started`, `on_event` for each event, `ended`,
    `close`; and `on_summary`, unless it is None, about once a second.

    Attributes:
        line: The line below everything else on the terminal of `stream`; None: there is none.
        on_summary: Takes a summary of the job for that line.
    """

    def __init__(
        self,
        stream: TextIO,
        loudness: Loudness = Loudness.NORMAL,
        clock: Callable[[], float] = now_s,
        line: TerminalLine | None = None,
    ) -> None:
        self._loudness, self._clock = loudness, clock
        self._raw = unbuffered(stream)
        self._writer = BackgroundWriter[_Target]("report", self._write, lambda dropped_bytes: None)
        self._started_s = clock()
        self.line = line
        self.on_summary = None if line is None else self._take_summary
        self._progress = ProgressLine(self._started_s)
        self._is_drawing = False
        self._generations = self._losses = 0
        self._members = set[str]()  # of all generations
        self._newcomers = set[str]()  # members that came after the first generation
        self._raised: dict[str, str] = {}  # the exceptions of workers
        self._restarts_of_all = 0
        self._is_new_attempt = False
        self._cut_short: TrainingCutShort | None = None
        self._divergences = 0
        self._remarks: dict[str, str] = {}  # by topic
        self._alone = set[str]()  # workers that have trained without having met the others
        self._lacks_horovod = False

    def started(self, config: JobConfig, command: Sequence[str]) -> None:
        """Report that the job is about to begin."""
        self._started_s = self._clock()
        if self._loudness >= Loudness.NORMAL:
            workers = f"{count(config.num_proc, 'worker')} ({_limits(config)})"
            workers += f" and {count(config.spares, 'spare')}" if config.spares else ""
            self._print(f"{workers} to run {shlex.join(command)}")

    def on_event(self, event: Event) -> None:
        """Report an event."""
        self._remember(event)
        if self.line is not None:
            self._progress.on_event(event)
        if not self._is_wanted(event):
            return
        if isinstance(event, UserCodeFailed):  # its stderr has shown the traceback already
            self._print(f"{event.worker} raised {event.summary}")
        elif isinstance(event, WorkerTrainsAlone) and len(self._alone) > 1:
            self._print(f"{event.worker} trains alone, too")  # the first one's line says what to do
        elif isinstance(event, WorkerLost):
            self._print("\n".join([event.line(), *self._last_lines(event)]))
        else:
            self._print(event.line())

    def ended(self, exit_code: int, reason: str) -> None:
        """Report the result of a job that is over. `reason` is a whole sentence."""
        counts = (
            count(self._generations, "generation"),
            f"{count(self._losses, 'worker')} lost",
            f"{len(self._newcomers)} joined",
            *([f"{count(self._restarts_of_all, 'restart')} of all workers"] if self._restarts_of_all else []),
            f"{self._clock() - self._started_s:.1f} s",
        )
        self._print(", ".join(counts))
        self._print(f"{self._verdict(exit_code)}. {reason}")
        if self._lacks_horovod and exit_code != 0:
            self._print("the script imports horovod: start it with farandole run --horovod")

    def _verdict(self, exit_code: int) -> str:
        """Return the result in a few words. Workers that did not train together are no success, whatever their exit
        codes; nor is a training of which something was left out, or mended."""
        remarks = list(self._remarks.values())
        if self._divergences:
            times = "once" if self._divergences == 1 else f"{self._divergences} times"
            remarks.insert(0, f"the states of workers differed {times}, and were copied")
        if self._raised and exit_code == 0:
            who, first = next(iter(self._raised.items()))
            others = len(self._raised) - 1
            more = f", and {count(others, 'other worker')} raised exceptions, too" if others else ""
            remarks.append(f"{who} raised {first}{more}")
        remarked = f"with remarks: {'; '.join(remarks)}" if remarks else ""
        alone = ""
        if self._alone:
            each = "each for itself" if len(self._alone) > 1 else "for itself"
            alone = f"{count(len(self._alone), 'worker')} trained {each}, not together with the others"
        if exit_code != 0:
            return ", ".join(filter(None, [f"failed (exit code {exit_code})", alone and f"and {alone}", remarked]))
        ended = "" if self._cut_short is None else self._cut_short.verdict()
        if remarked:
            ended = ended or "finished"
        return ", ".join(filter(None, [alone, ended, remarked])) or "success"

    def note(self, text: str) -> None:
        """Show a note to the user, or why the job could not be run; also when quiet."""
        self._print(text)

    def detail(self, text: str) -> None:
        """Show a note to the user, unless quiet."""
        if self._loudness >= Loudness.NORMAL:
            self._print(text)

    def close(self) -> None:
        """Write the remaining lines; waits for that with a time limit. Idempotent."""
        self._writer.put((), b"")
        self._writer.close()

    def _remember(self, event: Event) -> None:
        if isinstance(event, GenerationStarted):
            if self._generations and not self._is_new_attempt:
                self._newcomers.update(set(event.workers) - self._members)
            self._generations += 1
            self._members.update(event.workers)
            self._is_new_attempt = False
        elif isinstance(event, AllWorkersRestart):
            self._restarts_of_all += 1
            self._is_new_attempt = True
        elif isinstance(event, WorkerLost):
            self._losses += 1
            self._lacks_horovod = self._lacks_horovod or _NO_HOROVOD in event.last_lines
        elif isinstance(event, WorkerTrainsAlone):
            self._alone.add(event.worker)
        elif isinstance(event, WorkerMetOthers):
            self._alone.discard(event.worker)
        elif isinstance(event, TrainingCutShort):
            self._cut_short = event
        elif isinstance(event, JobRemarked):
            self._remarks[event.topic] = event.text
        elif isinstance(event, StatesDiverged) and not event.is_fatal:
            self._divergences += 1
        elif isinstance(event, UserCodeFailed):
            self._raised[event.worker] = event.summary

    def _is_wanted(self, event: Event) -> bool:
        if self._loudness == Loudness.VERBOSE:
            return True
        if isinstance(event, _DETAILS):
            return False
        if isinstance(event, Recovered) and not event.is_planned:
            return True  # a warning has told of the loss
        return event.level == "warning" or self._loudness == Loudness.NORMAL

    def _last_lines(self, event: WorkerLost) -> list[str]:
        """Return the end of the lost worker's stderr. Of a traceback, which was shown when it came, only the last line;
        nothing when that was reported as the worker's exception."""
        lines = [line for line in event.last_lines if line.strip()]
        if self._loudness < Loudness.VERBOSE:
            is_traceback = _TRACEBACK in lines
            if is_traceback and event.worker in self._raised:
                return []
            lines = lines[-1:] if is_traceback else lines[-_LAST_LINES:]
        return [f"    | {line}" for line in lines]

    def _print(self, text: str) -> None:
        lines = "".join(f"{OWN_PREFIX}{line}\n" for line in text.splitlines())
        self._writer.put(None, lines.encode("utf-8", "backslashreplace"))

    def _take_summary(self, summary: JobSummary) -> None:
        """Have the line drawn anew, unless the terminal has not taken the former one yet."""
        now_s = self._clock()
        self._progress.on_summary(summary, now_s)
        if not self._is_drawing:
            self._is_drawing = True
            self._writer.put(self._progress.parts(now_s), b"")

    # In the writer's thread -------------------------------------------------------------------------------

    def _write(self, target: _Target, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the reader is gone; the exit code still tells
            if self.line is None:
                write_all(self._raw, data)
            elif target is None:
                self.line.write(self._raw, data)
            elif target:
                self._is_drawing = False
                self.line.show(target)
            else:
                self.line.end()


def _limits(config: JobConfig) -> str:
    if config.max_restarts is not None:
        times = count(config.max_restarts, "restart") if config.max_restarts else "no restart"
        return f"{times} of all workers after a failure"
    return f"at least {config.min_np}" + ("" if config.max_np is None else f", at most {config.max_np}")
