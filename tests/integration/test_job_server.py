"""The job server of the tests: what it starts is what `python -m farandole` starts, but for the time of imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import launching
from tests.support.jobs import farandole_run
from tests.support.launching import launch

DEADLINE_S = 30.0
WORKER = """
import os, sys, tempfile, farandole as fd
already = "torch" in sys.modules
fd.init()
print(os.getcwd(), os.environ.get("FROM_A_TEST"), tempfile.gettempdir(), already, sys.argv[1:])
print("an error", file=sys.stderr)
if fd.rank() == 1:
    fd.allgather_object(None)
    fd.shutdown()
    raise SystemExit(7)
fd.allgather_object(None)
fd.shutdown()
"""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.005)


@pytest.mark.long
@pytest.mark.parametrize("fresh", [False, True])
def test_output_exit_code_environment_and_folder_are_those_of_the_job(
    fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setenv("FROM_A_TEST", "a value")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = farandole_run("-np", "2", "--restarts", "0", sys.executable, str(script), "-x", "y z", fresh=fresh)
    assert done.returncode == 7
    said = f"{tmp_path} a value {tmp_path} {not fresh} ['-x', 'y z']"
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {said}" for rank in (0, 1)]
    assert done.stderr.count("an error") >= 2
    assert "generation 1 starts" in done.stderr
    assert list(tmp_path.iterdir()) == [script]


def test_an_environment_that_is_read_by_imports_gets_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not launching.needs_imports_of_its_own()
    monkeypatch.setenv("FROM_A_TEST", "a value")
    assert not launching.needs_imports_of_its_own()
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launching.needs_imports_of_its_own()


def test_what_a_job_leaves_behind_is_told_and_ended(tmp_path: Path) -> None:
    """A worker starts a process in a session of its own, which nothing else would end."""
    os.mkfifo(tmp_path / "fifo")
    words = ["run", "-np", "1", "--", "sh", "-c", "setsid sh -c 'echo > fifo; exec sleep 987' & read x < fifo; exit 3"]
    with (
        (tmp_path / "output").open("wb") as output,
        launch(words, output, output, folder=tmp_path, gone_s=0.5) as job,
    ):
        assert job.wait(DEADLINE_S) == 3
        left = job.left()
    assert [each.partition(": ")[2].strip() for each in left] == ["sleep 987"]
    assert not Path(f"/proc/{left[0].partition(':')[0]}").exists()


def test_jobs_run_beside_each_other_and_take_signals(tmp_path: Path) -> None:
    words = ["run", "-np", "1", "--", "sh", "-c", "echo starte''d; exec sleep 987"]
    one, two = tmp_path / "one", tmp_path / "two"
    with one.open("wb") as output, launch(words, output, output) as first:
        with two.open("wb") as output, launch(words, output, output) as second:
            wait_until(lambda: all("started" in path.read_text() for path in (one, two)), "a worker has not started")
            with pytest.raises(subprocess.TimeoutExpired):
                first.wait(0.01)
            first.send_signal(signal.SIGINT)
            assert first.wait(DEADLINE_S) == 130
            assert second.poll() is None
            second.kill()
            assert second.wait(DEADLINE_S) == -signal.SIGKILL
        assert first.left() == second.left() == []


def test_a_job_server_that_was_killed_is_started_again_and_its_jobs_go_on(tmp_path: Path) -> None:
    words = ["run", "-np", "1", "--", "sh", "-c", "read x < fifo; exit 5"]
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "output").open("wb") as output, launch(words, output, output, folder=tmp_path) as job:
        assert launching._process is not None
        launching._process.kill()
        launching._process.wait()
        assert farandole_run("-np", "1", "--", "sh", "-c", "exit 4").returncode == 4
        with (tmp_path / "fifo").open("w") as fifo:
            fifo.write("go on\n")
        assert job.wait(DEADLINE_S) == 5
