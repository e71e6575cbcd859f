"""What only the script knows: a loop body that comes again begins as it began, and other workers receive what all have
changed alike."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, chain, count, cycle, islice, pairwise, takewhile, tee, zip_longest
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from farandole.integrations.torchrun.in_place.script_frames import frames_of_script, set_locals
from farandole.integrations.torchrun.in_place.script_holder import Holder
from farandole.integrations.torchrun.in_place.script_iterators import shift_counts
from farandole.integrations.torchrun.in_place.script_search import hooks_of
from farandole.integrations.torchrun.in_place.script_state import ScriptState
from farandole.training.collectives import world


class Trainer:
    """Keeps what trainers keep: counts, results, lists, an average of the weights, a center, a queue."""

    def __init__(self) -> None:
        self.count, self.rank, self.seconds = 0, 0, 0.0
        self.best = {"accuracy": 0.0}
        self.history: list[float] = []
        self.last: deque[int] = deque(maxlen=3)
        self.net = torch.nn.Linear(2, 2)
        self.average = copy.deepcopy(self.net)
        self.center = torch.zeros(2)
        self.queue = [torch.zeros(2) for _ in range(2)]
        self.values = np.zeros(2)
        self.flags = {"warm"}

    def before_step(self) -> None:
        self.count += 1
        self.best["accuracy"] = self.best[f"of {self.count}"] = self.count / 10
        self.history.append(self.count / 10)
        self.last.append(self.count)
        self.center = self.center * 0.9 + 1
        self.queue[self.count % 2].data.fill_(self.count)  # without a new version of the tensor
        self.net.eval()
        self.flags.add(f"{self.count}")

    def after_step(self) -> None:
        self.average.weight.data.mul_(0.5)
        self.values += 1

    def picture(self) -> Any:
        tensors = [self.average.weight, self.center, *self.queue]
        plain = (self.count, dict(self.best), list(self.history), list(self.last), sorted(self.flags))
        return plain, [each.tolist() for each in tensors], self.net.training


def state_of(trainer: Trainer, **further: Any) -> ScriptState:
    roots = [Holder("trainer", trainer, "object"), *(Holder(key, each, "dict") for key, each in further.items())]
    return ScriptState(lambda: list(trainer.net.parameters()), lambda: roots)


def train(trainer: Trainer, state: ScriptState, steps: int) -> None:
    for number in range(steps):
        state.take(is_due=number < 3)
        trainer.before_step()
        state.look()
        trainer.after_step()
    state.take(is_due=True)


def test_a_loop_body_that_comes_again_begins_as_it_began() -> None:
    trainer = Trainer()
    state = state_of(trainer)
    train(trainer, state, 5)
    state.take(is_due=False)
    trainer.net.train()
    state.take(is_due=False)
    before = trainer.picture()
    trainer.before_step()
    state.save()  # the step is aborted
    trainer.average.weight.data.mul_(0.5)
    assert trainer.picture() != before
    state.roll_back()
    assert trainer.picture() == before


def test_a_newcomer_receives_what_all_have_changed_alike_and_keeps_what_is_its_own() -> None:
    torch.manual_seed(0)
    trainers = [Trainer() for _ in range(3)]
    for rank, trainer in enumerate(trainers):
        trainer.rank, trainer.average = rank, copy.deepcopy(trainers[0].average)
    states = [state_of(trainer) for trainer in trainers]
    for rank in (0, 1):
        train(trainers[rank], states[rank], 4)
        trainers[rank].seconds = 1.5 + rank
        states[rank].take(is_due=True)
    tables = [state.changed() for state in states[:2]]
    for state in states[:2]:
        state.compare(tables)
    train(trainers[2], states[2], 1)  # as it passes over what is done
    loaded, missing = states[2].apply(copy.deepcopy(states[0].pack()))
    assert not missing
    assert trainers[2].picture() == trainers[0].picture()
    assert trainers[2].values.tolist() == [4.0, 4.0]
    assert (trainers[2].rank, trainers[2].seconds) == (2, 0.0)
    assert "trainer.count" in loaded
    assert not any("seconds" in name or "rank" in name for name in loaded)


def test_the_first_loop_body_of_a_newcomer_may_come_again() -> None:
    """As at the end of an epoch, where all workers run a body without effect. Nothing was learned from its own yet."""
    trainers = [Trainer() for _ in range(2)]
    trainers[1].average = copy.deepcopy(trainers[0].average)
    first, newcomer = (state_of(trainer) for trainer in trainers)
    train(trainers[0], first, 4)
    newcomer.apply(copy.deepcopy(first.pack()))
    abort_a_body(trainers[1], newcomer)
    assert trainers[1].picture() == trainers[0].picture()


def test_the_first_loop_body_of_the_job_may_come_again() -> None:
    trainer = Trainer()
    state, before = state_of(trainer), trainer.picture()
    state.take(is_due=True)
    abort_a_body(trainer, state)
    assert trainer.picture() == before


def abort_a_body(trainer: Trainer, state: ScriptState) -> None:
    was_training = trainer.net.training
    trainer.before_step()
    state.save()
    trainer.after_step()
    state.roll_back()
    trainer.net.train(was_training)  # it belongs to the TorchState


def test_what_has_no_place_on_a_newcomer_is_named() -> None:
    here: dict[str, Any] = {"teacher": None}
    there: dict[str, Any] = {"teacher": None}
    ours, theirs = state_of(Trainer(), main=here), state_of(Trainer(), main=there)
    theirs.take(is_due=True)
    there["teacher"] = torch.nn.Linear(1, 1)
    theirs.take(is_due=True)
    _, missing = ours.apply(theirs.pack())
    assert any("teacher" in name for name in missing)


def test_results_with_a_graph_are_not_kept() -> None:
    trainer, main = Trainer(), dict[str, Any]()
    state = state_of(trainer, main=main)
    state.take(is_due=True)
    main["loss"] = trainer.net(torch.ones(1, 2)).sum()
    state.take(is_due=True)
    assert not any("loss" in values for _, values in state._copies)
    assert not any("loss" in name for name in state.changed())


def test_variables_of_running_functions_are_written() -> None:
    count, inner_count = 0, 0

    def nested() -> None:
        nonlocal inner_count
        inner_count += 1
        frame = next(each for each in frames_of_script() if each.f_code.co_name.startswith("test_variables"))
        set_locals(frame, {"count": 7, "inner_count": 8})

    nested()
    assert (count, inner_count) == (7, 8)


def test_enumerate_goes_on_from_another_number_of_batches() -> None:
    def batches() -> Iterator[str]:
        yield "a"
        yield "b"
        assert shift_counts(-1)
        yield "b again"
        yield "c"

    def log_every(iterable: Any) -> Iterator[Any]:
        yield from iterable

    other = enumerate("xyz")
    next(other)
    expected = [(0, "a"), (1, "b"), (1, "b again"), (2, "c")]
    assert list(enumerate(batches())) == expected
    assert list(enumerate(log_every(batches()))) == expected
    assert [(number, batch) for number, (batch,) in enumerate(zip(batches(), strict=True))] == expected
    assert next(other) == (1, "y")


class Asking:
    """A loader whose next() moves what is around it."""

    def __init__(self, by: int) -> None:
        self._by, self.asked, self.done = by, 0, list[bool]()

    def __iter__(self) -> Asking:
        return self

    def __next__(self) -> int:
        self.asked += 1
        if self.asked == 3:
            self.done.append(shift_counts(self._by))
        return self.asked


@pytest.mark.parametrize("beside", [list, tuple, str, lambda text: np.array(list(text)).tolist()])
def test_what_a_zip_goes_through_beside_the_batches_is_moved(beside: Any) -> None:
    loader = Asking(-1)
    pairs = [
        (number, count, letter) for number, (count, letter) in enumerate(zip(loader, beside("abcd"), strict=False))
    ]
    assert loader.done == [True]
    assert pairs[:4] == [(0, 1, "a"), (1, 2, "b"), (1, 3, "b"), (2, 4, "c")]


def first(number: int, values: Any) -> list[Any]:
    found = []
    for value in values:
        found.append(value)
        if len(found) == number:
            break
    return found


TENSORS = [torch.full((2,), float(number)) for number in range(9)]


@pytest.mark.parametrize("before", [list("abcd"), "abcd", range(5, 20), count(5), range(9, 0, -2), TENSORS, (8, 8, 9)])
def test_what_a_zip_has_taken_before_the_batch_comes_again(before: Any) -> None:
    loader = Asking(-1)
    one, two, three = first(3, before)
    taken = []
    for value, _ in zip(count(5) if isinstance(before, count) else before, loader, strict=False):
        taken.append(value)
        if len(taken) == 4:
            break
    assert [*map(str, taken)] == [*map(str, [one, two, two, three])]
    assert loader.done == [True]


@pytest.mark.parametrize("is_by_map", [False, True])
def test_what_the_script_keeps_of_a_zip_cannot_be_replaced(is_by_map: bool) -> None:
    loader = Asking(-1)
    pairs = map(lambda *pair: pair, "abcd", loader) if is_by_map else zip("abcd", loader, strict=False)
    assert list(pairs) == [("a", 1), ("b", 2), ("c", 3), ("d", 4)]
    assert loader.done == [False]


@pytest.mark.parametrize(
    "around", [chain, partial(map, str), partial(filter, None), partial(takewhile, bool), lambda each: islice(each, 9)]
)
def test_a_count_may_be_around_other_iterators(around: Any) -> None:
    loader = Asking(-1)
    numbers = [number for number, _ in first(4, enumerate(around(loader)))]
    assert (numbers, loader.done) == ([0, 1, 1, 2], [True])


@pytest.mark.parametrize("around", [accumulate, pairwise, lambda each: tee(each)[0], partial(zip_longest, "abcdefg")])
def test_iterators_that_keep_something_of_a_batch_are_reported(around: Any) -> None:
    loader = Asking(-1)
    first(4, around(loader))
    assert loader.done == [False]


def test_a_batch_that_comes_again_does_not_count_for_islice() -> None:
    loader = Asking(-1)
    assert list(islice(loader, 4)) == [1, 2, 3, 4, 5]
    assert loader.done == [True]
    assert not list(islice(Asking(-1), 1, 8, 2))[4:]


@pytest.mark.parametrize("beside", [cycle("abc"), (letter for letter in "abcdefg")])
def test_iterators_without_a_place_cannot_be_moved(beside: Iterator[str]) -> None:
    loader = Asking(-1)
    assert [letter for _, letter in islice(zip(loader, beside, strict=False), 4)][:3] == ["a", "b", "c"]
    assert loader.done == [False]


def test_values_of_unusual_kinds_are_left_alone() -> None:
    class Stubborn:
        __slots__ = ("unset",)

        def __eq__(self, other: object) -> bool:
            raise ValueError("not comparable")

        __hash__ = None  # type: ignore[assignment]

    main: dict[str, Any] = {
        "meta": torch.empty(2, device="meta"),
        "sparse": torch.eye(2).to_sparse(),
        "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
        "lazy": torch.nn.LazyLinear(2),
        "objects": np.array([object()], dtype=object),
        "stubborn": Stubborn(),
        "numbers": iter(range(3)),
        "not a number": float("nan"),
        "empty": torch.empty(0),
        "nested": {(1, 2): [torch.ones(1)], None: {"deep": (torch.ones(1), [1])}},
    }
    main["itself"] = main
    state = state_of(Trainer(), main=main)
    for _ in range(3):
        state.take(is_due=True)
        state.look()
        state.save()
        state.roll_back()
    loaded, missing = state.apply(state.pack())
    assert not missing
    assert not loaded


class Constructing(dict[str, Any]):
    """A table that calls what it holds, and fails for instances."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


