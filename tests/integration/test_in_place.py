"""Scripts of torchrun, unchanged and elastic in place: without a disturbance their results are those of torchrun, and
whoever is killed or joins, wherever the script is, they stay the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.differential import run as differential
from tests.differential.pieces import PIECES
from tests.support import jobs

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "script_of_torchrun.py"
UNSUITABLE = ROOT / "tests" / "scripts" / "unsuitable_script.py"
LOOPS = ROOT / "tests" / "scripts" / "loops_of_torchrun.py"
DEADLINE_S = 240.0

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)  # a test may have two jobs, and wait for the fixture's

Entry = dict[str, Any]
Logs = dict[int, list[Entry]]


class Job:
    """A job whose workers write logs into `folder`."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder = folder
        self._output = (folder / "output").open("wb")
        self._process = jobs.start(command, self._output)
        self._deadline_s = time.monotonic() + DEADLINE_S

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._output.close()
        jobs.check_nothing_is_left(self._process)

    def logs(self) -> Logs:
        """Return the entries of each worker, by process id."""
        return {
            int(path.stem.removeprefix("log-")): [
                json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")
            ]
            for path in sorted(self.folder.glob("log-*.jsonl"))
        }

    def wait_until(self, is_so: Callable[[Logs], bool]) -> Logs:
        while not is_so(logs := self.logs()):
            assert self._process.poll() is None, self.output()
            assert time.monotonic() < self._deadline_s, self.output()
            time.sleep(0.005)
        return logs

    def wait(self, exit_code: int = 0) -> Logs:
        """Wait for the end of the job, which must be a success unless another exit code is expected."""
        assert self.wait_for_code() == exit_code, self.output()
        return self.logs()

    def wait_for_code(self) -> int:
        """Return the exit code."""
        return self._process.wait(max(1.0, self._deadline_s - time.monotonic()))

    def output(self) -> str:
        return (self.folder / "output").read_text()


def in_place(folder: Path, workers: int, *words: str, flags: str = "", script: Path = SCRIPT) -> Job:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "farandole", "run", "-np", str(workers), "--in-place", *flags.split()]
    ledger = ["--sample-ledger", str(folder / "ledger")]
    return Job(folder, [*command, *ledger, sys.executable, str(script), "--folder", str(folder), *words])


def unsuitable(folder: Path, kind: str) -> Job:
    command = [sys.executable, "-m", "farandole", "run", "-np", "2", "--in-place", sys.executable, str(UNSUITABLE)]
    return Job(folder, [*command, kind])


def torchrun(folder: Path, workers: int, *words: str, script: Path = SCRIPT) -> Job:
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    return Job(folder, [*command, str(script), "--folder", str(folder), *words])


def entries(log: list[Entry], at: str) -> list[Entry]:
    return [each for each in log if each["at"] == at]


def members(logs: Logs) -> dict[str, int]:
    """Return the processes of the first three workers that have begun a batch, by name: the spare may have, too."""
    begun = {log[0]["worker"]: pid for pid, log in logs.items() if entries(log, "batch")}
    return {worker: pid for worker, pid in begun.items() if worker in {"w0", "w1", "w2"}}


def ends(logs: Logs) -> dict[int, Entry]:
    """Return the last entry of each worker that has come to its end."""
    return {pid: log[-1] for pid, log in logs.items() if log and log[-1]["at"] == "over"}


