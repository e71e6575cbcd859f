"""Counting backward passes: what is due, what is one too many, what is still to be reduced."""

from __future__ import annotations

import pytest

from farandole.training.optim.passes import Passes

pytestmark = pytest.mark.core


def test_gradients_are_due_after_the_last_pass_of_all() -> None:
    passes = Passes(2)
    for key in (1, 2, 1):
        passes.count(key)
    assert not passes.are_due([1, 2])
    passes.count(2)
    assert passes.are_due([1, 2])


def test_one_pass_too_many_says_what_to_raise_to_which_number() -> None:
    passes = Passes(2)
    passes.count(1)
    passes.count(1)
    with pytest.raises(AssertionError, match=r"3 times .* expected 2 times: increase backward_passes_per_step to 3"):
        passes.count(1)


def test_what_is_reduced_stays_so_until_another_pass_or_the_step() -> None:
    passes = Passes(1)
    passes.count(1)
    passes.reduced([1, 2])
    assert passes.unreduced([1, 2, 3]) == {3}
    passes.restart()  # synchronize()
    assert passes.unreduced([1, 2]) == set()
    passes.count(1)
    assert passes.unreduced([1, 2]) == {1}
    passes.forget()
    assert passes.unreduced([1, 2]) == {1, 2}


def test_zeroing_is_refused_only_while_gradients_wait_for_a_step() -> None:
    passes = Passes(1)
    passes.refuse_zeroing()
    passes.count(1)
    with pytest.raises(AssertionError, match=r"zero_grad\(\) between loss\.backward\(\) and optimizer\.step\(\)"):
        passes.refuse_zeroing()
    passes.restart()
    passes.refuse_zeroing()
