"""Optimizers of all kinds: workers are killed in the middle of epochs and replaced, and all workers have the same
parameters and the same state of their optimizers at the end, which are those of plain torch in one process."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts.optimizer_kinds import (
    BATCH,
    EPOCHS,
    SAMPLES,
    SEED,
    STEPS,
    TORCH,
    WRITTEN,
    LookaheadList,
    Make,
    Sam,
    ScheduleFree,
    dataset,
    difference,
    loss_of,
    network,
    sam,
    whole,
)
from tests.support.jobs import SCRIPTS, farandole_run
from tests.support.pure_order import global_batches

pytestmark = [pytest.mark.long, pytest.mark.core, pytest.mark.timeout(300)]

Found = list[dict[str, Any]]
"""What each worker has written at the end."""


def run_job(folder: Path, kinds: str, *die: str, way: str = "optimizer") -> Found:
    """Three workers. One dies at each of these places, one after another, and is replaced."""
    words = ["--folder", str(folder), "--kinds", kinds, "--way", way, "--die", *die]
    done = farandole_run("-np", "3", sys.executable, str(SCRIPTS / "optimizer_kinds_job.py"), *words, timeout_s=280)
    assert done.returncode == 0, done.stderr
    found = [torch.load(path) for path in sorted(folder.glob("worker-*.pt"))]
    assert len(found) == 3, done.stderr
    assert len([*folder.glob("killed-*")]) == len(die)
    # The second death is that of another of the first workers; the third one is that of a worker that has joined.
    assert [each["joined"] for each in found].count(1) == max(1, 3 - len(die)), "nobody has joined"
    return found


def train_plainly(model: torch.nn.Module, optimizer: Any, body: Any = None) -> dict[str, Any]:
    """One process, nothing of ours; the order of the samples is computed apart from the library."""
    samples = dataset()
    for number, batch in enumerate(global_batches(SAMPLES, BATCH, SEED, EPOCHS).values()):
        x, y = samples[[sample for _, sample in batch]]
        (body or usual_body)(model, optimizer, x, y, number)
    return whole(model, optimizer)


def usual_body(model: torch.nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()


def assert_right(found: Found, name: str, expected: dict[str, Any]) -> None:
    assert [each["steps"] for each in found] == [STEPS] * 3
    for each in found:
        assert difference(each["kinds"][name], found[0]["kinds"][name], 0.0) == ""
        assert difference(each["kinds"][name], expected, 1e-10) == ""


@cache
def expected_of(make: Make) -> dict[str, Any]:
    """What plain torch makes of it; several tests compare with it."""
    model = network()
    return train_plainly(model, make(list(model.parameters())))


# Side by side ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_job(tmp_path_factory.mktemp("torch"), "torch", "in mid-step")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_job(tmp_path_factory.mktemp("written"), "written", "in mid-step")


@pytest.fixture(scope="module")
def written_with_ddp(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_job(tmp_path_factory.mktemp("ddp"), "written", "after backward", way="ddp")


@pytest.fixture(scope="module")
def written_with_commits(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_job(tmp_path_factory.mktemp("commits"), "written", "in mid-step", way="horovod")


@pytest.mark.parametrize("name", TORCH)
def test_an_optimizer_of_torch(name: str, of_torch: Found) -> None:
    assert_right(of_torch, name, expected_of(TORCH[name]))


@pytest.mark.parametrize("name", WRITTEN)
def test_an_optimizer_that_somebody_has_written(name: str, written: Found) -> None:
    assert_right(written, name, expected_of(WRITTEN[name]))


@pytest.mark.parametrize("name", WRITTEN)
def test_an_optimizer_that_somebody_has_written_with_ddp(name: str, written_with_ddp: Found) -> None:
    assert_right(written_with_ddp, name, expected_of(WRITTEN[name]))


@pytest.mark.parametrize("name", WRITTEN)
def test_an_optimizer_that_somebody_has_written_under_the_commit_rule(name: str, written_with_commits: Found) -> None:
    model = network()
    optimizer = WRITTEN[name](list(model.parameters()))
    x, y = dataset().tensors
    for number in range(STEPS):
        usual_body(model, optimizer, x, y, number)
    assert_right(written_with_commits, name, whole(model, optimizer))


def test_networks_have_learned_something() -> None:
    before = {f"<{name}>": parameter.detach() for name, parameter in network().named_parameters()}
    for name, make in (TORCH | WRITTEN).items():
        after = expected_of(make)
        moved = max(float((after[key] - value).abs().max()) for key, value in before.items())
        assert moved > 0.01, name


# In loop bodies of their own -----------------------------------------------------------------------------------------


def two_steps(model: torch.nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
    loss_of(model, x, y).backward()
    optimizer.first_step(zero_grad=True)
    loss_of(model, x, y).backward()
    optimizer.second_step(zero_grad=True)


def evaluating(model: torch.nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    if number % 3 == 0:
        optimizer.eval()
        optimizer.train()
    optimizer.step()


FIRST, SECOND, AFTER = "in the first backward pass", "in the second backward pass", "after the step"


@pytest.mark.parametrize(("way", "die"), [("optimizer", (FIRST, SECOND, AFTER)), ("ddp", (SECOND,))])
def test_two_backward_passes_for_each_step(way: str, die: tuple[str, ...], tmp_path: Path) -> None:
    model = network()
    expected = train_plainly(model, sam(list(model.parameters())), two_steps)
    assert_right(run_job(tmp_path, "SAM", *die, way=way), "SAM", expected)


@pytest.mark.parametrize(("way", "die"), [("optimizer", (FIRST, SECOND)), ("ddp", (SECOND,))])
def test_two_backward_passes_of_which_one_is_in_a_closure(way: str, die: tuple[str, ...], tmp_path: Path) -> None:
    model = network()
    expected = train_plainly(model, sam(list(model.parameters())), two_steps)
    assert_right(run_job(tmp_path, "SAM, closure", *die, way=way), "SAM, closure", expected)


@pytest.mark.parametrize("way", ["optimizer", "ddp"])
def test_a_backward_pass_in_a_closure(way: str, tmp_path: Path) -> None:
    model = network()
    expected = train_plainly(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    assert_right(run_job(tmp_path, "SGD, closure", FIRST, way=way), "SGD, closure", expected)


@pytest.mark.parametrize("way", ["optimizer", "ddp"])
def test_a_worker_dies_while_the_parameters_are_those_for_evaluation(way: str, tmp_path: Path) -> None:
    model = network()
    expected = train_plainly(model, ScheduleFree(model.parameters(), lr=0.2), evaluating)
    assert_right(run_job(tmp_path, "schedule-free", "in evaluation", way=way), "schedule-free", expected)


def test_an_optimizer_around_another_one_alone(tmp_path: Path) -> None:
    model = network()
    expected = train_plainly(model, LookaheadList(torch.optim.Adam(model.parameters(), lr=0.02)))
    assert_right(run_job(tmp_path, "Lookahead", FIRST, AFTER), "Lookahead", expected)


def test_what_two_passes_reach_is_not_what_one_reaches() -> None:
    """Or the tests of two passes would say nothing."""
    first, second = network(), network()
    one: Sam = sam(list(first.parameters()))
    plain = train_plainly(second, torch.optim.SGD(second.parameters(), lr=0.05, momentum=0.9))
    with_sam = train_plainly(first, one, two_steps)
    assert float((plain["<0.weight>"] - with_sam["<0.weight>"]).abs().max()) > 1e-4
