"""TorchState under the commit rule: handlers, commits, restoring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from farandole.errors import ConfigError, StepError
from farandole.integrations.horovod.committed_state import CommittedState
from farandole.integrations.horovod.object_state import State
from farandole.integrations.horovod.state_handlers import (
    ModelStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    set_handler_registry,
)
from farandole.integrations.horovod.torch_state import TorchState
from farandole.training.collectives import world
from farandole.training.state.session import SESSION
from farandole.training.state.step_state import StepState

pytestmark = pytest.mark.core


class Sampler:
    """Records, and counts how often it was divided anew."""

    def __init__(self) -> None:
        self.epoch = self.processed_num = self.loads = 0

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        self.processed_num += batch_size

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.loads += 1


def trained(width: int = 4, **more: Any) -> TorchState:
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = TorchState(model, optimizer, batch=0, trail=[[]], **more)
    train(state)
    return state


def train(state: TorchState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.randn(8, 3)).square().mean().backward()
    state.optimizer.step()
    state.batch += 1
    state.trail[0].append(state.batch)


def content(state: TorchState) -> Any:
    optimizer = state.optimizer.state_dict()
    return (
        {key: value.tolist() for key, value in state.model.state_dict().items()},
        {i: {k: torch.as_tensor(v).tolist() for k, v in e.items()} for i, e in optimizer["state"].items()},
        optimizer["param_groups"],
        state.batch,
        [list(each) for each in state.trail],
    )


class RunLoop:
    """As inside of an elastic function."""

    def committing(self) -> None: ...
    def committed(self) -> None: ...


@pytest.fixture
def elastic() -> Iterator[None]:
    SESSION.open(RunLoop())  # type: ignore[arg-type]
    yield
    SESSION.close()
    world.refuse_collectives(None)


@pytest.mark.usefixtures("elastic")
def test_where_a_commit_follows_each_step_nothing_is_copied_and_a_rollback_is_exact() -> None:
    state = trained(commit_follows_step=True)
    for _ in range(3):
        state.save()
        train(state)
    state.save()
    committed = content(state)
    assert content(state) == committed
    state.trail[0].append("lost")
    state.model[1].running_mean.add_(1)  # by a forward pass that came to nothing
    state.restore()
    assert content(state) == committed
    train(state)  # from the copy that the rollback has left
    state.restore()
    assert content(state) == committed


@pytest.mark.usefixtures("elastic")
def test_a_rollback_between_step_and_commit_is_refused_and_changes_nothing() -> None:
    state = trained(commit_follows_step=True)
    state.save()
    train(state)
    stepped = content(state)
    for call in (state.restore, state.sync):
        with pytest.raises(StepError, match="commit_follows_step"):
            call()
    assert content(state) == stepped


@pytest.mark.usefixtures("elastic")
def test_with_a_sampler_that_agrees_before_each_commit_copies_are_made_all_the_same() -> None:
    class Agreeing(Sampler):
        has_news = False

    state = trained(commit_follows_step=True, sampler=Agreeing())
    state.save()
    committed = content(state)
    train(state)
    assert not world.are_refused()
    state.restore()
    assert content(state) == committed


@pytest.mark.parametrize("width", [4, 200_000], ids=["copied at once", "copied in the background"])
def test_restore_returns_everything_to_the_last_commit(width: int) -> None:
    state = trained(width)
    state.save()
    committed = content(state) if width == 4 else None
    weight = state.model[0].weight.detach().clone()
    moment = state.optimizer.state[state.model[0].weight]["exp_avg"].clone()
    for _ in range(2):  # twice, since what was restored once must not be the commit itself
        state.optimizer.param_groups[0]["lr"] = 0.5
        train(state)
        train(state)
        state.restore()
        assert torch.equal(state.model[0].weight, weight)
        assert torch.equal(state.optimizer.state[state.model[0].weight]["exp_avg"], moment)
        assert (state.batch, state.trail) == (1, [[1]])
        if committed is not None:
            assert content(state) == committed


def test_before_the_first_commit_restore_returns_to_what_was_given() -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    state = TorchState(model=model, optimizer=optimizer, batch=0, trail=[[]])
    before = model.weight.tolist()
    train(state)
    state.restore()
    assert model.weight.tolist() == before
    assert not optimizer.state
    assert (state.batch, state.trail) == (0, [[]])


def test_parameters_that_no_optimizer_moves_are_copied_at_once() -> None:
    """An exponential average, say, which is changed in place without any step()."""
    state = trained(average=torch.nn.Linear(2, 2))
    wanted = state.average.weight.tolist()
    state.save()
    with torch.no_grad():
        state.average.weight.mul_(0.5)
    state.restore()
    assert state.average.weight.tolist() == wanted


def test_several_models_and_optimizers_are_restored() -> None:
    generator, critic = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (generator, critic)]
    state = TorchState(generator=generator, critic=critic, g_opt=optimizers[0], c_opt=optimizers[1])
    for each in optimizers:
        each.param_groups[0]["lr"] = 0.2
    state.save()
    wanted = [generator.weight.tolist(), critic.weight.tolist()]
    for model, optimizer in zip((generator, critic), optimizers, strict=True):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.3
    state.restore()
    assert [generator.weight.tolist(), critic.weight.tolist()] == wanted
    assert [each.param_groups[0]["lr"] for each in optimizers] == [0.2, 0.2]


def test_a_scheduler_stays_the_same_object() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = TorchState(model, optimizer, scheduler=scheduler)
    state.save()
    optimizer.step()
    scheduler.step()
    state.restore()
    assert state.scheduler is scheduler
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_a_sampler_has_its_handler_and_is_rolled_back() -> None:
    sampler = Sampler()
    state = TorchState(sampler=sampler)
    sampler.record_batch(0, 4)
    state.save()
    sampler.record_batch(1, 4)
    state.restore()
    assert sampler.processed_num == 4


def test_a_value_assigned_to_a_handled_name_is_handled_from_then_on() -> None:
    state = trained()
    model = torch.nn.Linear(3, 1)
    state.model = model
    wanted = model.weight.tolist()
    with torch.no_grad():
        model.weight.zero_()
    state.restore()
    assert state.model is model
    assert model.weight.tolist() == wanted


def test_names_of_the_step_rule_are_free_under_the_commit_rule() -> None:
    state = TorchState(step=3, progress=0.5, tensors=[1], run_id="x", boundary_number=None)
    state.step = 4
    state.restore()
    assert (state.step, state.progress, state.tensors, state.run_id, state.boundary_number) == (3, 0.5, [1], "x", None)


def test_torchs_own_loader_does_not_make_it_a_state_of_the_step_rule() -> None:
    loader = torch.utils.data.DataLoader([1, 2, 3])
    assert not isinstance(TorchState(loader=loader), StepState)


class Mine(torch.utils.data.Sampler[int]):
    """A sampler of the user's own, which may divide."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(2))


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.fixture
def under_farandole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"AGENT": "@a", "WORKER": "w0", "SECRET": "s", "SLOT": "0"}.items():
        monkeypatch.setenv(f"FARANDOLE_{name}", value)


