"""Checks of DistributedOptimizer and what goes with it, over all ranks of a job; each rank prints one line for each.

Every `check_...` runs on all ranks in the same order. What other ranks hold is computed here from their seeds.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import farandole as fd
from farandole.errors import HorovodInternalError, StepError
from farandole.integrations.horovod.named.adasum import tree
from farandole.integrations.horovod.named.negotiation import Adasum, Sum
from farandole.integrations.horovod.named.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from farandole.integrations.horovod.named.process_sets import add_process_set, remove_process_set
from farandole.integrations.horovod.sync_batch_norm import SyncBatchNorm
from farandole.training.optim.compression import Compression
from farandole.training.optim.distributed_optimizer import DistributedOptimizer
from farandole.training.state import step as open_step
from farandole.training.state.session import SESSION


def net(seed: int = 1) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def data(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


def averaged(model: torch.nn.Module, *steps: int, scale: float | None = None) -> list[torch.Tensor]:
    """The gradient over all ranks of the sum over `steps`, computed here."""
    total = sum(loss(model, data(rank, step)) for rank in range(fd.size()) for step in steps)
    parts = torch.autograd.grad(total, list(model.parameters()))  # type: ignore[arg-type]
    return [part * (1 / fd.size() if scale is None else scale) for part in parts]


def same(ours: list[torch.Tensor], wanted: list[torch.Tensor], atol: float = 1e-12) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=atol) for a, b in zip(ours, wanted, strict=True))


def equal_everywhere(model: torch.nn.Module) -> bool:
    mine = [p.detach().tolist() for p in model.parameters()]
    return all(theirs == mine for theirs in allgather_object(mine))


def raises(kind: type[BaseException], words: str) -> Any:
    return pytest.raises(kind, match=re.escape(words))


def sgd(model: torch.nn.Module, lr: float = 0.1, **options: Any) -> Any:
    options.setdefault("named_parameters", model.named_parameters())
    return DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), **options)


# Gradients -----------------------------------------------------------------------------------------------


def check_gradients_are_final_when_backward_returns() -> None:
    for options in (
        {},
        {"named_parameters": None},
        {"groups": 2},
        {"gradient_predivide_factor": 4.0},
        {"gradient_predivide_factor": 4.0, "groups": 3},
    ):
        model = net()
        optimizer = sgd(model, **options)
        for step in range(3):
            optimizer.zero_grad()
            wanted = averaged(model, step)
            loss(model, data(fd.rank(), step)).backward()
            assert same(gradients(model), wanted), options
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            assert optimizer.step() is True
        assert equal_everywhere(model)


def check_lists_of_parameters_are_groups() -> None:
    model = net()
    some = list(model.parameters())
    optimizer = sgd(model, groups=[[some[0], some[3]], [some[1]]], gradient_predivide_factor=2.0)
    wanted = averaged(model, 0)
    loss(model, data(fd.rank())).backward()
    assert same(gradients(model), wanted)
    optimizer.step()


def check_sums_are_not_divided() -> None:
    model = net()
    sgd(model, op=Sum)
    wanted = averaged(model, 0, scale=1.0)
    loss(model, data(fd.rank())).backward()
    assert same(gradients(model), wanted)


def check_compressed_gradients_are_near() -> None:
    for compression in (Compression.fp16, Compression.bf16):
        model = net()
        optimizer = sgd(model, compression=compression)
        wanted = averaged(model, 0)
        loss(model, data(fd.rank())).backward()
        assert same(gradients(model), wanted, atol=0.02)
        assert not same(gradients(model), wanted, atol=1e-9)
        assert gradients(model)[0].dtype == torch.float64
        optimizer.step()
        assert equal_everywhere(model)


def check_passes_are_summed_before_they_are_reduced() -> None:
    model = net()
    optimizer = sgd(model, backward_passes_per_step=2)
    for _ in range(2):
        wanted = averaged(model, 1, 2)
        loss(model, data(fd.rank(), 1)).backward()
        loss(model, data(fd.rank(), 2)).backward()
        assert same(gradients(model), wanted)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    wanted = averaged(model, 3)
    loss(model, data(fd.rank(), 3)).backward()
    assert same(gradients(model), wanted)


def check_a_step_in_the_middle_of_the_passes_reduces_what_there_is() -> None:
    model = net()
    optimizer = sgd(model, backward_passes_per_step=3)
    wanted = averaged(model, 1)
    loss(model, data(fd.rank(), 1)).backward()
    optimizer.step()
    assert same(gradients(model), wanted)


def check_a_pass_too_many_is_refused() -> None:
    model = net()
    optimizer = sgd(model)
    loss(model, data(fd.rank())).backward()
    with raises(AssertionError, "increase backward_passes_per_step to 2"):
        loss(model, data(fd.rank())).backward()
    optimizer.abandon_step()
    wanted = averaged(model, 1)
    loss(model, data(fd.rank(), 1)).backward()
    assert same(gradients(model), wanted)


def check_zeroing_between_backward_and_step_is_refused() -> None:
    model = net()
    optimizer = sgd(model)
    loss(model, data(fd.rank())).backward()
    with raises(AssertionError, "zero_grad"):
        optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.zero_grad()
    loss(model, data(fd.rank())).backward()
    optimizer.step()
    optimizer.zero_grad()


def check_load_state_dict_counts_from_zero() -> None:
    model = net()
    optimizer = sgd(model)
    loss(model, data(fd.rank())).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    loss(model, data(fd.rank())).backward()
    optimizer.step()
    assert equal_everywhere(model)


def check_gradients_that_a_script_keeps_stay_as_they_were() -> None:
    """Those of the last step, or parts of them, while `.grad` is that of the next one."""
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda g: g, lambda g: g.view(-1), lambda g: g.detach()]
    for way in ways:
        model = net()
        optimizer = sgd(model)
        kept: list[torch.Tensor] = []
        for step in range(6):
            optimizer.zero_grad()
            values = [each.clone() for each in kept]
            wanted = averaged(model, step)
            loss(model, data(fd.rank(), step)).backward()
            assert all(map(torch.equal, kept, values))
            assert same(gradients(model), wanted)
            kept = [way(gradient) for gradient in gradients(model)]
            optimizer.step()


def check_gradients_that_a_script_does_not_keep() -> None:
    """Their buffer is used again in the next step."""
    for to_none in (True, False):
        model = net()
        optimizer = sgd(model)
        for step in range(5):
            optimizer.zero_grad(set_to_none=to_none)
            wanted = averaged(model, step)
            loss(model, data(fd.rank(), step)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            assert same(gradients(model), wanted)


def check_gradients_of_several_kinds() -> None:
    """Dtypes, memory formats, and one that autograd differentiates again."""
    torch.manual_seed(1)
    model = torch.nn.ModuleDict(
        {
            "image": torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
            "narrow": torch.nn.Linear(3, 2).bfloat16(),
            "wide": torch.nn.Linear(3, 2).double(),
        }
    )
    optimizer = sgd(model)

    def loss_of(rank: int, step: int) -> torch.Tensor:
        x = data(rank, step)
        image = x.float().repeat(4, 3)[:9, :9].expand(1, 3, 9, 9).contiguous(memory_format=torch.channels_last)
        return (
            model["image"](image).square().mean()
            + model["narrow"](x.bfloat16()).square().mean()
            + model["wide"](x).square().mean()
        )

    for step in range(3):
        optimizer.zero_grad()
        total = sum(loss_of(rank, step) for rank in range(fd.size()))
        wanted = [part / fd.size() for part in torch.autograd.grad(total, list(model.parameters()))]  # type: ignore[arg-type]
        loss_of(fd.rank(), step).backward(create_graph=step == 1)
        tolerances = [2e-2 if part.dtype == torch.bfloat16 else 1e-6 for part in wanted]
        assert all(
            torch.allclose(a, b, rtol=0, atol=atol)
            for a, b, atol in zip(gradients(model), wanted, tolerances, strict=True)
        )
        assert all(g.requires_grad == (step == 1) for g in gradients(model))
        optimizer.step()
    assert equal_everywhere(model)


def check_ranks_that_reduce_different_gradients() -> None:
    model = net()
    if fd.rank() == 0:
        model[0].bias.requires_grad_(False)
    optimizer = sgd(model)
    with raises(HorovodInternalError, "gradients.0.weight"):
        loss(model, data(fd.rank())).backward()
    model[0].bias.requires_grad_(True)
    optimizer.abandon_step()
    wanted = averaged(model, 1)
    loss(model, data(fd.rank(), 1)).backward()
    assert same(gradients(model), wanted)


def check_parts_that_only_some_ranks_use() -> None:
    """Rank 0 uses one head, the others the other; nobody waits in backward for what comes in step()."""
    trunk, one, two = net(1), net(2), net(3)
    model = torch.nn.ModuleList([trunk, one, two])
    optimizer = sgd(model)
    for step in range(2):
        optimizer.zero_grad()
        x = data(fd.rank(), step)
        head = one if fd.rank() == 0 else two
        (loss(trunk, x) + loss(head, x)).backward()
        optimizer.step()
        assert equal_everywhere(model)
    assert same(gradients(trunk), gradients(trunk))


def check_two_backward_passes_over_different_parts() -> None:
    one, two = net(1), net(2)
    model = torch.nn.ModuleList([one, two])
    optimizer = sgd(model)
    wanted = averaged(one, 0) + averaged(two, 0)
    parts = [one, two] if fd.rank() == 0 else [two, one]
    for part in parts:
        loss(part, data(fd.rank())).backward()
    assert same(gradients(one) + gradients(two), wanted)
    optimizer.step()


def check_a_rank_without_any_gradient_takes_part_with_zeros() -> None:
    model = net()
    optimizer = sgd(model)
    if fd.rank() > 0:
        loss(model, data(fd.rank())).backward()
    optimizer.step()
    total = sum(loss(model_before(), data(rank)) for rank in range(1, fd.size()))
    assert torch.is_tensor(total)
    assert equal_everywhere(model)


def model_before() -> torch.nn.Module:
    return net()


def check_parameters_are_frozen_and_unfrozen() -> None:
    one, two = net(1), net(2)
    for parameter in two.parameters():
        parameter.requires_grad_(False)
    model = torch.nn.ModuleList([one, two])
    optimizer = sgd(model)
    for step in range(4):
        trained, frozen = (one, two) if step % 2 == 0 else (two, one)
        for part in (one, two):
            for parameter in part.parameters():
                parameter.requires_grad_(part is trained)
        optimizer.zero_grad()
        wanted = averaged(trained, step)
        before = [p.detach().clone() for p in frozen.parameters()]
        (loss(one, data(fd.rank(), step)) + loss(two, data(fd.rank(), step))).backward()
        assert same(gradients(trained), wanted)
        optimizer.step()
        assert same(list(frozen.parameters()), before)
        assert all(gradient is None for gradient in gradients(frozen))
    assert equal_everywhere(model)


def check_a_model_used_twice_and_one_that_recomputes() -> None:
    model = net()
    optimizer = sgd(model)
    x = data(fd.rank())
    (loss(model, x) + loss(model, 2 * x)).backward()
    optimizer.step()
    for reentrant in (False, True):
        optimizer.zero_grad()
        wanted = averaged(model, 1)
        x = data(fd.rank(), 1).requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
        optimizer.synchronize()
        assert same(gradients(model), wanted)
        with optimizer.skip_synchronize():
            optimizer.step()


def check_two_optimizers_in_one_backward_pass() -> None:
    """With the same names, and hooks that fire in another order on rank 0."""
    one, two = net(1), net(2)
    for names in (True, False):
        first = sgd(one, **({} if names else {"named_parameters": [(f"1.{n}", p) for n, p in one.named_parameters()]}))
        second = sgd(two, **({} if names else {"named_parameters": [(f"2.{n}", p) for n, p in two.named_parameters()]}))
        wanted = averaged(one, 0) + averaged(two, 0)
        losses = [loss(one, data(fd.rank())), loss(two, data(fd.rank()))]
        if not names and fd.rank() == 0:
            losses.reverse()
        sum(losses).backward()  # type: ignore[union-attr]
        assert same(gradients(one) + gradients(two), wanted)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


def check_sparse_gradients() -> None:
    for as_dense in (False, True):
        torch.manual_seed(1)
        embedding = torch.nn.Embedding(10, 3, sparse=True)
        optimizer = DistributedOptimizer(
            torch.optim.SparseAdam(list(embedding.parameters()), lr=0.1), sparse_as_dense=as_dense
        )
        for step in range(3):
            rows = torch.tensor([1, 5 + fd.rank(), 4])
            wanted = torch.zeros(10, 3)
            for rank in range(fd.size()):
                wanted[[1, 5 + rank, 4]] += 1 / fd.size()
            if step == 2 and fd.rank() == 0:  # no gradient here, after there were sparse ones
                wanted[[1, 5, 4]] -= 1 / fd.size()
            elif step < 2 or fd.rank() > 0:
                embedding(rows).sum().backward()
            if step < 2:
                assert torch.allclose(embedding.weight.grad.to_dense(), wanted)
            optimizer.step()
            optimizer.zero_grad()
        assert equal_everywhere(embedding)


def check_process_sets_reduce_among_themselves() -> None:
    some = add_process_set(list(range(fd.size() - 1)))
    model = net()
    optimizer = sgd(model, process_set=some)
    before = [p.detach().clone() for p in model.parameters()]
    loss(model, data(fd.rank())).backward()
    optimizer.step()
    optimizer.zero_grad()
    alike = allgather_object([p.detach().tolist() for p in model.parameters()])
    assert all(each == alike[0] for each in alike[: fd.size() - 1])
    assert alike[-1] != alike[0]
    assert not same(list(model.parameters()), before)
    remove_process_set(some)


# synchronize(), skip_synchronize(), closures, scalers -----------------------------------------------------


def check_clipping_by_horovods_recipe() -> None:
    model = net()
    optimizer = sgd(model)
    wanted = averaged(model, 0)
    loss(model, data(fd.rank())).backward()
    optimizer.synchronize()
    assert same(gradients(model), wanted)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.skip_synchronize():
            optimizer.step()
    assert equal_everywhere(model)


def check_a_step_after_synchronize_warns_once_and_keeps_what_was_clipped() -> None:
    model = net()
    optimizer = sgd(model, op=Sum)
    loss(model, data(fd.rank())).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.001)
    clipped = [gradient.clone() for gradient in gradients(model)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert [str(each.message)[:71] for each in caught] == [
        "optimizer.step() called without optimizer.skip_synchronize() after opti"
    ]
    assert same(gradients(model), clipped)
    optimizer.zero_grad()
    loss(model, data(fd.rank())).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def check_a_closure_is_reduced_after_each_call() -> None:
    model = net()
    optimizer = DistributedOptimizer(torch.optim.LBFGS(model.parameters(), lr=0.5), model.named_parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, data(fd.rank()))
        value.backward()
        return broadcast_object(value.detach())

    first = optimizer.step(closure)
    optimizer.step(closure)
    assert float(closure()) < float(first)
    assert equal_everywhere(model)


def check_grad_scalers_by_either_recipe() -> None:
    """Infinite on one rank only: all skip."""
    for horovod in (False, True):
        for fused in (False, True):
            torch.manual_seed(1)
            model = torch.nn.Linear(3, 1)
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), model.named_parameters()
            )
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            wanted = [p - 0.1 * g for p, g in zip(model.parameters(), averaged(model.double(), 0), strict=True)]
            model.float()
            for step in range(2):
                optimizer.zero_grad()
                factor = float("inf") if step == 1 and fd.rank() == 0 else 1.0
                scaler.scale(loss(model, data(fd.rank()).float()) * factor).backward()
                if horovod:
                    optimizer.synchronize()
                    scaler.unscale_(optimizer)
                    with optimizer.skip_synchronize():
                        scaler.step(optimizer)
                else:
                    scaler.step(optimizer)
                scaler.update()
                assert same([p.double() for p in model.parameters()], wanted, atol=1e-6), (horovod, fused, step)
            assert scaler.get_scale() == 512.0


def check_a_scaler_where_only_some_ranks_have_all_gradients() -> None:
    """Then the reduction comes in step(), after the scaler has looked: all must skip all the same."""
    one, two = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    model = torch.nn.ModuleList([one, two])
    broadcast_parameters(model.state_dict(), 0)
    optimizer = sgd(model)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x = data(fd.rank()).float()
    value = loss(one, x) if fd.rank() == 0 else loss(one, x * float("inf")) + loss(two, x)
    scaler.scale(value).backward()
    scaler.step(optimizer)
    assert same(list(model.parameters()), before)


# Errors ----------------------------------------------------------------------------------------------------


def check_after_a_mismatch_nothing_of_the_step_is_left() -> None:
    model = torch.nn.Linear(3 if fd.rank() == 0 else 2, 1)
    optimizer = sgd(model)
    with raises(HorovodInternalError, "weight"):
        model(torch.ones(1, model.in_features)).sum().backward()
    assert all(gradient is None for gradient in gradients(model))
    optimizer.zero_grad()
    good = net()
    optimizer = sgd(good)
    wanted = averaged(good, 0)
    loss(good, data(fd.rank())).backward()
    assert same(gradients(good), wanted)


# Adasum ----------------------------------------------------------------------------------------------------


def check_adasum_combines_the_steps() -> None:
    model = net()
    if fd.size() & (fd.size() - 1):
        with raises(NotImplementedError, f"got {fd.size()}"):
            sgd(model, op=Adasum)
        return
    optimizer = sgd(model, op=Adasum)
    for step in range(2):
        optimizer.zero_grad()
        start = [p.detach().clone() for p in model.parameters()]
        by_rank = [
            torch.autograd.grad(loss(model, data(rank, step)), list(model.parameters())) for rank in range(fd.size())
        ]
        wanted = [p + tree([-0.1 * by_rank[rank][place] for rank in range(fd.size())]) for place, p in enumerate(start)]
        loss(model, data(fd.rank(), step)).backward()
        with raises(AssertionError, "zero_grad"):
            optimizer.zero_grad()
        optimizer.synchronize()
        assert optimizer.step() is True
        assert same(list(model.parameters()), wanted)
        assert equal_everywhere(model)
    with raises(AssertionError, "Adasum"), optimizer.skip_synchronize():
        pass
    some = add_process_set([0])
    with raises(NotImplementedError, "process_set"):
        sgd(model, op=Adasum, process_set=some)
    remove_process_set(some)


class Elastic:
    """A run loop that does nothing but run."""

    def can_repeat(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


def check_adasum_in_an_elastic_job_averages_where_the_size_is_no_power_of_two() -> None:
    if fd.size() & (fd.size() - 1) == 0:
        return
    SESSION.open(Elastic())  # type: ignore[arg-type]
    try:
        model = net()
        optimizer = sgd(model, op=Adasum)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                wanted = [p - 0.1 * g for p, g in zip(model.parameters(), averaged(model, step), strict=True)]
                optimizer.zero_grad()
                loss(model, data(fd.rank(), step)).backward()
                optimizer.step()
                assert same(list(model.parameters()), wanted)
        assert [f"which is {fd.size()} now" in str(each.message) for each in caught] == [True]
    finally:
        SESSION.close()


# From one rank to all -------------------------------------------------------------------------------------


def check_parameters_are_broadcast() -> None:
    model = net(fd.rank())
    broadcast_parameters(model.state_dict(), fd.size() - 1)
    assert same(list(model.parameters()), list(net(fd.size() - 1).parameters()))
    model = net(fd.rank())
    broadcast_parameters(list(model.named_parameters()), 0)
    assert equal_everywhere(model)
    model = net(fd.rank())
    broadcast_parameters(list(model.parameters()), 0)
    assert equal_everywhere(model)
    with raises(ValueError, "generator"):
        broadcast_parameters(model.parameters(), 0)  # type: ignore[arg-type]


def check_objects_go_around() -> None:
    obj = {"hello": 123, 0: [1, 2], "f": lambda: 7} if fd.rank() == 1 else None
    received = broadcast_object(obj, root_rank=1)
    assert (received["hello"], received[0], received["f"]()) == (123, [1, 2], 7)
    gathered = allgather_object({"rank": fd.rank(), "text": "x" * 1000 * fd.rank()})
    assert [len(each["text"]) for each in gathered] == [1000 * rank for rank in range(fd.size())]


OPTIONS = [
    {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1, "centered": True},
    {"lr": 0.1, "betas": (0.9, 0.99), "etas": (0.8, 2.4), "amsgrad": True},
]


def optimizer_classes() -> list[Any]:
    named = {each.__name__: each for each in torch.optim.Optimizer.__subclasses__() if "torch.optim" in each.__module__}
    return [named[name] for name in sorted(named) if name not in ("LBFGS", "SparseAdam", "Muon")]


def made(kind: Any, options: dict[str, Any], model: torch.nn.Module) -> Any:
    known = inspect.signature(kind.__init__).parameters
    return kind(model.parameters(), **{key: value for key, value in options.items() if key in known})


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return (type(value).__name__, value) if not isinstance(value, (list, tuple)) else [plain(each) for each in value]


def check_optimizer_state_is_broadcast_without_moving_parameters() -> None:
    """Rank 0 has trained, the others join: for each optimizer of torch."""
    for kind in optimizer_classes():
        for options in OPTIONS:
            model = net()
            theirs = options if fd.rank() == 0 else {"lr": 0.5}
            base = made(kind, theirs, model)
            if fd.rank() == 0:
                for _ in range(2):
                    base.zero_grad()
                    loss(model, data(0)).backward()
                    base.step()
            base.zero_grad()
            optimizer = DistributedOptimizer(base, model.named_parameters())
            before = [p.detach().clone() for p in model.parameters()]
            broadcast_optimizer_state(optimizer, 0)
            assert same(list(model.parameters()), before), kind
            mine = plain(optimizer.state_dict())
            assert all(each == mine for each in allgather_object(mine)), kind
            broadcast_parameters(model.state_dict(), 0)
            optimizer.zero_grad()
            loss(model, data(fd.rank())).backward()
            optimizer.step()
            assert equal_everywhere(model), kind


def check_an_optimizer_without_state_keeps_none_and_gets_zero_gradients() -> None:
    model = net()
    next(model.parameters()).requires_grad_(False)
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    broadcast_optimizer_state(optimizer, 0)
    assert not optimizer.state_dict()["state"]
    first, *others = gradients(model)
    assert first is None
    assert all(torch.equal(each, torch.zeros_like(each)) for each in others)


def check_optimizers_that_cannot_be_broadcast() -> None:
    model = net()
    with raises(ValueError, "LBFGS"):
        broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)
    other = torch.nn.Linear(2 + fd.rank(), 1)
    with raises(ValueError, "build the same optimizer"):
        broadcast_optimizer_state(torch.optim.SGD(other.parameters(), lr=0.1), 0)


# SyncBatchNorm ---------------------------------------------------------------------------------------------


def check_batch_norm_over_all_ranks_equals_one_over_the_whole_batch() -> None:
    shapes: list[tuple[int, ...]] = [(4,), (4, 5), (4, 3, 2)]
    for affine in (True, False):
        for momentum in (0.1, None):
            for shape in shapes:
                options: dict[str, Any] = {"affine": affine, "momentum": momentum}
                sync, reference = SyncBatchNorm(4, **options).double(), torch.nn.BatchNorm1d(4, **options).double()
                reference._check_input_dim = lambda _: None  # type: ignore[method-assign]
                for _ in range(2):
                    generator = torch.Generator().manual_seed(5)
                    parts = [
                        (
                            torch.randn(rank + 1, *shape, generator=generator, dtype=torch.float64) + 1000
                        ).requires_grad_()
                        for rank in range(fd.size())
                    ]
                    weights = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in parts]
                    mine = parts[fd.rank()].detach().clone().requires_grad_()
                    sync.zero_grad()
                    reference.zero_grad()
                    out, wanted = sync(mine), reference(torch.cat(parts))
                    (out * weights[fd.rank()]).sum().backward()
                    (wanted * torch.cat(weights)).sum().backward()
                    low = sum(len(part) for part in parts[: fd.rank()])
                    assert torch.allclose(out, wanted[low : low + len(mine)], rtol=0, atol=1e-8)
                    assert torch.allclose(mine.grad, parts[fd.rank()].grad, rtol=0, atol=1e-7)
                    assert torch.allclose(sync.running_mean, reference.running_mean, rtol=1e-12)
                    assert torch.allclose(sync.running_var, reference.running_var, rtol=1e-9)
                    if affine:
                        for ours, theirs in zip(sync.parameters(), reference.parameters(), strict=True):
                            total = torch.stack(
                                [torch.tensor(each) for each in allgather_object(ours.grad.tolist())]
                            ).sum(0)
                            assert torch.allclose(total.double(), theirs.grad, rtol=1e-4, atol=1e-4)
                sync.eval()
                reference.eval()
                assert torch.allclose(sync(mine), reference(mine))


def check_batch_norm_with_unequal_local_batches_trains_as_one_process_does() -> None:
    class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, float]]):
        def __len__(self) -> int:
            return 3 * fd.size() - 2 * (fd.size() > 2)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
            generator = torch.Generator().manual_seed(index)
            return torch.randn(3, generator=generator, dtype=torch.float64), float(index % 3 + 1)

    def train(norm: torch.nn.Module, loss: str, world: tuple[int, int]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), norm, torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if world[1] > 1:
            optimizer = DistributedOptimizer(optimizer, loss="sum" if loss == "sum" else "mean")
        # Of the second global batch one rank has no sample where there are three ranks or more.
        loader = fd.elastic.DataLoader(Rows(), 2 * fd.size() - 1, shuffle=False)
        loader.set_world(*world)
        for x, weight in loader:
            optimizer.zero_grad()
            each = (model(x).squeeze(1) - 1).square()
            if loss == "weighted":
                if world[1] > 1:
                    fd.weight(float(weight.sum()))
                each = each * weight / weight.sum() * len(x)
            (each.sum() if loss == "sum" else each.mean()).backward()
            optimizer.step()
            loader.commit(loader.global_batch)  # type: ignore[arg-type]
            open_step.close()
        return [*model.parameters(), *model.buffers()]

    for loss in ("mean", "sum", "weighted"):
        ours = train(SyncBatchNorm(4), loss, (fd.rank(), fd.size()))
        theirs = train(torch.nn.BatchNorm1d(4), loss, (0, 1))
        for our, their in zip(ours, theirs, strict=True):
            assert torch.allclose(our, their, rtol=1e-9, atol=1e-9), (loss, our, their)


def check_batch_norm_refuses_a_weight_of_zero_on_a_rank_with_samples() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), SyncBatchNorm(4))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fd.elastic.DataLoader(torch.utils.data.TensorDataset(torch.randn(4 * fd.size(), 3)), 4 * fd.size())
    loader.set_world(fd.rank(), fd.size())
    (x,) = next(iter(loader))
    optimizer.zero_grad()
    fd.weight(fd.rank())
    with raises(StepError, "would be lost"):
        model(x).square().mean().backward()
    open_step.close()


def check_batch_norm_needs_two_values_in_the_whole_batch() -> None:
    norm = SyncBatchNorm(2)
    assert norm(torch.randn(1, 2)).shape == (1, 2)  # one value for each channel on each rank is enough
    with raises(ValueError, "got 0"):
        norm(torch.randn(0, 2))
    half = SyncBatchNorm(2)(torch.randn(3, 2).bfloat16())
    assert half.dtype == torch.bfloat16


def main(wanted: list[str]) -> None:
    fd.init()
    checks: dict[str, Callable[[], None]] = {
        name: value for name, value in globals().items() if name.startswith("check_") and (not wanted or name in wanted)
    }
    for name, check in checks.items():
        try:
            check()
            problem = None
        except Exception:  # noqa: BLE001 - the test shows it
            problem = traceback.format_exc()
        sys.stdout.write(json.dumps({"check": name, "rank": fd.rank(), "problem": problem}) + "\n")
        sys.stdout.flush()
    fd.shutdown()


main(sys.argv[1:])
