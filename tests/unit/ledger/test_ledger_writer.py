"""A worker's files: parts, full disks, and what is read back from them."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from farandole.errors import ConfigError
from farandole.training.ledger.check import check
from farandole.training.ledger.proving import Folder, ledger_files
from farandole.training.ledger.records import HOLED, LedgerWriter, Missed, Opened, Record, decode
from tests.support.ledgers import WrittenJob


class Disk:
    """Takes `room` bytes, then is full until `room` is set anew."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, file: int, line: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = os.write(file, line[: self.room])
        self.room -= taken
        return taken


def said_by(path: Path) -> list[Record | None]:
    return [decode(line) for line in path.read_bytes().splitlines()]


def written(job: WrittenJob) -> list[Record]:
    """What the only member has to say, without the first line, which is the writer's own."""
    return job.files["a"][1:]


def job_of_one(steps: int) -> WrittenJob:
    job = WrittenJob(members=["a"])
    job.train(steps)
    return job


def test_what_was_written_can_be_checked(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path / "new" / "folder", "w0", "host")
    for record in written(job_of_one(4)):
        writer.write(record)
    findings = check(Folder(tmp_path / "new" / "folder"))
    assert findings.is_exact
    assert (findings.workers, findings.whole_epochs()) == (1, 1)


def test_a_large_file_is_followed_by_another_one_that_can_be_understood_alone(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path, "w0", "host", part_bytes=400)
    for record in written(job_of_one(8)):
        writer.write(record)
    writer.close()
    files = ledger_files(tmp_path)
    assert len(files) > 2
    assert all(path.stat().st_size < 600 for path in files)
    assert {type(said_by(path)[1]).__name__ for path in files} == {"Started"}
    findings = check(Folder(tmp_path))
    assert findings.is_exact
    assert findings.workers == 1


def test_a_full_disk_is_said_once_in_the_log_and_in_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk(room=330)
    writer = LedgerWriter(tmp_path, "w0", "host", write=disk.write)
    with caplog.at_level(logging.WARNING, "farandole"):
        for record in written(job_of_one(8)):
            writer.write(record)
    assert ["lacks records from now on" in message for message in caplog.messages] == [True]
    (path,) = ledger_files(tmp_path)
    opened = said_by(path)[0]
    assert isinstance(opened, Opened)
    assert opened.status == HOLED
    findings = check(Folder(tmp_path))
    assert findings.remarks


@pytest.mark.parametrize("room", range(310, 355))
def test_wherever_a_line_is_cut_each_record_is_there_or_missing(tmp_path: Path, room: int) -> None:
    disk = Disk(room=room)
    writer = LedgerWriter(tmp_path, "w0", "host", write=disk.write)
    records = written(job_of_one(8))
    for number, record in enumerate(records):
        disk.room = 1 << 20 if number == 10 else disk.room
        writer.write(record)
    (path,) = ledger_files(tmp_path)
    said = said_by(path)
    missed = sum(record.lines for record in said if isinstance(record, Missed))
    assert missed
    assert len([record for record in said if record in records]) + missed == len(records)


def test_when_there_is_room_again_the_file_goes_on_and_says_how_much_is_missing(tmp_path: Path) -> None:
    disk = Disk(room=330)
    writer = LedgerWriter(tmp_path, "w0", "host", write=disk.write)
    records = written(job_of_one(8))
    for record in records[:10]:
        writer.write(record)
    disk.room = 1 << 20
    for record in records[10:]:
        writer.write(record)
    (path,) = ledger_files(tmp_path)
    said = said_by(path)
    (missed,) = (record for record in said if isinstance(record, Missed))
    whole = [record for record in said if record in records]
    assert len(whole) + missed.lines == len(records)
    findings = check(Folder(tmp_path))
    assert not findings.is_exact
    assert "steps 2 to 3 had been applied" in findings.problems[0]


def test_a_disk_that_is_full_from_the_start_stops_nothing(tmp_path: Path) -> None:
    disk = Disk(room=0)
    writer = LedgerWriter(tmp_path, "w0", "host", write=disk.write)
    records = written(job_of_one(4))
    for record in records[:3]:
        writer.write(record)
    disk.room = 1 << 20
    for record in records[3:]:
        writer.write(record)
    (path,) = ledger_files(tmp_path)
    opened, *others = said_by(path)
    assert isinstance(opened, Opened)
    assert opened.status == HOLED
    assert Missed(3) in others


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    writer = LedgerWriter(tmp_path / "file" / "folder", "w0", "host")
    with caplog.at_level(logging.WARNING, "farandole"):
        writer.write(Missed(1))
        writer.write(Missed(1))
    assert len(caplog.messages) == 1


def test_a_line_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    writer = LedgerWriter(tmp_path, "w0", "host")
    for record in written(job_of_one(4)):
        writer.write(record)
    (path,) = ledger_files(tmp_path)
    with path.open("ab") as file:
        file.write(b'["intent",1,1,4,0,1,0,')
    assert check(Folder(tmp_path)).is_exact


def test_a_folder_without_a_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no ledger files"):
        Folder(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        Folder(tmp_path / "nowhere")


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w0-1-0000.jsonl").write_text('["opened",2,"whole","w0","host",1,0]\n')
    with pytest.raises(ConfigError, match="format 2"):
        Folder(tmp_path)
