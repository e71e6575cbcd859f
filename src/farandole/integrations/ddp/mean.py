"""The mean of a DistributedDataParallel's gradients over all workers, where there is no batch of a loader: under the
commit rule, in a static job, between steps. As in torch, but with the same buckets on all workers at all times: torch's
reducer cuts them anew after the first pass, which a worker that joins would do alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.integrations.ddp.comm_hook import CommHook, HookedReduce
from farandole.training.collectives import world
from farandole.training.collectives.background import of_gradients
from farandole.training.optim.buckets import Buckets, is_same_memory
from farandole.training.optim.optimizer_mixin import at_end_of_pass


class Mean:
    """The mean of these gradients. Raises the errors of transports.

    finds_unused  parameters without a gradient on all ranks keep none; else a pass reduces when all have one
    least_bytes   the size of a bucket at least
    hook          the user's
    """

    hook: CommHook | None = None

    def __init__(self, parameters: Sequence[torch.Tensor], finds_unused: bool, least_bytes: int) -> None:
        self._parameters, self._finds_unused, self._least_bytes = parameters, finds_unused, least_bytes
        self._buckets: Buckets | None = None
        self._arrived: set[int] = set()  # parameters, by id, since the last forward pass
        self._reduces = self._closes = False

    def begin_forward(self, reduces: bool) -> None:
        """Note that a forward pass begins. Raises RuntimeError, as torch does, if the last one was not reduced."""
        if reduces and self._reduces and self._arrived and not self._finds_unused:
            self._reduces = False
            raise RuntimeError(
                f"Expected to have finished reduction in the prior iteration before starting a new one: "
                f"{len(self._parameters) - len(self._arrived)} parameters of the DistributedDataParallel got no "
                f"gradient in it. Pass find_unused_parameters=True"
            )
        self._reduces, self._closes = reduces, False
        self._arrived.clear()

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Handle a gradient. Runs inside backward()."""
        self._arrived.add(id(parameter))
        if self._reduces and not self._closes:
            self._closes = True
            at_end_of_pass(self._close)

    def _close(self) -> None:
        self._closes = False
        if not self._reduces or not (self._finds_unused or len(self._arrived) >= len(self._parameters)):
            return
        self._reduces = False
        transport = world.current().transport
        if transport.size > 1 or self.hook is not None:
            self._reduce()

    def _reduce(self) -> None:
        transport = world.current().transport
        unused = self._unused_everywhere()
        buckets = self._filled()
        of_gradients.wait()
        reduce = None if self.hook is None else HookedReduce(self.hook)
        for place, bucket in enumerate(buckets.buckets):
            if reduce is not None:
                reduce.reduce(buckets.buckets, place, None)
            else:
                transport.all_reduce(bucket.flat.div_(transport.size))
        buckets.show_all()
        for parameter in unused:
            parameter.grad = None

    def _unused_everywhere(self) -> list[torch.Tensor]:
        if not self._finds_unused:
            return []
        counts = torch.tensor([each.grad is not None for each in self._parameters], dtype=torch.int32)
        world.current().transport.all_reduce(counts)
        return [each for each, count in zip(self._parameters, counts.tolist(), strict=True) if not count]

    def _filled(self) -> Buckets:
        """Return buckets with this rank's gradients."""
        buckets = self._buckets
        if buckets is None or buckets.is_kept():
            buckets = self._buckets = Buckets(self._parameters)
            buckets.cut(self._least_bytes)
        for parameter in self._parameters:
            view, gradient = buckets.view(parameter), parameter.grad
            if gradient is None:
                view.zero_()
            elif not is_same_memory(gradient, view):
                view.copy_(gradient.detach())
        return buckets
