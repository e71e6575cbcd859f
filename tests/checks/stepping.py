"""What happens to gradients of a batch that ranks share, compared with one process on the whole batch. Cut into many
buckets, which are reduced while backward goes on, unless it says otherwise."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

import farandole as fd
from farandole.errors import CollectiveMismatch, ConfigError, RecoverableError, StepError
from farandole.training.collectives import world
from farandole.training.collectives.connection_pair import bytes_of
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch

MANY = 0.0001  # megabytes
SAMPLES = 12
STEPS = 3


def net(dtype: torch.dtype = torch.float64, width: int = 16) -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers = [torch.nn.Linear(width, width) for _ in range(6)]
    return torch.nn.Sequential(*[each for layer in layers for each in (layer, torch.nn.Tanh())]).to(dtype)


def samples(model: torch.nn.Module) -> torch.Tensor:
    first = next(model.parameters())
    return torch.randn(SAMPLES, first.shape[-1], generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(
        first.dtype
    )


def share(micro_batches: int = 1) -> Iterator[slice]:
    """This rank's samples of the batch, which is out meanwhile; shares differ in length."""
    bounds = [SAMPLES * (rank * rank + rank) // (fd.size() * (fd.size() + 1)) for rank in range(fd.size() + 1)]
    low, high = bounds[fd.rank()], bounds[fd.rank() + 1]
    global_batch = GlobalBatch(0, 0, SAMPLES, low, high, micro_batches)
    for index in range(micro_batches):
        begin = low + (high - low) * index // micro_batches
        end = low + (high - low) * (index + 1) // micro_batches
        step.open(Batch(global_batch, begin, end, index))
        yield slice(begin, end)
    step.close()


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def optimizer_of(parameters: Iterable[torch.Tensor], **arguments: Any) -> torch.optim.Optimizer:
    return fd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.5), **{"bucket_mb": MANY, **arguments})


def trained(model: torch.nn.Module, loss: Callable[..., torch.Tensor] = loss_of, **arguments: Any) -> torch.nn.Module:
    optimizer, x = optimizer_of(model.parameters(), **arguments), samples(model)
    for _ in range(STEPS):
        for mine in share():
            optimizer.zero_grad()
            loss(model, x[mine]).backward()
            assert optimizer.step() is True
    return model


def alone(model: torch.nn.Module, loss: Callable[..., torch.Tensor] = loss_of) -> torch.nn.Module:
    """The same on the whole batch, without us."""
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.5), samples(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model, x).backward()
        optimizer.step()
    return model


def refuse_difference(one: torch.nn.Module, other: torch.nn.Module, tolerance: float = 1e-12) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=tolerance), f"{name}: {(a - b).abs().max()}"
    refuse_drift(one)


def refuse_drift(model: torch.nn.Module) -> None:
    """The same bits on all ranks."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(bytes_of(parameter).numpy().tobytes())
    everybody = world.current().transport.all_gather(digest.digest())
    assert len(set(everybody)) == 1, "ranks have different parameters"


def renew() -> None:
    """After a failed reduction."""
    step.close()
    fd.shutdown()
    fd.init()


# The same as one process ---------------------------------------------------------------------------------------


def check_many_buckets_give_the_model_of_one_process() -> None:
    refuse_difference(trained(net()), alone(net()))


def check_one_bucket_gives_the_model_of_one_process() -> None:
    refuse_difference(trained(net(), bucket_mb=0), alone(net()))


def check_with_two_ranks_many_buckets_give_the_bits_of_one() -> None:
    one, many = trained(net(torch.float32), bucket_mb=0), trained(net(torch.float32))
    if fd.size() == 2:
        assert all(map(torch.equal, one.parameters(), many.parameters()))
    refuse_difference(one, many, 1e-6)


def check_buckets_of_several_dtypes() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = net(), net(torch.float32), net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.third(self.second(self.first(x).float()).double())

    refuse_difference(trained(Mixed()), alone(Mixed()), 1e-6)


def check_parameters_that_some_ranks_do_not_use_get_the_gradients_of_the_others() -> None:
    model, x = net(), None
    optimizer, x = optimizer_of(model.parameters()), samples(net())
    for turn in range(STEPS):
        for mine in share():
            optimizer.zero_grad()
            is_idle = (fd.rank() + turn) % 2 == 1
            (model[:4](x[mine]) if is_idle else model(x[mine])).square().mean().backward()
            assert all(each.grad is not None for each in model.parameters())
            assert optimizer.step() is True
    refuse_drift(model)


def check_frozen_parameters_stay() -> None:
    def frozen() -> torch.nn.Module:
        model = net()
        model[4].requires_grad_(False)
        model[0].weight.requires_grad_(False)
        return model

    model = trained(frozen())
    refuse_difference(model, alone(frozen()))
    assert torch.equal(model[4].weight, net()[4].weight)


def check_a_parameter_that_is_frozen_between_steps_stays() -> None:
    model, x = net(), samples(net())
    optimizer = optimizer_of(model.parameters(), bucket_mb=MANY)
    for turn in range(STEPS):
        if turn == 1:
            model[6].requires_grad_(False)
            before = model[6].weight.detach().clone()
        for mine in share():
            optimizer.zero_grad()
            loss_of(model, x[mine]).backward()
            optimizer.step()
    assert torch.equal(model[6].weight, before)
    refuse_drift(model)


def check_shared_parameters_are_reduced_once() -> None:
    def tied() -> torch.nn.Module:
        model = net()
        model[8].weight = model[2].weight
        return model

    refuse_difference(trained(tied()), alone(tied()))


def check_sparse_gradients_become_dense() -> None:
    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rest = net()
            torch.manual_seed(3)
            self.words = torch.nn.Embedding(10, 16, sparse=True, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rest(x + self.words(x[:, 0].mul(3).long().remainder(10)))

    refuse_difference(trained(Words()), alone(Words()))


def check_a_compiled_model_trains_alike() -> None:
    torch._dynamo.reset()
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    refuse_difference(trained(model, lambda _, x: loss_of(compiled, x)), alone(net()))


def check_micro_batches_add_up() -> None:
    model, x = net(), samples(net())
    optimizer = optimizer_of(model.parameters())
    for _ in range(STEPS):
        for mine in share(micro_batches=2):
            optimizer.zero_grad()
            if mine.start < mine.stop:
                loss_of(model, x[mine]).backward()
            optimizer.step()
    refuse_difference(model, alone(net()))


def check_two_backward_passes_add_up() -> None:
    def twice(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x)
        loss.backward(retain_graph=True)
        return loss

    refuse_difference(trained(net(), twice), alone(net(), twice))


def check_the_gradient_of_a_gradient_may_be_part_of_the_loss() -> None:
    def with_penalty(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Of each sample by itself: a mean of such penalties is that of the whole batch."""
        x = x.clone().requires_grad_(True)
        slopes = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        return loss_of(model, x) + slopes.square().mean()

    refuse_difference(trained(net(), with_penalty), alone(net(), with_penalty))


