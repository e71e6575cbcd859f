"""Gradients on their way to those of the global batch: in buckets, which all ranks reduce in the same order.

Where there are several buckets, those that are complete are reduced while backward goes on. The last one is always
reduced by the main thread, at the end: it carries the step header.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import torch

from farandole.collectives import world
from farandole.collectives.named.compression import Compressor
from farandole.collectives.transport import Transport
from farandole.errors import StepError
from farandole.optim.background import Background
from farandole.optim.buckets import Buckets
from farandole.optim.compressed import CompressedReduce
from farandole.optim.device_order import Arrivals
from farandole.optim.header import StepHeader
from farandole.optim.parameters import describe
from farandole.optim.plan_agreement import agree_on_buckets

logger = logging.getLogger("farandole")


class BucketedGradients:
    """They are copied into buckets; `.grad` becomes a view of them, so that nothing is copied back. Main thread only.

    names         the parameters, and what to call them in errors
    pinned_bytes  least size of a bucket that the user has asked for, 0 for one; None: it is chosen
    """

    def __init__(
        self, names: Mapping[torch.Tensor, str], digest: int, compression: Compressor, pinned_bytes: int | None
    ) -> None:
        self._names, self._digest, self._pinned_bytes = names, digest, pinned_bytes
        self.parameters = list(names)
        self._buckets = Buckets(self.parameters)
        self._reduce = CompressedReduce(compression)
        self._background = Background()
        self._agreed_in: world.World | None = None
        self._place: dict[int, int] = {}  # of each parameter, its bucket's
        self._missing: list[int] = []  # gradients that each bucket waits for in this pass
        self._arrivals: list[Arrivals] = []  # in each bucket
        self._given = 0  # so many buckets are reduced, or on their way
        self._flies_by: Transport | None = None

    # From gradient to bucket -----------------------------------------------------------------------------

    def put(self, parameter: torch.Tensor, factor: float, adds: bool) -> None:
        """Take `factor` times its `.grad`, in addition to what is here or instead of it."""
        view, gradient = self._buckets.view(parameter), parameter.grad
        assert gradient is not None
        if gradient.requires_grad:  # backward(create_graph=True)
            gradient = gradient.detach()
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.shape != view.shape:
            raise StepError(
                f"the gradient of {self._names[parameter]} has shape {tuple(gradient.shape)}, but the parameter had "
                f"shape {tuple(view.shape)} when its bucket was made: change the model before the first step, and "
                f"wrap the optimizer then"
            )
        if not adds:
            if factor:
                torch.mul(gradient, factor, out=view)
            else:
                view.zero_()  # not multiplied: a ghost's inf times 0 would be NaN
        elif factor:
            view.add_(gradient, alpha=factor)
        # The next micro-batch must not accumulate on top of what is in the bucket already.
        parameter.grad = None

    def zero(self, parameter: torch.Tensor) -> None:
        """It has none."""
        self._buckets.view(parameter).zero_()

    # While backward goes on ------------------------------------------------------------------------------

    def may_fly(self) -> bool:
        """Whether what is complete can be reduced while backward goes on; then each arrived() counts."""
        buckets = self._buckets.buckets
        if len(buckets) == 1 or self._agreed_in is not world.current():
            return False
        self._missing = [len(bucket.parameters) for bucket in buckets]
        self._arrivals = [Arrivals(self._buckets.device) for _ in buckets]
        return True

    def arrived(self, parameter: torch.Tensor) -> None:
        """Its gradient is final on this rank. What is complete goes, but only after all that is before it: ranks differ
        in what is complete first."""
        place = self._place[id(parameter)]
        self._missing[place] -= 1
        self._arrivals[place].note()
        transport = self._flies_by = world.current().transport
        while self._given < len(self._missing) - 1 and not self._missing[self._given]:
            task = partial(self._all_reduce, transport, self._given, b"")
            self._background.add(self._arrivals[self._given].before(task))
            self._given += 1

    def is_flying(self) -> bool:
        """Whether something was given away to be reduced, and reduce() was not called."""
        return self._given > 0

    def end_flight(self, reason: str) -> None:
        """Return when nothing is on its way any more; the transport is aborted if something was."""
        if self._given and self._flies_by is not None:
            # Others wait for the buckets that will not come now.
            self._flies_by.abort(reason)
            self._background.finish()
            self._given = 0

    # From bucket to the sum ------------------------------------------------------------------------------

    def reduce(self, header: StepHeader) -> list[StepHeader]:
        """Add up over all ranks what is not yet; everybody's headers, by rank. Raises what transports raise."""
        here, note = world.current(), header.pack()
        if self._agreed_in is not here:
            self._agree(here)
        self._land(here.transport)
        given, self._given = self._given, 0
        *others, last = range(len(self._buckets.buckets))
        for place in others[given:]:
            self._all_reduce(here.transport, place, b"")
        return [StepHeader.unpack(each) for each in self._all_reduce(here.transport, last, note)]

    def _land(self, transport: Transport) -> None:
        """Wait for what is on its way. Raises what went wrong with it."""
        if not self._given:
            return
        try:
            error = self._background.finish()
        except BaseException as interruption:
            transport.abort(f"a step was interrupted by {type(interruption).__name__}")
            self._background.finish()
            self._given = 0
            raise
        if error is not None:
            self._given = 0
            raise error

    def _all_reduce(self, transport: Transport, place: int, note: bytes) -> list[bytes]:
        return self._reduce.all_reduce(transport, self._buckets.buckets[place].flat, note)

    def _agree(self, here: world.World) -> None:
        """Once in each generation, and after each change of the parameters."""
        total = self._buckets.total_bytes
        described = describe(self._names)
        is_on_device = self._buckets.device.type != "cpu"
        least = agree_on_buckets(here, self._digest, described, total, self._pinned_bytes, is_on_device)
        self._buckets.cut(least)
        self._reduce.forget()
        buckets = self._buckets.buckets
        self._place = {id(each): place for place, bucket in enumerate(buckets) for each in bucket.parameters}
        self._agreed_in = here
        if least and here.placement.rank == 0:
            logger.info(
                "%.1f MB of gradients in %d buckets of %.1f MB, reduced while backward goes on",
                total / 2**20,
                len(buckets),
                least / 2**20,
            )

    def scale(self, factor: float) -> None:
        """All of them, after reduce()."""
        if factor != 1.0:
            for flat in self._buckets.flats:
                flat.mul_(factor)

    # From the sum to .grad -------------------------------------------------------------------------------

    def publish(self) -> None:
        """Every `.grad` is what is here."""
        for parameter in self.parameters:
            parameter.grad = self._buckets.view(parameter) if parameter.requires_grad else None

    def tensors(self) -> list[torch.Tensor]:
        """All of them, in as few tensors as there are."""
        return self._buckets.flats
