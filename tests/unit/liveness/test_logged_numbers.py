"""Of the numbers that a user logs in each step, those that are shown: how old they are, and what is refused."""

from __future__ import annotations

import pytest
import torch

from farandole.base.liveness import logged_numbers
from farandole.base.liveness.logged_numbers import MOST_NAMES, SAMPLE_EVERY_NS, WRITE_EVERY_NS, LoggedNumbers


class Clock:
    """The worker's clock."""

    ns = 1_000_000_000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(logged_numbers, "now_ns", lambda: clock.ns)
    return clock


class Scalar:
    """A tensor on a device: it says how often it was waited for."""

    is_cpu = False
    waits = 0

    def numel(self) -> int:
        return 1

    def detach(self) -> Scalar:
        return self

    def __float__(self) -> float:
        self.waits += 1
        return 2.5


def loss_of(value: float) -> torch.Tensor:
    """A tensor that has its graph."""
    return torch.tensor(float(value), requires_grad=True) * 1


def test_a_loss_is_read_every_fifty_milliseconds_and_everything_else_always(clock: Clock) -> None:
    numbers, shown = LoggedNumbers(), []
    for step in range(100):
        numbers.log({"loss": loss_of(step), "lr": float(step), "count": step, "accuracy": torch.tensor(float(step))})
        shown.append(numbers.take())
        clock.ns += 10_000_000
    assert [each["loss"] for each in shown] == [step // 5 * 5 for step in range(100)]
    assert [(each["lr"], each["count"], each["accuracy"]) for each in shown] == [(n, n, n) for n in range(100)]
    assert SAMPLE_EVERY_NS == 50_000_000


def test_each_name_has_its_own_time(clock: Clock) -> None:
    numbers = LoggedNumbers()
    numbers.log({"loss": loss_of(1.0)})
    clock.ns += 1
    numbers.log({"loss": loss_of(2.0)})
    numbers.log({"other loss": loss_of(0.5)})
    assert numbers.take() == {"loss": 1.0, "other loss": 0.5}


def test_they_are_written_twice_a_second_and_only_when_something_was_logged(clock: Clock) -> None:
    numbers = LoggedNumbers()
    assert not numbers.is_due()
    numbers.log({"lr": 0.1})
    assert numbers.is_due()
    numbers.take()
    numbers.log({"lr": 0.2})
    assert not numbers.is_due()
    clock.ns += WRITE_EVERY_NS
    assert numbers.is_due()
    numbers.take()
    clock.ns += WRITE_EVERY_NS
    assert not numbers.is_due()


def test_a_tensor_of_a_device_is_waited_for_only_when_it_is_written(clock: Clock) -> None:
    numbers, loss = LoggedNumbers(), Scalar()
    numbers.log({"loss": loss})
    assert loss.waits == 0
    assert numbers.take() == numbers.take() == {"loss": 2.5}
    assert loss.waits == 1


def test_the_graph_of_a_tensor_is_not_kept(clock: Clock) -> None:
    numbers, loss = LoggedNumbers(), loss_of(1.0)
    numbers.log({"loss": loss})
    numbers.log({"loss": loss * 2})
    assert all(type(each) is float for each in numbers._newest.values())


def test_at_most_fifty_names_are_shown() -> None:
    numbers = LoggedNumbers()
    numbers.log({f"name{number}": float(number) for number in range(MOST_NAMES + 1)})
    assert len(numbers.take()) == MOST_NAMES


@pytest.mark.parametrize(("value", "name"), [(torch.ones(2), "Tensor"), ("0.5", "str"), (None, "NoneType")])
def test_what_is_no_number_is_refused(value: object, name: str) -> None:
    with pytest.raises(TypeError, match=rf"state\.log\(loss=\.\.\.\).*got {name}"):
        LoggedNumbers().log({"loss": value})