def check_backward_may_keep_its_graph() -> None:
    model = net()
    optimizer, x = optimizer_of(model.parameters()), samples(model)
    for mine in share():
        with pytest.warns(UserWarning, match="create_graph"):
            loss_of(model, x[mine]).backward(create_graph=True)
        assert not any(each.grad.requires_grad for each in model.parameters())
        assert optimizer.step() is True
    refuse_drift(model)


def check_something_is_reduced_in_the_background() -> None:
    trained(net())
    assert any(thread.name == "farandole-gradients" for thread in threading.enumerate())


# On the wire ---------------------------------------------------------------------------------------------------


def check_compressed_gradients_are_the_same_bits_on_all_ranks() -> None:
    for compression in (fd.Compression.bf16, fd.Compression.fp16):
        for bucket_mb in (0, MANY):
            model = trained(net(torch.float32), compression=compression, bucket_mb=bucket_mb)
            refuse_difference(model, alone(net(torch.float32)), 0.01)
            gradient = next(model.parameters()).grad
            narrow = torch.bfloat16 if compression is fd.Compression.bf16 else torch.float16
            assert torch.equal(gradient, gradient.to(narrow).float())


def check_a_compressor_of_the_user_works() -> None:
    class Halves(fd.Compression.none):
        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return tensor / 2, None

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return tensor * 2

    refuse_difference(trained(net(), compression=Halves), alone(net()))


# What goes wrong -----------------------------------------------------------------------------------------------


def check_different_models_are_found_with_the_first_parameter_that_differs() -> None:
    width = 16 if fd.rank() == 0 else 17
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, width)).double()
    optimizer, x = optimizer_of(model.parameters(), named_parameters=model.named_parameters()), samples(model)
    before = model[0].weight.detach().clone()
    for mine in share():
        with pytest.raises(CollectiveMismatch) as caught:
            loss_of(model, x[mine]).backward()
    others = "rank 1" if fd.size() == 2 else "ranks 1, 2"
    assert f"number 2: 1.weight (16, 16) float64 on rank 0; 1.weight (17, 16) float64 on {others}" in str(caught.value)
    assert torch.equal(model[0].weight, before)
    assert optimizer.state == {}
    renew()


def check_a_model_with_more_parameters_is_found() -> None:
    layers = [torch.nn.Linear(16, 16).double() for _ in range(1 + (fd.rank() == 1))]
    model = torch.nn.Sequential(*layers)
    optimizer_of(model.parameters())
    for mine in share():
        with pytest.raises(CollectiveMismatch, match="number 2: nothing on rank"):
            loss_of(model, samples(model)[mine]).backward()
    renew()


def check_inf_and_nan_of_one_rank_are_everybodys() -> None:
    for bad in (float("inf"), float("nan")):
        model = net()
        optimizer, x = optimizer_of(model.parameters()), samples(model)
        for mine in share():
            (loss_of(model, x[mine]) * (bad if fd.rank() == 0 else 1.0)).backward()
            assert not any(bool(torch.isfinite(each.grad).any()) for each in model.parameters())
            assert optimizer.step() is True


def check_parameters_on_several_devices_are_refused_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16, device="meta"))
    optimizer_of(model.parameters(), named_parameters=model.named_parameters())
    for _ in share():
        with pytest.raises(ConfigError, match=r"1\.weight of shape \(16, 16\) is on meta.*on cpu, meta"):
            model[0](torch.ones(1, 16)).sum().backward()


def check_a_backward_that_raises_half_way_ends_the_step_on_all_ranks() -> None:
    model = net()
    optimizer, x = optimizer_of(model.parameters()), samples(model)
    for mine in share():  # the buckets are agreed upon
        loss_of(model, x[mine]).backward()
        optimizer.step()

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("half way")

    if fd.rank() == 0:
        model[0].weight.register_hook(fail)
    for mine in share():
        optimizer.zero_grad()
        if fd.rank() == 0:
            with pytest.raises(ValueError, match="half way"):
                loss_of(model, x[mine]).backward()
            with pytest.raises(StepError, match="FARANDOLE_BUCKET_MB=0"):
                optimizer.zero_grad()
            step.close()  # as the run loop does
        else:
            with pytest.raises(RecoverableError):
                loss_of(model, x[mine]).backward()
    renew()


def check_after_that_everything_works_again() -> None:
    check_many_buckets_give_the_model_of_one_process()