def test_a_dictionary_is_read_without_its_own_methods() -> None:
    table = Constructing(made=list, number=3)
    assert Holder("table", table, "dict").read() == {"made": list, "number": 3}


def test_a_script_that_has_left_its_loop_keeps_its_variables_and_gets_its_tensors_and_random_numbers_back() -> None:
    trainer, numbers = Trainer(), np.random.default_rng(1)
    state = state_of(trainer, own={"numbers": numbers})
    train(trainer, state, 4)
    state.take(is_due=False)
    center, drawn = trainer.center.clone(), copy.deepcopy(numbers).random()
    trainer.before_step()
    trainer.count = 99  # as the code behind the loop does
    numbers.random()
    state.save()
    state.roll_back(has_left=True)
    assert trainer.count == 99
    assert torch.equal(trainer.queue[0], torch.full((2,), 4.0))
    assert numbers.random() == drawn
    assert not torch.equal(trainer.center, center)  # another object, of a variable


class Meter:
    """An object that loop bodies make."""

    def __init__(self) -> None:
        self.count, self.total, self.parts = 0, torch.zeros(2), {"first": [0]}
        self.mean = 0.0

    def update(self) -> None:
        self.count += 1
        self.total += 1
        self.parts["first"].append(self.count)

    def picture(self) -> Any:
        return self.count, self.total.tolist(), copy.deepcopy(self.parts)


