"""The loader in one process: what moves its position, what it hands out again, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from farandole.base.membership import Shortfall
from farandole.errors import ConfigError, DataError, StepError
from farandole.integrations.horovod.torch_state import TorchState
from farandole.training.data.elastic_loader import LoaderHooks
from farandole.training.data.grouped_order import Bucketed, ShardLocal, Stratified, Weighted
from farandole.training.data.loader import DataLoader
from farandole.training.data.sample_order import Order, Shuffled
from farandole.training.state import step
from farandole.training.state.step import StepStatus

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def no_open_step() -> Iterator[None]:
    step.close()
    yield
    step.close()
    step.on_decided(None)


class Numbers:
    """Its samples are their own indices; `fetched` holds them in the order of asking."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        self.fetched.append(index)
        return index


class Regroups(LoaderHooks):
    """Hooks for which something happens once, at a boundary; `answers` to whether all are through with the epoch."""

    def __init__(self, action: Callable[[], None] = lambda: None, answers: tuple[bool, ...] = ()) -> None:
        self.action: Callable[[], None] | None = action
        self.answers = list(answers)

    def reach_boundary(self) -> None:
        action, self.action = self.action, None
        if action is not None:
            action()

    def reach_epoch_end(self) -> bool:
        return self.answers.pop(0) if self.answers else True


def make(size: int = 10, global_batch_size: int = 4, **options: Any) -> DataLoader:
    return DataLoader(Numbers(size), global_batch_size, **{"shuffle": False, "collate_fn": list, **options})


def make_step(loader: DataLoader) -> None:
    """What optimizer and state do when a step is applied."""
    step.on_decided(lambda batch: loader.commit(batch.global_batch))
    step.mark_reduced()
    step.decide()


def train_rest(loader: DataLoader) -> list[Any]:
    seen = []
    for batch in loader:
        seen.append(batch)
        make_step(loader)
    return seen


def test_an_epoch_goes_once_over_the_data_set_and_ends_with_a_short_batch() -> None:
    loader = make()
    seen = []
    for batch in loader:
        seen.append(batch)
        assert loader.indices == batch
        make_step(loader)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(loader) == 3
    assert (loader.epoch, loader.cursor, loader.batch, loader.global_batch) == (0, 10, None, None)
    assert step.status() is StepStatus.NONE


@pytest.mark.parametrize("options", [{}, {"max_local_batch": 2}, {"tail": "drop"}, {"tail": "carry"}])
def test_steps_are_counted_whatever_the_loop_body_sees(options: dict[str, Any]) -> None:
    loader = make(**options)
    for _ in loader.epochs(3):
        counts = [(loader.steps_done, loader.steps_left)]
        for _ in loader:
            assert (loader.steps_done, loader.steps_left) == counts[-1]
            if not step.expects_micro_batch():
                make_step(loader)
                counts.append((loader.steps_done, loader.steps_left))
        total = len(loader)
        assert counts == [(number, total - number) for number in range(total + 1)]


def test_a_tensor_data_set_is_collated_as_by_torch() -> None:
    x = torch.arange(12.0).reshape(6, 2)
    loader = DataLoader(TensorDataset(x, x.sum(1)), 3)
    features, total = next(iter(loader))
    assert torch.equal(features, x[loader.indices])
    assert torch.equal(total, features.sum(1))


def test_epochs_continue_where_the_state_is() -> None:
    loader = make(4, 2)
    seen = []
    loader.load_state_dict({**loader.state_dict(), "epoch": 1, "cursor": 2})
    for epoch in loader.epochs(3):
        for batch in loader:
            seen.append((epoch, batch))
            make_step(loader)
    assert seen == [(1, [2, 3]), (2, [0, 1]), (2, [2, 3])]
    assert list(loader.epochs(3)) == []
    assert (loader.epoch, loader.cursor) == (3, 0)


def test_every_epoch_has_its_own_order() -> None:
    loader = make(50, 50, shuffle=True)
    orders = []
    for _ in loader.epochs(2):
        for batch in loader:
            orders.append(batch)
            make_step(loader)
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50))


def test_a_regroup_in_the_tail_hands_out_the_epoch_again_with_nothing_left_in_it() -> None:
    loader = make(2, 2)
    loader.hooks = Regroups(answers=(False, True))
    tails, batches = [], 0
    for epoch in loader.epochs(1):
        for _ in loader:
            batches += 1
            make_step(loader)
        tails.append(epoch)
    assert (tails, batches) == ([0, 0], 1)