def check_ledger(folder: Path) -> None:
    command = [sys.executable, "-m", "farandole", "ledger", "check", str(folder / "ledger")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert checked.stdout.endswith("exactly once: yes\n"), checked.stdout + checked.stderr


def difference(one: Path, other: Path) -> float:
    ours, theirs = torch.load(one / "final.pt"), torch.load(other / "final.pt")
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


def check_disturbed(folder: Path, logs: Logs, undisturbed: Path, survivors: set[int]) -> None:
    """Check that survivors came to the end in their own processes, with the parameters of a job without disturbance."""
    finished = ends(logs)
    assert survivors <= finished.keys()
    assert len({end["digest"] for end in finished.values()}) == 1
    assert len({end["lr"] for end in finished.values()}) == 1
    assert difference(folder, undisturbed) < 1e-10
    check_ledger(folder)


WORDS = ("--samples", "192", "--epochs", "4")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job with global batches of 24 samples."""
    folder: Path = tmp_path_factory.mktemp("undisturbed")
    with in_place(folder, 2, *WORDS, "--batch-size", "12") as job:
        job.wait()
    return folder


@pytest.mark.parametrize("words", ["--norm", pytest.param("--accumulate 2 --amp --workers 1", marks=pytest.mark.long)])
def test_without_a_disturbance_losses_and_parameters_are_those_of_torchrun(tmp_path: Path, words: str) -> None:
    losses, digests = [], []
    for launch in (torchrun, in_place):
        with launch(tmp_path / launch.__name__, 2, *words.split()) as job:
            logs = job.wait()
        digests.append({end["digest"] for end in ends(logs).values()})
        of_rank_0 = next(log for log in logs.values() if log[0]["rank"] == 0)
        losses.append([each["loss"] for each in entries(of_rank_0, "end")])
    assert digests[0] == digests[1]
    assert losses[0] == losses[1]
    check_ledger(tmp_path / "in_place")


@pytest.mark.parametrize(
    ("place", "victim"), [("batches", 0), ("batches", -1), ("validation", 0), ("between epochs", -1)]
)
def test_survivors_of_a_kill_stay_in_their_loop(tmp_path: Path, undisturbed: Path, place: str, victim: int) -> None:
    pauses = {
        "batches": ("--pause", "0.02"),
        "validation": ("--pause-validation", "0.3"),
        "between epochs": ("--pause-between", "0.5"),
    }
    with in_place(tmp_path / "job", 3, *WORDS, *pauses[place], flags="--restarts 0") as job:
        at, epoch = ("batch", 1) if place == "batches" else ("end", 1)
        logs = job.wait_until(
            lambda logs: (
                len([log for log in logs.values() if log and log[-1]["at"] == at and log[-1]["epoch"] == epoch]) == 3
            )
        )
        time.sleep(0.1)
        killed = sorted(logs)[victim]
        os.kill(killed, signal.SIGKILL)
        logs = job.wait()
    check_disturbed(tmp_path / "job", logs, undisturbed, logs.keys() - {killed})
    assert {end["size"] for end in ends(logs).values()} == {2}
    epochs = [each["epoch"] for each in entries(logs[max(logs.keys() - {killed})], "epoch")]
    assert epochs == [0, 1, 2, 3]  # the code after each epoch has run once


@pytest.mark.long
def test_a_new_loader_with_a_batch_sampler_for_each_epoch_stays_elastic(tmp_path: Path, undisturbed: Path) -> None:
    """A worker is killed in the second epoch, and another one joins in its place."""
    words = ("--anew", "--pause", "0.1", "--until-logs", "4", "--until-size", "3")
    with in_place(tmp_path / "job", 3, *WORDS, *words) as job:
        logs = job.wait_until(lambda logs: sum(bool(log) and log[-1].get("epoch") == 1 for log in logs.values()) == 3)
        killed = max(logs)
        os.kill(killed, signal.SIGKILL)
        logs = job.wait()
        output = job.output()
    check_disturbed(tmp_path / "job", logs, undisturbed, logs.keys() - {killed})
    assert {end["size"] for end in ends(logs).values()} == {3}
    assert "static" not in output


@pytest.mark.long
def test_a_survivor_that_has_not_come_to_the_end_of_the_epoch_goes_on_with_the_others(
    tmp_path: Path, undisturbed: Path
) -> None:
    """One worker is in its last loop body, and the other one in the code after the epoch, when a third is killed."""
    hold = tmp_path / "hold"
    hold.write_text("")
    words = ("--pause", "0.3", "--hold", str(hold))
    with in_place(tmp_path / "job", 3, *WORDS, *words, flags="--restarts 0") as job:
        logs = job.wait_until(
            lambda logs: (
                sum(bool(log) and (log[-1].get("epoch"), log[-1].get("number")) == (1, 7) for log in logs.values()) == 3
            )
        )
        by_rank = {log[0]["rank"]: pid for pid, log in logs.items()}
        hold.write_text(str(by_rank[1]))
        job.wait_until(lambda logs: all(logs[by_rank[rank]][-1]["at"] == "end" for rank in (0, 2)))
        time.sleep(0.2)  # they are in the validation's collective now
        os.kill(by_rank[2], signal.SIGKILL)
        job.wait_until(lambda _: "regrouping for generation 2" in job.output())
        hold.write_text("")
        logs = job.wait()
    check_disturbed(tmp_path / "job", logs, undisturbed, {by_rank[0], by_rank[1]})


@pytest.mark.long
def test_collectives_at_some_counts_of_batches_match_after_a_kill(tmp_path: Path, undisturbed: Path) -> None:
    """One worker is slow: when another is killed, it has not begun the batch of the step that is aborted."""
    words = ("--pause", "0.05", "--slow-rank", "1", "--reduce-every", "3")
    with in_place(tmp_path / "job", 3, *WORDS, *words, flags="--restarts 0") as job:
        logs = job.wait_until(lambda logs: sum(bool(log) and log[-1].get("epoch") == 1 for log in logs.values()) == 3)
        killed = next(pid for pid, log in logs.items() if log[0]["rank"] == 2)
        time.sleep(0.3)
        os.kill(killed, signal.SIGKILL)
        logs = job.wait()
    check_disturbed(tmp_path / "job", logs, undisturbed, logs.keys() - {killed})
    for log in without(logs, killed):  # a batch that came again has the number that it had
        assert {each["number"] for each in entries(log, "batch") if each["epoch"] == 1} == set(range(8))


def without(logs: Logs, killed: int) -> list[list[Entry]]:
    return [log for pid, log in logs.items() if pid != killed]


@pytest.mark.long
def test_a_newcomer_passes_over_what_is_done_and_joins(tmp_path: Path, undisturbed: Path) -> None:
    words = ("--pause", "0.1", "--until-logs", "4", "--until-size", "3")
    with in_place(tmp_path / "job", 3, *WORDS, *words) as job:
        logs = job.wait_until(lambda logs: sum(bool(log) and log[-1].get("epoch") == 1 for log in logs.values()) == 3)
        killed = sorted(logs)[1]
        os.kill(killed, signal.SIGKILL)
        logs = job.wait()
        output = job.output()
    newcomer = max(logs)
    assert len(logs) == 4, output
    check_disturbed(tmp_path / "job", logs, undisturbed, logs.keys() - {killed})
    assert {end["size"] for end in ends(logs).values()} == {3}
    assert "carried over: model (DistributedDataParallel of Sequential), optimizer (SGD), value (StepLR)" in output
    assert "carried over from the script's variables: " in output
    assert len({end["best"] for end in ends(logs).values()}) == 1
    assert entries(logs[newcomer], "batch")[0]["rank"] != 0


@pytest.mark.long
def test_a_newcomer_that_is_killed_while_it_passes_over_is_replaced(tmp_path: Path, undisturbed: Path) -> None:
    words = ("--batch-size", "12", "--pause", "0.1", "--until-logs", "4", "--until-size", "2")
    with in_place(tmp_path / "job", 2, *WORDS, *words) as job:
        logs = job.wait_until(lambda logs: sum(bool(log) and log[-1].get("epoch") == 1 for log in logs.values()) == 2)
        killed = [sorted(logs)[1]]
        os.kill(killed[0], signal.SIGKILL)
        for count in (3, 4):
            logs = job.wait_until(lambda logs, count=count: sum(map(bool, logs.values())) == count)
            if count == 3:
                killed.append(max(logs.keys() - set(killed), key=lambda pid: logs[pid][0]["time"]))
                os.kill(killed[1], signal.SIGKILL)
        logs = job.wait()
    check_disturbed(tmp_path / "job", logs, undisturbed, logs.keys() - set(killed))


@pytest.mark.long
def test_batches_that_are_added_up_to_a_step_survive_a_kill(tmp_path: Path) -> None:
    words = ("--samples", "336", "--epochs", "3", "--accumulate", "2")
    with in_place(tmp_path / "undisturbed", 2, *words, "--batch-size", "12") as job:
        job.wait()
    with in_place(tmp_path / "job", 3, *words, "--batch-size", "8", "--pause", "0.05", flags="--restarts 0") as job:
        logs = job.wait_until(lambda logs: sum(bool(log) and log[-1].get("epoch") == 1 for log in logs.values()) == 3)
        killed = max(logs)
        os.kill(killed, signal.SIGKILL)
        logs = job.wait()
    check_disturbed(tmp_path / "job", logs, tmp_path / "undisturbed", logs.keys() - {killed})


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("iterable", "its DataLoader has Stream, an IterableDataset"),
        ("sampler", "its sampler Drawn draws from the random numbers of its process"),
        ("endless", "its sampler Endless does not end"),
        ("join", "DistributedDataParallel.join() is for workers with different numbers of batches"),
        ("undivided", "its DataLoader has a RandomSampler, and no DistributedSampler"),
        ("drawn", "optimizer.step() trains samples of no DataLoader"),
        ("subgroup", "the script has a process group of ranks [0], which do not stay the same (unsuitable_script.py:"),
        ("alone", "has parameters of no DistributedDataParallel"),
        ("mixed", "has parameters of no DistributedDataParallel"),
        ("lightning", "Lightning's Trainer counts its batches itself"),
        ("static graph", "DistributedDataParallel(static_graph=True)"),
    ],
)
def test_a_script_that_does_not_qualify_stays_static_and_says_why(tmp_path: Path, kind: str, reason: str) -> None:
    with unsuitable(tmp_path, kind) as job:
        job.wait()
        output = job.output()
    assert "rank 1 has finished" in output
    assert output.count("this job is not elastic in place") == 1
    assert "unsuitable_script.py:" in output
    assert reason in output


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("twice", "trying to initialize the default process group twice!"),
        ("backend", "glooo"),
        ("size", "init_process_group(world_size=3): this job was started with 2 workers; leave world_size out, or"),
    ],
)
def test_a_mistake_ends_the_job_at_once_and_is_named(tmp_path: Path, kind: str, reason: str) -> None:
    with unsuitable(tmp_path, kind) as job:
        assert job.wait_for_code() == 1
        output = job.output()
    assert reason in output
    assert "has finished" not in output


def test_a_worker_that_is_to_leave_does_so_between_two_steps(tmp_path: Path, undisturbed: Path) -> None:
    with in_place(tmp_path / "job", 3, *WORDS, "--pause", "0.05", flags="--restarts 0") as job:
        logs = job.wait_until(lambda logs: sum(bool(log) and log[-1].get("epoch") == 1 for log in logs.values()) == 3)
        left = max(logs)
        os.kill(left, signal.SIGTERM)
        logs = job.wait()
        output = job.output()
    check_disturbed(tmp_path / "job", logs, undisturbed, logs.keys() - {left})
    assert "Traceback" not in output
    assert "Exception ignored" not in output


SECOND = "the script iterates for training over a second DataLoader (loops_of_torchrun.py:"
COUNTS = "next() of the training loader is in a loop that counts its batches"


STATIC_LOOPS = {
    "two_phases": SECOND,
    "alternating": SECOND,
    "zipped": SECOND,
    "by_turns": COUNTS,
    "counted": COUNTS,
    "accumulated": COUNTS,
    "looked_through": "the script takes a batch of its training loader before the last one is trained",
    "cycled": "SGD.step() with samples that come from no batch of the first training loader",
}


@pytest.fixture(scope="module")
def digests_of_torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The digests that torchrun's workers come to, by the loop."""
    with torchrun(tmp_path_factory.mktemp("loops") / "torchrun", 2, *STATIC_LOOPS, script=LOOPS) as job:
        logs = job.wait()
    return {
        loop: {each["digest"] for log in logs.values() for each in entries(log, "over") if each["loop"] == loop}
        for loop in STATIC_LOOPS
    }


@pytest.mark.long
@pytest.mark.parametrize("loop", STATIC_LOOPS)
def test_a_script_that_turns_out_not_to_qualify_goes_on_as_under_torchrun(
    tmp_path: Path, digests_of_torchrun: dict[str, set[str]], loop: str
) -> None:
    with in_place(tmp_path, 2, loop, script=LOOPS) as job:
        digests = {end["digest"] for end in ends(job.wait()).values()}
        output = job.output()
    assert len(digests) == 1
    assert digests == digests_of_torchrun[loop], output
    assert output.count("this job is static from here on, with 2 workers") == 1
    assert "loops_of_torchrun.py:" in output
    assert STATIC_LOOPS[loop] in output


def of_table(logs: Logs, table: int, epoch: int) -> list[Entry]:
    return [
        each
        for log in logs.values()
        for each in entries(log, "batch")
        if (each["table"], each["epoch"]) == (table, epoch)
    ]


def test_after_a_kill_it_goes_on_with_the_workers_that_are_left(tmp_path: Path) -> None:
    with in_place(tmp_path, 3, "two_phases", "--pause", "0.1", flags="--restarts 0", script=LOOPS) as job:
        logs = job.wait_until(lambda logs: sum(len(entries(log, "batch")) > 2 for log in logs.values()) == 3)
        killed = sorted(logs)[1]
        os.kill(killed, signal.SIGKILL)
        logs = job.wait()
        output = job.output()
    assert ends(logs).keys() == logs.keys() - {killed}
    assert len({end["digest"] for end in ends(logs).values()}) == 1
    assert "this job is static from here on, with 2 workers" in output
    for epoch in (0, 1):
        second = of_table(logs, 1, epoch)
        assert {(each["rank"], each["size"]) for each in second} == {(0, 2), (1, 2)}
        assert sum(each["samples"] for each in second) == 120
    check_ledger(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("reduced", "needs_all"), [("loss", True), ("copy", False), ("rows", True), ("whole", False)])
def test_gradients_through_what_the_script_reduces_or_gathers_need_all_workers(
    tmp_path: Path, reduced: str, needs_all: bool
) -> None:
    words = ("generated", "--epochs", "4", "--pause", "0.25", "--reduce", reduced)
    with in_place(tmp_path, 3, *words, flags="--restarts 0", script=LOOPS) as job:
        logs = job.wait_until(lambda logs: sum(len(entries(log, "batch")) > 2 for log in logs.values()) == 3)
        killed = sorted(logs)[1]
        os.kill(killed, signal.SIGKILL)
        logs = job.wait()
        output = job.output()
    assert len({end["digest"] for end in ends(logs).values()}) == 1
    assert ("gradients flow through a tensor that the script reduces or gathers" in output) == needs_all, output
    assert ("this job is static from here on, with 2 workers" in output) == needs_all
    assert ("finished, with remarks: a static job with 2 workers, not 3" in output) == needs_all
    check_ledger(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "reason"),
    [(["--reduce", "rows"], "into the own part only"), (["--weights"], "is not the mean of those of its samples")],
    ids=["rows", "weights"],
)
def test_where_gradients_need_all_workers_the_replacement_of_a_lost_one_is_waited_for(
    tmp_path: Path, loss: list[str], reason: str
) -> None:
    words = ("generated", "--epochs", "4", *loss, "--pause")
    for name, pause in (("quiet", "0"), ("lossy", "0.2")):
        folder = tmp_path / name
        folder.mkdir()
        with in_place(folder, 3, *words, pause, script=LOOPS) as job:
            if name == "lossy":
                logs = job.wait_until(lambda logs: sum(len(entries(log, "batch")) > 2 for log in logs.values()) == 3)
                os.kill(sorted(logs)[1], signal.SIGKILL)
            job.wait()
            output = job.output()
        assert "success. 3 workers finished the training." in output
        check_ledger(folder)
    assert "each step needs 3 workers, so lost ones are waited for" in output
    assert reason in output
    assert difference(tmp_path / "quiet", tmp_path / "lossy") < 1e-9