@pytest.mark.parametrize("bodies", [1, 2, 5])
def test_an_object_that_a_loop_body_has_made_is_brought_back_from_the_next_body_on(bodies: int) -> None:
    variables: dict[str, Any] = {}
    state = state_of(Trainer(), variables=variables)
    state.take(is_due=True)
    state.take(is_due=False)
    for _ in range(bodies):
        variables.setdefault("meter", Meter()).update()
        state.take(is_due=False)
    before = variables["meter"].picture()
    variables["meter"].update()
    state.save()
    state.roll_back()
    assert variables["meter"].picture() == before


def test_objects_of_a_single_body_are_not_kept() -> None:
    variables: dict[str, Any] = {}
    state = state_of(Trainer(), variables=variables)
    state.take(is_due=True)
    made = []
    for _ in range(4):
        variables["output"] = Meter()
        made.append(weakref.ref(variables["output"]))
        state.take(is_due=False)
    gc.collect()
    assert [each() is not None for each in made] == [False, False, False, True]


def test_a_tensor_that_gets_other_memory_is_brought_back() -> None:
    """`tensor.data = ...` is not counted by autograd; in the first bodies nothing has changed its bytes."""
    trainer = Trainer()
    state = state_of(trainer)
    state.take(is_due=True)
    trainer.average.weight.data = trainer.average.weight.data * 1.0
    state.look()
    state.take(is_due=False)
    before = trainer.average.weight.tolist()
    trainer.average.weight.data = trainer.average.weight.data * 0.5
    state.save()
    state.roll_back()
    assert trainer.average.weight.tolist() == before


