"""DistributedDataParallel and ordinary optimizers after they were adopted: workers as threads, and a world of one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from farandole.base.membership import GenerationId, Placement
from farandole.errors import ConfigError, GenerationEnded, StepError
from farandole.integrations.ddp.module import adopt
from farandole.integrations.torchrun.process_group.c10d_group import FarandoleGroup
from farandole.integrations.torchrun.process_group.works import Everybody
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.optim.distributed_optimizer import DistributedOptimizer
from farandole.training.optim.step_agreement import weight
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.session import SESSION
from farandole.training.state.step import StepStatus
from tests.support.run_loops import RepeatingRunLoop
from tests.support.thread_workers import run_workers

pytestmark = pytest.mark.core

FEATURES = 3


def enter(number: int) -> AloneTransport:
    transport = AloneTransport(number)
    world.enter(world.World(GenerationId(1, 1, number, ""), Placement(0, 1, 0, 1, 0, 1), transport))
    return transport


@pytest.fixture
def alone() -> Iterator[AloneTransport]:
    step.close()
    step.on_decided(None)
    yield enter(1)
    step.close()
    step.on_decided(None)
    SESSION.close()
    world.enter(None)


_seeding = threading.Lock()  # there is one generator for all threads


def net() -> torch.nn.Sequential:
    with _seeding:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def samples(count: int) -> torch.Tensor:
    return torch.randn(count, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def parallel(module: torch.nn.Module | None = None, **arguments: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module or net(), process_group=FarandoleGroup(Everybody()), **arguments)


def adopted(ddp: DistributedDataParallel, **arguments: Any) -> torch.optim.SGD:
    """An optimizer of its parameters, in the elastic function, too."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    assert adopt([ddp], [optimizer], **arguments)
    return optimizer


def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def gradients(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None])


def wanted(x: torch.Tensor, module: torch.nn.Module | None = None) -> torch.Tensor:
    module = module or net()
    loss(module, x).backward()
    return gradients(module)


def hand_out(shares: list[list[int]], rank: int) -> Iterator[tuple[Batch, torch.Tensor]]:
    """The micro-batches of one global batch, as a loader does. `shares`: sizes of those of each rank, equally many."""
    total = sum(map(sum, shares))
    low = sum(map(sum, shares[:rank]))
    global_batch = GlobalBatch(0, 0, total, low, low + sum(shares[rank]), len(shares[rank]))
    for index, count in enumerate(shares[rank]):
        batch = Batch(global_batch, low, low + count, index)
        step.open(batch)
        x = samples(total)[low : low + count] if count else samples(total)[:2] * float("inf")
        low += count
        yield batch, x


# Shares ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [[[5], [2], [0]], [[1], [1], [1]], [[4, 2], [3, 0], [0, 0]], [[2, 2, 1], [2, 2, 1]]])
@pytest.mark.parametrize("as_view", [False, True])
def test_shares_of_any_size_make_the_gradient_of_the_whole_batch(shares: list[list[int]], as_view: bool) -> None:
    def worker(rank: int) -> torch.Tensor:
        ddp = parallel(gradient_as_bucket_view=as_view)
        optimizer = adopted(ddp)
        for batch, x in hand_out(shares, rank):
            optimizer.zero_grad()
            loss(ddp, x).backward()
            if not batch.is_last:
                assert optimizer.step() is False
                assert all(each.grad is not None and not each.grad.any() for each in ddp.parameters())
        found = gradients(ddp).clone()
        assert optimizer.step() is True
        return found

    expected = wanted(samples(sum(map(sum, shares))))
    for found in run_workers(len(shares), worker):
        assert torch.allclose(found, expected, rtol=0, atol=1e-14)