def test_break_ends_the_epoch_and_the_next_one_starts_at_its_beginning() -> None:
    loader = make()
    seen = []
    for _ in loader.epochs(2):
        for batch in loader:
            seen.append(batch)
            make_step(loader)
            if loader.epoch == 0:
                break
    assert seen == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_second_pass_over_an_epoch_that_is_through_is_an_error_that_says_what_to_write() -> None:
    loader = make(4, 2)
    train_rest(loader)
    with pytest.raises(StepError, match=r"all batches of epoch 0 are trained.*for epoch in loader\.epochs\(5\)"):
        train_rest(loader)
    assert (loader.epoch, loader.cursor) == (0, 4)
    for _ in loader.epochs(2):
        assert len(train_rest(loader)) == (0 if loader.epoch == 0 else 2)


def test_a_worker_that_enters_in_the_middle_of_an_epoch_may_take_its_last_batch_in_another_loop() -> None:
    """The others are in the second loop of a body that has two; this worker begins with the first one."""
    loader = make(6, 2)
    loader.load_state_dict({**loader.state_dict(), "cursor": 2})
    found = []
    for epoch in loader.epochs(1):
        found.append((epoch, train_rest(loader), train_rest(loader)))
    assert found == [(0, [[2, 3], [4, 5]], [])]


@pytest.mark.parametrize("goes_on", ["break", "set_world", "load_state_dict"])
def test_a_second_pass_is_right_where_the_epoch_may_go_on(goes_on: str) -> None:
    """After `break`; after a regroup, when the function is called again; after a state was loaded."""
    loader = make(4, 2)
    if goes_on == "break":
        for _ in loader:
            make_step(loader)
            break
        assert train_rest(loader) == [[2, 3]]
        return
    train_rest(loader)
    if goes_on == "set_world":
        loader.set_world(0, 1)
        assert list(loader) == [[0, 1]]  # without effect, see below
    else:
        loader.load_state_dict({**loader.state_dict(), "cursor": 2})
        assert train_rest(loader) == [[2, 3]]
    with pytest.raises(StepError):
        iter(loader)


@pytest.mark.parametrize(
    ("tail", "steps", "left_in_the_middle", "left_at_the_end"),
    [("short", 12, 5, 2), ("drop", 8, 3, 1), ("carry", 10, 3, 1)],
)
def test_what_epochs_has_promised_and_was_not_done_is_counted_also_in_a_state_that_is_loaded(
    tail: Any, steps: int, left_in_the_middle: int, left_at_the_end: int
) -> None:
    loader = make(tail=tail)  # 10 samples in global batches of 4
    assert loader.shortfall() is None
    for epoch in loader.epochs(4):
        for _ in loader:
            make_step(loader)
            if epoch == 1:
                break
        if epoch == 2:
            break
    assert loader.shortfall() == Shortfall(4, 2, steps, left_in_the_middle)
    loader.load_state_dict(loader.state_dict())
    for _ in loader.epochs(4):
        train_rest(loader)
    assert loader.shortfall() == Shortfall(4, 1, steps, left_at_the_end)


@pytest.mark.parametrize("tail", ["short", "drop", "carry"])
def test_a_promise_is_kept_also_where_the_last_epoch_is_left_in_its_tail(tail: Any) -> None:
    loader = make(tail=tail)
    for epoch in loader.epochs(3):
        train_rest(loader)
        if epoch == 2:
            break
    assert loader.shortfall() is None


def test_a_number_of_steps_ends_the_last_epoch_behind_the_last_of_them_also_after_a_state_is_loaded() -> None:
    loader, seen = make(), []  # 10 samples in global batches of 4
    for epoch in loader.epochs(steps=5):
        seen.append((int(epoch), len(train_rest(loader))))
        loader.load_state_dict(loader.state_dict())
    assert (seen, loader.shortfall()) == ([(0, 3), (1, 2)], None)
    assert list(loader.epochs(steps=5)) == []
    for _ in loader.epochs(steps=9):
        break
    assert loader.shortfall() == Shortfall(0, 0, 9, 4)
    for words in ({}, {"total": 1, "steps": 3}):
        with pytest.raises(ConfigError):
            next(loader.epochs(**words))


def test_fetching_moves_nothing_that_is_saved() -> None:
    loader = make()
    before = loader.state_dict()
    next(iter(loader))
    assert loader.state_dict() == before