NUMBERS: list[Any] = [1, 2, 3]


@pytest.mark.usefixtures("under_farandole_run")
@pytest.mark.parametrize(
    ("loader", "advice"),
    [
        (torch.utils.data.DataLoader(NUMBERS), r"a SequentialSampler.* fd\.elastic\.DataLoader\(.*ElasticSampler"),
        (torch.utils.data.DataLoader(NUMBERS, shuffle=True), "a RandomSampler"),
        (torch.utils.data.DataLoader(NUMBERS, batch_size=None), "a SequentialSampler"),
        (torch.utils.data.DataLoader(Stream()), r"an IterableDataset.* fd\.elastic\.StreamLoader\("),
    ],
)
def test_torchs_own_loader_is_refused_where_every_worker_would_train_all_of_the_data(loader: Any, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        TorchState(loader=loader)
    with pytest.raises(ConfigError, match=advice):
        TorchState(None, None, loader)


@pytest.mark.usefixtures("under_farandole_run")
def test_torchs_own_loader_is_taken_where_a_sampler_may_divide_the_data_or_it_is_for_something_else() -> None:
    for divided in (
        torch.utils.data.DataLoader(NUMBERS, sampler=Sampler()),  # type: ignore[arg-type]
        torch.utils.data.DataLoader(NUMBERS, sampler=Mine()),
        torch.utils.data.DataLoader(NUMBERS, batch_sampler=torch.utils.data.BatchSampler(Mine(), 2, False)),
        torch.utils.data.DataLoader(NUMBERS, batch_sampler=[[0, 1], [2]]),  # type: ignore[arg-type]
    ):
        assert TorchState(loader=divided).loader is divided
    evaluate: Any = torch.utils.data.DataLoader(NUMBERS)
    assert TorchState(evaluate=evaluate).evaluate is evaluate


def test_torchs_own_loader_is_not_copied_and_its_elastic_sampler_is_rolled_back() -> None:
    sampler = Sampler()
    loader: Any = torch.utils.data.DataLoader(NUMBERS, sampler=sampler)  # type: ignore[arg-type]
    for values in ({"loader": loader}, {"sampler": sampler, "loader": loader}):
        sampler.processed_num = 0
        state = TorchState(**values)
        assert list(CommittedState(state).samplers().values()) == [sampler]
        sampler.record_batch(0, 1)
        assert sampler.processed_num == 1
        state.restore()
        assert sampler.processed_num == 0
        assert state.loader is loader
        assert loader.sampler is sampler


class Position:
    """A loader of the step rule."""

    epoch = cursor = 0

    def commit(self, global_batch: object) -> None: ...
    def set_world(self, rank: int, size: int) -> None: ...
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_with_a_loader_of_ours_it_is_a_state_of_the_step_rule() -> None:
    state = TorchState(loader=Position(), best=1.0)
    assert isinstance(state, StepState)
    assert isinstance(state, TorchState)
    assert isinstance(state, State)
    assert issubclass(StepState, TorchState)
    assert state.step == 0
    state.commit()
    with pytest.raises(ConfigError, match=r"elastic\.run"):
        state.sync()


def test_a_class_of_ones_own_with_a_loader_must_say_which_rule_it_means() -> None:
    class Mine(TorchState):
        pass

    class Stepping(StepState):
        pass

    with pytest.raises(ConfigError, match="StepState"):
        Mine(loader=Position())
    assert isinstance(Stepping(loader=Position()), Stepping)
    assert isinstance(Mine(batch=1), Mine)


class Counter:
    def __init__(self, count: int) -> None:
        self.count = count


class CounterHandler(StateHandler):
    def __init__(self, value: Counter) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self.saved = self.value.count

    def restore(self) -> None:
        self.value.count = self.saved

    def sync(self) -> None:
        self.value.count = -1


@pytest.fixture
def registry() -> Iterator[list[Any]]:
    before = list(get_handler_registry())
    yield list(before)
    set_handler_registry(before)


def test_a_handler_of_the_users_own_is_used(registry: list[Any]) -> None:
    set_handler_registry([(Counter, CounterHandler), *registry])
    state = TorchState(counter=Counter(1))
    state.counter.count = 2
    state.save()
    state.counter.count = 3
    state.restore()
    assert state.counter.count == 2
    state.counter = Counter(7)
    state.counter.count = 8
    state.restore()
    assert state.counter.count == 7


def test_the_registry_is_the_list_itself(registry: list[Any]) -> None:
    set_handler_registry(registry)
    get_handler_registry().append((Counter, CounterHandler))
    assert isinstance(TorchState(counter=Counter(1))._handlers["counter"], CounterHandler)


def test_handlers_save_and_restore_on_their_own() -> None:
    model = torch.nn.Linear(2, 2)
    handler = ModelStateHandler(model)
    wanted = model.weight.tolist()
    with torch.no_grad():
        model.weight.zero_()
    handler.restore()
    assert model.weight.tolist() == wanted


class OldSampler(Sampler):
    """Horovod's older sampler: each rank records the indices of its own."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def test_records_that_differ_by_rank_are_united_within_an_epoch() -> None:
    sampler = OldSampler()
    states = [
        {"epoch": 1, "processed_indices": {1, 2}},
        {"epoch": 1, "processed_indices": {3}},
        {"epoch": 0, "processed_indices": {9}},
    ]
    SamplerStateHandler(sampler).load_united(states)
    assert sampler.loaded == {"epoch": 1, "processed_indices": {1, 2, 3}}


def test_records_that_count_for_all_ranks_are_the_sources() -> None:
    sampler = OldSampler()
    SamplerStateHandler(sampler).load_united([{"epoch": 1, "processed_num": 4}, {"epoch": 1, "processed_num": 8}])
    assert sampler.loaded == {"epoch": 1, "processed_num": 4}


@pytest.mark.parametrize("kind", [TorchState, StepState])
@pytest.mark.parametrize("value", [torch.ones(1, requires_grad=True), [torch.nn.Parameter(torch.ones(1))]])
def test_a_tensor_that_an_optimizer_can_train_is_no_value(kind: type[TorchState], value: Any) -> None:
    with pytest.raises(ConfigError, match=r"state.alpha has a tensor that requires gradients.*ParameterList"):
        kind(alpha=value)


def test_a_value_that_contains_itself_is_refused_by_name() -> None:
    value: dict[str, Any] = {"list": [1, (2, 3)], "same": 1}
    value["again"] = value["list"]
    StepState(value=value)
    value["list"].append(value)
    with pytest.raises(ConfigError, match=r"state.value is a dict that contains itself"):
        StepState(value=value)


@pytest.mark.parametrize("name", ["on_step", "has_rehearsed", "watched", "progress", "step"])
def test_a_value_cannot_take_the_name_of_something_that_the_state_has_itself(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the name '{name}' is reserved"):
        StepState(**{name: [1.0]})
