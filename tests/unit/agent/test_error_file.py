"""Error files as torch's `@record` and others write them, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.job.agent.worker_files import LONGEST_ERROR_FILE_BYTES, ErrorFiles, read_error_file


def written(folder: Path, content: object) -> Path:
    path = folder / "error.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_an_exception_of_record_is_read_with_its_traceback_and_time(tmp_path: Path) -> None:
    more = {"py_callstack": "Traceback ...\nValueError: bad", "timestamp": "1700000000"}
    error = read_error_file(written(tmp_path, {"message": {"message": "ValueError: bad", "extraInfo": more}}))
    assert error is not None
    assert (error.message, error.time_s) == ("ValueError: bad", 1700000000)
    assert error.traceback.startswith("Traceback")
    assert error.file == str(tmp_path / "error.json")


def test_the_file_is_that_which_torch_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def train() -> None:
        raise ValueError("bad batch")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(ValueError, match="bad batch"):
        train()
    error = read_error_file(tmp_path / "error.json")
    assert error is not None
    assert error.message == "ValueError: bad batch"
    assert error.time_s > 0
    assert "in train" in error.traceback


def test_a_plain_message_is_read_too(tmp_path: Path) -> None:
    error = read_error_file(written(tmp_path, {"message": "out of memory", "timestamp": 5}))
    assert error is not None
    assert (error.message, error.traceback, error.time_s) == ("out of memory", "", 5)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", '{"message": 3}', '{"other": 1}', " " * (LONGEST_ERROR_FILE_BYTES + 1)],
    ids=["empty", "cut", "list", "number", "no text", "no message", "too long"],
)
def test_a_damaged_file_is_no_error(tmp_path: Path, content: str) -> None:
    assert read_error_file(written(tmp_path, content)) is None


def test_a_time_that_is_none_is_unknown(tmp_path: Path) -> None:
    error = read_error_file(written(tmp_path, {"message": {"message": "x", "extraInfo": {"timestamp": "soon"}}}))
    assert error is not None
    assert error.time_s == 0


def test_files_that_last_lie_where_torchrun_puts_them_and_an_old_one_is_removed(tmp_path: Path) -> None:
    files = ErrorFiles(tmp_path, lasts=True)
    path = files.prepare("w3", attempt=1, rank=0)
    assert path == tmp_path / "attempt_1" / "0" / "error.json"
    written(path.parent, {"message": "old"})
    assert files.take("w3") is not None
    assert files.prepare("w4", attempt=1, rank=0) == path
    assert not path.exists()
    assert files.take("w4") is None


def test_an_error_names_its_file_only_where_the_file_lasts(tmp_path: Path) -> None:
    for lasts in (True, False):
        files = ErrorFiles(tmp_path, lasts)
        path = files.prepare("w3", attempt=0, rank=0)
        assert path is not None
        written(path.parent, {"message": "out of memory"})
        error = files.take("w3")
        assert error is not None
        assert (error.message, error.file) == ("out of memory", str(path) if lasts else "")


def test_two_living_workers_never_share_a_file(tmp_path: Path) -> None:
    files = ErrorFiles(tmp_path, lasts=True)
    assert files.prepare("w2", attempt=0, rank=2) != files.prepare("w3", attempt=0, rank=2)


def test_a_worker_runs_without_the_file_where_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    files = ErrorFiles(tmp_path / "taken", lasts=False)
    assert files.prepare("w0", attempt=0, rank=0) is None
    assert files.take("w0") is None
