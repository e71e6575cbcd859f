"""Several optimizers in one loop body: they make one step together, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.base.membership import GenerationId, Placement
from farandole.errors import StepError
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.state import step
from farandole.training.state.packing import pack, unpack
from farandole.training.state.session import SESSION
from tests.support.run_loops import RepeatingRunLoop

pytestmark = pytest.mark.core

REAL = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def transport() -> Iterator[AloneTransport]:
    yield enter_new_world()
    step.close()
    step.on_decided(None)
    SESSION.close()
    world.enter(None)


def enter_new_world() -> AloneTransport:
    transport = AloneTransport(1)
    world.enter(world.World(GenerationId(1, 1, 1, ""), Placement(0, 1, 0, 1, 0, 1), transport))
    return transport


class Gan:
    """A generator and a discriminator, alone or with everything of ours around them."""

    def __init__(
        self, micro_batch_size: int | None = None, wrap: Callable[[Any], Any] = fd.DistributedOptimizer
    ) -> None:
        torch.manual_seed(5)
        self.generator = torch.nn.Linear(4, 4).double()
        self.discriminator = torch.nn.Linear(4, 1).double()
        self.first = wrap(torch.optim.Adam(self.generator.parameters(), lr=0.05))
        self.second = wrap(torch.optim.SGD(self.discriminator.parameters(), lr=0.05, momentum=0.9))
        self.loader = fd.elastic.DataLoader(
            torch.utils.data.TensorDataset(REAL), 6, seed=1, micro_batch_size=micro_batch_size
        )

    def state(self) -> fd.elastic.TorchState:
        return fd.elastic.TorchState(
            model=self.generator,
            optimizer=self.first,
            loader=self.loader,
            discriminator=self.discriminator,
            second=self.second,
        )

    def generator_step(self, x: torch.Tensor) -> Any:
        """Its loss leaves gradients in the discriminator."""
        self.first.zero_grad()
        (self.discriminator(self.generator(x)) - 1).square().mean().backward()
        return self.first.step()

    def discriminator_step(self, x: torch.Tensor) -> Any:
        """Two backward passes, as in PyTorch's DCGAN."""
        self.second.zero_grad()
        (self.discriminator(x) - 1).square().mean().backward()
        self.discriminator(self.generator(x).detach()).square().mean().backward()
        return self.second.step()

    def everything(self) -> list[torch.Tensor]:
        tensors = [p.detach().clone() for p in (*self.generator.parameters(), *self.discriminator.parameters())]
        for optimizer in (self.first, self.second):
            for entry in optimizer.state.values():
                tensors += [value.clone() for value in entry.values() if torch.is_tensor(value)]
        return tensors


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.allclose, some, others))


@pytest.mark.parametrize("order", [["generator_step", "discriminator_step"], ["discriminator_step", "generator_step"]])
def test_a_gan_trains_as_without_us_whoever_steps_first(order: list[str]) -> None:
    ours, plain = Gan(), Gan(wrap=lambda optimizer: optimizer)
    state = ours.state()
    for (x,) in ours.loader:
        for name in order:
            assert getattr(ours, name)(x) is True
            getattr(plain, name)(x)
    assert state.step == 2
    assert equal(ours.everything(), plain.everything())


def test_the_step_is_decided_by_the_last_of_them() -> None:
    gan = Gan()
    state = gan.state()
    for (x,) in gan.loader:
        before = state.step
        gan.generator_step(x)
        assert (state.step, step.status()) == (before, "reduced")
        gan.discriminator_step(x)
        assert (state.step, step.status()) == (before + 1, "decided")


def test_a_body_may_step_one_of_them_and_decides_the_step_when_it_is_over() -> None:
    """As in a WGAN, whose generator steps for every n-th batch only."""
    ours, plain = Gan(), Gan(wrap=lambda optimizer: optimizer)
    state = ours.state()
    for epoch in ours.loader.epochs(3):
        for (x,) in ours.loader:
            before = state.step
            for gan in (ours, plain):
                gan.discriminator_step(x)
                if before % 3 == 0:
                    gan.generator_step(x)
            assert state.step == before + (before % 3 == 0)
            assert ours.loader.cursor == 6 * (state.step - 2 * epoch)
    assert state.step == 6
    assert equal(ours.everything(), plain.everything())


