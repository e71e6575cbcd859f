"""DistributedOptimizer in a world of one: what a training script can see of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from farandole.base.membership import GenerationId, Placement
from farandole.errors import ConfigError, GenerationEnded, NotInitialized, StepError
from farandole.integrations.horovod.named.engine import NAMED, NamedCollectives
from farandole.integrations.horovod.named.negotiation import Adasum, Sum
from farandole.integrations.horovod.named.tensor_queue import synchronize
from farandole.training.collectives import world
from farandole.training.collectives.alone import AloneTransport
from farandole.training.optim.compression import Compression
from farandole.training.optim.distributed_optimizer import DistributedOptimizer
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.session import SESSION
from tests.support.run_loops import RepeatingRunLoop

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def alone() -> Iterator[AloneTransport]:
    transport = AloneTransport(1)
    world.enter(world.World(GenerationId(1, 1, 1, ""), Placement(0, 1, 0, 1, 0, 1), transport))
    step.close()
    yield transport
    step.close()
    step.on_decided(None)
    SESSION.close()
    world.enter(None)


def model() -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(3, 1).double()


def samples(count: int) -> torch.Tensor:
    return torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def loss(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def hand_out(micro_batches: list[int]) -> Iterator[int]:
    """The micro-batches of one global batch, as a loader does; gives their sizes."""
    total = sum(micro_batches)
    global_batch = GlobalBatch(0, 0, total, 0, total, len(micro_batches))
    low = 0
    for index, count in enumerate(micro_batches):
        step.open(Batch(global_batch, low, low + count, index))
        low += count
        yield count


def test_it_trains_like_the_optimizer_it_wraps() -> None:
    x = samples(8)
    plain, wrapped = model(), model()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(torch.optim.AdamW(wrapped.parameters(), lr=0.1))
    for _ in range(5):
        for net, each in ((plain, reference), (wrapped, optimizer)):
            each.zero_grad()
            loss(net, x).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True))


def test_it_is_an_instance_of_the_class_it_wraps_and_shares_what_that_has() -> None:
    base = torch.optim.SGD(model().parameters(), lr=0.1, momentum=0.9)
    optimizer = DistributedOptimizer(base)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert optimizer.state is base.state
    assert optimizer.param_groups is base.param_groups
    assert optimizer.defaults is base.defaults


def test_a_scheduler_made_before_or_after_wrapping_moves_its_learning_rate() -> None:
    base = torch.optim.SGD(model().parameters(), lr=1.0)
    torch.optim.lr_scheduler.ConstantLR(base, factor=0.5)
    optimizer = DistributedOptimizer(base)
    assert optimizer.param_groups[0]["lr"] == 0.5
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_state_dict_comes_back() -> None:
    net = model()
    optimizer = DistributedOptimizer(torch.optim.Adam(net.parameters()))
    loss(net, samples(4)).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    other = model()
    again = DistributedOptimizer(torch.optim.Adam(other.parameters()))
    again.load_state_dict(saved)
    loss(other, samples(4)).backward()
    assert again.step() is True
    assert again.state[other.weight]["step"] == 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_micro_batches_add_up_to_the_gradient_of_the_global_batch(set_to_none: bool) -> None:
    x = samples(12)
    net, reference = model(), model()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(3):
        offset, applied = 0, []
        for count in hand_out([5, 4, 3]):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss(net, x[offset : offset + count]).backward()
            applied.append(optimizer.step())
            offset += count
        assert applied == [False, False, True]
        reference.zero_grad()
        loss(reference, x).backward()
        assert torch.allclose(net.weight.grad, reference.weight.grad, rtol=0, atol=1e-14)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter -= 0.1 * parameter.grad
    assert torch.allclose(net.weight, reference.weight, rtol=0, atol=1e-13)


def test_what_an_aborted_batch_left_does_not_count_for_the_next() -> None:
    x = samples(4)
    net, reference = model(), model()
    DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    loss(reference, x).backward()
    for count in hand_out([2, 2]):
        loss(net, x[:count]).backward()
        break  # a regroup comes before the second micro-batch
    for _ in hand_out([4]):
        loss(net, x).backward()
    assert torch.allclose(net.weight.grad, reference.weight.grad, rtol=0, atol=1e-14)


def test_a_dummy_batch_counts_nothing_even_if_its_gradient_is_infinite() -> None:
    net = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    step.open(Batch(GlobalBatch(0, 0, 0, 0, 0, 1), 0, 0, 0))
    (net(samples(1)) * float("inf")).sum().backward()
    assert torch.equal(net.weight.grad, torch.zeros_like(net.weight))
    assert optimizer.step() is True


def test_backward_passes_before_the_step_add_up() -> None:
    net, reference, x = model(), model(), samples(4)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in hand_out([4]):
        for each in (net, reference):
            loss(each, x).backward()
            net.weight.grad.mul_(1.0)
            (3 * each.bias.sum()).backward()
        assert torch.allclose(net.weight.grad, reference.weight.grad, rtol=0, atol=1e-14)
        assert torch.allclose(net.bias.grad, reference.bias.grad, rtol=0, atol=1e-14)
        assert optimizer.step() is True


def test_with_micro_batches_a_second_backward_pass_is_refused_with_advice() -> None:
    net = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for count in hand_out([2, 2]):
        loss(net, samples(count)).backward()
    with pytest.raises(StepError, match="second backward pass"):
        loss(net, samples(2)).backward()
    optimizer.zero_grad()


def test_gradients_that_are_zeroed_before_the_step_do_not_count() -> None:
    net, x = model(), samples(4)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    wanted = torch.autograd.grad(loss(net, x), net.weight)[0]
    for _ in hand_out([4]):
        (9 * loss(net, x)).backward()
        optimizer.zero_grad()
        loss(net, x).backward()
        assert torch.equal(net.weight.grad, wanted)


@pytest.mark.parametrize("is_set", [False, True])
def test_a_batch_whose_gradients_the_script_sets_is_trained(is_set: bool) -> None:
    net, x = model(), samples(4)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in hand_out([4]):
        if is_set:
            net.weight.grad = torch.autograd.grad(loss(net, x), net.weight)[0]
        optimizer.step()
        assert step.facts().trains_nothing is not is_set


def test_a_second_step_for_one_batch_is_refused() -> None:
    net = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in hand_out([4]):
        loss(net, samples(4)).backward()
        optimizer.step()
        with pytest.raises(StepError, match="twice"):
            optimizer.step()


def test_two_optimizers_whose_losses_run_through_each_other() -> None:
    """A GAN: the generator's loss leaves gradients in the discriminator, which has stepped already."""

    def trained(wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> list[torch.Tensor]:
        first, second = model(), torch.nn.Linear(1, 1).double()
        one = wrap(torch.optim.SGD(first.parameters(), lr=0.1))
        two = wrap(torch.optim.SGD(second.parameters(), lr=0.1))
        for _ in range(2):
            one.zero_grad()
            loss(first, samples(4)).backward()
            one.step()
            two.zero_grad()
            second(first(samples(4))).sum().backward()
            two.step()
        return [*first.parameters(), *second.parameters()]

    ours, plain = trained(DistributedOptimizer), trained(lambda optimizer: optimizer)
    assert all(map(torch.equal, ours, plain))


def test_a_parameter_that_was_frozen_in_the_first_step_must_not_be_unfrozen_under_a_loader() -> None:
    net = model()
    net.bias.requires_grad_(False)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in hand_out([4]):
        loss(net, samples(4)).backward()
        optimizer.step()
    net.bias.requires_grad_(True)
    for _ in hand_out([4]):
        loss(net, samples(4)).backward()
        with pytest.raises(StepError, match=r"parameter 1 of shape \(1,\)"):
            optimizer.step()


def test_a_parameter_that_was_frozen_when_it_was_wrapped_is_trained_once_it_is_not() -> None:
    net = model()
    net.bias.requires_grad_(False)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    before = net.bias.detach().clone()
    net.bias.requires_grad_(True)
    for _ in hand_out([4]):
        loss(net, samples(4)).backward()
        optimizer.step()
    assert not torch.equal(net.bias, before)


@pytest.mark.parametrize(
    "arguments",
    [{"backward_passes_per_step": 2}, {"op": Sum}, {"gradient_predivide_factor": 2.0}, {"groups": 1}, {"op": Adasum}],
)
def test_what_a_loader_does_by_itself_is_refused_at_its_first_batch(arguments: dict[str, Any]) -> None:
    net = model()
    DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **arguments)
    for _ in hand_out([4]):
        with pytest.raises(StepError, match="DataLoader"):
            loss(net, samples(4)).backward()