def test_an_aborted_step_gets_the_same_batch_again() -> None:
    loader = make()
    feed = iter(loader)
    first = next(feed)
    step.abort()
    assert next(feed) == first
    make_step(loader)
    assert next(feed) == [4, 5, 6, 7]


def test_after_a_regroup_the_same_global_batch_is_divided_anew() -> None:
    loader = make()
    feed = iter(loader)
    assert next(feed) == [0, 1, 2, 3]
    step.abort()
    loader.hooks = Regroups(lambda: (step.close(), loader.set_world(1, 2)))
    assert next(feed) == [2, 3]
    assert loader.global_batch is not None
    assert (loader.global_batch.start, loader.global_batch.stop) == (0, 4)


def test_a_regroup_after_the_last_step_of_an_epoch_may_lead_back_into_it() -> None:
    """This worker missed nothing, but the state that all agreed on is one step behind."""
    loader = make(4, 2)
    feed = iter(loader)
    behind = None
    for _ in range(2):
        next(feed)
        behind = behind or {**loader.state_dict(), "cursor": 2}
        make_step(loader)
    loader.hooks = Regroups(lambda: loader.load_state_dict(behind))
    assert next(feed) == [2, 3]


def test_nothing_of_the_old_division_is_fetched_after_a_change_of_the_world() -> None:
    loader = make(100, 10)
    feed = iter(loader)
    next(feed)
    make_step(loader)
    loader.set_world(0, 5)
    loader.dataset.fetched.clear()
    next(feed)
    assert loader.dataset.fetched == [10, 11]


def test_after_a_break_nothing_of_the_rest_is_fetched() -> None:
    loader = make(100, 10)
    for epoch in loader.epochs(2):
        loader.dataset.fetched.clear()
        for _ in loader:
            make_step(loader)
            break
        assert loader.dataset.fetched == list(range(10)), epoch


def test_a_dummy_batch_has_samples_but_delivers_none() -> None:
    loader = make(3, 3, min_local_batch=2)
    loader.set_world(1, 2)
    assert next(iter(loader)) == [1, 2]
    assert loader.batch is not None
    assert loader.batch.is_dummy
    assert loader.indices == []


def test_a_large_share_comes_in_micro_batches_with_one_step() -> None:
    loader = make(8, 8, max_local_batch=3)
    feed = iter(loader)
    assert [next(feed), next(feed)] == [[0, 1], [2, 3, 4]]
    assert loader.cursor == 0
    assert next(feed) == [5, 6, 7]
    make_step(loader)
    assert loader.cursor == 8


def test_a_fault_between_micro_batches_starts_the_global_batch_again() -> None:
    loader = make(8, 8, max_local_batch=3)
    feed = iter(loader)
    assert [next(feed), next(feed)] == [[0, 1], [2, 3, 4]]
    loader.hooks = Regroups(lambda: (step.abort(), loader.set_world(0, 2)))
    assert [next(feed), next(feed)] == [[0, 1], [2, 3]]


class Trains:
    """A DistributedOptimizer, as the open step sees one."""

    def begin_padding(self) -> None: ...

    def end_overlap(self, reason: str) -> None: ...


def test_a_loop_body_without_a_step_is_an_error_that_says_what_to_do() -> None:
    feed = iter(make())
    next(feed)
    step.take_part(Trains())
    with pytest.raises(StepError, match=r"without backward\(\) and optimizer.step\(\) for samples \[0, 4\)"):
        next(feed)


def test_a_loop_body_with_an_optimizer_of_torchs_alone_is_told_to_wrap_it() -> None:
    feed = iter(make())
    next(feed)
    with pytest.raises(StepError, match=r"no DistributedOptimizer .* samples \[0, 4\).*fd.DistributedOptimizer\("):
        next(feed)


def test_a_backward_pass_without_a_step_is_an_error_too() -> None:
    feed = iter(make())
    next(feed)
    step.mark_reduced()
    with pytest.raises(StepError, match=r"without optimizer.step\(\) for samples \[0, 4\) of epoch 0"):
        next(feed)


def test_a_step_that_nobody_commits_is_an_error_instead_of_the_same_batch_for_ever() -> None:
    feed = iter(make())
    next(feed)
    step.mark_reduced()
    step.decide()
    with pytest.raises(StepError, match="pass the loader to TorchState"):
        next(feed)


