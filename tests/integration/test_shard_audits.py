"""Audits in strict mode: a worker whose results are wrong is found before they are applied, named, and left out."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.scripts.strict_job import MODELS
from tests.support.combinations import each_once
from tests.support.jobs import SCRIPTS, farandole, farandole_run, run_alone

pytestmark = [pytest.mark.long, pytest.mark.core]

SCRIPT = SCRIPTS / "strict_job.py"
OVER_TCP, ON_TWO_HOSTS = ["-np", "4", "--transport", "tcp"], ["-np", "4", "-H", "localhost:2,127.0.0.1:2"]
NAMED = r"(w\d) on \S+ has computed shard (\d) of step (\d+) wrongly, as the results of ([w\d, and]+) show"


def run(flags: list[str], *words: str) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), "--audit", "1", *words]
    done = farandole_run(*flags, "--verbose", *command, timeout_s=120.0)
    return done.returncode, done.stdout + done.stderr


def hashes(output: str) -> set[str]:
    return set(re.findall(r"rank \d+ of \d+: ([0-9a-f]{64}) after", output))


@cache
def hash_alone(*words: str) -> str:
    """The hash of a single process without a launcher, where nothing can be audited."""
    done = run_alone(SCRIPT, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = hashes(done.stdout)
    return found


@pytest.mark.parametrize(("model", "flags"), each_once([*MODELS], [OVER_TCP, ["-np", "3"], ON_TWO_HOSTS]))
def test_audits_change_no_bit_and_accuse_nobody(model: str, flags: list[str], tmp_path: Path) -> None:
    words = ("--model", model, "--shards", "8")
    code, said = run([*flags, "--sample-ledger", str(tmp_path)], *words)
    assert code == 0, said
    assert hashes(said) == {hash_alone(*words)}
    assert "wrong" not in said, said
    assert "exactly once: yes" in farandole("ledger", "check", str(tmp_path)).stdout


@pytest.mark.parametrize("kind", ["once", "always", "random"])
@pytest.mark.parametrize("where", ["own", "again"])
def test_the_worker_in_whose_memory_a_bit_flips_is_named_and_left_out(kind: str, where: str, tmp_path: Path) -> None:
    words = ("--model", "mlp", "--shards", "3")
    flags = ["-np", "3", "--sample-ledger", str(tmp_path)]
    code, said = run(flags, *words, "--flip", f"w1:5:{kind}:{where}")
    assert code == 0, said
    assert [found[0] for found in re.findall(NAMED, said)] == ["w1"], said
    assert "farandole.errors.WrongResult: strict mode: this worker, rank 1, has computed shard" in said
    assert hashes(said) == {hash_alone(*words)}
    assert "lost w1" in said
    assert "starting w3" not in said
    assert "exactly once: yes" in farandole("ledger", "check", str(tmp_path)).stdout


@pytest.mark.parametrize(("model", "flags"), each_once(["resnet", "gpt"], [OVER_TCP, ON_TWO_HOSTS]))
def test_wrong_workers_are_named_over_each_transport(model: str, flags: list[str]) -> None:
    words = ("--model", model, "--shards", "4")
    code, said = run(flags, *words, "--flip", "w2:5:always:own")
    assert code == 0, said
    assert [found[0] for found in re.findall(NAMED, said)] == ["w2"], said
    assert hashes(said) == {hash_alone(*words)}
    # Two workers are left on the other host, if there is one: the whole host is left.
    assert ("is drained: w2 has computed wrongly there; workers that leave: w3" in said) == ("-H" in flags), said


@pytest.mark.parametrize("kind", ["once", "random"])
def test_of_two_workers_the_one_is_wrong_that_cannot_repeat_its_result(kind: str) -> None:
    words = ("--model", "mlp", "--shards", "2")
    code, said = run(["-np", "2"], *words, "--flip", f"w1:5:{kind}:own")
    assert code == 0, said
    assert [found[0] for found in re.findall(NAMED, said)] == ["w1"], said
    assert hashes(said) == {hash_alone(*words)}


def test_two_workers_that_disagree_for_ever_end_the_job_before_the_step_is_applied() -> None:
    code, said = run(["-np", "2"], "--model", "mlp", "--shards", "2", "--flip", "w1:5:always:own")
    assert code == 1
    assert re.search(r"WrongResult: strict mode: ranks 0 and 1 have different results of shard 1 in step 5", said), said
    assert not hashes(said)


def test_a_job_of_fixed_size_ends_with_both_named() -> None:
    words = ["--model", "mlp", "--shards", "2", "--audit", "1", "--flip", "1:5:once:own"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    named = "strict mode: ranks 1 and 0 have different results of shard 1 in step 5"
    assert f"{named}; the job ends: one of fixed size cannot compute it again" in done.stderr
