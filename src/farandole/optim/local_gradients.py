"""Gradients of a single worker without accumulation: `.grad` has its final value already.

A mean over all items of a single worker has weight 1 for any `fd.weight`: nothing is multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.collectives import world


class LocalGradients:
    """Gradients in the tensors that autograd has created. It implements the applicable part of BucketedGradients'
    interface."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters

    def settle(self, factor: float) -> None:
        """Complete the gradients after the backward passes: each parameter has one, as with several workers. 0: zeros
        only."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None or not factor:  # not multiplied: inf times 0 would be NaN
                self.zero(parameter)
            elif gradient.is_sparse or gradient.requires_grad:  # of backward(create_graph=True)
                gradient = gradient.detach()
                parameter.grad = gradient.to_dense() if gradient.is_sparse else gradient

    def zero(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse or gradient.requires_grad:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        else:
            gradient.zero_()

    def raise_if_ended(self) -> None:
        """Raise if the generation has ended, as a reduction would."""
        world.current().transport.barrier()

    def publish(self) -> None:
        for parameter in self.parameters:
            if not parameter.requires_grad:
                parameter.grad = None  # frozen since: an old gradient would change it

    def tensors(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]