def test_iterating_anew_hands_out_the_batch_that_made_no_step() -> None:
    loader = make()
    next(iter(loader))
    assert next(iter(loader)) == [0, 1, 2, 3]


def test_stale_early_and_double_commits_are_refused() -> None:
    loader = make()
    feed = iter(loader)
    next(feed)
    first = loader.global_batch
    make_step(loader)
    next(feed)
    second = loader.global_batch
    with pytest.raises(DataError, match=r"cannot commit samples \[0, 4\) of epoch 0: next are \[4, 8\)"):
        loader.commit(first)
    make_step(loader)
    next(feed)
    with pytest.raises(DataError, match=r"cannot commit samples \[4, 8\)"):
        loader.commit(second)
    third = loader.global_batch
    loader.load_state_dict({**loader.state_dict(), "cursor": 0})
    with pytest.raises(DataError, match=r"cannot commit samples \[8, 10\)"):
        loader.commit(third)
    assert loader.cursor == 0


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (make(size=11), "size"),
        (make(global_batch_size=5), "global_batch_size"),
        (make(seed=1), "seed"),
        (make(shuffle=True), "order"),
        (make(tail="carry"), "tail"),
    ],
)
def test_a_state_whose_cursor_would_mean_other_samples_is_refused(other: DataLoader, name: str) -> None:
    loader = make()
    before = loader.state_dict()
    with pytest.raises(DataError, match=f"the saved loader has {name}="):
        loader.load_state_dict({**other.state_dict(), "epoch": 3})
    assert loader.state_dict() == before


@pytest.mark.parametrize("damage", [{"version": 2}, {"cursor": 11}, {"cursor": -1}, {"epoch": -1}])
def test_a_damaged_state_is_refused(damage: dict[str, int]) -> None:
    loader = make()
    with pytest.raises(DataError):
        loader.load_state_dict({**loader.state_dict(), **damage})
    assert (loader.epoch, loader.cursor) == (0, 0)


def test_a_place_in_the_world_must_exist() -> None:
    with pytest.raises(DataError, match=r"rank must be in 0\.\.1, got 2"):
        make().set_world(2, 2)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [(Stream(), "is an IterableDataset"), (iter([1]), "needs __len__ and __getitem__")],
)
def test_what_cannot_be_asked_by_index_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataLoader(dataset, 1)


class Broken(Numbers):
    error: Exception = KeyError("no such file")

    def __getitem__(self, index: int) -> int:
        if index == 5 and self.error is not None:
            raise self.error
        return super().__getitem__(index)


def test_an_error_of_the_data_set_leaves_the_position_as_it_was() -> None:
    dataset = Broken(10)
    loader = DataLoader(dataset, 4, shuffle=False, collate_fn=list)
    feed = iter(loader)
    next(feed)
    make_step(loader)
    with pytest.raises(KeyError, match="no such file"):
        next(feed)
    assert loader.cursor == 4
    dataset.error = None
    assert next(feed) == [4, 5, 6, 7]


def test_a_stop_iteration_of_the_data_set_is_not_taken_for_the_end_of_the_epoch() -> None:
    dataset = Broken(10)
    dataset.error = StopIteration()
    loader = DataLoader(dataset, 10, shuffle=False)
    with pytest.raises(DataError, match="the data set raised StopIteration"):
        next(iter(loader))


def test_loading_takes_no_number_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    next(iter(make()))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_loop_body_runs_once_for_each_step_however_few_workers_are_left() -> None:
    loader = make(24, 12)
    loader.set_world(0, 3)
    loader.set_world(0, 1)
    assert len(next(iter(loader))) == 12
    assert loader.global_batch is not None
    assert loader.global_batch.micro_batches == 1


def test_a_limit_that_was_given_is_the_source_ranks_on_every_worker() -> None:
    source, newcomer = make(24, 12, max_local_batch=4), make(24, 12, max_local_batch=6)
    newcomer.load_state_dict(source.state_dict())
    newcomer.set_world(0, 2)
    next(iter(newcomer))
    assert newcomer.global_batch is not None
    assert newcomer.global_batch.micro_batches == 2


def test_a_limit_of_a_saved_loader_does_not_bind_one_without() -> None:
    loader = make(24, 12)
    loader.load_state_dict(make(24, 12, max_local_batch=4).state_dict())
    assert len(next(iter(loader))) == 12


