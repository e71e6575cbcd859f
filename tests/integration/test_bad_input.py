"""What a person, a script or a stranger may do wrong: each a clear error, and never a traceback of ours."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from farandole.testing.running_job import all_training
from tests.support.jobs import ELASTIC_JOB, RunningJob, farandole_run


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def test_a_script_that_does_not_exist_is_refused_before_anything_starts() -> None:
    done = farandole_run("-np", "2", "python", "no_such_script.py")
    assert done.returncode == 2
    assert "no_such_script.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_that_does_not_exist_is_refused_before_anything_starts() -> None:
    done = farandole_run("-np", "2", "no-such-program", "x")
    assert done.returncode == 2
    assert "no-such-program" in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-n", "0"], "-np must be at least 1"),
        (["-np", "2", "--min-np", "3", "--max-np", "2"], "--min-np 3"),
        (["-np", "2", "--min-np", "0"], "--min-np must be at least 1"),
        (["-np", "two"], "two"),
        (["-np", "2", "--restarts", "-1"], "--restarts"),
        (["-np", "2", "--elastic-timeout", "0"], "--elastic-timeout"),
        (["-np", "2", "--no-such-flag"], "--no-such-flag"),
        ([], "-np"),
    ],
)
def test_wrong_flags_are_named_with_their_values(flags: list[str], said: str) -> None:
    done = farandole_run(*flags, sys.executable, "-c", "pass")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_that_raises_at_once_shows_its_traceback_once(script) -> None:
    done = farandole_run("-np", "3", sys.executable, script("def f():\n    raise ValueError('no good')\nf()\n"))
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "ValueError: no good" in done.stderr


def test_a_script_that_raises_after_init_shows_its_traceback_once(script) -> None:
    text = "import farandole as fd\nfd.init()\nraise ValueError('no good')\n"
    done = farandole_run("-np", "3", sys.executable, script(text))
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "ValueError: no good" in done.stderr


def test_an_exception_on_all_workers_of_an_elastic_function_ends_the_job_without_restarts(script) -> None:
    text = """
import farandole as fd
fd.init()
@fd.elastic.run
def train(state):
    raise KeyError("the same everywhere")
train(fd.elastic.TorchState())
"""
    done = farandole_run("-np", "2", sys.executable, script(text))
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "the same everywhere" in done.stderr.splitlines()[-1]


def test_a_script_that_never_calls_init_just_runs_on_every_worker(script) -> None:
    done = farandole_run("-np", "2", sys.executable, script("print('hello')\n"))
    assert done.returncode == 0
    assert done.stdout.count("hello") == 2


def test_a_worker_that_never_calls_init_is_named_when_the_time_is_up(script) -> None:
    text = """
import os, time
import farandole as fd
if os.environ["FARANDOLE_SLOT"] == "1":
    time.sleep(60)
fd.init()
"""
    done = farandole_run("-np", "2", "--start-timeout", "1", "--grace", "1", sys.executable, script(text))
    assert done.returncode == 1
    assert "slot 1" in done.stderr
    assert "init()" in done.stderr


def test_a_worker_that_ends_without_init_while_others_wait_is_named_at_once(script) -> None:
    text = """
import os
import farandole as fd
if os.environ["FARANDOLE_SLOT"] == "0":
    fd.init()
"""
    done = farandole_run("-np", "2", sys.executable, script(text))
    assert done.returncode == 1
    assert "without calling it" in done.stderr


def test_a_static_script_ends_with_the_death_of_one_worker_and_says_why(script) -> None:
    text = """
import os, signal, time
import farandole as fd
fd.init()
if fd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    done = farandole_run("-np", "2", "--grace", "1", sys.executable, script(text))
    assert done.returncode == 1
    assert "SIGKILL" in done.stderr
    assert "elastic function" in done.stderr


def test_the_exit_code_of_a_static_script_is_the_jobs(script) -> None:
    done = farandole_run("-np", "2", sys.executable, script("import farandole as fd\nfd.init()\nraise SystemExit(7)\n"))
    assert done.returncode == 7


def test_flags_of_the_users_script_are_never_touched(script) -> None:
    text = "import sys\nprint(sys.argv[1:])\n"
    done = farandole_run("-np", "1", sys.executable, script(text), "-np", "5", "--min-np", "--help", "--", "-v")
    assert done.returncode == 0
    assert "['-np', '5', '--min-np', '--help', '--', '-v']" in done.stdout


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = farandole_run("-np", "1", "--port", str(port), sys.executable, "-c", "pass")
    assert done.returncode == 2
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr


def test_other_addresses_than_loopback_are_refused() -> None:
    done = farandole_run("-np", "1", "--host", "0.0.0.0", sys.executable, "-c", "pass")
    assert done.returncode == 2
    assert "0.0.0.0" in done.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_random_bytes_and_a_wrong_token_on_the_port_leave_the_running_job_unharmed(tmp_path: Path) -> None:
    port = free_port()
    flags = ["-np", "2", "--port", str(port)]
    with RunningJob(flags, ELASTIC_JOB, ["--epochs", "40"], tmp_path, tmp_path / "output") as job:
        job.wait_until(all_training(2), 60)
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"\xff" * 5000, b""):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
                stranger.sendall(garbage)
        assert job.wait(60) == 0
    from farandole.testing.proof import Proof

    assert set(Proof(tmp_path).generations()) == {1}


def test_a_second_elastic_function_is_refused_with_a_reason(script) -> None:
    text = """
import farandole as fd
fd.init()
@fd.elastic.run
def train(state):
    return 1
train(fd.elastic.TorchState())
train(fd.elastic.TorchState())
"""
    done = farandole_run("-np", "2", sys.executable, script(text))
    assert done.returncode == 1
    assert "second elastic function" in done.stderr
