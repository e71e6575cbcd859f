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
from farandole.integrations.ddp.ddp_path import may_overlap
from farandole.integrations.ddp.module import adopt, path_of
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


def test_a_single_worker_needs_no_reducer_until_another_one_joins(alone: AloneTransport) -> None:
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
    path = path_of(ddp)
    assert path is not None
    assert path.is_alone
    assert not path.has_passed

    def worker(rank: int) -> torch.Tensor:
        ddp = parallel(gradient_as_bucket_view=True)
        adopted(ddp)
        for _, x in hand_out([[2], [2]], rank):
            loss(ddp, x).backward()
        assert path_of(ddp).has_passed  # type: ignore[union-attr]
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
    def worker(rank: int) -> tuple[torch.Tensor, list[int], int]:
        ddp, seen = parallel(bucket_cap_mb=1e-5), []
        # Older versions of torch do not ask for the limits of the buckets: there is one bucket then.
        buckets = 4 if hasattr(ddp, "_bucket_config") else 1

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
        return gradients(ddp), seen, buckets

    for found, seen, buckets in run_workers(2, worker):
        assert torch.allclose(found, 2 * wanted(samples(4)), rtol=0, atol=1e-14)
        assert seen == [*range(buckets)]


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
    assert not isinstance(ddp.process_group, type(ddp._farandole_group))  # type: ignore[attr-defined]
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


# Overlap -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "overlaps"),
    [
        pytest.param(Placement(0, 1, 0, 1, 0, 1), False, id="alone"),
        pytest.param(Placement(0, 2, 0, 1, 0, 2), True, id="between hosts"),
        pytest.param(Placement(0, 512, 0, 512, 0, 1), False, id="no core to spare"),
    ],
)
def test_buckets_are_reduced_during_backward_between_hosts_and_where_a_core_is_free(
    placement: Placement, overlaps: bool
) -> None:
    here = world.World(GenerationId(1, 1, 1, ""), placement, AloneTransport(1))
    assert may_overlap(here) is overlaps