@pytest.mark.long
@pytest.mark.parametrize("flags", ["", "--max-restarts 1"])
def test_once_static_a_loss_ends_the_job_or_starts_it_again(tmp_path: Path, flags: str) -> None:
    with in_place(tmp_path, 2, "counted", "--pause", "0.1", flags=flags, script=LOOPS) as job:
        logs = job.wait_until(lambda logs: sum(len(entries(log, "batch")) > 3 for log in logs.values()) == 2)
        os.kill(max(logs), signal.SIGKILL)
        logs = job.wait(exit_code=0 if flags else 1)
        output = job.output()
    if flags:
        assert len(logs) == 4
        assert len(ends(logs)) == 2
        assert output.count("this job is static from here on") == 2
    else:
        assert len(logs) == 2
        assert "The job had become static, so the others cannot continue without it: loops_of_torchrun.py:" in output


@pytest.mark.long
def test_a_newcomer_that_comes_too_late_for_the_step_loop_ends_and_no_other_is_started(tmp_path: Path) -> None:
    """The worker is killed in the first loader, and nobody starts within its batches."""
    words = ("two_phases", "--epochs", "1", "--pause", "0.2", "--late")
    with in_place(tmp_path, 3, *words, flags="--no-fork-server", script=LOOPS) as job:
        logs = job.wait_until(lambda logs: sum(len(entries(log, "batch")) > 3 for log in logs.values()) == 3)
        killed = sorted(logs)[1]
        os.kill(killed, signal.SIGKILL)
        logs = job.wait()
        output = job.output()
    assert "this job is static from here on, with 2 workers" in output
    assert ends(logs).keys() >= {pid for pid, log in logs.items() if pid != killed and len(entries(log, "batch")) > 3}
    assert len(ends(logs)) == 2
    assert "Traceback" not in output


