"""`--events FILE`: one JSON object a line, and a job that does not depend on it."""

from __future__ import annotations

import json
import os
import threading
from contextlib import closing
from pathlib import Path

import pytest

from farandole.base.events.job_events import ScaleChanged
from farandole.base.events.worker_events import WorkerEnded
from farandole.errors import ConfigError
from farandole.job.launch.job_files import EventFile


def nobody(text: str) -> None:
    raise AssertionError(text)


def test_each_event_is_a_line_with_its_time(tmp_path: Path) -> None:
    path = tmp_path / "events"
    with closing(EventFile(path, nobody)) as events:
        events.on_event(ScaleChanged(1, 2))
        events.on_event(WorkerEnded("w1", 1, "left\nwell"))
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["event"], first["old"], first["new"], first["level"]) == ("ScaleChanged", 1, 2, "info")
    assert first.keys() == {"event", "level", "time", "clock_s", "old", "new"}  # as docs/events.md says
    assert second["how"] == "left\nwell"
    assert 1.7e9 < first["time"] <= second["time"]
    assert first["clock_s"] <= second["clock_s"]


def test_lines_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "events"
    for size in (2, 3):
        with closing(EventFile(path, nobody)) as events:
            events.on_event(ScaleChanged(1, size))
    assert [json.loads(line)["new"] for line in path.read_text().splitlines()] == [2, 3]


def test_a_file_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--events .*/no/such cannot be written: No such file"):
        EventFile(tmp_path / "no" / "such", nobody)
    with pytest.raises(ConfigError, match="Is a directory"):
        EventFile(tmp_path, nobody)


def test_a_pipe_that_nobody_reads_is_an_error_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe cannot be written"):
        EventFile(tmp_path / "pipe", nobody)


def test_a_full_disk_is_said_once_and_raises_nothing() -> None:
    said: list[str] = []
    has_said = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        has_said.set()

    with closing(EventFile(Path("/dev/full"), say)) as events:
        events.on_event(ScaleChanged(1, 2))
        assert has_said.wait(10.0)
        events.on_event(ScaleChanged(2, 3))
    assert said == ["--events /dev/full: No space left on device; events are missing from the file from now on"]


def test_a_line_that_was_cut_by_a_full_disk_spoils_no_later_one(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.touch()
    with closing(EventFile(path, nobody)) as events:
        events._is_torn = True
        path.write_text('{"event": "Scale')
        events.on_event(ScaleChanged(2, 3))
    assert [json.loads(line)["new"] for line in path.read_text().splitlines()[1:]] == [3]
