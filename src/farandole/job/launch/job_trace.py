"""The generations of a job as events of Chrome's trace format, for Perfetto and chrome://tracing. Pure.

page_server.py serves them as a file, and launch/job_timeline.py adds them to the file of --timeline-filename. Format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from farandole.base.events.event import count
from farandole.job.launch.job_history import PHASES, Generation, JobHistory

TraceEvent = dict[str, Any]

_JOB, _WORKERS = 2_000_000_001, 2_000_000_002  # beyond those of named operations, which are counted from 0
_GENERATIONS, _REGROUPS, _EVENTS = 1, 2, 3
_US = 1e6


def trace_of(history: JobHistory, start_us: int, ended_at: float) -> list[TraceEvent]:
    """Return the trace: the generations, the regroups with their phases, the events, and for each worker its rank in
    each generation.

    Args:
        history: The job.
        start_us: The time that is 0 in the trace, in microseconds since 1970. Generations that had ended then are not
            in it; the first one, and what led to it, may begin at 0.
        ended_at: The end of the newest generation, in seconds since 1970.
    """
    clock = _Clock(start_us)
    events = [*_head(_JOB, "job", -2), *_head(_WORKERS, "workers of the job", -1)]
    for number, name in ((_GENERATIONS, "generations"), (_REGROUPS, "regroups"), (_EVENTS, "events")):
        events.append(_named(_JOB, number, name))
    threads: dict[str, int] = {}
    generations = list(history.generations)
    shown_from, not_before = 0.0, 0
    for index, each in enumerate(generations):
        after = generations[index + 1] if index + 1 < len(generations) else None
        end = ended_at if after is None else max(each.at, after.at if _is_change(after) else _regroup_began(after))
        if end * _US < start_us:
            shown_from = end
            continue
        values = {"workers": list(each.workers), "lost": list(each.lost), "joined": list(each.joined)}
        events.append(clock.slice(_JOB, _GENERATIONS, _title(each), each.at, end, {**values, "reason": each.reason}))
        regroup = list(_regroup(clock, each, not_before))
        not_before = max([not_before, *(slice["ts"] + slice["dur"] for slice in regroup)])
        events += regroup
        for rank, worker in enumerate(each.workers):
            if worker not in threads:
                threads[worker] = len(threads) + 1
                events.append(_named(_WORKERS, threads[worker], worker))
            where = {"generation": each.number}
            events.append(clock.slice(_WORKERS, threads[worker], f"rank {rank}", each.at, end, where))
    for event in history.events:
        if event["at"] < shown_from:
            continue
        values = {"level": event["level"], "line": event["line"], **event["fields"]}
        at_us = clock.us(event["at"])
        events.append(
            {"ph": "i", "s": "t", "name": event["name"], "ts": at_us, "pid": _JOB, "tid": _EVENTS, "args": values}
        )
    return events


class _Clock:
    """Times since the beginning of a trace."""

    def __init__(self, start_us: int) -> None:
        self._start_us = start_us

    def us(self, at: float) -> int:
        """Return a time in seconds since 1970 as microseconds of the trace."""
        return max(0, round(at * _US) - self._start_us)

    def at(self, us: int) -> float:
        """Return a time of the trace as seconds since 1970."""
        return (self._start_us + us) / _US

    def slice(
        self, process: int, thread: int, name: str, begin: float, end: float, values: Mapping[str, Any]
    ) -> TraceEvent:
        """Return something that lasts from `begin` to `end`."""
        at_us = self.us(begin)
        took_us = max(0, self.us(end) - at_us)
        return {
            "ph": "X", "name": name, "ts": at_us, "dur": took_us, "pid": process, "tid": thread, "args": dict(values),
        }  # fmt: skip


def _title(generation: Generation) -> str:
    """Return what the slice of a generation shows: "generation 3: 2 workers, without w1"."""
    lost = f", without {', '.join(generation.lost)}" if generation.lost else ""
    joined = f", with {', '.join(generation.joined)}" if generation.joined else ""
    return f"generation {generation.number}: {count(len(generation.workers), 'worker')}{lost}{joined}"


def _is_change(generation: Generation) -> bool:
    """Return whether it was planned, so that the former generation trained until it began."""
    return generation.is_planned and not generation.lost


def _regroup_began(generation: Generation) -> float:
    """Return when the regroup began that led to a generation."""
    phases = generation.phases_ms
    return generation.at - (phases["silent"] + phases["ready"] if phases else generation.regroup_ms) / 1e3


def _regroup(clock: _Clock, generation: Generation, not_before: int) -> Iterator[TraceEvent]:
    """Yield the regroup that led to a generation, and its phases, which lie inside of it. A change may be planned while
    the former regroup is under way, and is shown behind it: slices of one row must not cross each other."""
    if not generation.total_ms:
        return
    began = max(_regroup_began(generation), clock.at(not_before))
    values = {
        "generation": generation.number,
        "reason": generation.reason,
        "lost": list(generation.lost),
        "noticed": list(generation.noticed),
        "slowest": generation.slowest,
        "steps_redone": generation.steps_redone,
        "samples_redone": generation.samples_redone,
    }
    name = "change" if _is_change(generation) else "recovery"
    ended = began + generation.total_ms / 1e3
    yield clock.slice(_JOB, _REGROUPS, name, began, ended, values)
    for phase in PHASES:
        took = generation.phases_ms[phase] / 1e3
        if took:
            end = min(began + took, ended)  # all of them are rounded
            yield clock.slice(_JOB, _REGROUPS, phase, began, end, {"generation": generation.number})
        began += took


def _head(process: int, name: str, place: int) -> list[TraceEvent]:
    return [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}},
        {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": place}},
    ]


def _named(process: int, thread: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}
