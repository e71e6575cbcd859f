"""The state that a communication hook of a DistributedDataParallel keeps from step to step: workers as threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from farandole.errors import GenerationEnded
from farandole.integrations.ddp.module import adopt
from farandole.integrations.torchrun.process_group.c10d_group import FarandoleGroup
from farandole.integrations.torchrun.process_group.works import Everybody
from farandole.training.collectives import world
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.session import SESSION
from tests.support.run_loops import RepeatingRunLoop
from tests.support.thread_workers import run_workers

pytestmark = pytest.mark.core

FEATURES, SAMPLES, BEFORE = 8, 12, 2  # steps before PowerSGD begins


class Worker:
    """A worker from its first generation to its last: its model is not made anew, whatever its rank."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(FEATURES, FEATURES, bias=False).double()
        torch.nn.init.eye_(self.net.weight)
        self.fails = False
        self.errors: dict[int, torch.Tensor] = {}  # before the last pass
        self.left: dict[int, torch.Tensor] = {}  # after it
        self.is_made = False

    def make(self) -> None:
        group = FarandoleGroup(Everybody())
        self.state = PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=BEFORE)
        self.ddp = DistributedDataParallel(self.net, process_group=group)

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
            self.errors = dict(state.error_dict)
            future = powerSGD_hook(state, bucket)
            future.wait()
            self.left = dict(state.error_dict)
            if self.fails:
                raise GenerationEnded("test", 1)
            return future

        self.ddp.register_comm_hook(self.state, hook)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1)
        adopt([self.ddp], [self.optimizer])
        self.is_made = True

    def train(self, steps: int, first: int = 0) -> None:
        """Make steps in the current generation."""
        if not self.is_made:
            self.make()
        here = world.current().placement
        share = SAMPLES // here.size
        for number in range(first, first + steps):
            low = share * here.rank
            batch = Batch(GlobalBatch(0, 0, SAMPLES, low, low + share, 1), low, low + share, 0)
            step.open(batch)
            x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
            self.optimizer.zero_grad()
            (self.ddp(x[low : low + share]) - x[low : low + share].cos()).square().mean().backward()
            self.optimizer.step()

    def equal(self) -> dict[str, Any]:
        """What is equal on all workers."""
        return {
            "iter": self.state.iter,
            "q": self.state.q_memory_dict,
            "random": self.state.rng.get_state()[1].tolist(),
        }


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else bool(first == second)


def test_a_worker_that_joins_gets_what_is_equal_and_the_others_keep_their_errors() -> None:
    workers = [Worker() for _ in range(3)]
    run_workers(2, lambda rank: workers[rank].train(5))
    before = [dict(each.state.error_dict) for each in workers[:2]]
    assert all(bool(each[0].any()) for each in before)
    run_workers(1, lambda _: workers[2].make())
    joined = [workers[2], workers[0], workers[1]]
    run_workers(3, lambda rank: joined[rank].train(1, 5))
    for worker, own in zip(workers[:2], before, strict=True):
        assert torch.allclose(worker.errors[0], own[0] * 3 / 2, rtol=1e-12, atol=0)
    assert workers[2].errors == {}
    assert all(same(each.equal(), workers[0].equal()) for each in workers)
    assert workers[0].state.iter == 6
    gradients = [each.net.weight.grad for each in workers]
    assert all(torch.equal(each, gradients[0]) for each in gradients)  # type: ignore[arg-type]


def test_a_survivor_keeps_its_errors_and_those_of_a_lost_worker_are_lost() -> None:
    workers = [Worker() for _ in range(3)]
    run_workers(3, lambda rank: workers[rank].train(5))
    before = dict(workers[1].state.error_dict)
    run_workers(1, lambda rank: workers[1].train(1, 5))
    assert torch.allclose(workers[1].errors[0], before[0] / 3, rtol=1e-12, atol=0)
    assert workers[1].state.iter == 6


def test_in_the_same_generation_nothing_is_exchanged_or_multiplied() -> None:
    workers = [Worker() for _ in range(2)]

    def work(rank: int) -> None:
        workers[rank].train(4)
        before = dict(workers[rank].state.error_dict)
        workers[rank].train(1, 4)
        assert same(workers[rank].errors, before)

    run_workers(2, work)


@pytest.fixture
def repeating() -> Any:
    SESSION.open(RepeatingRunLoop())  # type: ignore[arg-type]
    yield
    SESSION.close()


def test_an_aborted_step_leaves_the_state_as_it_was(repeating: None) -> None:
    worker = Worker()

    def work(rank: int) -> None:
        worker.train(4)
        equal, errors = worker.equal(), dict(worker.state.error_dict)
        equal["q"] = {key: value.clone() for key, value in equal["q"].items()}
        worker.fails = True
        worker.train(1, 4)
        assert step.is_aborted()
        step.close()
        assert same(worker.equal(), equal)
        assert same(worker.state.error_dict, errors)
        worker.fails = False
        worker.train(1, 4)
        assert same(worker.errors, errors)
        assert worker.state.iter == 5

    run_workers(1, work)


def test_a_worker_that_missed_the_end_of_a_step_goes_on_with_its_errors_of_that_step(repeating: None) -> None:
    """Its compression had ended, and the others have applied the step."""
    workers = [Worker() for _ in range(2)]

    def work(rank: int) -> None:
        workers[rank].train(4)
        if rank == 1:
            lose_the_end_of_steps(world.current().transport)
        workers[rank].train(1, 4)
        assert step.is_aborted() is (rank == 1)

    run_workers(2, work)
    left = [each.left for each in workers]
    assert not same(workers[1].state.error_dict, left[1])
    run_workers(2, lambda rank: workers[rank].train(1, 5))
    assert [same(each.errors, own) for each, own in zip(workers, left, strict=True)] == [True, True]
    assert same(workers[0].equal(), workers[1].equal())


def lose_the_end_of_steps(transport: Any) -> None:
    """Let the header of each step reach the others, and raise here."""
    real = transport.all_reduce

    def all_reduce(tensor: torch.Tensor, trailer: bytes = b"", *others: Any) -> list[bytes]:
        result = real(tensor, trailer, *others)
        if trailer:
            raise GenerationEnded("test", 1)
        return result  # type: ignore[no-any-return]

    transport.all_reduce = all_reduce
