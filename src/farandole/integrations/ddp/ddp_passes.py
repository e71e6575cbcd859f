"""Backward passes through a DistributedDataParallel: their buckets, one after the other. ddp_path.py chooses the kind
of each pass.

The reducer passes each bucket when it and all before it are complete, and copies the results of the futures into
`.grad` at the end of the pass. Over a network buckets are reduced while backward continues (collectives/background.py).
Here the futures complete with the last bucket, after the step header: a fault before
that yields zeros, and does not disturb the reducer itself.
"""

from __future__ import annotations

from collections.abc import Collection, Container, KeysView
from functools import partial
from typing import Protocol

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from farandole.errors import RecoverableError
from farandole.integrations.ddp.comm_hook import CommHook
from farandole.integrations.torchrun.process_group.works import overlapped
from farandole.training.collectives import world
from farandole.training.optim.buckets import Arrivals, laid_out
from farandole.training.optim.step_agreement import StepHeader, absorb, conclude, packed_at_end
from farandole.training.state import step
from farandole.training.state.batch import Batch


class Pass(Protocol):
    def take(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Take the buckets of the pass, in order. Raises the errors of transports that cannot be absorbed."""
        ...

    def end_overlap(self, reason: str) -> None:
        """Wait until no reduction is under way; the transport is aborted if one was."""
        ...


class PlainPass:
    """A pass without an undecided batch of a Farandole loader: it takes the mean over all ranks, as torch does."""

    def __init__(self, hook: CommHook | None) -> None:
        self._hook = hook

    def take(self, bucket: GradBucket) -> Future[torch.Tensor]:
        if self._hook is not None:
            if bucket.index() == 0:
                self._hook.begin(None, bucket.buffer().device)
            return self._hook.start(bucket)
        transport, flat = world.current().transport, bucket.buffer()
        if transport.size > 1:
            overlapped.wait()
            transport.all_reduce(flat.div_(transport.size))
        return _holding(flat)

    def end_overlap(self, reason: str) -> None:
        """Do nothing: between two calls no reduction is under way."""


class DroppedPass:
    """A pass whose gradients do not count: the step is aborted, or applied already. Nothing is sent; the gradients are
    zero."""

    def take(self, bucket: GradBucket) -> Future[torch.Tensor]:
        return _holding(bucket.buffer().zero_())

    def end_overlap(self, reason: str) -> None:
        """Do nothing, as in PlainPass."""


class StepPass:
    """The pass whose gradients, with those of earlier micro-batches, make the step.

    Buckets before the last one are reduced while backward continues, or with the last one. Both are the same order, so
    each worker decides by itself.

    factor       weight of this rank's gradients; 0 for a dummy batch
    accumulated  gradients of earlier micro-batches
    weighed      parameters, by id, whose gradients were multiplied before they came into a bucket; grows
    overlaps     buckets are reduced while backward continues
    """

    def __init__(
        self,
        batch: Batch,
        header: StepHeader,
        factor: float,
        accumulated: Accumulated,
        hook: CommHook | None,
        weighed: Container[int],
        overlaps: bool = False,
    ) -> None:
        self._weighed, self._overlaps = weighed, overlaps
        self._batch, self._header, self._hook = batch, header, hook
        self._factor, self._accumulated = factor, accumulated
        self._transport = world.current().transport
        self._buckets: list[tuple[Future[torch.Tensor], torch.Tensor]] = []
        self._under_way: list[Future[torch.Tensor]] = []  # futures of the user's hook
        self._unsent: list[torch.Tensor] = []  # buckets that are reduced with the last one
        self._has_submitted = False

    def take(self, bucket: GradBucket) -> Future[torch.Tensor]:
        future: Future[torch.Tensor] = Future()
        self._buckets.append((future, bucket.buffer()))
        if not step.is_aborted():
            try:
                self._reduce(bucket)
            except RecoverableError:
                if not absorb():
                    raise
        if bucket.is_last():
            self._complete()
        return future

    def _reduce(self, bucket: GradBucket) -> None:
        """Reduce a bucket, and with the last one exchange the headers."""
        world.raise_if_refused("gradients cannot be reduced")
        flat, trailer = bucket.buffer(), packed_at_end(self._header) if bucket.is_last() else b""
        if self._hook is None:
            self._weigh(bucket, 1.0)
            if not bucket.is_last():
                self._submit(flat)
                return
            self._land()
            trailers = self._transport.all_reduce(flat, trailer)
        else:
            self._weigh(bucket, float(self._transport.size))  # the hook takes the mean
            if bucket.index() == 0:
                self._hook.begin(self._batch.global_batch, flat.device)
            self._under_way.append(self._hook.start(bucket))
            if bucket.is_last():
                self._wait_for(self._hook)
                trailers = self._transport.all_reduce(torch.empty(0), trailer)
        if bucket.is_last():
            factor = conclude([StepHeader.unpack(each) for each in trailers], self._batch)
            for _, values in self._buckets if factor != 1.0 else ():
                values.mul_(factor)
            step.mark_reduced()

    def _weigh(self, bucket: GradBucket, scale: float) -> None:
        flat, factor = bucket.buffer(), self._factor * scale
        if not factor:
            flat.zero_()  # not multiplied: a dummy batch's inf times 0 would be NaN
        for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if factor and factor != 1.0 and id(parameter) not in self._weighed:
                part.mul_(factor)  # left by an earlier pass in no_sync(), and not used in this one
            earlier = self._accumulated.of(parameter)
            if earlier is not None:
                # GradBucket.gradients() assumes the contiguous order, but the reducer copies in that of the parameter
                # (torch 2.13, torch/csrc/distributed/c10d: GradBucket::getGradients() in comm.hpp,
                # initialize_bucket_views() in reducer.hpp).
                laid_out(part, parameter).add_(earlier, alpha=scale)

    def _submit(self, flat: torch.Tensor) -> None:
        if self._overlaps:
            self._has_submitted = True
            arrived = Arrivals(flat.device)
            arrived.record()
            overlapped.add(arrived.before(partial(self._transport.all_reduce, flat)))
        else:
            self._unsent.append(flat)

    def _land(self) -> None:
        """Wait for the buckets that are under way, and reduce the others before the last one. Raises the errors of
        transports."""
        self._has_submitted = False
        overlapped.land(self._transport)
        for flat in self._unsent:
            self._transport.all_reduce(flat)

    def end_overlap(self, reason: str) -> None:
        """Wait until no reduction is under way; the transport is aborted if one was."""
        if self._has_submitted:
            self._has_submitted = False
            self._transport.abort(reason)  # other ranks wait for the remaining buckets, which will not come
            overlapped.finish()

    def _wait_for(self, hook: CommHook) -> None:
        """Wait for the results of the user's hook."""
        values = [hook.wait(each) for each in self._under_way]
        hook.end()
        self._buckets = [(future, value) for (future, _), value in zip(self._buckets, values, strict=True)]

    def _complete(self) -> None:
        for future, values in self._buckets:
            future.set_result(values.zero_() if step.is_aborted() else values)


def _holding(tensor: torch.Tensor) -> Future[torch.Tensor]:
    future: Future[torch.Tensor] = Future()
    future.set_result(tensor)
    return future


# Gradients of the processed micro-batches of a global batch -----------------------------------------------------------
#
# They are weighted, and kept until the last micro-batch is reduced.


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
