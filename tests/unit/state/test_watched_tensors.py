"""Parameters that user code changes between two boundaries: seen, copied, put back."""

from __future__ import annotations

import pytest
import torch

from farandole.training.state.watched_tensors import WatchedTensors

pytestmark = pytest.mark.core


def watching(**tensors: torch.Tensor) -> WatchedTensors:
    watched = WatchedTensors()
    watched.track(tensors, owned=tensors)
    watched.capture()
    return watched


def test_a_tensor_that_was_seen_to_change_before_a_step_is_put_back_from_then_on() -> None:
    key, query = torch.zeros(3), torch.ones(3)
    watched = watching(key=key, query=query)
    key.add_(1)
    watched.look()
    assert watched.changing[0] == ("key",)
    watched.capture()
    key.mul_(5)
    assert watched.put_back() == []
    assert key.tolist() == [1, 1, 1]


def test_the_first_change_in_a_step_that_is_aborted_is_told_by_name() -> None:
    key = torch.zeros(3)
    watched = watching(key=key, query=torch.ones(3))
    key.add_(1)
    assert watched.put_back() == ["key"]


def test_what_an_optimizer_changes_at_its_step_is_nothing_to_put_back() -> None:
    weight = torch.zeros(3)
    watched = watching(weight=weight)
    watched.look()
    weight.add_(1)
    watched.capture()
    watched.look()
    assert (watched.changing[0], watched.put_back()) == ((), [])
    assert weight.tolist() == [1, 1, 1]


def test_a_whole_capture_covers_writes_that_no_version_counts() -> None:
    """Weights that are swapped through `.data` for an evaluation."""
    weight = torch.nn.Parameter(torch.zeros(3))
    watched = watching(weight=weight)
    watched.capture(is_whole=True)
    weight.data.fill_(9)
    assert watched.put_back() == []
    assert weight.tolist() == [0, 0, 0]


def test_a_tensor_that_is_always_copied_is_put_back_however_it_was_written() -> None:
    weight = torch.zeros(3)
    watched = watching(weight=weight)
    watched.add_changing(["weight"])
    watched.capture()
    weight.data.fill_(9)
    assert watched.put_back() == []
    assert weight.tolist() == [0, 0, 0]


def test_what_an_undo_has_put_back_is_trusted() -> None:
    weight, other = torch.zeros(3), torch.zeros(3)
    watched = watching(weight=weight, other=other)
    for each in (weight, other):
        each.add_(1).sub_(1)
    watched.trust([weight])
    assert watched.put_back() == ["other"]


def test_adopted_changes_stay() -> None:
    """What a function changes that is called once in an epoch, behind its batches."""
    swapped, averaged = torch.zeros(3), torch.zeros(3)
    watched = watching(swapped=swapped, averaged=averaged)
    watched.capture(is_whole=True)
    swapped.add_(5)
    mark = watched.mark()
    averaged.add_(1)
    watched.adopt(mark)
    assert watched.put_back() == []
    assert (swapped.tolist(), averaged.tolist()) == ([0, 0, 0], [1, 1, 1])


def test_tensors_that_are_gone_are_copied_no_longer() -> None:
    old, new = torch.zeros(3), torch.ones(3)
    watched = watching(old=old)
    watched.add_changing(["old"])
    watched.capture()
    watched.track({"new": new}, owned={"new"})
    watched.capture()
    new.add_(1)
    assert watched.put_back() == ["new"]


def test_an_average_that_the_body_changes_behind_an_aborted_step_is_put_back() -> None:
    weight, average = torch.zeros(3), torch.zeros(3)
    watched = WatchedTensors()
    watched.track({"weight": weight, "average": average}, owned={"weight"})
    watched.capture()
    watched.save()
    average.data.add_(1)
    assert watched.put_back() == []
    assert average.tolist() == [0, 0, 0]


def test_what_has_changed_before_the_step_was_aborted_is_not_copied_too_late() -> None:
    average = torch.zeros(3)
    watched = WatchedTensors()
    watched.track({"average": average})
    watched.capture()
    average.add_(1)
    watched.save()
    assert watched.put_back() == ["average"]


def test_writes_that_no_version_counts_are_found_within_some_steps_and_put_back_from_then_on() -> None:
    """An average of weights through `.data`, which begins long after the rehearsal."""
    averages = {f"ema.{number}": torch.zeros(3) for number in range(5)}
    weight = torch.nn.Parameter(torch.zeros(3))
    watched = WatchedTensors()
    watched.track({**averages, "weight": weight}, owned={"weight"})
    steps, found = 0, ()
    while not found:
        steps += 1
        assert steps < 6
        watched.capture()
        for each in averages.values():
            each.data.add_(1)
        watched.look()
        with torch.no_grad():
            weight.add_(1)
        found = watched.changing[0]
    assert found == tuple(sorted(averages))
    watched.capture()
    before = averages["ema.3"].clone()
    averages["ema.3"].data.add_(1)
    assert watched.put_back() == []
    assert torch.equal(averages["ema.3"], before)


def test_sampled_elements_find_nothing_where_only_the_step_changes_anything() -> None:
    weight, average = torch.zeros(4), torch.full((4,), float("nan"))
    watched = WatchedTensors()
    watched.track({"weight": weight, "average": average}, owned={"weight"})
    for _ in range(20):
        watched.capture()
        watched.look()
        weight.data.add_(1)
    assert watched.changing[0] == ()


def test_tensors_of_which_no_element_can_be_looked_at_do_no_harm() -> None:
    transposed = torch.zeros(2, 3).t()
    watched = watching(empty=torch.zeros(0), transposed=transposed, plain=torch.zeros(2))
    for _ in range(4):
        watched.look()
        watched.capture()
    assert watched.put_back() == []


def test_a_loop_body_that_is_inspected_shows_by_bytes_what_changes_after_its_step() -> None:
    """As in place, where no rehearsal comes first: weights that are clipped after the step, and a teacher before it."""
    weight, teacher = torch.full((3,), 2.0), torch.zeros(3)
    watched = WatchedTensors()
    watched.track({"weight": weight, "teacher": teacher}, owned={"weight", "teacher"})
    watched.inspect()
    watched.capture()
    teacher.data.add_(1)
    watched.look()
    weight.add_(1)  # the optimizer
    watched.applied()
    weight.data.clamp_(max=2.5)
    watched.capture()
    assert watched.changing == (("teacher",), ("weight",))
    watched.save()  # the next step is aborted
    weight.data.mul_(0.5)
    assert watched.put_back() == []
    assert weight.tolist() == [2.5, 2.5, 2.5]


def test_what_changes_after_a_later_step_for_the_first_time_is_seen_by_its_version() -> None:
    weight = torch.zeros(3)
    watched = watching(weight=weight)
    weight.add_(1)  # the optimizer
    watched.applied()
    watched.capture()
    assert watched.changing == ((), ())
    weight.add_(1)
    watched.applied()
    weight.clamp_(max=1.5)
    watched.capture()
    assert watched.changing == ((), ("weight",))
