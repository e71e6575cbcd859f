"""`farandole torchrun` with real processes: restarts of all workers, error files, logs, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.jobs import ELASTIC_JOB, SCRIPTS, farandole, processes_with

PLAIN = str(SCRIPTS / "plain_training.py")
TIMEOUT_S = 240.0


def torchrun(*words: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    return farandole("torchrun", *words, timeout_s=TIMEOUT_S, fresh=fresh)


def seen(folder: Path) -> dict[tuple[int, int], dict[str, object]]:
    """What the workers wrote, by attempt and rank."""
    every = [json.loads(path.read_text()) for path in folder.glob("attempt*.rank*")]
    return {(each["attempt"], each["rank"]): each for each in every}


def test_a_kill_starts_all_workers_again_with_the_same_ranks_in_the_next_attempt(tmp_path: Path) -> None:
    done = torchrun("--nproc-per-node=3", "--max-restarts=2", PLAIN, str(tmp_path), "kill:1:0")
    assert done.returncode == 0, done.stderr
    workers = seen(tmp_path)
    assert sorted(workers) == [(attempt, rank) for attempt in (0, 1) for rank in (0, 1, 2)]
    assert {each["size"] for each in workers.values()} == {3}
    assert len({each["pid"] for each in workers.values()}) == 6
    assert "restarting all 3 workers (attempt 2 of 3): w1 (slot 1) was killed by SIGKILL (signal 9)" in done.stderr
    assert "1 restart of all workers" in done.stderr
    assert "rank 0 of 3, attempt 1" in done.stdout.splitlines()


def test_when_all_restarts_are_used_up_the_job_fails_with_torchrun_s_code(tmp_path: Path) -> None:
    done = torchrun("--nproc-per-node=2", "--max-restarts=2", PLAIN, str(tmp_path), "exit7:0:*")
    assert done.returncode == 1
    assert {attempt for attempt, _ in seen(tmp_path)} == {0, 1, 2}
    assert "attempt 3 of 3 (--max-restarts)" in done.stderr
    assert "failed (exit code 1). w4 (slot 0) exited with code 7" in done.stderr
    assert "exitcode  : 7 (pid: " in done.stderr
    assert "plain_training.py FAILED" in done.stderr


def test_without_restarts_the_first_failure_ends_the_job(tmp_path: Path) -> None:
    done = torchrun("--nproc-per-node=2", PLAIN, str(tmp_path), "kill:1:0")
    assert done.returncode == 1
    assert len(seen(tmp_path)) == 2
    assert "Signal 9 (SIGKILL) received by PID" in done.stderr


def test_a_worker_that_is_done_is_started_again_when_another_one_fails(tmp_path: Path) -> None:
    done = torchrun("--nproc-per-node=2", "--max-restarts=1", PLAIN, str(tmp_path), "late:0:0", "exit7:1:0")
    assert done.returncode == 0, done.stderr
    assert (1, 0) in seen(tmp_path)


def test_an_exception_in_record_is_the_root_cause_with_its_traceback(tmp_path: Path) -> None:
    done = torchrun("--nproc-per-node=2", PLAIN, str(tmp_path), "record:1:0")
    assert done.returncode == 1
    root = done.stderr.partition("Root Cause (first observed failure):")[2]
    assert "rank      : 1 (local_rank: 1)" in root
    assert "ValueError: bad batch" in root
    assert "in fail" in root
    assert not Path(str(seen(tmp_path)[0, 1]["error_file"])).exists()  # removed with the job


def test_logs_and_error_files_lie_where_torchrun_puts_them(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    done = torchrun(
        *("--nproc-per-node=2", "--max-restarts=1", "--rdzv-id=job7", f"--log-dir={logs}", "-r", "1", "-t", "2"),
        *(PLAIN, str(tmp_path), "record:0:*"),
    )
    assert done.returncode == 1
    [run] = logs.iterdir()
    assert run.name.startswith("job7_")
    for attempt in (0, 1):
        for rank in (0, 1):
            text = (run / f"attempt_{attempt}" / str(rank) / "stdout.log").read_text()
            assert text == f"rank {rank} of 2, attempt {attempt}\n"
        assert "ValueError: bad batch" in (run / f"attempt_{attempt}" / "0" / "stderr.log").read_text()
        assert "bad batch" in (run / f"attempt_{attempt}" / "0" / "error.json").read_text()
    assert "rank 0 of 2" not in done.stdout
    assert "[default0]:ValueError: bad batch" in done.stderr


def test_a_script_with_an_elastic_function_loses_one_worker_and_restarts_nobody_else(tmp_path: Path) -> None:
    words = ("--records", str(tmp_path), "--raise-once", str(tmp_path / "raised"))
    done = torchrun("--nproc-per-node=2", "--max-restarts=1", str(ELASTIC_JOB), *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "raised").exists()
    assert "restarting all" not in done.stderr
    assert "1 worker lost" in done.stderr
    assert "2 workers finished the training" in done.stderr


def test_a_module_and_a_program_are_started_as_by_torchrun(tmp_path: Path) -> None:
    done = torchrun("--nproc-per-node=2", "-m", "tests.scripts.plain_training", str(tmp_path), "-m")
    assert done.returncode == 0, done.stderr
    assert seen(tmp_path)[0, 1]["arguments"] == [str(tmp_path), "-m"]
    assert seen(tmp_path)[0, 1]["threads"] == os.environ.get("OMP_NUM_THREADS", "1")
    program = tmp_path / "train.sh"
    program.write_text('#!/bin/sh\necho "program of rank $HOROVOD_RANK: $1"\n')
    program.chmod(0o755)
    done = torchrun("--nproc-per-node=2", "--no-python", str(program), "--epochs=3", fresh=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"program of rank {rank}: --epochs=3" for rank in (0, 1)]


def test_a_script_that_does_not_exist_is_refused_before_anything_is_started() -> None:
    done = torchrun("--nproc-per-node=2", "there-is-no-such.py")
    assert done.returncode == 2
    assert "there-is-no-such.py: no such file" in done.stderr


@pytest.mark.parametrize("attempt", [0, 1], ids=["in the first attempt", "after a restart"])
def test_ctrl_c_leaves_nothing(tmp_path: Path, attempt: int) -> None:
    plans = ["wait:9:1", "exit7:1:0"] if attempt else ["wait:9:0"]
    command = [sys.executable, "-m", "farandole", "torchrun", "--nproc-per-node=2", "--max-restarts=1"]
    with (tmp_path / "output").open("wb") as output:
        job = subprocess.Popen(
            [*command, "--fork-server=off", PLAIN, str(tmp_path), *plans, f"mark{os.getpid()}"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline_s = time.monotonic() + TIMEOUT_S
            while not {(attempt, 0), (attempt, 1)} <= seen(tmp_path).keys():
                assert time.monotonic() < deadline_s, "the workers never started"
                time.sleep(0.05)
            job.send_signal(signal.SIGINT)
            assert job.wait(TIMEOUT_S) == 130
        finally:
            job.kill()
    assert processes_with(f"mark{os.getpid()}") == []


def run_two_nodes(tmp_path: Path, addresses: list[list[str]], script: list[str]) -> list[str]:
    """Run a job of two nodes with two workers each, with these arguments for each node; return what the nodes print."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    common = ["--nnodes=2", "--nproc-per-node=2", "--max-restarts=1", "--fork-server=off"]
    common += [f"--rdzv-conf=token_file={token},join_timeout=200"]
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "farandole", "torchrun", *common, *address, *script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for address in addresses
    ]
    try:
        outputs = [node.communicate(timeout=TIMEOUT_S)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    return outputs


def test_two_nodes_are_one_job_with_the_ranks_of_their_numbers(tmp_path: Path) -> None:
    address = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    outputs = run_two_nodes(
        tmp_path,
        [[*address, "--node-rank=1"], [*address, "--node-rank=0"]],
        [PLAIN, str(tmp_path), "kill:3:0"],
    )
    workers = seen(tmp_path)
    assert sorted(workers) == [(attempt, rank) for attempt in (0, 1) for rank in range(4)]
    assert {each["size"] for each in workers.values()} == {4}
    assert "restarting all 4 workers (attempt 2 of 2): w3" in outputs[1]


def test_with_c10d_one_node_that_has_the_address_runs_the_coordinator_and_the_other_joins(tmp_path: Path) -> None:
    address = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    outputs = run_two_nodes(tmp_path, [address, address], [PLAIN, str(tmp_path)])
    assert sorted(seen(tmp_path)) == [(0, rank) for rank in range(4)]
    assert sorted("joined job" in output for output in outputs) == [False, True]


def test_a_node_that_comes_later_makes_the_job_larger(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    command = [sys.executable, "-m", "farandole", "torchrun", "--nnodes=1:2", "--fork-server=off"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    command += [f"--rdzv-conf=token_file={token},last_call_timeout=0.1", PLAIN, str(tmp_path), "wait:9:0"]
    deadline_s = time.monotonic() + TIMEOUT_S
    with (tmp_path / "output").open("wb") as output:
        nodes = [subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)]
        try:
            while (0, 0) not in seen(tmp_path):
                assert time.monotonic() < deadline_s, "the first worker never started"
                time.sleep(0.05)
            nodes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
            assert [node.wait(TIMEOUT_S) for node in nodes] == [0, 0], (tmp_path / "output").read_text()
        finally:
            for node in nodes:
                node.kill()
    workers = seen(tmp_path)
    assert {place: each["size"] for place, each in workers.items()} == {(0, 0): 1, (1, 0): 2, (1, 1): 2}
    assert "there are slots for 2 instead of 1" in (tmp_path / "output").read_text()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
