"""The trial of the loss: a mean over samples, or what the loop says that it is, passes; everything else is named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from farandole.training.collectives.alone import AloneTransport
from farandole.training.data.fetching import row_digests
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.worker.loss_trial import LossTrial
from tests.support.losses import Loss, State, mean, total, weighted

SAMPLES = 16
told: list[Callable[[int], int]] = []
data_of: list[Callable[[int, torch.Tensor], torch.Tensor]] = [lambda rank, x: x]
differing: list[str] = []


class Gathering:
    """An all_gather among threads."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier, self._payloads = size, threading.Barrier(size), [b""] * size

    def on(self, rank: int) -> Gathering:
        here = object.__new__(type(self))
        here.__dict__ = {**self.__dict__, "rank": rank}
        return here

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._payloads[self.rank] = payload  # type: ignore[attr-defined]
        self._barrier.wait(20)
        gathered = list(self._payloads)
        self._barrier.wait(20)
        return gathered


def tried(loss: Loss, rank: int, size: int, transport: object, *layers: torch.nn.Module) -> tuple[str, int]:
    """Return what is said of a loss, and the number of runs."""
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), *layers, torch.nn.Linear(8, 3)).double()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    x = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator)
    y = torch.randint(3, (SAMPLES,), generator=generator)
    trial = LossTrial(State(model), rank, size)  # type: ignore[arg-type]
    while not trial.runs or not trial.is_over():
        assert trial.part is not None
        number, parts = trial.part
        low, high = number * SAMPLES // parts, (number + 1) * SAMPLES // parts
        step.open(Batch(GlobalBatch(0, 0, SAMPLES, low, high), low, high), is_rehearsal=True)
        trial.begin()
        model.zero_grad()
        told[:] = [trial.told_size]
        result = loss(model, x[low:high], y[low:high])
        if result.requires_grad:
            result.backward()
        samples = (data_of[-1](rank, x)[low:high], y[low:high])
        trial.take(transport, row_digests(samples, range(low, high)))  # type: ignore[arg-type]
        step.close()
    assert all(module.training for module in model.modules())
    differing.append(trial.differing_sample())
    return trial.judge(), trial.runs


def alone(loss: Loss, *layers: torch.nn.Module) -> tuple[str, int]:
    return tried(loss, 0, 1, AloneTransport(), *layers)


def pairs(model: torch.nn.Module, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    rows = F.normalize(model(x), dim=1)
    return F.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))


def noisy(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x + torch.randn_like(x)), y)


def with_its_weight(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    step.set_weight(float(weights[y].sum()))
    return weighted(model, x, y)


@pytest.fixture(params=["mean", "sum"])
def declared(request: pytest.FixtureRequest) -> object:
    step.add_losses(request.param == "sum")
    yield request.param
    step.add_losses(False)


def test_a_mean_over_samples_takes_three_runs_alone_and_nothing_is_said() -> None:
    assert alone(mean) == ("", 3)


@pytest.mark.parametrize(("loss", "said"), [(total, 'loss="sum"'), (weighted, "fd.weight(n)"), (pairs, "fd.weight(n)")])
def test_another_loss_is_named_with_what_to_write(loss: Loss, said: str) -> None:
    found, runs = alone(loss)
    assert said in found
    assert runs == 4


def test_a_mean_over_something_else_passes_with_its_weight() -> None:
    assert alone(with_its_weight)[0] == ""


def test_chance_is_not_taken_for_another_loss() -> None:
    assert alone(noisy) == ("", 4)


@pytest.mark.parametrize(
    "layer", [torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8)], ids=lambda each: type(each).__name__
)
def test_layers_of_chance_and_of_batches_are_off_and_leave_no_trace(layer: torch.nn.Module) -> None:
    before = {name: each.clone() for name, each in layer.named_buffers()}
    assert alone(mean, layer)[0] == ""
    for name, each in layer.named_buffers():
        assert torch.equal(each, before[name]), name


@pytest.mark.parametrize(
    "layer", [torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8)], ids=lambda each: type(each).__name__
)
def test_a_loss_behind_such_layers_is_named_all_the_same(layer: torch.nn.Module) -> None:
    assert "fd.weight(n)" in alone(weighted, layer)[0]


def test_what_the_loop_says_of_its_loss_counts(declared: str) -> None:
    results = among(3, total if declared == "sum" else mean), among(3, mean if declared == "sum" else total)
    assert results[0] == [("", 1)] * 3
    assert all("samples" in found for found, _ in results[1])


