"""Strict mode: the model of every job is the same to the last bit."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import farandole as fd
from farandole.errors import ConfigError
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.scripts.strict_job import MODELS, SAMPLES
from tests.support.combinations import each_once
from tests.support.jobs import SCRIPTS, RunningJob, farandole, farandole_run, run_alone

pytestmark = [pytest.mark.long, pytest.mark.core]

SCRIPT = SCRIPTS / "strict_job.py"
WORLDS = {
    "2 over shared memory": ["-np", "2"],
    "3 over TCP": ["-np", "3", "--transport", "tcp"],
    "4 on two hosts": ["-np", "4", "-H", "localhost:2,127.0.0.1:2"],
}


def hashes(output: str) -> list[str]:
    return re.findall(r"rank \d+ of \d+: ([0-9a-f]{64}) after", output)


def hashes_of_job(flags: Sequence[str], *arguments: str) -> list[str]:
    done = farandole_run("-q", *flags, sys.executable, str(SCRIPT), *arguments, timeout_s=120.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return hashes(done.stdout)


@cache
def hash_alone(*arguments: str, fresh: bool = False) -> str:
    """The hash of a single process without a launcher."""
    done = run_alone(SCRIPT, *arguments, fresh=fresh)
    assert done.returncode == 0, done.stdout + done.stderr
    return hashes(done.stdout)[0]


@pytest.mark.parametrize(("model", "world"), each_once([*MODELS], [*WORLDS]))
def test_every_world_trains_the_same_bits(model: str, world: str) -> None:
    arguments = ("--model", model, "--shards", "8")
    expected = hash_alone(*arguments, fresh=True)
    assert set(hashes_of_job(WORLDS[world], *arguments)) == {expected}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["--shards", "4", "--micro", "2"], id="accumulation"),
        pytest.param(["--shards", "3"], id="as many shards as workers"),
        pytest.param(["--shards", "6", "--num-workers", "2"], id="loader workers"),
        pytest.param(["--shards", "24"], id="more shards than samples in the last batch"),
    ],
)
def test_other_settings_train_the_same_bits_in_every_world(more: list[str]) -> None:
    arguments = ("--model", "mlp", *more)
    expected = hash_alone(*arguments)
    assert set(hashes_of_job(["-np", "3"], *arguments)) == {expected}
    assert set(hashes_of_job(["-np", "2", "--transport", "tcp"], *arguments)) == {expected}


@pytest.mark.parametrize("model", MODELS)
def test_a_ddp_trains_the_same_bits_as_a_distributed_optimizer(model: str, tmp_path: Path) -> None:
    arguments = ("--model", model, "--shards", "8")
    expected, ledgers = hash_alone(*arguments), []
    for number, flags in enumerate((["-np", "2"], ["-np", "3", "--transport", "tcp"], WORLDS["4 on two hosts"])):
        ledgers.append(str(tmp_path / str(number)))
        how = ["--ddp", "--audit", "1"] if number else []
        assert set(hashes_of_job([*flags, "--sample-ledger", ledgers[-1]], *arguments, *how)) == {expected}
    for other in ledgers[1:]:
        done = farandole("ledger", "check", ledgers[0], "--against", other)
        assert "the same state: yes, by 3 hashes" in done.stdout, done.stdout + done.stderr


def test_without_strict_mode_the_bits_depend_on_the_world() -> None:
    """Else the tests above would show nothing."""
    arguments = ("--model", "mlp", "--plain")
    assert set(hashes_of_job(["-np", "3"], *arguments)) != {hash_alone(*arguments)}


def test_the_ledger_tells_jobs_with_other_states_apart(tmp_path: Path) -> None:
    for folder, shards in (("one", "8"), ("other", "4")):
        hashes_of_job(["-np", "2", "--sample-ledger", str(tmp_path / folder)], "--model", "mlp", "--shards", shards)
    done = farandole("ledger", "check", str(tmp_path / "one"), "--against", str(tmp_path / "other"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "exactly once: yes" in done.stdout
    assert "the same state: NO, since step 4 at the latest" in done.stdout


def test_the_state_can_be_hashed_within_epochs(tmp_path: Path) -> None:
    ledgers = [str(tmp_path / name) for name in ("one", "other")]
    for ledger, flags in zip(ledgers, (["-np", "2"], ["-np", "3", "--transport", "tcp"]), strict=True):
        how = ["--sample-ledger", ledger, "--hash-every", "3"]
        hashes_of_job([*flags, *how], "--model", "resnet", "--shards", "4")
    done = farandole("ledger", "check", ledgers[0], "--against", ledgers[1])
    # After steps 3, 6, 9 and 12, and at the ends of epochs of 4 steps.
    assert "the same state: yes, by 6 hashes, the last one after step 12" in done.stdout, done.stdout + done.stderr


def test_the_launcher_can_make_loaders_strict_with_as_many_shards_as_workers_may_ever_train() -> None:
    found = hashes_of_job(["-np", "2", "--max-np", "4", "--strict"], "--model", "mlp")
    assert set(found) == {hash_alone("--model", "mlp", "--shards", "4")}
    assert set(hashes_of_job(["-np", "2", "--shards", "8"], "--model", "mlp")) == {
        hash_alone("--model", "mlp", "--shards", "8")
    }


def trained_weights(epochs: int) -> str:
    """A worker of farandole.run(): the hash of its state."""
    import torch

    import farandole as fd

    fd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
    optimizer = fd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    data = torch.utils.data.TensorDataset(torch.rand(48, 5, generator=torch.Generator().manual_seed(1)))
    loader = fd.elastic.DataLoader(data, 24, seed=3)
    state: Any = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)

    @fd.elastic.run
    def train(state: Any) -> None:
        for _ in loader.epochs(epochs):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    train(state)
    return str(state.hash())


def test_functions_can_be_run_in_strict_mode() -> None:
    found = {*fd.run(trained_weights, (3,), num_proc=2, shards=4)}
    assert found == {*fd.run(trained_weights, (3,), num_proc=3, strict=True, shards=4)}
    assert len(found) == 1
    with pytest.raises(ConfigError, match="shards=2 is below the largest number of workers, 3"):
        fd.run(trained_weights, (3,), num_proc=3, shards=2)


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("operator", r"put_.*does not have a deterministic implementation"),
        (
            "noise",
            r"StepError: strict mode: two runs.*model\.6\.bias, .* and 3 more.*another output is model\.0 \(Flatten\)",
        ),
    ],
)
def test_what_cannot_be_repeated_to_the_last_bit_is_named(broken: str, error: str) -> None:
    done = farandole_run("-np", "2", sys.executable, str(SCRIPT), "--model", "mlp", "--shards", "4", "--break", broken)
    assert done.returncode != 0
    assert re.search(error, done.stdout + done.stderr), done.stdout + done.stderr


def test_a_worker_that_rounds_otherwise_is_named_and_the_others_train_on() -> None:
    """Here by its number of threads, as by another processor."""
    flags = ["-np", "3", "--restarts", "0", "--verbose"]
    words = ["--model", "mlp", "--shards", "8", "--break", "threads"]
    done = farandole_run(*flags, sys.executable, str(SCRIPT), *words)
    said = done.stdout + done.stderr
    assert re.search(r"ConfigError: strict mode: rank 1 rounds otherwise than 2 of 3 workers.*2 threads", said), said
    assert set(hashes(said)) == {hash_alone("--model", "mlp", "--shards", "8")}


def beyond(generation: int, size: int) -> Any:
    def condition(latest: dict[int, dict[str, Any]]) -> bool:
        return all_training(size)(latest) and latest[0]["generation"] > generation

    return condition


def beyond_step(step: int, size: int) -> Any:
    def condition(latest: dict[int, dict[str, Any]]) -> bool:
        return len(latest) == size and all(each.get("before", 0) > step for each in latest.values())

    return condition


@pytest.mark.parametrize(("model", "way"), each_once([*MODELS], [("tcp", "--ddp"), ("shm", "--audit", "1"), ("tcp",)]))
def test_kills_and_joins_change_no_bit(model: str, way: Sequence[str], tmp_path: Path) -> None:
    (transport, *how), epochs = way, ("--epochs", "12")
    arguments = ["--model", model, "--shards", "8", *epochs, "--step-s", "0.1", "--slow-below", "3", *how]
    ledger, quiet = tmp_path / "ledger", tmp_path / "quiet"
    flags = ["-np", "3", "--transport", transport, "--verbose", "--sample-ledger", str(ledger)]
    with RunningJob(flags, SCRIPT, arguments, tmp_path, tmp_path / "output") as running:
        latest = running.wait_until(all_training(3), 60)
        running.kill(latest[1]["pid"])
        running.wait_until(beyond(latest[0]["generation"], 2), 60)  # without it, then with its replacement
        running.wait_until(beyond(latest[0]["generation"], 3), 60)
        assert running.wait(120) == 0, (tmp_path / "output").read_text()
    found = hashes((tmp_path / "output").read_text())
    assert len(found) == 3
    assert set(found) == {hash_alone("--model", model, "--shards", "8", *epochs)}
    assert Proof(tmp_path).epochs(SAMPLES).is_exact
    hashes_of_job(["-np", "2", "--sample-ledger", str(quiet)], "--model", model, "--shards", "8", *epochs)
    done = farandole("ledger", "check", str(ledger), "--against", str(quiet))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 hashes of the state; after step 48: " in done.stdout
    assert "the same state: yes, by 12 hashes, the last one after step 48" in done.stdout
    assert (tmp_path / "output").read_text().count("the state after step ") >= 12


@pytest.mark.parametrize("model", ["mlp", "resnet"])
def test_a_job_that_is_killed_as_a_whole_and_resumed_at_another_size_trains_the_same_bits(
    model: str, tmp_path: Path
) -> None:
    """The number of shards is that of the checkpoint. The hashes of epochs that are trained again are compared."""
    epochs = ("--epochs", "12")
    ledger, before, after = tmp_path / "ledger", tmp_path / "before", tmp_path / "after"
    before.mkdir()
    kept = ["--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "3steps", "--sample-ledger", str(ledger)]
    flags = ["-np", "3", "--max-np", "6", "--strict", *kept]
    arguments = ["--model", model, *epochs, "--step-s", "0.05"]
    with RunningJob(flags, SCRIPT, arguments, before, tmp_path / "first") as running:
        running.wait_until(beyond_step(14, 3), 60)
        running.process.kill()
        running.process.wait()
    after.mkdir()
    words = ["--model", model, *epochs, "--records", str(after)]
    done = farandole_run("-np", "2", "--strict", *kept, sys.executable, str(SCRIPT), *words, timeout_s=120.0)
    assert set(hashes(done.stdout)) == {hash_alone("--model", model, "--shards", "6", *epochs)}, done.stdout
    assert "has the digest" not in done.stdout + done.stderr, "of another state than the one that was saved"
    done = farandole("ledger", "check", str(ledger))
    assert "12 hashes of the state" in done.stdout
    assert "has two hashes" not in done.stdout