@pytest.mark.long
@pytest.mark.parametrize("loop", ["generated", "prefetched"])
def test_loops_that_end_with_their_batches_stay_elastic(tmp_path: Path, loop: str) -> None:
    with in_place(tmp_path / "undisturbed", 2, loop, "--batch-size", "12", script=LOOPS) as job:
        job.wait()
    with in_place(tmp_path / "job", 3, loop, "--pause", "0.1", flags="--restarts 0", script=LOOPS) as job:
        logs = job.wait_until(lambda logs: sum(len(entries(log, "batch")) > 2 for log in logs.values()) == 3)
        killed = max(logs)
        os.kill(killed, signal.SIGKILL)
        logs = job.wait()
        output = job.output()
    check_disturbed(tmp_path / "job", logs, tmp_path / "undisturbed", logs.keys() - {killed})
    assert "static" not in output


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_killed_worker_so_that_not_a_bit_changes(tmp_path: Path) -> None:
    """With as many workers as before, BatchNorm's statistics are those of the same local batches."""
    words = (*WORDS, "--norm")
    with in_place(tmp_path / "undisturbed", 3, *words) as job:
        digests = {end["digest"] for end in ends(job.wait()).values()}
    hold, events = tmp_path / "hold", tmp_path / "events.jsonl"
    hold.touch()
    flags = f"--spares 1 --restarts 0 --events {events}"
    with in_place(tmp_path / "job", 3, *words, "--hold", str(hold), "--pause", "0.05", flags=flags) as job:
        job.wait_until(lambda logs: len(members(logs)) == 3)
        held = members(job.logs())
        killed = held["w1"]
        hold.write_text(" ".join(map(str, held.values())))
        job.wait_until(lambda _: "SpareWaits" in events.read_text())
        begun = len(job.logs()[killed])
        hold.write_text("")
        job.wait_until(lambda logs: len(logs[killed]) > begun + 1)
        os.kill(killed, signal.SIGKILL)
        logs = job.wait()
    assert {end["digest"] for end in ends(logs).values()} == digests
    assert {end["size"] for end in ends(logs).values()} == {3}
    assert len(ends(logs)) == 3
    assert {each["size"] for log in logs.values() for each in log if "size" in each} == {3}
    check_ledger(tmp_path / "job")


