"""Gradients of the only worker there is, where nothing is accumulated: `.grad` is what it should be already.

What a mean over some things weighs in that over the same things is 1, whatever `fd.weight` says: nothing is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.collectives import world


class LocalGradients:
    """Where autograd has put them. The parts of bucketed_gradients.py that make sense."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters

    def settle(self, factor: float) -> None:
        """After the backward passes: each has a gradient as it would have with others. 0: zeros only."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None or not factor:  # not multiplied: inf times 0 would be NaN
                self.zero(parameter)
            elif gradient.is_sparse or gradient.requires_grad:  # that of backward(create_graph=True)
                gradient = gradient.detach()
                parameter.grad = gradient.to_dense() if gradient.is_sparse else gradient

    def zero(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse or gradient.requires_grad:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        else:
            gradient.zero_()

    def raise_if_ended(self) -> None:
        """As a reduction would."""
        world.current().transport.barrier()

    def publish(self) -> None:
        for parameter in self.parameters:
            if not parameter.requires_grad:
                parameter.grad = None  # frozen since: it would be moved by an old one

    def tensors(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]