def test_gradients_may_be_compressed_under_a_loader() -> None:
    net = model()
    DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), compression=Compression.bf16)
    for _ in hand_out([4]):
        loss(net, samples(4)).backward()
    assert torch.equal(net.weight.grad, net.weight.grad.bfloat16().double())


def test_a_parameter_that_is_frozen_later_is_left_alone() -> None:
    net = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.5))
    before = net.bias.detach().clone()
    net.bias.requires_grad_(False)
    loss(net, samples(4)).backward()
    assert optimizer.step() is True
    assert torch.equal(net.bias, before)


def test_a_group_that_is_added_is_trained() -> None:
    net, extra = model(), model()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    optimizer.add_param_group({"params": list(extra.parameters())})
    before = extra.weight.detach().clone()
    (loss(net, samples(4)) + loss(extra, samples(4))).backward()
    optimizer.step()
    assert not torch.equal(extra.weight, before)


def test_a_step_without_any_gradient_takes_part_with_zeros() -> None:
    net = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    before = net.weight.detach().clone()
    assert optimizer.step() is True
    assert torch.equal(net.weight, before)


def test_a_closure_is_refused_with_micro_batches() -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD(model().parameters(), lr=0.1))
    for _ in hand_out([4, 4]):
        with pytest.raises(StepError, match="closure"):
            optimizer.step(lambda: 1.0)


