"""Optimizers that step in two parts, or run backward passes themselves, while a batch of a loader is out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.base.membership import GenerationId, Placement
from farandole.errors import ConfigError, StepError
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.state import step
from farandole.training.state.deep_copy import BackgroundCopy
from farandole.training.state.session import SESSION
from tests.scripts.optimizer_kinds import Attributes, LookaheadList, Rules, ScheduleFree, sam, whole
from tests.support.run_loops import RepeatingRunLoop

pytestmark = pytest.mark.core

X = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def transport() -> Iterator[AloneTransport]:
    transport = AloneTransport(1)
    world.enter(world.World(GenerationId(1, 1, 1, ""), Placement(0, 1, 0, 1, 0, 1), transport))
    yield transport
    step.close()
    step.on_decided(None)
    SESSION.close()
    world.enter(None)


def net() -> torch.nn.Linear:
    torch.manual_seed(5)
    return torch.nn.Linear(4, 2).double()


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 1).square().mean()


class Training:
    """A model, an optimizer of a kind and everything of ours around them."""

    def __init__(self, make: Callable[[Any], Any], micro_batch_size: int | None = None) -> None:
        self.model = net()
        self.optimizer: Any = fd.DistributedOptimizer(make(list(self.model.parameters())))
        self.loader = fd.elastic.DataLoader(
            torch.utils.data.TensorDataset(X), 6, seed=1, micro_batch_size=micro_batch_size
        )
        self.state = fd.elastic.TorchState(model=self.model, optimizer=self.optimizer, loader=self.loader)

    def everything(self) -> str:
        return repr(whole(self.model, self.optimizer))

    def two_steps(self, x: torch.Tensor) -> None:
        loss_of(self.model, x).backward()
        self.optimizer.first_step(zero_grad=True)
        loss_of(self.model, x).backward()
        self.optimizer.second_step(zero_grad=True)


def test_the_second_of_two_steps_decides_the_step() -> None:
    ours = Training(sam)
    for (x,) in ours.loader:
        before = ours.state.step
        loss_of(ours.model, x).backward()
        ours.optimizer.first_step(zero_grad=True)
        assert ours.model.weight.grad is None
        assert (ours.state.step, step.status()) == (before, "reduced")
        loss_of(ours.model, x).backward()
        ours.optimizer.second_step()
        assert (ours.state.step, step.status()) == (before + 1, "decided")


def test_a_closure_between_the_two_steps_gives_the_same() -> None:
    one = Training(sam)
    for (x,) in one.loader:
        one.two_steps(x)
    other = Training(sam)
    for (x,) in other.loader:

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            loss = loss_of(other.model, x)
            loss.backward()
            return loss

        loss_of(other.model, x).backward()
        loss = other.optimizer.step(closure)
        assert torch.isfinite(loss)
        other.optimizer.zero_grad()
    assert one.everything() == other.everything()


@pytest.mark.parametrize("fault_in", [1, 2])
def test_a_fault_in_either_pass_takes_everything_back(fault_in: int, transport: AloneTransport) -> None:
    SESSION.open(RepeatingRunLoop())  # type: ignore[arg-type]
    ours = Training(sam)
    batches = iter(ours.loader)
    ours.two_steps(next(batches)[0])
    (x,) = next(batches)
    before = ours.everything()
    if fault_in == 1:
        transport.abort("a worker was lost")
    loss_of(ours.model, x).backward()
    ours.optimizer.first_step(zero_grad=True)
    transport.abort("a worker was lost")
    loss_of(ours.model, x).backward()
    ours.optimizer.second_step(zero_grad=True)
    assert (ours.state.step, step.status()) == (1, "aborted")
    step.take_back()
    assert ours.everything() == before


def test_a_fault_in_a_closure_takes_everything_back_and_gives_a_loss(transport: AloneTransport) -> None:
    SESSION.open(RepeatingRunLoop())  # type: ignore[arg-type]
    ours = Training(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    batches = iter(ours.loader)
    (x,) = next(batches)
    before = ours.everything()
    transport.abort("a worker was lost")
    for _ in range(2):  # the second time it is aborted when it begins
        assert torch.isfinite(ours.optimizer.step(lambda: loss_and_backward(ours, x)))
    assert step.is_aborted()
    step.take_back()
    assert ours.everything() == before


def loss_and_backward(ours: Training, x: torch.Tensor) -> torch.Tensor:
    ours.optimizer.zero_grad()
    loss = loss_of(ours.model, x)
    loss.backward()
    return loss


def test_a_step_without_a_backward_pass_is_refused() -> None:
    ours = Training(sam)
    ours.two_steps(next(iter(ours.loader))[0])
    next(iter(ours.loader))
    with pytest.raises(StepError, match="without the gradients of the global batch"):
        ours.optimizer.second_step()
    step.close()
    other = Training(lambda p: torch.optim.SGD(p, lr=0.1))
    next(iter(other.loader))
    with pytest.raises(StepError, match="without the gradients of the global batch"):
        other.optimizer.step(lambda: 1.0)


def test_two_steps_for_one_batch_are_refused() -> None:
    ours = Training(sam)
    batches = iter(ours.loader)
    (x,) = next(batches)
    ours.two_steps(x)
    assert ours.state.step == 1
    with pytest.raises(StepError, match="twice"):
        ours.two_steps(x)


def test_what_is_being_copied_is_copied_before_a_method_changes_it() -> None:
    ours = Training(sam)
    (x,) = next(iter(ours.loader))
    loss_of(ours.model, x).backward()
    source = ours.model.weight.detach()
    before, target, copies = source.clone(), torch.empty_like(source), BackgroundCopy()
    copies.postpone([(source, target)])
    ours.optimizer.first_step()
    assert not torch.equal(source, before)
    assert torch.equal(target, before)


def test_parameters_must_not_move_between_micro_batches() -> None:
    ours = Training(sam, micro_batch_size=2)
    (x,) = next(iter(ours.loader))
    loss_of(ours.model, x).backward()
    ours.optimizer.first_step()  # with gradients of zeros it moves nothing
    with pytest.raises(StepError, match=r"second_step\(\) between the micro-batches.*micro_batch_size"):
        ours.optimizer.second_step()


def test_a_switch_to_evaluation_is_taken_back_with_the_step(transport: AloneTransport) -> None:
    SESSION.open(RepeatingRunLoop())  # type: ignore[arg-type]
    ours = Training(lambda p: ScheduleFree(p, lr=0.1))
    batches = iter(ours.loader)
    (x,) = next(batches)
    loss_and_backward(ours, x)
    ours.optimizer.step()
    (x,) = next(batches)
    before = ours.everything()
    ours.optimizer.eval()
    assert ours.everything() != before
    step.take_back()
    assert ours.everything() == before
    assert ours.optimizer.param_groups[0]["train_mode"] is True


def test_between_epochs_a_method_is_what_it_is_without_us() -> None:
    ours = Training(lambda p: ScheduleFree(p, lr=0.1))
    for (x,) in ours.loader:
        loss_and_backward(ours, x)
        ours.optimizer.step()
    ours.optimizer.eval()
    before = ours.everything()
    step.close()
    assert ours.everything() == before


@pytest.mark.parametrize("kind", [Attributes, Rules])
def test_functions_that_a_class_has_made_of_itself_see_the_same_attributes(kind: Any) -> None:
    ours = Training(lambda p: kind(p, lr=0.1))
    plain = net()
    reference = kind(list(plain.parameters()), lr=0.1)
    for (x,) in ours.loader:
        loss_and_backward(ours, x)
        ours.optimizer.step()
        reference.zero_grad()
        loss_of(plain, x).backward()
        reference.step()
    assert ours.everything() == repr(whole(plain, reference))


def test_lbfgs_and_sparse_adam_are_refused_at_once() -> None:
    for make in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(ConfigError, match=f"torch.optim.{make.__name__} .*commit rule"):
            Training(make)
    with pytest.raises(ConfigError, match="LBFGS"):
        Training(lambda p: LookaheadList(torch.optim.LBFGS(p)))


class WithCycles(torch.optim.SGD):
    """An optimizer that only the garbage collector can free, as many are: their hooks refer to them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.own: dict[str, Any] = {"counts": {}, "me": self}
        self.loop = [self.own]


def test_freeing_the_given_optimizer_leaves_the_wrapped_one_whole() -> None:
    """Both have the same attributes. From Python 3.13 on, the collector has cleared them with the given optimizer."""
    for _ in range(20):
        optimizer = fd.DistributedOptimizer(WithCycles(net().parameters(), lr=0.1, momentum=0.9))
        gc.collect()
        assert set(optimizer.own) == {"counts", "me"}
        assert optimizer.loop[0] is optimizer.own
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_outermost_optimizer_is_the_one_to_wrap() -> None:
    model = net()
    outer = LookaheadList(fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)))
    with pytest.raises(StepError, match="this LookaheadList contains a DistributedOptimizer"):
        fd.DistributedOptimizer(outer)
    loader = fd.elastic.DataLoader(torch.utils.data.TensorDataset(X), 6)
    with pytest.raises(ConfigError, match="the LookaheadList of the TorchState contains a DistributedOptimizer"):
        fd.elastic.TorchState(model=model, optimizer=outer, loader=loader)
