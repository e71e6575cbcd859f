"""One backward pass through a DistributedDataParallel: its buckets, one after the other. ddp_path.py says which pass
counts for what.

The reducer hands over each bucket when it and all before it are complete, and copies what the futures hold into `.grad`
at the end of the pass. Futures are completed here with the last bucket, after the header of the step: a fault in
between leaves zeros, and nothing goes wrong in the reducer itself.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from farandole.collectives import world
from farandole.errors import RecoverableError
from farandole.optim.ddp.accumulated import Accumulated
from farandole.optim.ddp.user_hook import UserHook
from farandole.optim.header import StepHeader
from farandole.optim.step_agreement import absorb, conclude
from farandole.state import step
from farandole.state.global_batch import Batch


class Pass(Protocol):
    def take(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """All buckets of the pass, in order. Raises what transports raise where that cannot be absorbed."""
        ...


class PlainPass:
    """No batch of a loader of ours is out, or its step is decided: the mean over all ranks, as torch does it."""

    def __init__(self, hook: UserHook | None) -> None:
        self._hook = hook

    def take(self, bucket: GradBucket) -> Future[torch.Tensor]:
        if self._hook is not None:
            return self._hook.start(bucket)
        transport, flat = world.current().transport, bucket.buffer()
        if transport.size > 1:
            transport.all_reduce(flat.div_(transport.size))
        return _holding(flat)


class DroppedPass:
    """Its gradients do not count: the step is aborted, or applied already. Nothing is sent; they are zero."""

    def take(self, bucket: GradBucket) -> Future[torch.Tensor]:
        return _holding(bucket.buffer().zero_())


class StepPass:
    """The pass whose gradients, with those of earlier micro-batches, make the step.

    factor       what this rank's weigh; 0 for a dummy batch
    accumulated  those of earlier micro-batches
    weighed      parameters, by id, whose gradients were multiplied before they came into a bucket; grows
    """

    def __init__(
        self,
        batch: Batch,
        header: StepHeader,
        factor: float,
        accumulated: Accumulated,
        hook: UserHook | None,
        weighed: Container[int],
    ) -> None:
        self._weighed = weighed
        self._batch, self._header, self._hook = batch, header, hook
        self._factor, self._accumulated = factor, accumulated
        self._transport = world.current().transport
        self._buckets: list[tuple[Future[torch.Tensor], torch.Tensor]] = []
        self._under_way: list[Future[torch.Tensor]] = []  # of the user's hook

    def take(self, bucket: GradBucket) -> Future[torch.Tensor]:
        future: Future[torch.Tensor] = Future()
        self._buckets.append((future, bucket.buffer()))
        if step.state() != "aborted":
            try:
                self._reduce(bucket)
            except RecoverableError:
                if not absorb():
                    raise
        if bucket.is_last():
            self._complete()
        return future

    def _reduce(self, bucket: GradBucket) -> None:
        """Ours, and with the last bucket everybody's."""
        world.raise_if_refused("gradients cannot be reduced")
        flat, trailer = bucket.buffer(), self._header.pack() if bucket.is_last() else b""
        if self._hook is None:
            self._weigh(bucket, 1.0)
            trailers = self._transport.all_reduce(flat, trailer)
        else:
            self._weigh(bucket, float(self._transport.size))  # the hook takes the mean
            self._under_way.append(self._hook.start(bucket))
            if bucket.is_last():
                self._land(self._hook)
                trailers = self._transport.all_reduce(torch.empty(0), trailer)
        if bucket.is_last():
            factor = conclude([StepHeader.unpack(each) for each in trailers], self._batch)
            for _, values in self._buckets if factor != 1.0 else ():
                values.mul_(factor)
            step.reduced()

    def _weigh(self, bucket: GradBucket, scale: float) -> None:
        flat, factor = bucket.buffer(), self._factor * scale
        if not factor:
            flat.zero_()  # not multiplied: a dummy batch's inf times 0 would be NaN
        for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if factor and factor != 1.0 and id(parameter) not in self._weighed:
                part.mul_(factor)  # what an earlier pass, in no_sync(), has left, and this one has not used
            earlier = self._accumulated.of(parameter)
            if earlier is not None:
                _as_in_bucket(part, parameter).add_(earlier, alpha=scale)

    def _land(self, hook: UserHook) -> None:
        """What the user's hook has made of the buckets."""
        values = [hook.wait(each) for each in self._under_way]
        self._buckets = [(future, value) for (future, _), value in zip(self._buckets, values, strict=True)]

    def _complete(self) -> None:
        for future, values in self._buckets:
            future.set_result(values.zero_() if step.state() == "aborted" else values)


def _holding(tensor: torch.Tensor) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(tensor)
    return future


def _as_in_bucket(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A part of a bucket, in the order in which the reducer has put the gradient there: that of memory, where the
    parameter's is dense (channels_last). `GradBucket.gradients()` knows of no other than the usual one."""
    if parameter.is_contiguous():
        return part
    from torch._prims_common import is_non_overlapping_and_dense_or_false  # takes a while, and is rarely needed

    if is_non_overlapping_and_dense_or_false(parameter):
        return part.view(-1).as_strided(parameter.shape, parameter.stride())
    return part
