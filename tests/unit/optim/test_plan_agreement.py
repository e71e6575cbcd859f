"""Where models of different ranks differ."""

from __future__ import annotations

import pytest

from farandole.training.optim.bucketed_gradients import difference_of_models

pytestmark = pytest.mark.core

SAME = ["a (2, 2) float32", "b (2,) float32"]


@pytest.mark.parametrize(
    ("by_rank", "said"),
    [
        (
            [SAME, ["a (2, 2) float32", "b (3,) float32"]],
            "number 1: b (2,) float32 on rank 0; b (3,) float32 on rank 1",
        ),
        ([SAME, SAME, SAME[:1]], "number 1: b (2,) float32 on ranks 0, 1; nothing on rank 2"),
        ([[""], SAME], "number 0: nothing on rank 0; a (2, 2) float32 on rank 1"),
        ([SAME, ["x (2, 2) float64", SAME[1]], SAME], "a (2, 2) float32 on ranks 0, 2; x (2, 2) float64 on rank 1"),
        (
            [SAME, ["other (2, 2) float32", "b () float32"]],
            "number 1: b (2,) float32 on rank 0; b () float32 on rank 1",
        ),
    ],
)
def test_the_first_parameter_that_differs_is_named_with_the_ranks(by_rank: list[list[str]], said: str) -> None:
    assert said in difference_of_models(by_rank)
