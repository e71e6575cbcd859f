"""The trace of a job for Perfetto and chrome://tracing."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from farandole.base.events.event import Event
from farandole.base.events.generation_events import GenerationStarted, Recovered, RegroupBegan
from farandole.base.wire.control import EventRecord
from farandole.job.launch import job_timeline
from farandole.job.launch.job_history import JobHistory
from farandole.job.launch.job_timeline import JobTimeline, append
from farandole.job.launch.job_trace import trace_of

START_S = 1_700_000_000
RECOVERED = Recovered(
    number=2,
    is_planned=False,
    lost=("w1",),
    reason="w1 was killed by SIGKILL",
    noticed=("exit",),
    last_lines=(),
    total_ms=30.0,
    silent_ms=0.0,
    ready_ms=10.0,
    connected_ms=5.0,
    synced_ms=3.0,
    first_step_ms=12.01,  # the rounded phases may have a larger sum
    slowest="w0",
    steps_redone=1,
    samples_redone=20,
)


def started(number: int, *workers: str, regroup_s: float = 0.0) -> Event:
    return GenerationStarted(number=number, workers=workers, regroup_s=regroup_s, bootstrap=number == 1)


def a_kill_and_a_join() -> list[tuple[float, Event]]:
    return [
        (1.0, started(1, "w0", "w1")),
        (5.0, RegroupBegan(number=2, reason="w1 was killed by SIGKILL", survivors=("w0",))),
        (5.01, started(2, "w0", regroup_s=0.01)),
        (5.04, RECOVERED),
        (9.0, started(3, "w0", "w2", regroup_s=0.002)),
    ]


def check(trace: list[dict[str, Any]]) -> None:
    """What the trace viewers need: slices of one thread lie inside of each other or apart, and times are not
    negative."""
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for each in trace:
        assert each["ph"] in "MXBEi", each
        if each["ph"] != "M":
            assert each["ts"] >= 0
        if each["ph"] == "X":
            lanes.setdefault((each["pid"], each["tid"]), []).append((each["ts"], each["ts"] + each["dur"]))
    for slices in lanes.values():
        around: list[int] = []
        for begin, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1], slices
            around.append(end)


def lanes_of(trace: list[dict[str, Any]]) -> dict[str, list[tuple[str, float, float]]]:
    """The slices of each thread by its name: their names, beginnings and ends in milliseconds."""
    names = {(each["pid"], each["tid"]): each["args"]["name"] for each in trace if each.get("name") == "thread_name"}
    found: dict[str, list[tuple[str, float, float]]] = {name: [] for name in names.values()}
    for each in trace:
        if each["ph"] == "X" and (each["pid"], each["tid"]) in names:
            slices = found[names[each["pid"], each["tid"]]]
            slices.append((each["name"], each["ts"] / 1e3, (each["ts"] + each["dur"]) / 1e3))
    return found


def test_generations_regroups_and_workers_have_a_row_each() -> None:
    history = JobHistory("job")
    for number, (at, event) in enumerate(a_kill_and_a_join(), 1):
        record = EventRecord(1, number, 0.0, event.level, event.line(), event.fields())
        history.on_event(record, START_S + at)
    trace = trace_of(history, int(START_S * 1e6), START_S + 10.0)
    check(trace)
    lanes = lanes_of(trace)
    assert lanes["generations"] == [
        ("generation 1: 2 workers", 1000.0, 5000.0),
        ("generation 2: 1 worker, without w1", 5010.0, 9000.0),
        ("generation 3: 2 workers, with w2", 9000.0, 10_000.0),
    ]
    assert lanes["regroups"] == [
        ("recovery", 5000.0, 5030.0),
        ("ready", 5000.0, 5010.0),
        ("connected", 5010.0, 5015.0),
        ("synced", 5015.0, 5018.0),
        ("first_step", 5018.0, 5030.0),
    ]
    assert [name for name, *_ in lanes["w0"]] == ["rank 0", "rank 0", "rank 0"]
    assert lanes["w1"] == [("rank 1", 1000.0, 5000.0)]
    assert lanes["w2"] == [("rank 1", 9000.0, 10_000.0)]
    told = [each["name"] for each in trace if each["ph"] == "i"]
    assert told == [type(event).__name__ for _, event in a_kill_and_a_join()]
    later = trace_of(history, int((START_S + 7) * 1e6), START_S + 10.0)  # the file was begun anew
    check(later)
    assert lanes_of(later)["generations"][0] == ("generation 2: 1 worker, without w1", 0.0, 2000.0)
    assert "RegroupBegan" in [each["name"] for each in later if each["ph"] == "i"]
    assert "w1" not in lanes_of(later)


TIMELINE = (
    b'[\n{"name": "process_name", "ph": "M", "pid": 0, '
    b'"args": {"name": "farandole", "start_time_since_epoch_in_micros": %d}}'
)


@pytest.mark.parametrize("end", [b"\n]\n", b',\n{"name": "proc'], ids=["whole", "torn"])
def test_the_file_of_a_timeline_gets_them_at_the_end(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(TIMELINE % 500 + end)
    append(path, 400, lambda start_us: [{"ph": "i", "name": "event", "ts": 600 - start_us}])
    told = json.loads(path.read_bytes())
    assert [each["name"] for each in told] == ["process_name", "event"]
    assert told[1]["ts"] == 100


@pytest.mark.parametrize("content", [None, b"", TIMELINE % 300 + b"\n]\n"], ids=["missing", "empty", "of another job"])
def test_without_the_timeline_of_a_worker_the_file_has_the_generations(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    append(path, 400, lambda start_us: [{"ph": "i", "name": "event", "ts": start_us}])
    head, event = json.loads(path.read_bytes())
    assert head["args"]["start_time_since_epoch_in_micros"] == event["ts"] == 400


def test_a_file_that_cannot_be_written_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    with closing(JobTimeline(tmp_path / "missing" / "t.json", told.append)) as timeline:
        timeline.on_event(started(1, "w0"))
    assert len(told) == 1
    assert "lacks the generations of the job: No such file or directory" in told[0]
    monkeypatch.setattr(job_timeline, "append", None)  # a job without a generation writes nothing
    with closing(JobTimeline(tmp_path / "t.json", told.append)):
        pass