@pytest.mark.parametrize(("size", "runs", "runs_of_others"), [(2, 2, 2), (3, 1, 2), (4, 1, 1), (9, 1, 1)])
def test_workers_share_the_runs(size: int, runs: int, runs_of_others: int) -> None:
    assert among(size, mean) == [("", runs)] * size
    found = among(size, weighted)
    assert {each for _, each in found} == {runs_of_others}
    assert len({said for said, _ in found}) == 1
    assert "fd.weight(n)" in found[0][0]


def test_a_count_over_all_workers_beside_a_declared_sum_is_not_blamed() -> None:
    step.add_losses(True)
    counts = iter([16.0, 8.0, 12.0])  # another one in each run
    try:
        assert alone(lambda model, x, y: total(model, x, y) / next(counts))[0] == ""
    finally:
        step.add_losses(False)


def of_workers(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mean(model, x, y) * told[0](3)


def logging_only(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = mean(model, x, y)
    assert loss.item() / told[0](3) > 0
    return loss


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_workers_that_have_different_data_are_not_taken_for_another_loss(size: int) -> None:
    places = threading.local()
    drawn = iter(range(100))

    def of_own_data(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not hasattr(places, "shift"):
            places.shift = next(drawn)
        return mean(model, x + places.shift, y)

    assert {found for found, _ in among(size, of_own_data)} == {""}


@pytest.mark.parametrize(("size", "runs"), [(1, 5), (2, 3), (3, 3), (4, 2)])
def test_a_loss_that_depends_on_the_number_of_workers_is_named(size: int, runs: int) -> None:
    results = among(size, of_workers)
    assert {each for _, each in results} == {runs}
    assert all("fd.size()" in found for found, _ in results)


@pytest.mark.parametrize(("size", "runs"), [(1, 4), (2, 3), (3, 2)])
def test_a_loop_that_only_asks_for_the_number_of_workers_is_not_blamed(size: int, runs: int) -> None:
    assert among(size, logging_only) == [("", runs)] * size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_loop_that_leaves_out_small_batches_is_named(size: int) -> None:
    def long_enough(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mean(model, x, y) if len(x) > SAMPLES // 2 else torch.zeros(())

    assert all("`continue`" in found for found, _ in among(size, long_enough))


def among(size: int, loss: Loss) -> list[tuple[str, int]]:
    """Return the results of `size` workers, which run one after the other in threads of one process."""
    gathering = Gathering(size)
    results: list[tuple[str, int]] = [("", 0)] * size
    turn = threading.Lock()

    class Transport:
        def __init__(self, rank: int) -> None:
            self._inner = gathering.on(rank)

        def all_gather(self, payload: bytes) -> list[bytes]:
            turn.release()  # the step is the process's: one worker at a time has it
            gathered = self._inner.all_gather(payload)
            turn.acquire()
            return gathered

    def run(rank: int) -> None:
        with turn:
            results[rank] = tried(loss, rank, size, Transport(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    return results


@pytest.fixture
def own_data() -> Iterator[Callable[[Callable[[int, torch.Tensor], torch.Tensor]], None]]:
    """Set what the data set has on each worker."""
    differing.clear()
    yield data_of.append
    del data_of[1:]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_sample_that_is_another_one_on_another_worker_is_named(own_data: Callable[..., None], size: int) -> None:
    own_data(lambda rank, x: x + rank)
    among(size, mean)
    assert {int(each) for each in differing} <= set(range(SAMPLES))
    assert len(differing) == size


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_same_samples_are_not_named(own_data: Callable[..., None], size: int) -> None:
    own_data(lambda rank, x: x)
    among(size, mean) if size > 1 else alone(mean)
    assert set(differing) == {""}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_samples_that_are_random_on_each_worker_are_not_named(own_data: Callable[..., None], size: int) -> None:
    noise = torch.Generator()  # of all threads, which do not draw the same numbers
    own_data(lambda rank, x: x + torch.randn(x.shape, generator=noise, dtype=x.dtype))
    among(size, mean)
    assert set(differing) == {""}


def test_samples_are_told_apart_by_the_length_to_which_a_batch_has_padded_them() -> None:
    short, long = torch.ones(2, 3), torch.cat([torch.ones(2, 3), torch.zeros(2, 1)], dim=1)
    assert not row_digests({"ids": [short]}, [4, 7]).keys() & row_digests({"ids": [long]}, [4, 7]).keys()
    assert row_digests({"ids": [short]}, [4, 7]) == row_digests({"ids": [short.clone()]}, [4, 7])
    assert row_digests(("text", 3), [4]) == {}
