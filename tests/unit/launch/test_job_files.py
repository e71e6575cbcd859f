"""The files by which commands find the jobs of a user: private, and gone with the job."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from farandole.base.env import read_runtime_folder
from farandole.base.membership import Address
from farandole.errors import ConfigError
from farandole.job.launch.job_files import JobFile, announced, born, own_namespace, read_job_file, running, shared

ADDRESS = Address("127.0.0.1", 4711)


def put(folder: Path, job: str, pid: int, born_: int | None, processes: str | None = None) -> Path:
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{job}.job"
    namespace = own_namespace() if processes is None else processes
    file = JobFile(job, pid, born_, ADDRESS, b"token", ("train.py",), 1.0, processes=namespace)
    path.write_bytes(msgspec.json.encode(file))
    path.chmod(0o600)
    return path


def test_a_job_is_found_while_it_runs_and_its_file_is_the_user_s_alone(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    file = JobFile("abc", os.getpid(), born(os.getpid()), ADDRESS, b"token", ("train.py", "--x"), 1.0)
    with announced(msgspec.structs.replace(file, processes=own_namespace()), folder) as problem:
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


def test_files_of_launchers_in_other_containers_are_passed_over_and_left_alone(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    other = put(tmp_path / "jobs", "other", child.pid, 1, processes="pid:[1]")
    assert running(tmp_path / "jobs") == []
    assert other.exists()


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
    with announced(job_file(), folder) as problem:
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


# Files on a folder that machines share --------------------------------------------------------------------------------


def job_file(job: str = "a") -> JobFile:
    return JobFile(job, 1, None, Address("h", 1), b"t" * 64, ("python",), 0.0, (Address("h", 1), Address("i", 1)))


def test_a_shared_file_is_its_owners_only_and_exists_as_long_as_the_job(tmp_path: Path) -> None:
    path = tmp_path / "new" / "job"
    with shared(path, job_file()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert read_job_file(path) == job_file()
    assert not path.exists()


def test_the_file_of_a_later_job_stays(tmp_path: Path) -> None:
    path = tmp_path / "job"
    with shared(path, job_file("a")):
        with shared(path, job_file("b")):
            assert read_job_file(path).job == "b"
            path.with_suffix(".copy").write_bytes(path.read_bytes())
        path.with_suffix(".copy").rename(path)
        path.chmod(0o600)
    assert read_job_file(path).job == "b"


def test_a_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "job"
    with pytest.raises(ConfigError, match="does not exist: the job has not started yet, or has ended"):
        read_job_file(path)
    path.write_text("{}")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"can be read by others \(mode -rw-r--r--\)"):
        read_job_file(path)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is no job file of `farandole run --job-file`"):
        read_job_file(path)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"), shared(tmp_path / "file" / "job", job_file()):
        pass
