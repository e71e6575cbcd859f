"""Gradients of the processed micro-batches of a global batch: weighted, and kept until the last micro-batch is
reduced."""

from __future__ import annotations

from collections.abc import Collection, KeysView

import torch


class Accumulated:
    """Gradients by parameter. Those of the current loop body can be dropped again, where several optimizers share
    it."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}  # by id of the parameter
        self._body: dict[int, torch.Tensor] = {}  # gradients of the current loop body, if they may be dropped
        self._closed: set[int] = set()  # parameters whose optimizer has stepped in this loop body

    def forget(self) -> None:
        """Drop everything for the next global batch."""
        self._sums.clear()
        self._body.clear()
        self._closed.clear()

    def begin_body(self) -> None:
        """Begin the next micro-batch: the gradients of the previous one count."""
        for key, gradient in self._body.items():
            _add(self._sums, key, gradient)
        self._body.clear()
        self._closed.clear()

    def take(self, parameter: torch.Tensor, factor: float, may_be_dropped: bool) -> None:
        """Add `factor` times the parameter's `.grad`, and set it to None, so that no code clips a partial sum or adds
        to it."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or not factor or id(parameter) in self._closed:
            return  # not multiplied: a dummy batch's inf times 0 would be NaN
        _add(self._body if may_be_dropped else self._sums, id(parameter), gradient.detach().mul_(factor))

    def drop_body(self, keys: Collection[int]) -> None:
        """Drop the current loop body's gradients of these parameters."""
        for key in keys:
            self._body.pop(key, None)

    def close_body(self, keys: Collection[int]) -> None:
        """Ignore the current loop body's further gradients of these parameters."""
        self._closed.update(keys)

    def keys(self) -> KeysView[int]:
        """Return the ids of the parameters that have gradients here."""
        return self._sums.keys()

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return self._sums.get(id(parameter))


def _add(sums: dict[int, torch.Tensor], key: int, gradient: torch.Tensor) -> None:
    if key in sums:
        sums[key].add_(gradient)
    else:
        sums[key] = gradient