def test_what_the_user_says_a_loss_weighs_counts() -> None:
    def worker(rank: int) -> torch.Tensor:
        ddp = parallel()
        adopted(ddp)
        for _, x in hand_out([[3], [1]], rank):
            weight(1.0 + rank)
            loss(ddp, x).backward()
        return gradients(ddp)

    x = samples(4)
    expected = (wanted(x[:3]) + 2 * wanted(x[3:])) / 3
    for found in run_workers(2, worker):
        assert torch.allclose(found, expected, rtol=0, atol=1e-14)


def test_gradients_of_micro_batches_lie_as_their_parameters_do_in_memory() -> None:
    def conv() -> torch.nn.Module:
        with _seeding:
            torch.manual_seed(3)
            layers = torch.nn.Conv2d(3, 4, 2).double(), torch.nn.Flatten(), torch.nn.Linear(16, 1).double()
        return torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    pictures = torch.randn(4, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def worker(rank: int) -> torch.Tensor:
        ddp = parallel(conv())
        adopted(ddp)
        for batch, _ in hand_out([[1, 1], [1, 1]], rank):
            loss(ddp, pictures[batch.low : batch.high]).backward()
        return gradients(ddp)

    expected = wanted(pictures, conv())
    for found in run_workers(2, worker):
        assert torch.allclose(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("accumulates", [False, True])
def test_no_sync_holds_where_the_script_accumulates_by_itself_and_not_where_the_loader_does(accumulates: bool) -> None:
    def worker(rank: int) -> torch.Tensor:
        ddp = parallel()
        adopted(ddp, accumulates=lambda: accumulates)
        for _, x in hand_out([[2], [2]], rank):
            with ddp.no_sync():
                loss(ddp, x).backward()
            assert step.status() == ("reduced" if accumulates else "open")
        return gradients(ddp)

    found = run_workers(2, worker)
    assert torch.equal(found[0], found[1]) is accumulates


def test_loop_bodies_that_do_not_count_leave_the_gradients_as_they_are(alone: AloneTransport) -> None:
    ddp = parallel()
    optimizer = adopted(ddp, accumulates=lambda: True)
    for _, x in hand_out([[4]], 0):
        loss(ddp, x).backward()
    batch = step.batch()
    assert batch is not None
    for _ in range(2):
        step.pad(batch.padding())
        optimizer.zero_grad()
        assert torch.equal(gradients(ddp), wanted(samples(4)))
        ddp.zero_grad(set_to_none=False)
        loss(ddp, 100 * samples(4)).backward()
        assert torch.equal(gradients(ddp), wanted(samples(4)))
    assert optimizer.step() is True
    assert torch.equal(ddp.module[0].weight, _stepped(samples(4)))


def _stepped(x: torch.Tensor) -> torch.Tensor:
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss(module, x).backward()
    optimizer.step()
    return module[0].weight.detach()


def test_two_models_that_share_a_step_are_undone_together(alone: AloneTransport) -> None:
    SESSION.open(RepeatingRunLoop())  # type: ignore[arg-type]
    first, second = parallel(), parallel()
    optimizers = [adopted(first), adopted(second)]
    step.track(optimizers)
    before = first.module[0].weight.detach().clone()
    for _, x in hand_out([[2, 2]], 0):
        for ddp, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad()
            (loss(ddp, x) + loss(first, x)).backward()  # the second one's runs through the first
            optimizer.step()
            if step.status() is StepStatus.REDUCED:
                assert not torch.equal(first.module[0].weight, before)
                alone.abort("test")
    assert step.is_aborted()
    step.take_back()
    assert torch.equal(first.module[0].weight, before)


# Which passes reduce, and what ---------------------------------------------------------------------------------


class Branches(torch.nn.Module):
    """Of its branches each rank uses those that it is told."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleList(net() for _ in range(count))

    def forward(self, x: torch.Tensor, *used: int) -> torch.Tensor:
        return sum((self.branches[each](x) for each in used), torch.zeros(1, dtype=x.dtype))


def grads_of(ddp: DistributedDataParallel, branch: int) -> list[torch.Tensor | None]:
    return [each.grad for each in ddp.module.branches[branch].parameters()]  # type: ignore[index, union-attr]


@pytest.mark.parametrize("shares", [[[2], [3]], [[5]], [[1, 1], [2, 1]]])
def test_a_parameter_that_no_rank_has_used_has_no_gradient_and_one_that_some_have_used_has_it_everywhere(
    shares: list[list[int]],
) -> None:
    def worker(rank: int) -> torch.Tensor:
        ddp = parallel(Branches(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        adopt([ddp], [optimizer], lambda: len(shares[rank]) > 1)
        before = [each.detach().clone() for each in ddp.module.branches[2].parameters()]
        for _, x in hand_out(shares, rank):
            optimizer.zero_grad()
            ddp(x, rank % 2).square().mean().backward()
            optimizer.step()
        assert grads_of(ddp, 2) == [None] * 4
        assert all(map(torch.equal, before, ddp.module.branches[2].parameters()))
        used = grads_of(ddp, 0) + (grads_of(ddp, 1) if len(shares) > 1 else [])
        assert all(each is not None for each in used)
        return torch.cat([each.detach().flatten() for each in ddp.parameters()])

    found = run_workers(len(shares), worker)
    assert all(torch.equal(each, found[0]) for each in found)


def test_what_only_a_dummy_batch_has_used_is_not_used() -> None:
    def worker(rank: int) -> None:
        ddp = parallel(Branches(2), find_unused_parameters=True)
        adopted(ddp)
        for _, x in hand_out([[4], [0]], rank):
            ddp(x, rank).square().mean().backward()
        assert grads_of(ddp, 1) == [None] * 4
        assert all(each is not None and each.isfinite().all() for each in grads_of(ddp, 0))

    run_workers(2, worker)


@pytest.mark.parametrize("is_inner", [False, True])
def test_gradients_of_a_pass_that_does_not_reduce_are_reduced_with_those_of_the_next_one(is_inner: bool) -> None:
    """In no_sync(), and of an output of the module inside."""

    def worker(rank: int) -> torch.Tensor:
        ddp = parallel()
        optimizer = adopted(ddp)
        for _, x in hand_out([[2], [3]], rank):
            if is_inner:
                loss(ddp.module, x).backward()
            else:
                with ddp.no_sync():
                    loss(ddp, x).backward()
            assert step.status() == "open"
            assert torch.equal(gradients(ddp), wanted(x))  # its own, as in torch
            loss(ddp, x).backward()
            found = gradients(ddp).clone()
            assert optimizer.step() is True
        return found

    for found in run_workers(2, worker):
        assert torch.allclose(found, 2 * wanted(samples(5)), rtol=0, atol=1e-14)


def test_the_parts_of_an_output_may_have_passes_of_their_own() -> None:
    """A pass reduces when all parameters have a gradient: there is one reduction, as in torch."""

    def worker(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        class Two(Branches):
            def forward(self, x: torch.Tensor, *_: int) -> Any:
                return self.branches[0](x), self.branches[1](x)

        ddp = parallel(Two(2))
        optimizer = adopted(ddp)
        for _, x in hand_out([[2], [3]], rank):
            first, second = ddp(x)
            first.square().mean().backward()
            assert step.status() == "open"
            second.square().mean().backward()
            assert step.status() == "reduced"
            found = [torch.cat([each.flatten() for each in grads_of(ddp, part) if each is not None]) for part in (0, 1)]
            assert optimizer.step() is True
        return found[0], found[1]

    for pair in run_workers(2, worker):
        for found in pair:
            assert torch.allclose(found, wanted(samples(5)), rtol=0, atol=1e-14)


def test_two_optimizers_of_one_module_and_one_of_two_modules_step_together() -> None:
    def worker(rank: int) -> torch.Tensor:
        first, second = parallel(), parallel()
        head, tail = first.module[0].parameters(), first.module[2].parameters()
        optimizers = [torch.optim.SGD(head, lr=0.1), torch.optim.SGD([*tail, *second.parameters()], lr=0.1)]
        assert adopt([first, second], optimizers)
        step.track(optimizers)
        for _ in range(2):
            for _, x in hand_out([[2], [3]], rank):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss(first, x).backward()
                loss(second, x).backward()
                assert [each.step() for each in optimizers] == [True, True]
                assert step.status() is StepStatus.DECIDED
        step.track([])
        return torch.cat([each.detach().flatten() for each in (*first.parameters(), *second.parameters())])

    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss(module, samples(5)).backward()
        optimizer.step()
    expected = torch.cat([each.detach().flatten() for each in module.parameters()]).repeat(2)
    for found in run_workers(2, worker):
        assert torch.allclose(found, expected, rtol=0, atol=1e-14)


def test_gradients_of_parameters_without_an_optimizer_are_reduced_too() -> None:
    """Their norm, by which a script clips those of the others, has to be the same everywhere."""

    def worker(rank: int) -> torch.Tensor:
        ddp = parallel()
        optimizer = torch.optim.SGD(ddp.module[2].parameters(), lr=0.1)
        adopt([ddp], [optimizer])
        for _, x in hand_out([[2], [3]], rank):
            loss(ddp, x).backward()
            found = gradients(ddp).clone()
            assert optimizer.step() is True
        return found

    for found in run_workers(2, worker):
        assert torch.allclose(found, wanted(samples(5)), rtol=0, atol=1e-14)


def test_what_a_script_makes_of_the_gradients_is_what_is_applied(alone: AloneTransport) -> None:
    """By tensors of its own, and under a GradScaler, which unscales in step()."""
    ddp = parallel(net().float())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    adopt([ddp], [optimizer], lambda: True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _, x in hand_out([[2, 2]], 0):
        scaler.scale(loss(ddp, x.float())).backward()
        batch = step.batch()
        if batch is not None and batch.is_last:
            for each in ddp.parameters():
                each.grad = each.grad * 1.0  # type: ignore[operator]
            scaler.step(optimizer)
            scaler.update()
    assert torch.allclose(ddp.module[0].weight, _stepped(samples(4)).float(), atol=1e-6)


def test_a_script_may_drop_the_gradients_of_a_step_and_step_nevertheless() -> None:
    def worker(rank: int) -> torch.Tensor:
        ddp = parallel()
        optimizer = adopted(ddp)
        for _, x in hand_out([[2], [3]], rank):
            loss(ddp, x * float("nan")).backward()
            assert not gradients(ddp).isfinite().all()
            optimizer.zero_grad()
            assert optimizer.step() is True
        return ddp.module[0].weight.detach()  # type: ignore[index, union-attr, return-value]

    for found in run_workers(2, worker):
        assert torch.equal(found, net()[0].weight)


def test_a_pass_that_raised_can_be_repeated() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise MemoryError("of the test")

    def worker(rank: int) -> torch.Tensor:
        ddp = parallel(torch.nn.Sequential(net(), torch.nn.Identity()))
        optimizer = adopted(ddp)
        for _, x in hand_out([[2], [3]], rank):
            hidden = ddp.module[0][1](ddp.module[0][0](x))
            with pytest.raises(MemoryError):
                (ddp(x).square().mean() + Fails.apply(hidden).sum()).backward()
            optimizer.zero_grad()
            loss(ddp, x).backward()
            found = gradients(ddp).clone()
            assert optimizer.step() is True
        return found

    for found in run_workers(2, worker):
        assert torch.allclose(found, wanted(samples(5)), rtol=0, atol=1e-14)


@pytest.mark.parametrize("finds_unused", [False, True])
def test_without_a_batch_gradients_are_the_mean_over_all_workers(finds_unused: bool) -> None:
    def worker(rank: int) -> None:
        ddp = parallel(Branches(2), find_unused_parameters=finds_unused)
        adopted(ddp)
        used = [0] if finds_unused else [0, 1]
        own = samples(4)[2 * rank : 2 * rank + 2]
        with ddp.no_sync():
            ddp(own, *used).square().mean().backward()
        local = [None if each is None else each.clone() for each in grads_of(ddp, 0)]
        ddp.zero_grad()
        ddp(own, *used).square().mean().backward()
        found = [each for each in grads_of(ddp, 0) if each is not None]
        everybodys = [torch.zeros_like(each) for each in found]
        for total, each in zip(everybodys, local, strict=True):
            assert each is not None
            total.copy_(each)
            world.current().transport.all_reduce(total)
        assert all(torch.allclose(each, total / 2) for each, total in zip(found, everybodys, strict=True))
        assert (grads_of(ddp, 1) == [None] * 4) is finds_unused

    run_workers(2, worker)


def test_without_a_batch_a_parameter_that_is_not_used_is_an_error_as_in_torch() -> None:
    def worker(rank: int) -> None:
        ddp = parallel(Branches(2))
        adopted(ddp)
        ddp(samples(2), 0).square().mean().backward()
        with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
            ddp(samples(2), 0)

    run_workers(2, worker)


# Faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("finds_unused", [False, True])
def test_a_fault_is_absorbed_and_the_same_objects_go_on_in_the_next_generation(
    alone: AloneTransport, where: str, finds_unused: bool
) -> None:
    SESSION.open(RepeatingRunLoop())  # type: ignore[arg-type]
    module = torch.nn.Sequential(net(), torch.nn.BatchNorm1d(1).double())
    ddp = parallel(module, find_unused_parameters=finds_unused)
    optimizer = adopted(ddp)
    before = [each.detach().clone() for each in ddp.parameters()]
    if where == "forward":
        alone.abort("test")
    for _, x in hand_out([[4]], 0):
        output = ddp(x)
        assert step.status() == ("aborted" if where == "forward" else "open")
        alone.abort("test")
        output.square().mean().backward()
    assert step.is_aborted()
    assert not gradients(ddp).any()
    assert optimizer.step() is False
    assert all(torch.equal(*pair) for pair in zip(ddp.parameters(), before, strict=True))
    step.close()
    enter(2)
    for each in ddp.parameters():
        each.grad = torch.full_like(each, float("nan"))  # what an aborted step leaves does not count
    for _, x in hand_out([[4]], 0):
        loss(ddp, x).backward()
    assert gradients(ddp).isfinite().all()
    assert optimizer.step() is True


def test_a_single_worker_keeps_its_gradients_until_another_one_joins(alone: AloneTransport) -> None:
    """Gradients are those of autograd itself, to the last bit, and two passes add up."""
    ddp = parallel(gradient_as_bucket_view=True)
    optimizer = adopted(ddp)
    for _, x in hand_out([[4]], 0):
        loss(ddp, x).backward()
        assert step.status() == "reduced"
        assert torch.equal(gradients(ddp), wanted(x))
        loss(ddp, x).backward()
        assert torch.equal(gradients(ddp), 2 * wanted(x))
        assert optimizer.step() is True

    def worker(rank: int) -> torch.Tensor:
        ddp = parallel(gradient_as_bucket_view=True)
        adopted(ddp)
        for _, x in hand_out([[2], [2]], rank):
            loss(ddp, x).backward()
        return gradients(ddp).clone()

    for found in run_workers(2, worker):
        assert torch.allclose(found, wanted(samples(4)), rtol=0, atol=1e-14)


def test_a_single_worker_learns_of_parameters_without_gradients_as_several_do(alone: AloneTransport) -> None:
    module = torch.nn.ModuleDict({"used": net(), "unused": net()})
    module.forward = lambda x: module["used"](x)
    ddp = parallel(module)
    optimizer = adopted(ddp)
    for _, x in hand_out([[4]], 0):
        loss(ddp, x).backward()
        with pytest.raises(StepError, match="find_unused_parameters=True"):
            optimizer.step()


def test_a_fault_leaves_as_it_is_where_no_batch_can_be_repeated(alone: AloneTransport) -> None:
    ddp = parallel()
    adopted(ddp)
    for _, x in hand_out([[4]], 0):
        output = ddp(x)
        alone.abort("test")
        with pytest.raises(GenerationEnded):
            output.mean().backward()


def test_a_fault_inside_of_a_users_hook_is_absorbed(alone: AloneTransport) -> None:
    SESSION.open(RepeatingRunLoop())  # type: ignore[arg-type]
    ddp = parallel()
    group = ddp.process_group

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
        alone.abort("test")
        work = group.allreduce([bucket.buffer()])
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, hook)
    optimizer = adopted(ddp)
    for _, x in hand_out([[4]], 0):
        loss(ddp, x).backward()
    assert step.is_aborted()
    assert not gradients(ddp).any()
    assert optimizer.step() is False


# The user's hook ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_late", [False, True])
def test_a_users_hook_is_kept_and_gets_weighed_gradients(is_late: bool) -> None:
    def worker(rank: int) -> tuple[torch.Tensor, list[int]]:
        ddp, seen = parallel(bucket_cap_mb=5e-6), []

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
            seen.append(bucket.index())
            flat = bucket.buffer().div_(state.size())
            return state.allreduce([flat]).get_future().then(lambda future: 2 * future.value()[0])

        if is_late:
            adopted(ddp)
        ddp.register_comm_hook(FarandoleGroup(Everybody()), hook)
        if not is_late:
            adopted(ddp)
        with pytest.raises(RuntimeError, match="only be called once"):
            ddp.register_comm_hook(None, hook)
        for _, x in hand_out([[3], [1]], rank):
            loss(ddp, x).backward()
        return gradients(ddp), seen

    for found, seen in run_workers(2, worker):
        assert torch.allclose(found, 2 * wanted(samples(4)), rtol=0, atol=1e-14)
        assert seen == [0, 1, 2, 3]


def test_what_a_hook_keeps_begins_anew_with_each_generation(alone: AloneTransport) -> None:
    class Counts:
        def __init__(self) -> None:
            self.buckets = [0]

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
        state.buckets[0] += 1
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp, counts = parallel(), Counts()
    ddp.register_comm_hook(counts, hook)
    adopted(ddp)
    for number in (1, 1, 2):
        if number > 1:
            enter(number)
        for _, x in hand_out([[4]], 0):
            loss(ddp, x).backward()
    assert counts.buckets == [1]


# What the objects are for the user -----------------------------------------------------------------------------


def test_the_objects_stay_what_they_are(alone: AloneTransport) -> None:
    ddp = parallel()
    optimizer = adopted(ddp)
    assert isinstance(ddp, DistributedDataParallel)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(ddp).__name__ == "DistributedDataParallel"
    again = adopt([torch.nn.Sequential(ddp)], [optimizer])
    assert again
    assert copy.deepcopy(ddp.module)[0].weight.equal(ddp.module[0].weight)
    assert not adopt([net()], [torch.optim.SGD(net().parameters(), lr=0.1)])


def test_a_scheduler_that_was_made_before_sees_the_steps(alone: AloneTransport) -> None:
    ddp = parallel()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    adopt([ddp], [optimizer])
    for _, x in hand_out([[4]], 0):
        loss(ddp, x).backward()
        assert optimizer.step() is True
    scheduler.step()  # which would warn
    assert scheduler.get_last_lr() == [0.05]


def test_outside_of_the_loaders_batches_they_are_torchs(alone: AloneTransport) -> None:
    ddp, other = parallel(), parallel()
    optimizer, reference = adopted(ddp), torch.optim.SGD(other.parameters(), lr=0.1)
    for each, its_optimizer in ((ddp, optimizer), (other, reference)):
        for _ in range(3):
            its_optimizer.zero_grad()
            loss(each, samples(4)).backward()
            its_optimizer.step()
    assert torch.equal(ddp.module[0].weight, other.module[0].weight)


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_skips_inf_and_the_step_is_decided(alone: AloneTransport, fused: bool) -> None:
    ddp = parallel(net().float())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, fused=fused)
    adopt([ddp], [optimizer])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = samples(4).float()
    before = ddp.module[0].weight.detach().clone()
    for factor in (float("inf"), 1.0):
        for _ in hand_out([[4]], 0):
            optimizer.zero_grad()
            scaler.scale(loss(ddp, x) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        assert step.status() is StepStatus.DECIDED
        assert torch.equal(ddp.module[0].weight, before) is (factor != 1.0)
    assert torch.allclose(ddp.module[0].weight, _stepped(samples(4)).float(), atol=1e-6)
    assert scaler.get_scale() == 512.0


# Bad input ---------------------------------------------------------------------------------------------------


def _with_loose_parameter() -> Any:
    ddp = parallel()
    return [ddp], [torch.optim.SGD([*ddp.parameters(), torch.nn.Parameter(torch.zeros(7))], lr=0.1)]


def _wrapped() -> Any:
    ddp = parallel()
    return [ddp], [DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))]


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Of the name of torch's, which wants a group of several processes."""


def _divided() -> Any:
    ddp = parallel()
    return [ddp], [ZeroRedundancyOptimizer(ddp.parameters(), lr=0.1)]


def _sparse() -> Any:
    return [parallel(torch.nn.Embedding(3, 2, sparse=True))], []


def _replaced_step() -> Any:
    ddp = parallel()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    return [ddp], [optimizer]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ([parallel(static_graph=True)], []), "static_graph"),
        (_with_loose_parameter, r"parameter 4 of group 0 .* shape \(7,\)"),
        (_wrapped, "reduced twice"),
        (_sparse, "sparse=False"),
        (_divided, "ZeroRedundancyOptimizer divides its work"),
        (_replaced_step, "replaced on the object"),
    ],
)
def test_what_cannot_be_right_is_refused_with_a_reason(
    alone: AloneTransport, make: Callable[[], Any], says: str
) -> None:
    modules, optimizers = make()
    with pytest.raises(ConfigError, match=says):
        adopt(modules, optimizers)


