"""The files by which commands find the jobs of a user: private, and gone with the job."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from farandole.env import read_runtime_folder
from farandole.errors import ConfigError
from farandole.launch.job_files import JobFile, announced, born, running
from farandole.membership import Address

ADDRESS = Address("127.0.0.1", 4711)


def put(folder: Path, job: str, pid: int, born_: int | None) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{job}.job"
    file = JobFile(job, pid, born_, ADDRESS, b"token", ("train.py",), 1.0)
    path.write_bytes(msgspec.json.encode(file))
    path.chmod(0o600)
    return path


def test_a_job_is_found_while_it_runs_and_its_file_is_the_user_s_alone(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    with announced("abc", ADDRESS, b"token", ["train.py", "--x"], folder) as problem:
        assert problem == ""
        (found,) = running(folder)
        assert (found.job, found.pid, found.coordinator) == ("abc", os.getpid(), ADDRESS)
        assert (found.token, found.command) == (b"token", ("train.py", "--x"))
        (path,) = folder.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []
    assert running(folder) == []


def test_files_of_launchers_that_are_gone_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    gone = put(folder, "gone", child.pid, 1)
    reused = put(folder, "reused", os.getpid(), (born(os.getpid()) or 0) - 1)
    put(folder, "here", os.getpid(), born(os.getpid()))
    assert [file.job for file in running(folder)] == ["here"]
    assert not gone.exists()
    assert not reused.exists()


def test_what_is_no_job_file_is_passed_over_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir(mode=0o700)
    strange = folder / "x.job"
    strange.write_text("{}")
    assert running(folder) == []
    assert strange.exists()


def test_a_folder_that_others_may_use_is_refused_and_the_job_runs_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="not a private folder of this user"):
        running(folder)
    with announced("abc", ADDRESS, b"token", [], folder) as problem:
        assert "XDG_RUNTIME_DIR" in problem
    assert list(folder.iterdir()) == []


def test_a_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    (tmp_path / "jobs").symlink_to(real)
    with pytest.raises(ConfigError):
        running(tmp_path / "jobs")


def test_the_folder_is_the_system_s_for_the_user_or_one_in_tmp() -> None:
    assert read_runtime_folder({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/farandole")
    for environ in ({}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "relative"}):
        assert read_runtime_folder(environ) == Path(f"/tmp/farandole-{os.geteuid()}")