class Rehearses(LoaderHooks):
    """The first batch is a rehearsal's."""

    def __init__(self) -> None:
        self.is_due = True

    def rehearses(self) -> bool:
        is_due, self.is_due = self.is_due, False
        return is_due


def test_a_rehearsal_hands_out_the_first_batch_twice() -> None:
    loader = make()
    loader.hooks = Rehearses()
    feed = iter(loader)
    assert next(feed) == [0, 1, 2, 3]
    assert (step.status(), step.is_rehearsal(), loader.cursor) == ("aborted", True, 0)
    assert next(feed) == [0, 1, 2, 3]
    assert (step.status(), step.is_rehearsal()) == ("open", False)


def test_with_a_limit_the_rehearsal_splits_the_share_as_a_loss_would() -> None:
    loader = make(24, 8, max_local_batch=4)
    loader.set_world(0, 2)
    loader.hooks = Rehearses()
    feed = iter(loader)
    assert [next(feed), next(feed)] == [[0, 1], [2, 3]]
    assert step.is_aborted()
    assert next(feed) == [0, 1, 2, 3]
    assert step.status() is StepStatus.OPEN


def test_with_a_limit_that_nothing_can_exceed_the_rehearsal_splits_nothing() -> None:
    loader = make(24, 8, max_local_batch=8)
    loader.set_world(0, 2)
    loader.hooks = Rehearses()
    assert next(iter(loader)) == [0, 1, 2, 3]


def test_break_in_a_loop_body_whose_step_is_aborted_does_not_end_the_epoch() -> None:
    loader = make(4, 2)
    seen = []
    for _ in loader.epochs(1):
        for batch in loader:
            seen.append(batch)
            if len(seen) == 1:
                step.abort()
                break
            make_step(loader)
    assert seen == [[0, 1], [0, 1], [2, 3]]


def test_behind_the_last_batch_workers_that_have_regrouped_get_one_without_effect() -> None:
    loader = make(4, 2)
    feed = iter(loader)
    for _ in range(2):
        next(feed)
        make_step(loader)
    loader.hooks = Regroups(lambda: loader.set_world(0, 1))
    assert next(feed) == [0, 1]
    assert (step.status(), loader.cursor) == ("aborted", 4)
    assert next(feed, None) is None


# Tails ------------------------------------------------------------------------------------------------------------


def train(loader: DataLoader, epochs: int) -> list[tuple[int, int, list[int]]]:
    """Epoch, len() at its beginning, and samples of each step."""
    steps = []
    for epoch in loader.epochs(epochs):
        length = len(loader)
        for batch in loader:
            steps.append((epoch, length, batch))
            make_step(loader)
    return steps


def test_a_carried_tail_is_filled_from_the_next_epoch_which_goes_on_behind_it() -> None:
    loader = make(tail="carry")
    assert train(loader, 2) == [
        (0, 3, [0, 1, 2, 3]),
        (0, 3, [4, 5, 6, 7]),
        (0, 3, [8, 9, 0, 1]),
        (1, 2, [2, 3, 4, 5]),
        (1, 2, [6, 7, 8, 9]),
    ]
    assert (loader.epoch, loader.cursor) == (2, 0)


def test_after_the_last_epoch_a_carried_tail_has_begun_one_more() -> None:
    loader = make(tail="carry")
    train(loader, 1)
    assert (loader.epoch, loader.cursor) == (1, 2)
    assert [batch for _, _, batch in train(loader, 2)] == [[2, 3, 4, 5], [6, 7, 8, 9]]


def test_a_job_that_ends_behind_the_border_goes_on_behind_it() -> None:
    loader, later = make(tail="carry"), make(tail="carry")
    loader.load_state_dict({**loader.state_dict(), "cursor": 12})
    assert next(iter(loader), None) is None
    later.load_state_dict(loader.state_dict())
    assert train(later, 2) == [(1, 2, [2, 3, 4, 5]), (1, 2, [6, 7, 8, 9])]


def test_the_two_epochs_of_a_carried_step_have_orders_of_their_own() -> None:
    loader = make(tail="carry", shuffle=True)
    steps = [batch for _, _, batch in train(loader, 2)]
    samples = [sample for batch in steps for sample in batch]
    assert sorted(samples[:10]) == sorted(samples[10:]) == list(range(10))
    assert samples[:10] != samples[10:]


