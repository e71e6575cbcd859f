"""Faults of one host that no other file has, in whole jobs: each is survived, and every sample trained once."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import ELASTIC_JOB, RunningJob, check_job

SAMPLES = 600
STEPS = 50  # of an epoch
BUDGET_S = 1.0
CGROUPS = Path("/sys/fs/cgroup/memory")


def endless(folder: Path, flags: list[str], *arguments: str) -> RunningJob:
    words = ["--epochs", "1000000", "--stop", str(folder / "stop"), *arguments]
    return RunningJob([*flags, "--restarts", "20"], ELASTIC_JOB, words, folder, folder / "output")


def finish(running: RunningJob, size: int) -> str:
    """Let the job end, and prove it exact; what it said."""
    (running.folder / "stop").touch()
    code = running.wait(60)
    said = (running.folder / "output").read_text()
    assert code == 0, said
    check_job(Proof(running.folder), samples=SAMPLES, workers_at_end=size)
    return said


def trains_without(pids: set[int], size: int) -> Callable[[dict[int, dict[str, Any]]], bool]:
    """Whether `size` workers train, none of them one of these."""

    def condition(latest: dict[int, dict[str, Any]]) -> bool:
        return all_training(size)(latest) and pids.isdisjoint(record["pid"] for record in latest.values())

    return condition


def in_the_last_step_of_an_epoch(latest: dict[int, dict[str, Any]]) -> bool:
    begun = any(record.get("before", 0) % STEPS == STEPS - 1 for record in latest.values())
    return all_training(3)(latest) and begun


def test_segfault_in_the_last_step_of_an_epoch_stop_and_two_deaths_at_once_are_survived(tmp_path: Path) -> None:
    with endless(tmp_path, ["-np", "3", "--detection-budget", f"{BUDGET_S:g}"], "--item-ms", "1") as running:
        running.wait_until(all_training(3), 60)
        latest = running.wait_until(in_the_last_step_of_an_epoch, 60)
        for numbers in ({1: signal.SIGSEGV}, {2: signal.SIGSTOP}, {0: signal.SIGKILL, 1: signal.SIGKILL}):
            lost_members = {latest[rank]["pid"] for rank in numbers}
            for rank, number in numbers.items():
                running.kill(latest[rank]["pid"], number)
            latest = running.wait_until(trains_without(lost_members, 3), 60)
        said = finish(running, 3)
    assert "SIGSEGV (signal 11)" in said
    assert f"was stopped by a signal for {BUDGET_S:g} s; it is killed" in said
    assert "4 joined" in said
    assert Proof(tmp_path).redone() <= 4


def test_a_worker_that_holds_its_interpreter_for_longer_than_the_budget_is_slow_and_not_lost(tmp_path: Path) -> None:
    """The others wait at their connections, and probe it; its kernel answers."""
    slow = tmp_path / "slow"
    flags = ["-np", "2", "--detection-budget", f"{BUDGET_S:g}", "--transport", "tcp"]
    with endless(tmp_path, flags, "--hold", str(slow)) as running:
        latest = running.wait_until(all_training(2), 60)
        slow.with_suffix(".new").write_text(str(latest[1]["pid"]))
        slow.with_suffix(".new").rename(slow)
        running.wait_until(lambda _: not slow.exists(), 60)
        step = max(record.get("after", 0) for record in running.latest().values())
        running.wait_until(lambda now: all(record.get("after", 0) > step + 5 for record in now.values()), 60)
        finish(running, 2)
    proof = Proof(tmp_path)
    assert set(proof.generations()) == {1}
    applied = sorted(r["ns"] for r in proof.records if "after" in r and r["pid"] == latest[0]["pid"])
    assert max(b - a for a, b in itertools.pairwise(applied)) > 2 * BUDGET_S * 1e9, "nobody had to wait"


@contextlib.contextmanager
def little_memory(pid: int) -> Iterator[None]:
    """The process may take 100 MB more. Skips the test where that cannot be arranged."""
    group = CGROUPS / f"farandole-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(100 << 20))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory control group of version 1 can be made: {error}")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def test_an_out_of_memory_kill_is_a_loss_like_any_other(tmp_path: Path) -> None:
    hungry = tmp_path / "hungry"
    with endless(tmp_path, ["-np", "2"], "--eat", str(hungry)) as running:
        victim = running.wait_until(all_training(2), 60)[1]["pid"]
        with little_memory(victim):
            hungry.with_suffix(".new").write_text(str(victim))
            hungry.with_suffix(".new").rename(hungry)
            running.wait_until(trains_without({victim}, 2), 60)
        said = finish(running, 2)
    assert "was killed by SIGKILL (signal 9)" in said
    assert Proof(tmp_path).redone() <= 1


def test_loader_workers_that_ignore_signals_end_with_their_worker(tmp_path: Path) -> None:
    with endless(tmp_path, ["-np", "2"], "--num-workers", "2", "--stubborn") as running:
        victim = running.wait_until(all_training(2), 60)[1]["pid"]
        loaders = children_of(victim)
        assert len(loaders) >= 2
        running.kill(victim)
        deadline = time.monotonic() + 10
        while any(is_there(pid, of=victim) for pid in loaders):
            assert time.monotonic() < deadline, "loader workers outlive their worker"
        running.wait_until(trains_without({victim}, 2), 60)
        said = finish(running, 2)
    assert "Traceback" not in said


def children_of(pid: int) -> list[int]:
    """Those that another one of its processes has forked, too: all of its session."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int(entry.name) != pid and os.getsid(int(entry.name)) == pid:
                found.append(int(entry.name))
    return found


def is_there(pid: int, of: int) -> bool:
    """Whether the process of this session lives; one that nobody has waited for yet is dead."""
    try:
        return os.getsid(pid) == of and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 64 KB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "farandole-test", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_under_output_ledger_and_checkpoints_stops_nothing(small_disk: Path, tmp_path: Path) -> None:
    flags = ["-np", "2", "--output-filename", str(small_disk / "output"), "--sample-ledger", str(small_disk / "ledger")]
    flags += ["--checkpoint", str(small_disk / "checkpoints"), "--checkpoint-every", "20steps"]
    with endless(tmp_path, flags, "--frozen-mb", "1") as running:
        latest = running.wait_until(all_training(2), 60)
        running.wait_until(lambda now: now[0].get("after", 0) > 200, 60)
        assert running.latest()[0]["pid"] == latest[0]["pid"]
        said = finish(running, 2)
    assert "could not save step" in said
    assert set(Proof(tmp_path).generations().values()) == {2}
