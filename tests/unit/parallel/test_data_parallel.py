"""DataParallel on the CPU: the module it is around, only in several threads."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import farandole as fd
from farandole.errors import ConfigError
from farandole.integrations.data_parallel.data_parallel import DataParallel

pytestmark = pytest.mark.core


class Twice(nn.Module):
    """Shared, frozen and unused parameters, and an output that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 3)
        self.frozen, self.unused = nn.Linear(5, 5), nn.Linear(2, 2)
        self.again = self.first
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.again(torch.tanh(self.frozen(self.first(x))))))


def twice() -> nn.Module:
    torch.manual_seed(1)
    return Twice().double()


def samples(count: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(count, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def assert_close(ours: Any, reference: Any, tolerance: float = 1e-12) -> None:
    for one, other in zip(ours, reference, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


# The same as without ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_fifty_steps_with_short_batches_give_the_model_that_one_thread_trains(threads: int, kind: str) -> None:
    plain, ours = twice(), DataParallel(twice(), threads=threads)
    steps = [getattr(torch.optim, kind)(module.parameters(), lr=0.05) for module in (plain, ours)]
    for number in range(50):
        x = samples((8, 7, 1, 2)[number % 4], seed=number)
        for module, optimizer in zip((plain, ours), steps, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    assert_close(ours.parameters(), plain.parameters(), 1e-10)


def test_unused_and_frozen_parameters_have_no_gradient_as_without() -> None:
    plain, ours = twice(), DataParallel(twice(), threads=2)
    for module in (plain, ours):
        module(samples(5)).sum().backward()
    assert_close(gradients(ours), gradients(plain))
    assert ours.unused.weight.grad is None
    assert ours.frozen.weight.grad is None


def test_gradients_add_up_over_passes() -> None:
    plain, ours = twice(), DataParallel(twice(), threads=2)
    for module in (plain, ours):
        first, second = module(samples(5)), module(samples(4, seed=7))
        (first.sum() + second.square().sum()).backward()
        module(samples(3, seed=8)).sum().backward()
    assert_close(gradients(ours), gradients(plain))


def test_gradients_flow_into_the_inputs_and_through_layers_around_it() -> None:
    torch.manual_seed(3)
    before, after = nn.Linear(5, 5).double(), nn.Linear(3, 1).double()
    models = [
        nn.Sequential(copy.deepcopy(before), nn.ReLU(inplace=True), middle, copy.deepcopy(after))
        for middle in (twice(), DataParallel(twice(), threads=2))
    ]
    inputs = [samples(7).requires_grad_() for _ in models]
    for model, x in zip(models, inputs, strict=True):
        model(x).square().mean().backward()
    assert_close([inputs[1].grad, *gradients(models[1])], [inputs[0].grad, *gradients(models[0])])


def test_a_module_may_change_its_input_in_place() -> None:
    module = DataParallel(nn.ReLU(inplace=True), threads=2)
    x = samples(4).requires_grad_()
    module(x * 1).sum().backward()
    assert_close([x.grad], [(x > 0).double()])


def test_autograd_grad_of_some_parameters_leaves_no_gradients_behind() -> None:
    plain, ours = twice(), DataParallel(twice(), threads=2)
    x = samples(6)
    found = [
        torch.autograd.grad(module(x).square().sum(), [module.second.weight, module.first.bias])
        for module in (plain, ours)
    ]
    assert_close(found[1], found[0])
    assert gradients(ours) == [None] * len(gradients(ours))


def test_gradients_of_gradients_are_those_of_the_plain_module() -> None:
    """A gradient penalty, and a third derivative."""

    def penalty(module: nn.Module) -> list[torch.Tensor | None]:
        x = samples(5).requires_grad_()
        loss = module(x).pow(3).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        (loss + first.square().sum() + second.square().sum()).backward()
        return [x.grad, *gradients(module)]

    assert_close(penalty(DataParallel(twice(), threads=2)), penalty(twice()), 1e-10)


def test_a_graph_that_is_kept_can_be_used_again_and_another_cannot() -> None:
    plain, ours = twice(), DataParallel(twice(), threads=2)
    for module in (plain, ours):
        loss = module(samples(4)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_close(gradients(ours), gradients(plain))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_hooks_fire_once_for_each_parameter_in_each_pass() -> None:
    ours = DataParallel(twice(), threads=2)
    accumulated, seen = [], []
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: accumulated.append(name))
            parameter.register_hook(lambda grad, name=name: seen.append(name))
    ours(samples(6)).sum().backward()
    expected = sorted(["first.weight", "first.bias", "second.weight", "second.bias"])
    assert sorted(accumulated) == sorted(seen) == expected


def test_checkpointed_layers_give_the_same_gradients() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.inner, self.reentrant = twice(), reentrant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 0 * self.inner.first.weight.sum()
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.reentrant)

    for reentrant in (False, True):
        plain, ours = Checkpointed(reentrant), DataParallel(Checkpointed(reentrant), threads=2)
        for module in (plain, ours):
            module(samples(6)).square().mean().backward()
        assert_close(gradients(ours), gradients(plain))


class Sequences(nn.Module):
    """Of a recurrent layer what has the samples in front: not the state that it ends with."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)[0]
        return y


@pytest.mark.parametrize(
    "build",
    [
        lambda: Sequences(nn.LSTM(5, 4, num_layers=2, batch_first=True)),
        lambda: Sequences(nn.GRU(5, 4, batch_first=True)),
        lambda: nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)),
        lambda: nn.EmbeddingBag(10, 4, sparse=True),
    ],
    ids=["lstm", "gru", "transformer", "weight_norm", "sparse"],
)
def test_layers_that_keep_their_parameters_in_their_own_way(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(4)
    plain = build().double()
    ours = DataParallel(copy.deepcopy(plain), threads=2)
    x = torch.randint(0, 10, (7, 3)) if isinstance(plain, nn.EmbeddingBag) else samples(21).view(7, 3, 5)
    for module in (plain, ours):
        module(x).square().mean().backward()
    for one, other in zip(gradients(ours), gradients(plain), strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one.to_dense(), other.to_dense(), rtol=0, atol=1e-12)


# What threads see -------------------------------------------------------------------------------------------------


class Seen(nn.Module):
    """Returns what its thread knows, and the thread."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.threads: set[str] = set()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        self.threads.add(threading.current_thread().name)
        return {
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "training": self.training,
            "dtype": self.layer(x).dtype,
            "inner": torch.get_num_threads(),
        }


def test_grad_mode_inference_mode_autocast_and_training_are_those_of_the_caller() -> None:
    ours, x = DataParallel(Seen(), threads=2), torch.zeros(4, 5)
    assert ours(x) | {"inner": 0} == {
        "grad": True, "inference": False, "training": True, "dtype": torch.float32, "inner": 0
    }  # fmt: skip
    ours.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        seen = ours(x)
    assert (seen["grad"], seen["training"], seen["dtype"]) == (False, False, torch.bfloat16)
    with torch.inference_mode():
        seen = ours(x)
    assert (seen["grad"], seen["inference"]) == (False, True)
    assert len(ours.threads) == 2


def test_gradients_under_autocast_are_those_of_the_plain_module() -> None:
    plain, ours = twice().float(), DataParallel(twice().float(), threads=2)
    x = samples(8).float()
    for module in (plain, ours):
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    for one, other in zip(gradients(ours), gradients(plain), strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_the_threads_within_an_operation_are_divided_and_given_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert DataParallel(Seen(), threads=2)(torch.zeros(4, 5))["inner"] == 2
        assert DataParallel(Seen(), threads=8)(torch.zeros(8, 5))["inner"] == 1
        assert torch.get_num_threads() == 4
        assert DataParallel(Seen())._placement.threads == 4
    finally:
        torch.set_num_threads(before)


class Failing(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.weight, self.where = nn.Parameter(torch.ones(5)), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward" and x[0, 0] < 0:
            raise LookupError("no such sample")
        y = x * self.weight
        if self.where == "backward" and x[0, 0] < 0:
            y.register_hook(self._fail)
        return y

    def _fail(self, grad: torch.Tensor) -> None:
        raise LookupError("no such gradient")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("replica", [0, 1])
def test_an_exception_in_a_replica_comes_to_the_caller_with_its_traceback(where: str, replica: int) -> None:
    ours, x = DataParallel(Failing(where), threads=2), torch.ones(4, 5)
    x[2 * replica] = -1
    with pytest.raises(LookupError, match="no such") as caught:
        ours(x).sum().backward()
    assert caught.traceback[-1].name == ("forward" if where == "forward" else "_fail")
    assert ours.weight.grad is None
    if hasattr(caught.value, "__notes__"):
        assert f"replica {replica}" in caught.value.__notes__[0]
    ours(torch.ones(4, 5)).sum().backward()  # and the next batch is computed as if nothing had been
    assert_close([ours.weight.grad], [torch.full((5,), 4.0)])


@pytest.mark.filterwarnings("ignore:This process")  # Python 3.12 and later on forks of processes with threads
def test_it_works_in_a_forked_process() -> None:
    ours, x = DataParallel(twice(), threads=2), samples(4)
    ours(x)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that hangs would hang us, too
        os.write(write, b"1" if torch.allclose(ours(x), ours.module(x), rtol=0, atol=1e-12) else b"0")
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"1"
    os.close(read)


def test_its_threads_end_with_it() -> None:
    ours = DataParallel(twice(), threads=3)
    before = set(threading.enumerate())
    ours(samples(6))
    new = set(threading.enumerate()) - before
    assert len(new) == 2
    del ours
    for thread in new:
        thread.join(10)
        assert not thread.is_alive()


# Buffers and random numbers ---------------------------------------------------------------------------------------


def test_the_first_replica_leaves_its_statistics() -> None:
    plain, ours = nn.BatchNorm1d(5).double(), DataParallel(nn.BatchNorm1d(5).double(), threads=2)
    x = samples(9)
    for number in range(3):
        y = ours(x + number)
        plain(x[:4] + number)
    assert_close(ours.buffers(), plain.buffers())
    assert_close([y[4:]], [F.batch_norm(x[4:], None, None, training=True)], 1e-9)


def test_buffers_that_forward_assigns_stay() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + len(x)
            return x

    ours = DataParallel(Counting(), threads=2)
    ours(torch.zeros(4, 1))
    ours(torch.zeros(4, 1))
    assert ours.seen == 4


def test_with_a_least_share_a_short_batch_is_computed_in_fewer_parts() -> None:
    ours = DataParallel(nn.BatchNorm1d(5).double(), threads=4, min_local_batch=2)
    for count in (2, 3, 5, 8):
        assert ours(samples(count)).shape == (count, 5)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.3)).double()


def test_dropout_follows_from_the_state_of_the_generator_and_differs_by_replica() -> None:
    torch.manual_seed(5)
    ours, x = DataParallel(dropping(), threads=3), samples(1).expand(9, 5)
    found = []
    for _ in range(20):
        torch.manual_seed(6)
        found.append((ours(x), torch.rand(3)))
    for y, following in found:
        assert torch.equal(y, found[0][0])
        assert torch.equal(following, found[0][1])
    parts = found[0][0].split(3)
    assert not torch.equal(parts[0], parts[1])
    assert not torch.equal(parts[1], parts[2])
    assert not torch.equal(ours(x), found[0][0])


def test_gradients_go_through_the_same_dropout() -> None:
    ours, x = DataParallel(nn.Dropout(0.5), threads=2), samples(64).abs().requires_grad_()
    y = ours(x)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)


def test_modules_that_draw_nothing_leave_the_generator_alone() -> None:
    ours = DataParallel(dropping().eval(), threads=2)
    torch.manual_seed(6)
    ours(samples(8))
    after = torch.rand(3)
    torch.manual_seed(6)
    assert torch.equal(after, torch.rand(3))


@pytest.mark.parametrize(
    "layer",
    [
        Sequences(nn.LSTM(5, 5, 2, batch_first=True, dropout=0.5)),
        nn.TransformerEncoderLayer(5, 1, 8, dropout=0.5, batch_first=True),
        nn.RReLU(),
        nn.Dropout1d(),
        nn.AlphaDropout(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_other_layers_that_draw_are_as_determined(layer: nn.Module) -> None:
    ours, x = DataParallel(layer.double(), threads=2), samples(24).view(8, 3, 5)
    found = []
    for _ in range(5):
        torch.manual_seed(6)
        found.append(ours(x))
    assert all(torch.equal(y, found[0]) for y in found)
    assert not torch.equal(ours(x), found[0])


# torch 2.6 leaves the generator of checkpoint() suspended when the module raises. Python reports an error when it is
# collected in another thread, so it is collected within this test.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_checkpoint_around_dropout_is_refused() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = dropping()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    with pytest.raises(ConfigError, match="checkpoint"):
        DataParallel(Checkpointed(), threads=2)(samples(4))
    gc.collect()


# In the place of the module ---------------------------------------------------------------------------------------


def test_names_and_state_are_those_of_the_module() -> None:
    plain, ours = twice(), DataParallel(twice(), threads=2)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(ours.state_dict()) == list(plain.state_dict())
    outer = nn.ModuleDict({"net": ours})
    assert list(outer.state_dict()) == list(nn.ModuleDict({"net": plain}).state_dict())
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    outer.load_state_dict(nn.ModuleDict({"net": plain}).state_dict())
    assert_close(ours.parameters(), plain.parameters())


def test_what_torch_has_saved_with_a_prefix_can_be_loaded() -> None:
    plain, ours = nn.Linear(5, 3), DataParallel(nn.Linear(5, 3), threads=2)
    ours.load_state_dict(nn.DataParallel(plain).state_dict())
    assert_close(ours.parameters(), plain.parameters())


def test_copies_and_pickles_train_for_themselves() -> None:
    ours = DataParallel(twice(), threads=2)
    ours(samples(4)).sum().backward()
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (
        copy.deepcopy(ours),
        pickle.loads(pickle.dumps(ours)),
        torch.load(file, weights_only=False),
    ):
        assert torch.equal(other(samples(4)), ours(samples(4)))
        with torch.no_grad():
            other.first.weight.zero_()
        assert other.module.first.weight.abs().sum() == 0
        assert other.again.weight is other.first.weight
        assert ours.first.weight.abs().sum() > 0


def test_moving_converting_and_switching_reach_the_module() -> None:
    ours = DataParallel(dropping(), threads=2)
    assert ours.float() is ours
    assert ours.module[0].weight.dtype == torch.float32
    assert ours.eval().module.training is False
    assert not any(each.training for each in ours.modules())
    ours.apply(lambda each: each.register_buffer("mark", torch.ones(1)))
    assert "mark" in ours.state_dict()
    assert ours.train().module.training


def test_attributes_and_methods_of_the_module_are_its_own() -> None:
    ours = DataParallel(Failing("nowhere"), threads=2)
    assert ours.where == "nowhere"
    assert ours._fail.__self__ is ours.module
    with pytest.raises(AttributeError, match="'Failing' object has no attribute 'missing'"):
        _ = ours.missing


def test_a_module_without_trainable_parameters_is_computed_all_the_same() -> None:
    frozen = twice().requires_grad_(False)
    ours, x = DataParallel(frozen, threads=2), samples(5)
    y = ours(x)
    assert_close([y], [frozen(x)])
    assert not y.requires_grad
    x.requires_grad_()
    ours(x).sum().backward()
    assert x.grad is not None


def test_two_threads_of_the_caller_may_use_it_at_the_same_time() -> None:
    ours, x = DataParallel(twice(), threads=2), [samples(6, seed) for seed in range(8)]
    found: list[torch.Tensor | None] = [None] * 8

    def use(place: int) -> None:
        for _ in range(10):
            found[place] = ours(x[place])

    callers = [threading.Thread(target=use, args=(place,)) for place in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert_close(found, [ours.module(each) for each in x])


# What cannot be ---------------------------------------------------------------------------------------------------


class Outside(nn.Module):
    """Reaches a parameter by a way that a replica does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.parts = [self.layer]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[0](x)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda: DataParallel(nn.Linear(5, 3), threads=0), "threads must be"),
        (lambda: DataParallel(nn.Linear(5, 3), threads=True), "threads must be"),
        (lambda: DataParallel(nn.Linear(5, 3), [0, 1]), "module is on the CPU"),
        (lambda: DataParallel(nn.Linear(5, 3), scalars="max"), "scalars must be"),
        (lambda: DataParallel(nn.Linear(5, 3), min_local_batch=0), "min_local_batch must be"),
        (lambda: DataParallel(nn.Linear(5, 3).weight), "wraps a torch.nn.Module"),
        (lambda: DataParallel(nn.LazyLinear(3)), "has no shape yet"),
        (lambda: DataParallel(nn.Linear(5, 3, device="meta")), "on 'meta'"),
        (lambda: DataParallel(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 3, device="meta"))), "several devices"),
        (lambda: DataParallel(nn.Sequential(nn.SyncBatchNorm(5))), "call its collective"),
        (lambda: DataParallel(fd.SyncBatchNorm(5)), "call its collective"),
        (lambda: DataParallel(DataParallel(nn.Linear(5, 3))), "each of them once"),
        (lambda: DataParallel(nn.DataParallel(nn.Linear(5, 3))), "each of them once"),
        (lambda: DataParallel(nn.Sequential(torch.compile(nn.Linear(5, 3), backend="eager"))), "leave out torch"),
    ],
)  # fmt: skip
def test_what_cannot_be_replicated_is_refused_with_a_reason(wrap: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrap()


def test_a_module_that_is_compiled_or_moved_afterwards_is_refused_at_its_next_batch() -> None:
    compiled = DataParallel(nn.Sequential(nn.Linear(5, 3)), threads=2)
    compiled.module[0].compile(backend="eager")
    with pytest.raises(ConfigError, match=r"torch\.compile"):
        compiled(torch.zeros(4, 5))
    moved = DataParallel(nn.Linear(5, 3), threads=2)
    moved.to("meta")
    with pytest.raises(ConfigError, match="'weight' of Linear"):
        moved(torch.zeros(4, 5))


def test_a_parameter_that_a_replica_does_not_know_is_refused_rather_than_not_trained() -> None:
    with pytest.raises(ConfigError, match="neither a parameter"):
        DataParallel(Outside(), threads=2)(torch.zeros(4, 5))
    with torch.no_grad():
        assert DataParallel(Outside(), threads=2)(torch.zeros(4, 5)).shape == (4, 3)