@pytest.mark.parametrize("is_decorated", [False, True])
def test_what_a_function_keeps_from_call_to_call_is_brought_back_and_carried(is_decorated: bool) -> None:
    def counter() -> Any:
        around = 0

        def count(seen: list[int] = [], *, named: dict[str, int] = {}) -> list[int]:  # noqa: B006 - the point of it
            nonlocal around
            around += 1
            count_it.calls += 1
            seen.append(around)
            named["last"] = around
            return [around, count_it.calls, *seen, *named.values()]

        count_it: Any = torch.no_grad()(count) if is_decorated else count
        count_it.calls = 0
        return count_it

    counters = [counter(), counter()]
    roots = [Holder("", {"count": each}, "dict") for each in counters]
    states = [ScriptState(list, lambda root=root: [root]) for root in roots]  # type: ignore[misc]
    states[0].take(is_due=True)
    counters[0]()
    states[0].take(is_due=True)
    counters[0]()
    states[0].roll_back()
    states[1].take(is_due=True)
    states[1].apply(copy.deepcopy(states[0].pack()))
    assert counters[0]() == [2, 2, 1, 2, 2]
    assert counters[1]() == [2, 2, 1, 2, 2]


class Stages(torch.utils.data.TensorDataset):
    def __init__(self) -> None:
        super().__init__(torch.zeros(3))
        self.level, self.names = 0, ["many"] * 5


