"""Scripts for torchrun under `farandole run`: what they find, and what is said of a script that trains alone."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from farandole.base.machine import now_s
from tests.support.jobs import SCRIPTS, RunningJob, farandole, farandole_run
from tests.support.joined import AgentProcess

SCRIPT = str(SCRIPTS / "contract_job.py")
TOGETHER = "success. All workers exited with code 0."
LONE = "trained each for itself, not together with the others. All workers exited with code 0; none of them called"


def run(part: str, *words: str, workers: int = 3, options: tuple[str, ...] = ()) -> tuple[list[str], str]:
    """Run a part of the script: what each worker printed, by rank, and what was written to stderr."""
    command = ("-np", str(workers), *options, sys.executable, SCRIPT, part, *words)
    done = farandole_run(*command, timeout_s=110)
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"RESULT (-?\d+) (.*)", done.stdout))
    return [found[str(rank)] for rank in range(workers)], done.stderr


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = now_s() + 60
    while not condition():
        assert now_s() < deadline_s
        time.sleep(0.01)


def free_ports(number: int) -> list[str]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def test_each_worker_finds_torchrun_s_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": "1", "TORCHELASTIC_ERROR_FILE": "x"}.items():
        monkeypatch.setenv(name, value)
    results, _ = run("variables")
    assert results == [f"{rank} {rank} 3 3 0 1 default {rank} 3 127.0.0.1 0 0 True" for rank in range(3)]


def test_hosts_are_groups() -> None:
    results, _ = run("variables", options=("-H", "localhost:2,127.0.0.1:1"))
    assert results == [
        "0 0 3 2 0 2 default 0 3 127.0.0.1 0 0 True",
        "1 1 3 2 0 2 default 1 3 127.0.0.1 0 0 True",
        "2 0 3 1 1 2 default 2 3 127.0.0.1 0 0 True",
    ]


def test_workers_of_another_agent_reach_the_store(tmp_path: Path) -> None:
    token, log = tmp_path / "token", tmp_path / "log"
    flags = ["-np", "2", "--local-slots", "1", "--token-file", str(token)]
    with RunningJob(flags, Path(SCRIPT), ["nanogpt"], tmp_path, log) as job:
        wait_for(lambda: "--join " in log.read_text())
        address = log.read_text().split("--join ")[1].split()[0]
        with AgentProcess(address, token, tmp_path / "agent", flags=["--slots", "1"]) as agent:
            assert job.wait(90) == 0, log.read_text()
            assert agent.wait() == 0
    results = re.findall(r"RESULT (\d) ddp=True (\S+)", log.read_text())
    assert sorted(rank for rank, _ in results) == ["0", "1"]
    assert len({weight for _, weight in results}) == 1


def test_groups_of_gloo_with_eight_workers() -> None:
    results, stderr = run("groups", workers=8)
    assert results == ["36.0 4.0 [36.0, 36.0, 36.0]"] * 4 + ["36.0 1.0 [36.0, 36.0, 36.0]"] * 4
    assert stderr.strip().endswith(TOGETHER)


def test_a_script_that_asks_for_rank_trains_together() -> None:
    results, stderr = run("nanogpt")
    assert len(set(results)) == 1
    assert results[0].startswith("ddp=True")
    assert stderr.strip().endswith(TOGETHER)
    assert "alone" not in stderr


@pytest.mark.long
@pytest.mark.parametrize("framework", ["accelerate", "lightning"])
def test_frameworks_train_together_unchanged(framework: str) -> None:
    results, stderr = run(framework, workers=2)
    assert results[0] == results[1]
    assert results[0].startswith("2 3 ")
    assert stderr.strip().endswith(TOGETHER)


def test_a_lost_worker_of_gloo_ends_the_job_at_once() -> None:
    done = farandole_run("-np", "2", sys.executable, SCRIPT, "dies", timeout_s=110)
    assert done.returncode == 1
    assert "The workers train in a process group of torch.distributed, which cannot continue without it" in done.stderr


def test_the_backend_needs_no_import_under_farandole_run() -> None:
    results, _ = run("ours")
    assert results == [f"[(3, {rank}, 6.0), (3, {rank}, 6.0), (3, {rank}, 6.0)]" for rank in range(3)]


@pytest.mark.long
def test_the_backend_needs_no_import_under_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, SCRIPT, "ours"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "RESULT 0 [(2, 0, 3.0), (2, 0, 3.0), (2, 0, 3.0)]" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("backend", ["farandole", "cpu:farandole", "cuda:farandole,cpu:farandole"])
def test_the_backend_needs_no_environment_whichever_devices_are_named(backend: str) -> None:
    code = f"import torch.distributed as d; d.init_process_group({backend!r}); print(d.get_rank(), d.get_world_size())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 1\n", done.stderr


def test_a_script_may_use_a_port_of_its_own() -> None:
    results, _ = run("own_port", *free_ports(2), workers=2)
    assert results == ["3.0 3.0 True"] * 2


def test_workers_that_train_alone_are_told_of_at_once_and_at_the_end() -> None:
    results, stderr = run("alone")
    assert len(set(results)) == 3
    for rank in range(3):
        assert f"farandole: rank {rank} of 3 has made an optimizer step and has not met the other workers" in stderr
    assert "w0 trains alone" in stderr
    *_, last = stderr.strip().splitlines()
    assert last.startswith(f"[farandole] 3 workers {LONE}")
    assert "success" not in stderr


def test_what_was_said_of_a_worker_is_withdrawn_when_it_meets_the_others() -> None:
    results, stderr = run("late")
    assert results == ["6.0"] * 3
    for rank in range(3):
        assert f"farandole: rank {rank} of 3 meets the others now" in stderr
    assert len(re.findall(r"w\d has met the other workers now", stderr)) == len(re.findall(r"w\d trains alone", stderr))
    assert stderr.strip().endswith(TOGETHER)


@pytest.mark.parametrize(("part", "workers"), [("alone", 1), ("evaluate", 2)])
def test_one_worker_and_an_evaluation_are_no_lone_training(part: str, workers: int) -> None:
    _, stderr = run(part, workers=workers)
    assert "trains alone" not in stderr
    assert "optimizer step" not in stderr
    assert stderr.strip().endswith("success. All workers exited with code 0; none of them called init().")


def test_shell_commands_are_judged_by_their_exit_codes_alone() -> None:
    done = farandole_run("-np", "2", "true", fresh=True)
    assert done.stderr.strip().endswith("success. All workers exited with code 0; none of them called init().")


def test_the_exit_code_and_the_lone_training_are_both_told(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nimport contract_job\ncontract_job.train()\n1 / 0"
    )
    done = farandole_run("-np", "2", sys.executable, str(script))
    assert done.returncode == 1
    assert re.search(r"failed \(exit code 1\), and [12] workers? trained (each )?for itself", done.stderr)


def test_misuse_is_an_error_at_once() -> None:
    results, _ = run("misuse", workers=2)
    wrong_size, wrong_rank, unknown, twice, forked, whole = results[0].split(" | ")
    assert wrong_size.startswith("ConfigError: init_process_group(rank=0, world_size=3): this is rank 0 of 2")
    assert wrong_rank.startswith("ConfigError: init_process_group(rank=1, world_size=2): this is rank 0 of 2")
    assert "farandoles" in unknown
    assert twice == "trying to initialize the default process group twice!"
    assert forked.startswith("StepError: ")
    assert whole == "3.0"


def test_misuse_of_other_backends_is_torch_s_error_and_a_size_that_cannot_be_is_told_of_before_torch_waits() -> None:
    results, stderr = run("misuse_of_gloo", workers=2)
    unknown, too_large, twice, whole = results[0].split(" | ")
    assert "glooo" in unknown.lower()
    assert too_large.startswith("DistStoreError: ")
    assert "farandole: init_process_group(world_size=3) in a job of 2 workers: unless the script starts" in stderr
    assert twice == "trying to initialize the default process group twice!"
    assert whole == "3.0"


@pytest.mark.long
@pytest.mark.parametrize("launch", ["run", "torchrun"])
def test_a_group_of_gloo_that_only_one_rank_opens_is_told_of_and_ends_with_torch_s_timeout(launch: str) -> None:
    words = ("-np", "2", sys.executable) if launch == "run" else ("--nproc-per-node", "2")
    done = farandole(launch, *words, SCRIPT, "one_rank", "gloo", timeout_s=110)
    assert done.returncode == 1
    assert "ended with exit code 0 without torch.distributed.init_process_group(): w1; called it: w0" in done.stderr
    assert "DistStoreError" in done.stderr


def test_our_group_that_only_one_rank_opens_ends_the_job_at_once() -> None:
    done = farandole_run("-np", "2", sys.executable, SCRIPT, "one_rank", "farandole", timeout_s=110)
    assert done.returncode == 1
    assert "w0 waits in init(), but w1 exited with code 0 without calling it" in done.stderr


@pytest.mark.long
def test_import_torch_loads_little_and_only_the_installed_package_is_asked() -> None:
    (entry,) = [each for each in entry_points(group="torch.backends") if each.name == "farandole"]
    assert entry.value == "farandole.integrations.torchrun.process_group.autoload:load"
    code = "import sys, torch; print(sorted(name for name in sys.modules if name.startswith(('farandole', 'msgspec'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    folder = "farandole.integrations.torchrun.process_group"
    parents = ["farandole", "farandole.integrations", "farandole.integrations.torchrun"]
    assert done.stdout.strip() == str([*parents, folder, f"{folder}.autoload"])
    off = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=off, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"
