"""Workers compute with their share of the host's cores, whoever starts them, unless the user says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import farandole as fd
from farandole.base.machine import affinity_cores
from tests.support.jobs import farandole_run
from tests.support.joined import AGENT

pytestmark = pytest.mark.long

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
TELL = """
import os, torch
print([os.environ.get("OMP_NUM_THREADS"), os.environ.get("MKL_NUM_THREADS"), torch.get_num_threads()])
"""
TELL_SETTINGS = """
import os
print([os.environ.get("OMP_NUM_THREADS"), os.environ.get("MKL_NUM_THREADS")])
"""
SHARED = "(OMP_NUM_THREADS=1; set it yourself to change that)"
CORES = affinity_cores()
MANY = CORES + 1  # workers: each has one thread


@pytest.fixture(autouse=True)
def the_user_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "tell.py"
    path.write_text(TELL)
    return str(path)


@pytest.fixture
def settings_script(tmp_path: Path) -> str:
    """A script without torch: what torch makes of the settings is the same for all who start it."""
    path = tmp_path / "tell_settings.py"
    path.write_text(TELL_SETTINGS)
    return str(path)


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [line.split("] ", 1)[1] for line in done.stdout.splitlines()]


def alone(script: str) -> str:
    """What the script says without a launcher."""
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60.0, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("fork_server", ["off", "on"])
def test_workers_share_the_cores_and_it_is_said_once(script: str, fork_server: str) -> None:
    done = farandole_run(
        "-np", str(MANY), "--fork-server", fork_server, sys.executable, script, timeout_s=110, fresh=True
    )
    assert told(done) == ["['1', None, 1]"] * MANY
    assert done.stderr.count(SHARED) == 1
    assert f"{MANY} workers may share {CORES} cores: each computes with 1 thread" in done.stderr


@pytest.mark.parametrize(("name", "fork_server"), [("OMP_NUM_THREADS", "off"), ("MKL_NUM_THREADS", "on")])
def test_a_setting_of_the_users_is_left_alone(
    script: str, monkeypatch: pytest.MonkeyPatch, name: str, fork_server: str
) -> None:
    """Workers are as `python tell.py` is. Two of them are enough for the cores to be shared without the setting."""
    monkeypatch.setenv(name, str(CORES))
    words = ["-np", "2", "--fork-server", fork_server]
    done = farandole_run(*words, sys.executable, script, timeout_s=110, fresh=True)
    assert told(done) == [alone(script)] * 2
    assert "set it yourself to change that" not in done.stderr


def test_what_a_script_sets_itself_counts(tmp_path: Path) -> None:
    path = tmp_path / "sets.py"
    path.write_text("import torch; torch.set_num_threads(7); print(torch.get_num_threads())")
    assert told(farandole_run("-np", "2", sys.executable, str(path), fresh=True)) == ["7"] * 2


def test_one_worker_has_all_the_cores(script: str) -> None:
    done = farandole_run("-np", "1", sys.executable, script, fresh=True)
    assert told(done) == [alone(script)]
    assert SHARED not in done.stderr


def test_one_worker_leaves_room_for_those_that_may_come_later(settings_script: str) -> None:
    done = farandole_run("-np", "1", "--max-np", str(MANY), sys.executable, settings_script, fresh=True)
    assert told(done) == ["['1', None]"]


def test_hosts_that_are_all_this_machine_share_its_cores(settings_script: str) -> None:
    done = farandole_run(
        "-np", str(MANY), "-H", f"localhost:{CORES},127.0.0.1:1", sys.executable, settings_script, fresh=True
    )
    assert told(done) == ["['1', None]"] * MANY


def test_a_function_is_run_with_its_share() -> None:
    def threads() -> tuple[str | None, int]:
        import torch

        return os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()

    assert fd.run(threads, num_proc=MANY) == [("1", 1)] * MANY
    assert fd.run(threads, num_proc=2, env={"OMP_NUM_THREADS": str(CORES)}) == [(str(CORES), CORES)] * 2


def test_an_agent_shares_the_cores_of_its_machine_among_its_slots(tmp_path: Path, settings_script: str) -> None:
    token, address = tmp_path / "token", "127.0.0.1:0"
    command = [sys.executable, "-m", "farandole", "run", "-np", str(MANY), "--token-file", str(token)]
    with subprocess.Popen(
        [*command, "--local-slots", "0", sys.executable, settings_script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stderr is not None
        for line in job.stderr:
            if "--join " in line:
                address = line.split("--join ")[1].split()[0]
                break
        words = ["--join", address, "--token-file", str(token), "--slots", str(MANY)]
        agent = subprocess.run([*AGENT, *words], capture_output=True, text=True, timeout=60.0)
        out, err = job.communicate(timeout=60.0)
    assert (job.returncode, agent.returncode) == (0, 0), err
    assert [line.split("] ", 1)[1] for line in out.splitlines()] == ["['1', None]"] * MANY
    assert agent.stderr.count(SHARED) == 1
    assert SHARED not in err, "no worker is on the machine of `farandole run`"
