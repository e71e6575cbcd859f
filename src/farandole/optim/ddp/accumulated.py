"""Gradients of the micro-batches of a global batch that are through: each weighed, and kept until the last one is
reduced."""

from __future__ import annotations

from collections.abc import Collection, KeysView

import torch


class Accumulated:
    """By parameter. What the loop body that runs has left can be dropped again, where several optimizers share it."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}  # by id of the parameter
        self._body: dict[int, torch.Tensor] = {}  # of the loop body that runs, if it may be dropped
        self._closed: set[int] = set()  # parameters whose optimizer has stepped in this loop body

    def forget(self) -> None:
        """The next global batch."""
        self._sums.clear()
        self._body.clear()
        self._closed.clear()

    def begin_body(self) -> None:
        """The next micro-batch: what the one before has left counts."""
        for key, gradient in self._body.items():
            _add(self._sums, key, gradient)
        self._body.clear()
        self._closed.clear()

    def take(self, parameter: torch.Tensor, factor: float, may_be_dropped: bool) -> None:
        """Add `factor` times its `.grad`, which is None afterwards: nobody shall clip or add to a part."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or not factor or id(parameter) in self._closed:
            return  # not multiplied: a dummy batch's inf times 0 would be NaN
        _add(self._body if may_be_dropped else self._sums, id(parameter), gradient.detach().mul_(factor))

    def drop_body(self, keys: Collection[int]) -> None:
        """What the loop body that runs has left for these parameters does not count."""
        for key in keys:
            self._body.pop(key, None)

    def close_body(self, keys: Collection[int]) -> None:
        """What it leaves for these from now on does not count."""
        self._closed.update(keys)

    def keys(self) -> KeysView[int]:
        """Of the parameters that have something here."""
        return self._sums.keys()

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return self._sums.get(id(parameter))


def _add(sums: dict[int, torch.Tensor], key: int, gradient: torch.Tensor) -> None:
    if key in sums:
        sums[key].add_(gradient)
    else:
        sums[key] = gradient