def test_alone_there_may_be_any_number_of_passes_between_steps_and_zeroing() -> None:
    net, x = model(), samples(4)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    loss(net, x).backward()
    loss(net, x).backward()
    assert torch.allclose(net.weight.grad, 2 * torch.autograd.grad(loss(net, x), net.weight)[0])
    optimizer.zero_grad()
    assert net.weight.grad is None


def test_alone_a_closure_gives_its_loss() -> None:
    net, x = model(), samples(4)
    optimizer = DistributedOptimizer(torch.optim.LBFGS(net.parameters(), lr=0.5))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(net, x)
        value.backward()
        return value

    first = optimizer.step(closure)
    for _ in range(3):
        optimizer.step(closure)
    assert loss(net, x) < first / 10


def test_wrapping_anew_leaves_the_old_optimizer_without_hooks() -> None:
    net = model()
    old = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), backward_passes_per_step=2)
    DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in hand_out([4]):
        loss(net, samples(4)).backward()  # the old one would refuse its two passes
    assert old.backward_passes_per_step == 2


def test_wrapping_twice_is_refused() -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD(model().parameters(), lr=0.1))
    with pytest.raises(StepError, match="already"):
        DistributedOptimizer(optimizer)


def test_before_init_it_says_so() -> None:
    world.enter(None)
    with pytest.raises(NotInitialized, match=r"init\(\)"):
        DistributedOptimizer(torch.optim.SGD(model().parameters(), lr=0.1))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_the_plain_grad_scaler_recipe_works_and_a_skipped_step_is_decided(fused: bool, unscales: bool) -> None:
    torch.manual_seed(1)
    net = torch.nn.Linear(3, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    decided: list[Any] = []
    step.on_decided(decided.append)
    x = samples(4).float()
    wanted = net.weight.detach() - 0.1 * torch.autograd.grad(loss(net, x), net.weight)[0]
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale(loss(net, x) * factor).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert len(decided) == 2
    assert torch.allclose(net.weight, wanted, atol=1e-6)
    assert scaler.get_scale() == 512.0


def test_a_fault_in_backward_is_absorbed_where_the_batch_can_be_repeated(alone: AloneTransport) -> None:
    SESSION.open(RepeatingRunLoop())
    net = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    before = net.weight.detach().clone()
    alone.abort("a worker was lost")
    for _ in hand_out([4]):
        loss(net, samples(4)).backward()
        assert torch.equal(net.weight.grad, torch.zeros_like(net.weight))
        assert optimizer.step() is False
        assert step.is_aborted()
    assert torch.equal(net.weight, before)


def test_a_fault_in_backward_is_raised_where_nobody_repeats_the_batch(alone: AloneTransport) -> None:
    net = model()
    DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    alone.abort("a worker was lost")
    for _ in hand_out([4]):
        with pytest.raises(GenerationEnded, match="a worker was lost"):
            loss(net, samples(4)).backward()


# Without a loader, in an elastic job that has shrunk to one worker ------------------------------------------


@pytest.fixture
def last_worker() -> Iterator[NamedCollectives]:
    SESSION.open(RepeatingRunLoop())
    placement = Placement(0, 1, 0, 1, 0, 1)
    named = NamedCollectives(AloneTransport(2), placement=placement, connect=no_connection)
    world.enter(world.World(GenerationId(1, 1, 2, ""), placement, AloneTransport(2), {NAMED: named}))
    yield named
    named.close()


def no_connection(ranks: tuple[int, ...], process_set: int) -> AloneTransport:
    raise AssertionError(f"a process set of {ranks} was asked for")


@pytest.mark.usefixtures("last_worker")
def test_the_last_worker_of_an_elastic_job_counts_passes() -> None:
    net, x = model(), samples(4)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    wanted = torch.autograd.grad(loss(net, x), net.weight)[0]
    loss(net, x).backward()
    assert torch.allclose(net.weight.grad, wanted)
    with pytest.raises(AssertionError, match="increase backward_passes_per_step to 2"):
        loss(net, x).backward()
    with pytest.raises(AssertionError, match="zero_grad"):
        optimizer.zero_grad()
    assert optimizer.step() is True
    optimizer.zero_grad()


@pytest.mark.usefixtures("last_worker")
def test_one_gradient_can_be_reduced_apart_as_with_horovods_optimizer() -> None:
    net = model()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), backward_passes_per_step=2, compression=Compression.fp16
    )
    loss(net, samples(4)).backward()
    assert net.weight.grad is not None
    gradient = net.weight.grad.clone()
    handle, ctx = optimizer._allreduce_grad_async(net.weight)
    reduced = Compression.fp16.decompress(synchronize(handle), ctx)
    assert torch.equal(reduced, gradient.half().double())
    net.bias.grad = None
    handle, ctx = optimizer._allreduce_grad_async(net.bias)
    assert torch.equal(Compression.fp16.decompress(synchronize(handle), ctx), torch.zeros(1, dtype=torch.float64))


