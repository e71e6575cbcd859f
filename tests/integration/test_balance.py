"""Local batches that follow the speed of the workers, in real jobs: shares move and come back, each sample is trained
once, and in strict mode the model is that of a quiet run to the last bit. Times are not tested here."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.integration.test_strict_mode import hash_alone, hashes
from tests.scripts.strict_job import GLOBAL_BATCH, SAMPLES
from tests.support.jobs import SCRIPTS, RunningJob, farandole, farandole_run

pytestmark = pytest.mark.long

SCRIPT = SCRIPTS / "strict_job.py"
EPOCHS = 20  # 80 steps
SLOW_FROM, SLOW_UNTIL = 12, 40
ARGUMENTS = ("--model", "mlp", "--epochs", str(EPOCHS), "--sample-s", "0.008")
SLOW = ("--slow", "1", "6", str(SLOW_FROM), str(SLOW_UNTIL))
BALANCED = ("--balance", "auto")


@pytest.fixture(autouse=True)
def _no_other_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of this test, and commands, meet in a folder of their own."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))


def run_job(flags: Sequence[str], arguments: Sequence[str], folder: Path) -> str:
    records = folder / "records"
    records.mkdir()
    done = farandole_run(*flags, sys.executable, str(SCRIPT), *arguments, "--records", str(records), timeout_s=120.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Proof(records).epochs(SAMPLES).is_exact
    return done.stdout + done.stderr


def samples_of(folder: Path, rank: int) -> dict[int, int]:
    """The samples that a rank has trained in each step with a whole global batch."""
    by_rank: Counter[tuple[int, int]] = Counter()
    by_step: Counter[int] = Counter()
    for record in Proof(folder / "records").records:
        if "before" in record:
            by_rank[record["before"], record["rank"]] += len(record["ids"])
            by_step[record["before"]] += len(record["ids"])
    return {step: by_rank[step, rank] for step in sorted(by_step) if by_step[step] == GLOBAL_BATCH}


def check_that_the_share_moves_and_comes_back(folder: Path) -> None:
    """Rank 1 of 3 is slow for a while. Other processes may slow down any rank of the test."""
    samples = samples_of(folder, 1)
    assert min(count for step, count in samples.items() if SLOW_FROM < step < SLOW_UNTIL) <= 4, samples
    assert max(count for step, count in samples.items() if step > SLOW_UNTIL) >= 5, samples
    assert all(1 <= count <= 16 for count in samples.values())


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        pytest.param([], [], id="shared memory"),
        pytest.param(["--transport", "tcp"], [], id="TCP"),
        pytest.param([], ["--ddp"], id="DistributedDataParallel"),
        pytest.param([], ["--num-workers", "2"], id="loader workers"),
        pytest.param([], ["--micro", "3"], id="accumulation"),
    ],
)
def test_a_slow_worker_gets_fewer_samples_until_it_is_fast_again(
    flags: list[str], more: list[str], tmp_path: Path
) -> None:
    flags = ["-np", "3", "--balance", "auto", "--sample-ledger", str(tmp_path / "ledger"), *flags]
    run_job(flags, [*ARGUMENTS, "--plain", *SLOW, *more], tmp_path)
    check_that_the_share_moves_and_comes_back(tmp_path)
    done = farandole("ledger", "check", str(tmp_path / "ledger"))
    assert "exactly once: yes" in done.stdout, done.stdout


def test_without_balance_all_get_equally_many(tmp_path: Path) -> None:
    """Else the tests above would show nothing."""
    run_job(["-np", "3"], ["--model", "mlp", "--epochs", "4", "--plain", "--slow", "1", "4", "2", "9"], tmp_path)
    assert set(samples_of(tmp_path, 1).values()) == {GLOBAL_BATCH // 3}


@pytest.mark.parametrize("more", [[], ["--ddp", "--audit", "1"]], ids=["", "audited, with DistributedDataParallel"])
def test_in_strict_mode_shards_move_and_no_bit_changes(more: list[str], tmp_path: Path) -> None:
    words = ["--model", "mlp", "--epochs", str(EPOCHS), "--shards", "12"]
    said = run_job(["-np", "3", *BALANCED], [*words, "--sample-s", "0.008", *SLOW, *more], tmp_path)
    assert set(hashes(said)) == {hash_alone(*words)}
    check_that_the_share_moves_and_comes_back(tmp_path)


@pytest.mark.parametrize("mode", [["--plain"], ["--shards", "12"]], ids=["plain", "strict"])
def test_a_kill_and_a_join_while_shares_are_unequal(mode: list[str], tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    words = [*ARGUMENTS, *mode, *BALANCED, "--slow", "1", "6", "8", "1000"]
    with RunningJob(["-np", "4"], SCRIPT, words, records, tmp_path / "output") as running:
        running.wait_until(beyond_step(24, 4), 60)
        latest = running.latest()
        running.kill(latest[2]["pid"])
        running.wait_until(lambda now: all_training(4)(now) and now[0]["generation"] > latest[0]["generation"] + 1, 60)
        assert running.wait(120) == 0, (tmp_path / "output").read_text()
    proof = Proof(records)
    assert proof.epochs(SAMPLES).is_exact
    steps = {record["before"] for record in proof.records if record["generation"] == 2 and "before" in record}
    after = [count for step, count in samples_of(tmp_path, 1).items() if step in steps]
    assert after
    assert max(after) <= 6  # the survivors begin with the speeds that are known; an equal share is 8
    if mode != ["--plain"]:
        words = ["--model", "mlp", "--epochs", str(EPOCHS), "--shards", "12"]
        assert set(hashes((tmp_path / "output").read_text())) == {hash_alone(*words)}


def beyond_step(step: int, size: int) -> Any:
    def condition(latest: dict[int, dict[str, Any]]) -> bool:
        return len(latest) == size and all(each.get("before", 0) > step for each in latest.values())

    return condition


def test_the_status_shows_share_and_speed_and_a_straggler_is_an_event(tmp_path: Path) -> None:
    records, events = tmp_path / "records", tmp_path / "events"
    records.mkdir()
    words = [*ARGUMENTS, "--plain", "--slow", "1", "6", "8", "44"]
    flags = ["-np", "2", "--balance", "auto", "--events", str(events)]
    with RunningJob(flags, SCRIPT, words, records, tmp_path / "output") as running:
        running.wait_until(beyond_step(34, 2), 60)
        shown = json.loads(farandole("status", "--json").stdout)
        text = farandole("status").stdout
        assert running.wait(120) == 0, (tmp_path / "output").read_text()
    telemetry = [each["telemetry"] for each in shown["members"]]
    assert sum(each["share"] for each in telemetry) == pytest.approx(1.0)
    assert telemetry[1]["share"] < telemetry[0]["share"]
    assert telemetry[1]["speed"] < telemetry[0]["speed"]
    assert re.search(r"restarts left .* share +samples/s\n.* \d+\.\d% +\d+\n", text), text
    told = [json.loads(line) for line in events.read_text().splitlines()]
    seen = {each["event"]: each for each in told if each["event"].startswith("Straggler")}
    assert seen["StragglerFound"]["rank"] == 1
    assert seen["StragglerFound"]["percent"] < 50
    assert seen["StragglerFound"]["level"] == "warning"
    assert seen["StragglerRecovered"]["step"] > 44


@pytest.mark.parametrize(
    ("flags", "words", "error"),
    [
        (
            ["--balance", "auto"],
            ["--model", "mlp", "--shards", "6", "--break", "mean"],
            r"StepError: mean\(\) in a run of the loop body",
        ),
        ([], ["--model", "mlp", "--balance", "off", "--shards", "6", "--break", "mean"], ""),
    ],
)
def test_a_mean_that_not_all_workers_would_call_is_refused(flags: list[str], words: list[str], error: str) -> None:
    done = farandole_run("-np", "2", *flags, sys.executable, str(SCRIPT), *words)
    assert (done.returncode != 0) == bool(error), done.stdout + done.stderr
    assert re.search(error, done.stdout + done.stderr)