def test_a_body_that_steps_none_of_them_is_refused() -> None:
    gan = Gan()
    state = gan.state()
    batches = iter(gan.loader)
    gan.discriminator(next(batches)[0]).mean().backward()
    with pytest.raises(StepError, match=r"without optimizer\.step\(\)"):
        next(batches)
    assert (state.step, gan.loader.cursor) == (0, 0)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_fault_between_them_takes_back_the_one_that_has_stepped(steps_before: int, transport: AloneTransport) -> None:
    SESSION.open(RepeatingRunLoop())
    gan = Gan()
    state = gan.state()
    batches = iter(gan.loader)
    for _ in range(steps_before):
        (x,) = next(batches)
        gan.generator_step(x)
        gan.discriminator_step(x)
    before = gan.everything()
    (x,) = next(batches)
    assert gan.generator_step(x) is True
    assert not equal(gan.everything(), before)
    transport.abort("a worker was lost")
    assert gan.discriminator_step(x) is False
    assert step.is_aborted()
    step.take_back()  # as the run loop does when the loop body is over
    assert equal(gan.everything(), before)
    assert state.step == steps_before

    enter_new_world()
    step.close()
    (again,) = next(batches)
    assert torch.equal(again, x)
    gan.generator_step(again)
    gan.discriminator_step(again)
    undisturbed = Gan()
    undisturbed.state()
    for _, (y,) in zip(range(steps_before + 1), undisturbed.loader, strict=False):
        undisturbed.generator_step(y)
        undisturbed.discriminator_step(y)
    assert equal(gan.everything(), undisturbed.everything())


def test_closing_the_step_between_them_takes_back_the_one_that_has_stepped() -> None:
    """As the run loop does when an exception leaves the function."""
    gan = Gan()
    gan.state()
    before = gan.everything()
    for (x,) in gan.loader:
        gan.generator_step(x)
        break
    step.close()
    iter(gan.loader)
    assert equal(gan.everything(), before)


def test_break_after_one_of_them_has_stepped_ends_the_body() -> None:
    gan = Gan()
    state = gan.state()
    for _ in gan.loader.epochs(2):
        for (x,) in gan.loader:
            gan.generator_step(x)
            break
        assert state.step == gan.loader.epoch
    assert state.step == 2


@pytest.mark.parametrize("generator_first", [True, False])
def test_micro_batches_of_a_gan_add_up_and_strays_do_not_count(generator_first: bool) -> None:
    ours, plain = Gan(micro_batch_size=3), Gan(wrap=lambda optimizer: optimizer)

    def losses(gan: Gan, x: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
        functions = {
            "first": lambda: (gan.discriminator(gan.generator(x)) - 1).square().mean(),
            "second": lambda: (gan.discriminator(x) + gan.discriminator(gan.generator(x).detach())).square().mean(),
        }
        return functions if generator_first else dict(reversed(functions.items()))

    state, applied = ours.state(), []
    for index, (x,) in enumerate(ours.loader):
        for name, loss in losses(ours, x).items():
            optimizer = getattr(ours, name)
            optimizer.zero_grad()
            loss().backward()
            applied.append(optimizer.step())
        for name, loss in losses(plain, x).items():
            optimizer = getattr(plain, name)
            parameters = optimizer.param_groups[0]["params"]
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss(), parameters), strict=True):
                parameter.grad = gradient / 2 if index % 2 == 0 else parameter.grad + gradient / 2
            if index % 2 == 1:
                optimizer.step()
    assert state.step == 2
    assert applied == [False, False, True, True] * 2
    assert equal(ours.everything(), plain.everything())


def test_the_state_of_all_of_them_is_taken_over() -> None:
    source, newcomer = Gan(), Gan()
    state = source.state()
    for (x,) in source.loader:
        source.generator_step(x)
        source.discriminator_step(x)
    source.second.param_groups[0]["lr"] = 0.125
    state.capture()
    metadata, tensors = unpack(state.captured()), unpack(pack(state.live_tensors()))
    other = newcomer.state()
    other.load_tensors(tensors)
    other.load_metadata(metadata)
    assert equal(newcomer.everything(), source.everything())
    assert newcomer.second.param_groups[0]["lr"] == 0.125
    assert other.step == 2