def test_plain_values_of_a_data_set_are_brought_back_and_carried_and_its_samples_are_not_looked_at() -> None:
    loaders = [torch.utils.data.DataLoader(torch.utils.data.Subset(Stages(), [0, 1])) for _ in range(2)]
    stages: list[Any] = [loader.dataset.dataset for loader in loaders]  # type: ignore[attr-defined]
    roots = [Holder("", {"loader": each}, "dict") for each in loaders]
    states = [ScriptState(list, lambda root=root: [root]) for root in roots]  # type: ignore[misc]
    states[0].take(is_due=True)
    stages[0].level = 1
    states[0].take(is_due=True)
    stages[0].level = 2
    stages[0].tensors[0].fill_(1)
    stages[0].names.append("more")
    states[0].roll_back()
    states[1].take(is_due=True)
    states[1].apply(copy.deepcopy(states[0].pack()))
    assert [each.level for each in stages] == [1, 1]
    assert (stages[0].tensors[0].tolist(), len(stages[0].names)) == ([1, 1, 1], 6)


def test_what_only_hooks_know_is_brought_back_and_carried() -> None:
    def counted(register: Any) -> list[int]:
        calls = [0]

        def hook(*_: object) -> None:
            calls[0] += 1

        register(hook)
        return calls

    nets = [torch.nn.Linear(2, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    counts = [
        [
            counted(net.register_forward_hook),
            counted(net.weight.register_post_accumulate_grad_hook),
            counted(partial(net.weight.register_hook)),
            counted(optimizer.register_step_post_hook),
        ]
        for net, optimizer in zip(nets, optimizers, strict=True)
    ]

    def train(place: int) -> None:
        nets[place](torch.ones(2)).sum().backward()
        optimizers[place].step()

    states = [
        ScriptState(
            lambda net=net: list(net.parameters()), lambda place=place: hooks_of([nets[place]], [optimizers[place]])
        )  # type: ignore[misc]
        for place, net in enumerate(nets)
    ]
    states[0].take(is_due=True)
    train(0)
    states[0].take(is_due=True)
    train(0)
    assert counts[0] == [[2]] * 4
    states[0].roll_back()
    states[1].take(is_due=True)
    states[1].apply(copy.deepcopy(states[0].pack()))
    assert counts[0] == counts[1] == [[1]] * 4


def test_what_adds_up_in_passing_begins_anew_but_for_the_variables_of_loops() -> None:
    values: dict[str, Any] = {"epoch": 0, "worse": 0, "history": []}
    state = ScriptState(list, lambda: [Holder("", values, "globals")])
    for epoch in range(3):
        values["epoch"] = epoch
        state.begin_anew({"epoch"})
        assert values == {"epoch": epoch, "worse": 0, "history": []}
        values["worse"] += 1
        values["history"].append(epoch)


def test_what_only_the_first_rank_has_is_known() -> None:
    state = state_of(Trainer())
    tables = [{"ema._parameters['weight']": 1, "steps": 2, "net._buffers['running_mean']": 3}]
    state.compare([*tables, {"net._buffers['running_mean']": 4}])
    assert state.of_first == {"ema._parameters['weight']", "steps"}


def test_containers_in_containers_are_brought_back() -> None:
    variables: dict[str, Any] = {
        "history": {"loss": [1.0], "by layer": {"first": [[2]]}},
        "pairs": ([3], {4}),
        "rows": [[5]],
    }
    state = state_of(Trainer(), variables=variables)
    state.take(is_due=True)
    before = copy.deepcopy(variables)
    variables["history"]["loss"].append(6.0)
    variables["history"]["by layer"]["first"][0].append(7)
    variables["pairs"][0].append(8)
    variables["pairs"][1].add(9)
    variables["rows"][0].append(10)
    state.roll_back()
    assert variables == before


@pytest.mark.parametrize("searches", [1, 3])
def test_of_many_holders_those_that_bodies_change_are_brought_back(searches: int) -> None:
    """A model of ordinary size has more holders than are copied at each boundary."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(600)))
    model[300].center, model[301].counts = torch.zeros(1), {"seen": 0}
    variables: dict[str, Any] = {"model": model}
    state = ScriptState(list, lambda: [Holder("variables", variables, "dict")])

    def body() -> None:
        model[300].center = model[300].center + 1
        model[301].counts["seen"] += 1

    state.take(is_due=True)
    for number in range(3 * searches):
        body()
        state.take(is_due=number % 3 == 2)
    for _ in range(3):
        body()
        state.take(is_due=False)
    before = float(model[300].center), dict(model[301].counts)
    body()
    state.save()
    state.roll_back()
    assert (float(model[300].center), dict(model[301].counts)) == before


def test_tensors_that_each_worker_has_by_itself_are_known() -> None:
    trainer = Trainer()
    state = state_of(trainer)
    train(trainer, state, 5)
    names = ["trainer.queue[0]", "trainer.center", "trainer.average._parameters['weight']"]
    state.compare([dict.fromkeys(names, 1), dict.fromkeys(names, 2)])
    assert sorted(state.own()) == ["trainer.average._parameters['weight']", "trainer.queue[0]"]


@pytest.mark.parametrize("meters", [1, 2])
def test_a_meter_goes_with_its_worker_as_a_whole(meters: int) -> None:
    """Its count is alike on all workers, and its sum is not. A single object of a kind may be the script's progress."""
    variables = {f"meter{number}": Meter() for number in range(meters)}
    state = ScriptState(list, lambda: [Holder("variables", variables, "dict")])
    for number in range(4):
        state.take(is_due=number < 3)
        for each in variables.values():
            each.update()
    state.take(is_due=True)
    table = state.changed()
    state.compare([table, {name: value + ("total" in name) for name, value in table.items()}])
    carried = {name for name, *_ in state.pack()["entries"]}
    assert any("count" in name for name in carried) == (meters == 1)
    assert not any("total" in name for name in carried)


def test_sums_that_differ_between_workers_are_known_in_each_type() -> None:
    variables = {"loss": Meter(), "rate": Meter()}
    state = ScriptState(list, lambda: [Holder("variables", variables, "dict")])
    for number in range(3):
        state.take(is_due=number < 2)
        for each in variables.values():
            each.mean += 0.1
    table = state.changed()
    state.compare([table, {name: value + (name == "variables['loss'].mean") for name, value in table.items()}])
    variables["rate"].mean = 5.0
    assert state.sums(torch.float64) == {variables["loss"].mean}
    assert state.sums(torch.float32) == {float(torch.tensor(variables["loss"].mean))}


@pytest.mark.parametrize("size", [20, 2000, 30_000])
@pytest.mark.parametrize("kind", ["numbers", "tensors", "dict", "set"])
def test_containers_of_every_length_return_or_are_named(monkeypatch: Any, kind: str, size: int) -> None:
    remarks = list[str]()
    here = SimpleNamespace(on_remark=lambda _, text: remarks.append(text))
    monkeypatch.setattr(world, "current", lambda: here)
    value: Any = dict.fromkeys(range(size), 0)
    if kind in ("numbers", "tensors"):
        value = [torch.tensor(each) if kind == "tensors" else each for each in range(size)]
    elif kind == "set":
        value = set(range(size))
    variables = {"value": value}
    state = ScriptState(list, lambda: [Holder("", variables, "globals")])

    def body(number: int) -> None:
        if isinstance(value, list):
            value.append(torch.tensor(number) if kind == "tensors" else number)
        elif isinstance(value, dict):
            value[7] += 1
        else:
            value.add(-number - 1 - 10 * len(value))

    for number in range(5):
        state.take(is_due=number in (1, 2, 4))
        body(number)
    state.roll_back()
    assert remarks == []
    state.take(is_due=False)
    body(4)
    body(4)
    state.roll_back()
    bodies = value[7] if isinstance(value, dict) else len(value) - size
    is_exact = size <= 20_000 or kind in ("numbers", "tensors")
    assert (bodies == 4, bool(remarks)) == (is_exact, not is_exact)


@pytest.mark.parametrize("size", [3, 200])
def test_results_with_a_graph_in_a_list_return_and_are_not_kept_alive(size: int) -> None:
    weight = torch.ones(2, requires_grad=True)
    losses: list[Any] = [weight.sum() for _ in range(size)]
    variables = {"losses": losses}
    state = ScriptState(list, lambda: [Holder("", variables, "dict")])
    state.take(is_due=True)
    state.take(is_due=False)
    before, added = [*losses], weight.sum()
    losses.append(added)
    state.roll_back()
    assert list(map(id, losses)) == list(map(id, before))
    before.clear()
    state.take(is_due=False)
    seen = weakref.ref(losses[0])
    losses.clear()
    gc.collect()
    assert seen() is None
    losses.append(added)
    state.roll_back()
    assert losses == []


@pytest.mark.parametrize("is_view", [False, True])
def test_views_of_what_is_restored_in_another_way_are_not_named(monkeypatch: Any, is_view: bool) -> None:
    remarks = list[str]()
    here = SimpleNamespace(on_remark=lambda _, text: remarks.append(text))
    monkeypatch.setattr(world, "current", lambda: here)
    weight = torch.nn.Parameter(torch.zeros(3))
    variables = {"saved": {"weight": weight.detach() if is_view else torch.zeros(3)}}
    state = ScriptState(lambda: [weight], lambda: [Holder("", variables, "globals")])
    for number in range(3):
        state.take(is_due=number == 1)
    variables["saved"]["weight"].fill_(1)
    state.roll_back()
    assert bool(remarks) is not is_view


def test_a_generator_of_torch_goes_to_a_newcomer_as_one_that_all_have_drawn_from_alike() -> None:
    workers = [SimpleNamespace(chance=torch.Generator().manual_seed(3)) for _ in range(2)]
    states = [ScriptState(list, lambda each=each: [Holder("", each, "object")]) for each in workers]  # type: ignore[misc]
    for state in states:
        state.take(is_due=True)
    for each in workers:
        torch.rand(5, generator=each.chance)
    for state in states:
        state.take(is_due=True)
    tables = [state.changed() for state in states]
    states[0].compare(tables)
    newcomer = SimpleNamespace(chance=torch.Generator().manual_seed(3))
    ScriptState(list, lambda: [Holder("", newcomer, "object")]).apply(states[0].pack())
    assert torch.equal(torch.rand(3, generator=newcomer.chance), torch.rand(3, generator=workers[0].chance))


@pytest.mark.parametrize(
    "kind", [type, dict, list, tuple, torch.utils.data.DataLoader, torch.utils.data.Dataset, partial]
)
def test_a_proxy_that_says_it_is_of_another_class_is_looked_at_as_what_it_is(kind: type) -> None:
    class Proxy:
        def __init__(self) -> None:
            self.count = 0

        __class__ = property(lambda _: kind)  # type: ignore[assignment]

    proxy = Proxy()
    state = ScriptState(list, lambda: [Holder("", SimpleNamespace(proxy=proxy), "object")])
    state.take(is_due=True)
    proxy.count += 1
    state.roll_back()
    assert proxy.count == 0