@pytest.mark.parametrize("option", [{"tail": "drop"}, {"drop_last": True}])
def test_a_tail_may_be_dropped(option: dict[str, Any]) -> None:
    loader = make(**option)
    assert train(loader, 2) == [(epoch, 2, batch) for epoch in (0, 1) for batch in ([0, 1, 2, 3], [4, 5, 6, 7])]
    assert loader.state_dict()["tail"] == "drop"


def test_a_cursor_beyond_the_end_exists_with_a_carried_tail_only() -> None:
    state = make(tail="carry").state_dict()
    make(tail="carry").load_state_dict({**state, "cursor": 13})
    for tail, cursor in (("carry", 14), ("short", 11), ("drop", 9)):
        loader = make(tail=tail)
        with pytest.raises(DataError, match=f"invalid position: epoch 0, cursor {cursor}"):
            loader.load_state_dict({**loader.state_dict(), "cursor": cursor})


# Where training is ------------------------------------------------------------------------------------------------


def test_people_can_read_where_training_is() -> None:
    loader = make(size=10_000, global_batch_size=50)
    assert str(loader) == "epoch 0, 0 of 10,000 samples (0.0%)"
    loader.load_state_dict({**loader.state_dict(), "epoch": 2, "cursor": 1250})
    assert str(loader) == "epoch 2, 1,250 of 10,000 samples (12.5%)"
    assert loader.fraction == 0.125


@pytest.mark.parametrize("tail", ["short", "carry", "drop"])
@pytest.mark.parametrize(
    "order", [Shuffled(), Weighted([1] * 7, 10**12), Stratified([0] * 7), Bucketed([1] * 7), ShardLocal([7])]
)
def test_the_state_of_every_order_is_small_at_a_million_million_samples(tail: Any, order: Order) -> None:
    if isinstance(order, Bucketed) and tail == "carry":
        return
    loader = make(7, 7, shuffle=True, seed=2**32 - 1, order=order, tail=tail, max_local_batch=256)
    state = {**loader.state_dict(), "size": 10**12, "global_batch_size": 65_535, "cursor": 10**12, "epoch": 90}
    assert len(msgspec.msgpack.encode(state)) <= 160
    assert not isinstance(order, Shuffled) or len(msgspec.msgpack.encode(state)) <= 128 + 11 * (tail != "short")


# torch's arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "harmless",
    [
        {"persistent_workers": False},
        {"persistent_workers": True},
        {"in_order": True},
        {"sampler": None, "batch_sampler": None, "generator": None},
        {"drop_last": False, "timeout": 0, "pin_memory": False, "pin_memory_device": "", "worker_init_fn": None},
    ],
)
def test_arguments_of_torch_that_change_nothing_are_taken(harmless: dict[str, Any]) -> None:
    assert next(iter(make(**harmless))) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ({"batch_size": 4}, "give global_batch_size"),
        ({"sampler": [1, 2]}, "give order="),
        ({"batch_sampler": [[1, 2]]}, "give order="),
        ({"generator": torch.Generator()}, "give seed="),
        ({"in_order": False}, "in the order of the epoch"),
        ({"drop_last": True, "tail": "carry"}, "contradict each other"),
    ],
)
def test_arguments_of_torch_that_cannot_be_followed_are_refused_with_a_reason(
    argument: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make(**argument)


@pytest.mark.parametrize("seed", [None, 1.5, "1"])
def test_a_seed_that_is_no_whole_number_is_refused(seed: Any) -> None:
    with pytest.raises(DataError, match="seed must be a whole number"):
        make(seed=seed)


def test_an_unknown_argument_is_refused_and_a_likely_one_named() -> None:
    with pytest.raises(TypeError, match=r"no argument 'num_worker'; did you mean num_workers\?"):
        make(num_worker=2)


def test_what_a_data_set_keeps_of_its_own_is_a_tracked_value_of_the_state() -> None:
    """Which worker fetches a sample is not fixed, so that fetching cannot move it; what the script sets can be kept."""

    class Curriculum(Numbers):
        level = 0

        def state_dict(self) -> dict[str, int]:
            return {"level": self.level}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.level = state["level"]

    dataset = Curriculum(10)
    model = torch.nn.Linear(1, 1)
    state = TorchState(model=model, optimizer=None, loader=DataLoader(dataset, 2), dataset=dataset)
    dataset.level = 3
    state.capture()
    dataset.level = 4
    state.restore()
    assert dataset.level == 3
