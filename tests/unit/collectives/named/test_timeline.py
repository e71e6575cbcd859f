"""The file that a timeline writes: what is in it, that it can be read at any time, and that trouble stays outside."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.base.machine import now_s
from farandole.integrations.horovod.named.stages import Kind
from farandole.integrations.horovod.named.timeline import BEGIN, END, Timeline, TimelineWriter

Event = dict[str, Any]
DEADLINE_S = 20.0


@pytest.fixture
def timeline() -> Iterator[Timeline]:
    timeline = Timeline()
    yield timeline
    timeline.stop()


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline_s, tick = now_s() + DEADLINE_S, threading.Event()
    while not is_true():
        assert now_s() < deadline_s, "it did not come in time"
        tick.wait(0.005)


def read(path: Path) -> list[Event]:
    events: list[Event] = json.loads(path.read_text())
    return events


def of(path: Path, operation: str) -> list[Event]:
    """The events of one operation, without what names its process."""
    events = read(path)
    named = {event["args"]["name"]: event["pid"] for event in events if event.get("name") == "process_name"}
    return [event for event in events if event["pid"] == named[operation] and event["ph"] != "M"]


def one_allreduce(timeline: Timeline, name: str = "allreduce.x") -> None:
    timeline.cycle()
    for rank in (1, 0):
        timeline.negotiate_start(name, Kind.ALLREDUCE)
        timeline.rank_ready(name, rank)
    timeline.end(name)
    timeline.begin(name, "ALLREDUCE")
    timeline.end(name)


def test_an_operation_is_shown_from_its_negotiation_to_its_end(timeline: Timeline, tmp_path: Path) -> None:
    timeline.start(tmp_path / "t.json")
    one_allreduce(timeline)
    timeline.stop()
    events = of(tmp_path / "t.json", "allreduce.x")
    assert [(event["ph"], event.get("name")) for event in events] == [
        ("B", "NEGOTIATE_ALLREDUCE"),
        ("X", "1"),
        ("X", "0"),
        ("E", None),
        ("B", "ALLREDUCE"),
        ("E", None),
    ]
    times = [event["ts"] for event in events]
    assert times == sorted(times)
    assert "start_time_since_epoch_in_micros" in (tmp_path / "t.json").read_text()


@pytest.mark.parametrize("marks", [False, True])
def test_cycles_are_marked_when_asked(timeline: Timeline, tmp_path: Path, marks: bool) -> None:
    timeline.start(tmp_path / "t.json", mark_cycles=marks)
    one_allreduce(timeline)
    timeline.stop()
    assert ("CYCLE_START" in (tmp_path / "t.json").read_text()) is marks


def test_the_file_is_whole_while_it_is_written(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    timeline.start(path, mark_cycles=True)
    assert read(path)
    for number in range(5):
        one_allreduce(timeline, f"allreduce.{number}")
        wait_until(lambda: f"allreduce.{number}" in path.read_text())  # noqa: B023 - used at once
        wait_until(lambda: len(of(path, f"allreduce.{number}")) == 6)  # noqa: B023


def test_it_can_be_started_and_stopped_many_times(timeline: Timeline, tmp_path: Path) -> None:
    one_allreduce(timeline)
    for number in range(3):
        path = tmp_path / f"{number}.json"
        timeline.start(path)
        timeline.start(path)  # It is on already: nothing is lost.
        one_allreduce(timeline)
        assert timeline.is_on
        timeline.stop()
        timeline.stop()
        assert not timeline.is_on
        assert len(of(path, "allreduce.x")) == 6


def test_another_file_takes_over(timeline: Timeline, tmp_path: Path) -> None:
    timeline.start(tmp_path / "a.json")
    one_allreduce(timeline, "allreduce.a")
    timeline.start(tmp_path / "b.json")
    one_allreduce(timeline, "allreduce.b")
    timeline.stop()
    assert of(tmp_path / "a.json", "allreduce.a")
    assert "allreduce.a" not in (tmp_path / "b.json").read_text()


def test_what_began_before_the_start_has_no_lonely_end(timeline: Timeline, tmp_path: Path) -> None:
    timeline.start(tmp_path / "t.json")
    timeline.end("allreduce.before")
    timeline.begin("allreduce.x", "ALLREDUCE")
    timeline.end("allreduce.x")
    timeline.end("allreduce.x")
    timeline.stop()
    assert [event["ph"] for event in read(tmp_path / "t.json") if event["ph"] != "M"] == ["B", "E"]


def test_odd_names_are_written_well(timeline: Timeline, tmp_path: Path) -> None:
    name = 'allreduce."quoted"\n\\ü\ud800'
    timeline.start(tmp_path / "t.json")
    one_allreduce(timeline, name)
    timeline.stop()
    assert len(of(tmp_path / "t.json", name)) == 6


def test_many_threads_may_tell_at_once(timeline: Timeline, tmp_path: Path) -> None:
    timeline.start(tmp_path / "t.json")
    names = [f"allreduce.{number}" for number in range(4)]
    threads = [
        threading.Thread(target=lambda name=name: [one_allreduce(timeline, name) for _ in range(100)]) for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    timeline.stop()
    assert all(len(of(tmp_path / "t.json", name)) == 600 for name in names)


@pytest.mark.parametrize("place", ["missing/t.json", "."])
def test_a_path_that_cannot_work_is_an_error_at_once(timeline: Timeline, tmp_path: Path, place: str) -> None:
    with pytest.raises(OSError, match="the timeline cannot be written") as caught:
        timeline.start(tmp_path / place)
    assert str(tmp_path) in str(caught.value)
    assert not timeline.is_on
    one_allreduce(timeline)


def test_a_full_disk_is_an_error_at_once(timeline: Timeline) -> None:
    with pytest.raises(OSError, match="No space left"):
        timeline.start("/dev/full")


def test_trouble_later_is_one_warning_and_hurts_nobody(
    timeline: Timeline, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The file is a pipe here, whose reader goes away."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with caplog.at_level(logging.WARNING, "farandole"):
        timeline.start(pipe)
        os.close(reader)
        one_allreduce(timeline)
        wait_until(lambda: not timeline.is_on)
        one_allreduce(timeline)
        timeline.stop()
    assert len([record for record in caplog.records if "the recording ends" in record.message]) == 1


def test_what_cannot_be_written_over_gets_its_end_at_the_end(timeline: Timeline, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    timeline.start(pipe)
    one_allreduce(timeline)
    timeline.stop()
    with open(reader, "rb") as file:
        assert len(json.loads(file.read())) == 2 + 2 + 6


def test_events_are_left_out_when_the_disk_is_too_slow(tmp_path: Path) -> None:
    timeline = Timeline(pause_s=DEADLINE_S, most_records=2)
    timeline.start(tmp_path / "t.json")
    one_allreduce(timeline)
    timeline.stop()
    events = read(tmp_path / "t.json")
    assert "5 events left out" in str(events)
    assert [event["ph"] for event in of(tmp_path / "t.json", "allreduce.x")] == ["B", "X", "E"]


def test_nested_activities_end_in_turn(tmp_path: Path) -> None:
    writer = TimelineWriter(str(tmp_path / "t.json"), 0)
    records = [(1000, BEGIN, "x", "ALLREDUCE"), (2000, BEGIN, "x", "COPY"), (3000, END, "x", ""), (4000, END, "x", "")]
    writer.add(records)
    writer.close()
    events = of(tmp_path / "t.json", "x")
    assert [(event["ph"], event["ts"]) for event in events] == [("B", 1), ("B", 2), ("E", 3), ("E", 4)]


def test_the_next_rank_0_continues_the_file_with_the_same_operations_and_ends_what_was_open(tmp_path: Path) -> None:
    path, start_us = tmp_path / "t.json", 1_700_000_000_000_000
    name = 'allreduce."x"\\'
    dead = TimelineWriter(str(path), start_us)
    dead.add([(1000, BEGIN, name, "ALLREDUCE"), (1000, BEGIN, "y", "ALLREDUCE"), (2000, BEGIN, "y", "COPY")])
    dead.add([(3000, END, "y", "")])
    dead.close()
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b',\n{"name": "process_na')  # what a killed process may have written of an event
    for round_ in (1, 2):
        following = TimelineWriter(str(path), start_us + 1_000_000 * round_, continues=True)
        following.add(
            [
                (5_000_000, BEGIN, name, "ALLREDUCE"),
                (6_000_000, END, name, ""),
                (7_000_000, BEGIN, f"z{round_}", "COPY"),
            ]
        )
        following.close()
    assert [(each["ph"], each["ts"]) for each in of(path, name)] == [
        *[("B", 1), ("E", 1_000_000)],
        *[("B", 1_005_000), ("E", 1_006_000)],
        *[("B", 2_005_000), ("E", 2_006_000)],
    ]
    assert [each["ph"] for each in of(path, "y")] == ["B", "B", "E", "E"]
    assert [(each["ph"], each["ts"]) for each in of(path, "z1")] == [("B", 1_007_000), ("E", 2_000_000)]
    numbers = [each["pid"] for each in read(path) if each.get("name") == "process_name"]
    assert len(numbers) == len(set(numbers)) == 5


@pytest.mark.parametrize("content", [None, b"", b"nonsense", b"[\n"])
def test_what_cannot_be_continued_begins_anew(timeline: Timeline, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    timeline.continue_file(path)
    one_allreduce(timeline)
    timeline.stop()
    assert len(of(path, "allreduce.x")) == 6


def test_a_timeline_that_was_stopped_is_not_continued(timeline: Timeline, tmp_path: Path) -> None:
    timeline.start(tmp_path / "t.json")
    timeline.stop()
    timeline.continue_file(tmp_path / "t.json")
    assert not timeline.is_on


def test_a_file_is_continued_when_its_former_writer_has_ended(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    former = TimelineWriter(str(path), 1_700_000_000_000_000)
    timeline.continue_file(path)
    one_allreduce(timeline, "second")
    former.add([(1000, BEGIN, "first", "ALLREDUCE")])
    former.close()
    timeline.stop()
    assert [each["ph"] for each in of(path, "first")] == ["B", "E"]
    assert len(of(path, "second")) == 6