def test_after_a_fault_nothing_of_the_step_is_left(last_worker: NamedCollectives) -> None:
    net = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), backward_passes_per_step=2)
    loss(net, samples(4)).backward()
    last_worker.abort("a worker was lost")
    with pytest.raises(GenerationEnded, match="a worker was lost"):
        loss(net, samples(4)).backward()
    assert net.weight.grad is None
    optimizer.zero_grad()
    loss(net, samples(4)).backward()  # the first of two passes again: nothing is reduced
    assert net.weight.grad is not None


@pytest.mark.usefixtures("last_worker")
def test_an_abandoned_step_leaves_neither_gradients_nor_passes() -> None:
    net = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    loss(net, samples(4)).backward()
    optimizer.abandon_step()
    assert net.weight.grad is None
    loss(net, samples(4)).backward()
    optimizer.step()


def test_a_step_that_adasum_could_not_combine_leaves_the_parameters() -> None:
    """Two workers of which one is gone: the named collectives have ended before step()."""
    placement = Placement(0, 2, 0, 2, 0, 1)
    transport = AloneTransport(1)
    transport.abort("a worker was lost")
    named = NamedCollectives(transport, placement=placement, connect=no_connection)
    world.enter(world.World(GenerationId(1, 1, 1, ""), placement, AloneTransport(1), {NAMED: named}))
    net = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), op=Adasum)
    before = net.weight.detach().clone()
    loss(net, samples(4)).backward()
    with pytest.raises(GenerationEnded, match="a worker was lost"):
        optimizer.step()
    assert torch.equal(net.weight, before)
    named.close()


# One worker, nothing to accumulate: gradients stay where autograd has put them ---------------------------------


def test_alone_gradients_are_those_of_autograd_without_a_copy() -> None:
    net, seen = model(), []
    net.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.data_ptr()))
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(2):
        for count in hand_out([4]):
            optimizer.zero_grad()
            loss(net, samples(count)).backward()
            assert net.weight.grad.data_ptr() == seen[-1]
            assert optimizer.step() is True


def test_alone_a_parameter_without_a_gradient_gets_zeros_as_with_others() -> None:
    used, unused = model(), model()
    optimizer = DistributedOptimizer(torch.optim.SGD([*used.parameters(), *unused.parameters()], lr=0.1))
    for set_to_none in (True, False):
        for _ in hand_out([4]):
            unused.weight.grad = torch.full_like(unused.weight, 7.0)
            optimizer.zero_grad(set_to_none)
            loss(used, samples(4)).backward()
            assert torch.equal(unused.weight.grad, torch.zeros_like(unused.weight))


def test_alone_weights_change_nothing_but_that_of_zero() -> None:
    net = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    wanted = torch.autograd.grad(loss(net, samples(4)), net.weight)[0]
    for given, expected in ((3.0, wanted), (0.0, torch.zeros_like(wanted))):
        for _ in hand_out([4]):
            optimizer.zero_grad()
            step.set_weight(given)
            loss(net, samples(4)).backward()
            assert torch.equal(net.weight.grad, expected)


def test_alone_sparse_gradients_become_dense_as_with_others() -> None:
    words = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(words.parameters(), lr=0.1))
    for _ in hand_out([1]):
        words(torch.tensor([3, 3])).sum().backward()
        assert torch.equal(words.weight.grad[3], torch.tensor([2.0, 2.0]))
        assert optimizer.step() is True