def test_what_cannot_be_right_later_on_is_refused_then(alone: AloneTransport) -> None:
    ddp = parallel()
    optimizer = adopted(ddp)
    with pytest.raises(ConfigError, match="static_graph"):
        ddp._set_static_graph()
    with pytest.raises(ConfigError, match="join"):
        ddp.join()
    for _, x in hand_out([[4]], 0):
        loss(ddp.module, x).backward()
        with pytest.raises(StepError, match="not reduced"):
            optimizer.step()
        optimizer.zero_grad()
        loss(ddp, x).backward()
        assert optimizer.step() is True
        with pytest.raises(StepError, match="twice"):
            optimizer.step()


def test_a_second_reduction_of_micro_batches_is_refused(alone: AloneTransport) -> None:
    ddp = parallel()
    adopted(ddp)
    for _, x in hand_out([[2, 2]], 0):
        loss(ddp, x).backward()
    with pytest.raises(StepError, match="second backward pass"):
        loss(ddp, samples(2)).backward()


def test_a_group_of_others_cannot_follow(alone: AloneTransport) -> None:
    def worker(rank: int) -> None:
        class Alone(Everybody):
            rank = 0
            size = 1

        ddp = parallel()
        ddp.process_group = FarandoleGroup(Alone())
        with pytest.raises(ConfigError, match=r"a group of 1 workers .* which has 2"):
            adopt([ddp], [])

    run_workers(2, worker)
