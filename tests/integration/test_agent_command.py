"""`farandole agent` as its own process: whole jobs that it joins, and what a person may do wrong."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.job.launch.joining import token_of_job
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import check_job, farandole, farandole_run, processes_with
from tests.support.joined import AGENT, JoinedJob

SAMPLES, LONG_S = 600, 40.0


def agent(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `farandole agent` to its end."""
    return farandole("agent", *words, timeout_s=30.0)


def dies(descriptor: int) -> bool:
    """Whether the process of a pidfd is dead now, or soon."""
    ready, _, _ = select.select([descriptor], [], [], 10.0)
    os.close(descriptor)
    return bool(ready)


@contextlib.contextmanager
def listening(says: bytes = b"", hangs_up: bool = True) -> Iterator[str]:
    """A stranger's listener that says something to the first caller, and hangs up; its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                caller, _ = server.accept()
                with caller:
                    caller.sendall(says)
                    if says:
                        caller.recv(1 << 16)  # to hang up with unread bytes would reset the connection

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.timeout(120)
def test_an_agent_joins_is_killed_comes_back_and_leaves_and_nothing_is_lost(tmp_path: Path) -> None:
    flags = ["-np", "2", "--local-slots", "1", "--detection-budget", "1"]
    with JoinedJob(tmp_path, flags) as job, contextlib.ExitStack() as agents:
        first = agents.enter_context(job.agent())
        before = job.running.wait_until(all_training(2), LONG_S)
        watched = {each["pid"]: os.pidfd_open(each["pid"]) for each in before.values()}

        first.process.kill()
        job.running.wait_until(all_training(1), LONG_S)
        assert "agent b is lost with its workers (w1)" in job.said()
        (gone,) = watched.keys() - {each["pid"] for each in job.running.latest().values()}
        assert dies(watched.pop(gone)), "the worker of the killed agent lives"
        os.close(watched.popitem()[1])

        second = agents.enter_context(job.agent())
        job.running.wait_until(all_training(2), LONG_S)
        regroups = job.said().count("regrouping for")
        second.process.send_signal(signal.SIGTERM)
        assert second.wait() == 0, second.said()
        assert "this host left the job: host b is drained" in second.said()
        job.running.wait_until(all_training(1), LONG_S)
        assert job.said().count("regrouping for") == regroups, "a planned leave is no fault"
        assert job.stop() == 0, job.said()
    check_job(Proof(job.records), SAMPLES, workers_at_end=1)
    assert processes_with(str(tmp_path)) == []


@pytest.mark.timeout(120)
def test_a_stopped_agent_is_replaced_in_time_its_guard_kills_its_workers_and_it_joins_again(tmp_path: Path) -> None:
    """No slots at all on the machine of `farandole run`; two other "machines"."""
    flags = ["-np", "2", "--local-slots", "0", "--detection-budget", "0.5"]
    with JoinedJob(tmp_path, flags) as job, job.agent() as stopped, job.agent(host="c") as other:
        before = job.running.wait_until(all_training(2), LONG_S)
        watched = {each["pid"]: os.pidfd_open(each["pid"]) for each in before.values()}
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            after = job.running.wait_until(all_training(1), LONG_S)
            (gone,) = watched.keys() - {each["pid"] for each in after.values()}
            assert dies(watched.pop(gone)), "the worker of the stopped agent lives"
            os.close(watched.popitem()[1])
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        job.running.wait_until(all_training(2), LONG_S)
        assert "joining" in stopped.said()
        assert job.stop() == 0, job.said()
        assert stopped.wait() == other.wait() == 0
        assert re.search(r"^\[0\] rank 0 is through after", job.said(), re.MULTILINE), "workers' lines are forwarded"
    check_job(Proof(job.records), SAMPLES, workers_at_end=2)
    assert processes_with(str(tmp_path)) == []


@pytest.mark.timeout(60)
def test_ctrl_c_at_an_agent_that_waits_for_its_job_ends_it(tmp_path: Path) -> None:
    token_of_job(tmp_path / "token")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [*AGENT, "--join", address, "--token-file", str(tmp_path / "token")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert f"no process listens at {address}; trying again for 60 s" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20.0) == 0


@pytest.mark.timeout(60)
def test_a_second_agent_of_the_same_name_and_a_wrong_token_are_refused_and_harm_nobody(tmp_path: Path) -> None:
    token_of_job(tmp_path / "another")
    with JoinedJob(tmp_path, ["-np", "2", "--local-slots", "0"]) as job, job.agent():
        job.wait_until_said("agent b on b joined with 1 slot")
        again = agent("--join", job.address, "--token-file", str(job.token_file), "--host", "b", "--retry", "0")
        assert (again.returncode, "host b already has an agent" in again.stderr) == (1, True)
        wrong = agent("--join", job.address, "--token-file", str(tmp_path / "another"), "--host", "d")
        assert (wrong.returncode, "does not accept the token" in wrong.stderr) == (2, True)
        assert "agent b is lost" not in job.said()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--join", "127.0.0.1:29400", "--slots", "0"], "--slots must be at least 1, got 0"),
        (["--join", "somewhere"], "--join needs HOST:PORT"),
        (["--join", "127.0.0.1:99999"], "--join needs HOST:PORT"),
        (["--join", "127.0.0.1:29400", "--retry", "-1"], "--retry must be a number of seconds >= 0, got -1"),
        (["--join", "127.0.0.1:29400", "--host", "a b"], "'a b' is not a valid host name"),
        (["--join", "127.0.0.1:29400"], "the job's token is missing"),
        (["--join", "127.0.0.1:29400", "--preemption", "aws=ftp://x"], "the address must look like http://HOST:PORT"),
        (["--join", "127.0.0.1:29400", "--left-exit-code", "256"], "--left-exit-code must be between 0 and 255"),
        (["--join", "127.0.0.1:29400", "--token-file", "/no/such/file"], "/no/such/file cannot be read"),
        ([], "--join"),
    ],
)
def test_wrong_words_are_named(words: list[str], said: str) -> None:
    done = agent(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_without_a_job_is_told_with_what_is_wrong(tmp_path: Path) -> None:
    token = str(tmp_path / "token")
    token_of_job(Path(token))
    with listening(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n") as address:
        done = agent("--join", address, "--token-file", token, "--retry", "0")
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    old = b"farandol" + (1).to_bytes(2, "big") + bytes(32)
    with listening(len(old).to_bytes(4, "big") + old) as address:
        done = agent("--join", address, "--token-file", token, "--retry", "0")
        assert done.returncode == 2
        assert "uses version 1 of the protocol" in done.stderr
        assert "install the same version" in done.stderr
    done = agent("--join", "no-such-host.invalid:29400", "--token-file", token, "--retry", "0")
    assert (done.returncode, "no-such-host.invalid:29400 cannot be reached" in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--host", "192.0.2.1"], "only a loopback address such as 127.0.0.1 is possible without hosts"),
        (["--host", "0.0.0.0", "--token-file", "T"], "give the address at which other machines reach this one"),
        (["--host", "myhost", "--token-file", "T"], "--host needs a numeric address of this machine, got myhost"),
        (["--local-slots", "1"], "--local-slots needs --token-file"),
        (["--local-slots", "-1", "--token-file", "T"], "--local-slots must not be negative"),
        (["--local-slots", "1", "-H", "localhost:2", "--token-file", "T"], "--local-slots and --hosts both determine"),
        (["--host-discovery-script", "x", "--token-file", "T"], "both determine the hosts"),
    ],
)
def test_a_job_that_nobody_could_join_as_asked_is_refused(flags: list[str], said: str, tmp_path: Path) -> None:
    words = [str(tmp_path / "token") if word == "T" else word for word in flags]
    done = farandole_run("-np", "2", *words, "python", "-c", "pass")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_is_not_there_is_refused_before_the_agent_joins(tmp_path: Path) -> None:
    token = str(tmp_path / "token")
    token_of_job(Path(token))
    with listening(b"") as address:
        done = agent("--join", address, "--token-file", token, "--folder", str(tmp_path / "missing"))
    assert done.returncode == 2
    assert f"--folder {tmp_path / 'missing'}: the folder does not exist on this machine" in done.stderr