# Bad input ---------------------------------------------------------------------------------------------------


def test_a_parameter_put_into_a_group_by_hand_is_refused() -> None:
    net, extra = model(), model()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    optimizer.param_groups[0]["params"].append(extra.weight)
    for _ in hand_out([4]):
        (loss(net, samples(4)) + loss(extra, samples(4))).backward()
        with pytest.raises(StepError, match=r"parameter 2 of shape \(1, 3\) was added to a parameter group"):
            optimizer.step()


def test_a_parameter_that_has_another_shape_than_at_first_is_refused() -> None:
    net = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in hand_out([2, 2]):
        loss(net, samples(2)).backward()
        optimizer.step()
    optimizer.zero_grad()
    net.weight.data = torch.zeros(2, 3, dtype=torch.float64)
    for _ in hand_out([2, 2]):
        with pytest.raises(StepError, match=r"parameter.0.0 has shape \(2, 3\).* had shape \(1, 3\)"):
            loss(net, samples(2)).backward()
        break


def test_an_optimizer_that_no_state_has_must_not_step_while_a_batch_is_out() -> None:
    net, other = model(), model()
    tracked = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    stranger = DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    step.track([tracked])
    for _ in hand_out([4]):
        loss(net, samples(4)).backward()
        loss(other, samples(4)).backward()
        with pytest.raises(StepError, match="belongs to no TorchState"):
            stranger.step()
        assert tracked.step() is True


@pytest.mark.parametrize("bucket_mb", ["many", -1])
def test_a_size_of_buckets_that_is_none_is_refused(bucket_mb: Any) -> None:
    with pytest.raises(ValueError, match="FARANDOLE_BUCKET_MB"):
        DistributedOptimizer(torch.optim.SGD(model().parameters(), lr=0.1), bucket_mb=bucket_mb)


def test_alone_backward_may_keep_its_graph() -> None:
    net = model()
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in hand_out([4]):
        with pytest.warns(UserWarning, match="create_graph"):
            loss(net, samples(4)).backward(create_graph=True)
        assert not net.weight.grad.requires_grad
        assert optimizer.step() is True


@pytest.mark.parametrize("micro_batches", [[4], [2, 2]])
@pytest.mark.parametrize("fused", [False, True])
def test_with_a_loader_a_grad_scaler_skips_inf_and_unscales_the_rest(micro_batches: list[int], fused: bool) -> None:
    torch.manual_seed(1)
    net = torch.nn.Linear(3, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = samples(4).float()
    wanted = net.weight.detach() - 0.1 * torch.autograd.grad(loss(net, x), net.weight)[0]
    for factor in (1.0, float("inf")):
        offset = 0
        for count in hand_out(micro_batches):
            optimizer.zero_grad()
            scaler.scale(loss(net, x[offset : offset + count]) * factor).backward()
            offset += count
            if offset == 4:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
    assert torch.allclose(net.weight, wanted, atol=1e-6)
    assert scaler.get_scale() == 512.0


def test_a_backward_that_raised_leaves_nothing_for_the_next_batch() -> None:
    net, x = model(), samples(4)
    DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    wanted = torch.autograd.grad(loss(net, x), net.weight)[0]

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("half way")

    for micro_batches in ([4], [2, 2]):
        handle = net.weight.register_hook(fail)
        for _ in hand_out(micro_batches):
            with pytest.raises(ValueError, match="half way"):
                loss(net, x).backward()
            break
        handle.remove()
        net.weight.grad = net.bias.grad = None
        for _ in hand_out([4]):
            loss(net, x).backward()
            assert torch.allclose(net.weight.grad, wanted, rtol=0, atol=1e-14)


def test_a_scheduler_of_the_optimizer_that_was_wrapped_still_counts_after_a_state_was_loaded() -> None:
    net = model()
    plain = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.1)
    wrapped = DistributedOptimizer(plain)
    loss(net, samples(2)).backward()
    wrapped.step()
    wrapped.load_state_dict(wrapped.state_dict())
    plain._opt_called = True  # type: ignore[attr-defined]  # the scheduler watches it for having stepped
    scheduler.step()
    assert wrapped.param_groups[0]["lr"] == pytest.approx(0.1)
    assert plain.state is wrapped.state
    assert "momentum_buffer" in plain.state[net.weight]


def test_an_optimizer_with_nothing_to_train_is_told_so_in_the_first_step() -> None:
    net = model().requires_grad_(False)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
    for _ in hand_out([2]):
        with pytest.raises(ConfigError, match="none of the optimizer's 2 parameters requires gradients"):
            optimizer.step()