def test_batches_that_all_ranks_leave_out_are_told_the_first_of_the_job_included() -> None:
    """The batches of a step are counted in the first one, for which this script takes two."""
    job = jobs.farandole_run("-np", "2", "--in-place", sys.executable, str(jobs.SCRIPTS / "bad_batches.py"))
    assert job.returncode == 0, job.stderr
    lines = [line.split("trained")[1].split() for line in job.stdout.splitlines() if "trained" in line]
    assert [line[-1] for line in lines] == ["True", "True"]
    good = [sample for sample in range(24) if sample // 4 not in (0, 3)]
    assert sorted(int(sample) for line in lines for sample in line[:-2]) == sorted(2 * good)
    assert "success" not in job.stderr.splitlines()[-1]
    assert "trained nothing, and were skipped" in job.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("piece", "reason"),
    [
        ("generator", "main().temperature, a generator, goes on in the loop body"),
        ("hash", "with equal samples, "),
    ],
)
def test_a_newcomer_that_lacks_what_the_others_have_trains_nothing(tmp_path: Path, piece: str, reason: str) -> None:
    script = tmp_path / f"{piece}.py"
    script.write_text(PIECES[f"states-{piece}"].script())
    outcome = differential.in_place(script, tmp_path / "job", 2, is_disturbed=True)
    assert outcome.exit_code == 0, outcome.output
    assert len(outcome.values) == 1, outcome.output
    remarks = outcome.line_with("finished, with remarks")
    assert f"not admitted, since it would not train as the others do: {reason}" in remarks, outcome.output


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("piece", "at"),
    [
        ("steps-accumulate-counted", "1:2"),
        ("steps-accumulate-and-skip", "1:3"),
        ("steps-accumulate-sum", "1:3"),
        ("losses-of-padded-rows", "1:2"),
        ("states-in-memory", "1:2"),
        ("states-momentum-by-data", "0:0"),
        ("states-center-of-own-part", "1:2"),
        ("states-target-frozen-after-wrapping", "1:2"),
    ],
)
def test_a_script_that_loses_one_of_three_workers_ends_as_under_torchrun(piece: str, at: str) -> None:
    """Two workers have other parts of a batch than three: the script counts, and keeps, what it has always kept."""
    words = ("tests.differential.run", "--only", piece, "--workers", "3", "--at", at)
    compared = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=500, check=False)
    verdicts = [line.removeprefix(piece).split() for line in compared.stdout.splitlines()[:-1]]
    assert [words[0] for words in verdicts] == ["right", "right"], compared.stdout + compared.stderr


def test_a_newcomer_gets_into_a_script_that_stops_when_it_makes_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes over epochs in which its model makes none: that must not add up."""
    script = tmp_path / "script.py"
    text = PIECES["states-early-stop"].script()
    script.write_text(
        text.replace("EPOCHS, SAMPLES, BATCH, LR = 3, 48, 4, 0.05", "EPOCHS, SAMPLES, BATCH, LR = 6, 48, 4, 0.02")
    )
    monkeypatch.setenv("FAULT_AT", "4:2")
    outcome = differential.in_place(script, tmp_path / "job", 2, is_disturbed=True)
    assert outcome.exit_code == 0, outcome.output
    assert "joined at epoch 4" in outcome.output, outcome.output
    assert len(outcome.values) == 2
    assert outcome.line_with("success"), outcome.output


def test_what_only_the_first_rank_had_is_named_when_it_is_lost(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PIECES["states-ema-of-first-rank"].script())
    outcome = differential.in_place(script, tmp_path / "job", 2, is_disturbed=True, victim=0)
    assert outcome.exit_code == 0, outcome.output
    remarks = outcome.line_with("finished, with remarks")
    assert "the worker that was started as rank 0 is lost, and with it main().ema, which" in remarks, outcome.output
