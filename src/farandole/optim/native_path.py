"""From gradient to step with a loader of ours: weighted by the ticket, in buckets, checked by the step header.

DistributedOptimizer takes this path whenever the loader has handed out a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farandole.collectives import world
from farandole.errors import RecoverableError, StepError
from farandole.optim.buckets import BucketPlan
from farandole.optim.header import StepHeader, check, ids_hash
from farandole.optim.options import Options
from farandole.optim.passes import Passes
from farandole.state import boundary, recording, step
from farandole.state.ticket import Batch


class NativePath:
    """`parameters` gives all of the optimizer's, whenever a plan is made."""

    def __init__(self, parameters: Callable[[], list[torch.Tensor]], options: Options, passes: Passes) -> None:
        self._parameters = parameters
        self._options = options
        self._passes = passes
        self._buckets: BucketPlan | None = None
        self._batch: Batch | None = None  # the one that all of this belongs to
        self._pass_is_open = False  # reset by zero_grad() too: a backward pass that raised never closes
        self.forget()

    @property
    def _plan(self) -> BucketPlan:
        """Made for the first batch: scripts without a loader do not need the memory."""
        if self._buckets is None:
            if self._passes.per_step != 1:
                raise StepError(
                    f"backward_passes_per_step={self._passes.per_step} is for scripts without a DataLoader of "
                    f"Farandole, which accumulates by itself: DataLoader(global_batch_size=..., max_local_batch=...)"
                )
            if not self._options.is_plain:
                raise StepError(
                    "op other than Average, gradient_predivide_factor, groups, sparse_as_dense and process_set are "
                    "for scripts without a DataLoader of Farandole, which weights gradients by itself: leave them out"
                )
            self._buckets = BucketPlan([parameter for parameter in self._parameters() if parameter.requires_grad])
        return self._buckets

    def plan_anew(self) -> None:
        """The parameters are others now."""
        self._buckets = None
        self._pass_is_open = False
        self.forget()

    def forget(self) -> None:
        """Nothing has happened since the last step."""
        self._filled: set[int] = set()  # parameters whose gradient of this ticket is in its bucket
        self._is_reduced = self._has_stepped = False

    # From gradient to bucket -----------------------------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor, batch: Batch) -> None:
        """Runs inside backward(), once for each parameter, while its gradient is hot in the cache."""
        if not self._pass_is_open:
            self._open_pass(batch)
        if self._has_stepped or not self._plan.holds(parameter):
            return  # e.g. a generator's loss that runs through the discriminator; or see _refuse_unfrozen
        view, gradient = self._plan.view(parameter), parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        weight = 0.0 if batch.is_ghost else batch.weight
        if id(parameter) in self._filled:
            if weight:
                view.add_(gradient, alpha=weight)
        elif weight:
            torch.mul(gradient, weight, out=view)
        else:
            view.zero_()  # not multiplied: a ghost's inf times 0 would be NaN
        self._filled.add(id(parameter))
        # The next micro-batch must not accumulate on top of what is in the bucket already.
        parameter.grad = None

    def _open_pass(self, batch: Batch) -> None:
        self._notice(batch)
        if self._is_reduced and not self._has_stepped:
            raise StepError(
                "a second backward pass for the same batch before optimizer.step(): its gradients are reduced "
                "already. Add the losses and call backward() once, or let the loader accumulate: "
                "DataLoader(global_batch_size=..., max_local_batch=...)"
            )
        self._pass_is_open = True
        torch.autograd.Variable._execution_engine.queue_callback(self._close_pass)

    def _close_pass(self) -> None:
        """Runs at the end of backward(), on the thread that called it."""
        self._pass_is_open = False
        batch = step.batch()
        if not self._has_stepped and batch is not None and batch.is_last:
            self._reduce(batch)

    def _notice(self, batch: Batch) -> None:
        """What was kept belongs to the last global batch, which was decided or aborted, if there is a new one."""
        if batch is not self._batch:
            self._batch = batch
            if batch.index == 0:
                self.forget()

    # From bucket to final gradient -----------------------------------------------------------------------

    def reduce_rest(self, batch: Batch) -> None:
        """What no backward pass has reduced: the other workers wait for us."""
        self._notice(batch)
        if batch.is_last and not self._is_reduced:
            self._reduce(batch)

    def _reduce(self, batch: Batch) -> None:
        """Make every `.grad` that of the global batch. A fault is absorbed where the loader can repeat
        the batch: gradients are zeroed and the step is marked as aborted."""
        for bucket in self._plan.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if id(parameter) not in self._filled:
                    view.zero_()
        try:
            self._reduce_buckets(batch)
        except RecoverableError:
            for bucket in self._plan.buckets:
                bucket.flat.zero_()
            self._publish()
            step.aborted()
            if not boundary.can_repeat():
                raise
        else:
            self._publish()
            step.reduced()
        self._is_reduced = True

    def _reduce_buckets(self, batch: Batch) -> None:
        here = world.current()
        buckets = self._plan.buckets
        header = self._header(here, batch)  # before anything is reduced: the ledger's intent is written here
        for bucket in buckets[:-1]:
            self._all_reduce(bucket.flat, b"")
        last = buckets[-1].flat if buckets else torch.empty(0)
        notes = self._all_reduce(last, header.pack())
        headers = [StepHeader.unpack(note) for note in notes]
        check(headers)
        recording.agree(sum(header.samples for header in headers), ids_hash(headers))
        boundary.agree([header.prepared for header in headers])

    def _all_reduce(self, flat: torch.Tensor, note: bytes) -> list[bytes]:
        compression = self._options.compression
        sent, ctx = compression.compress(flat)
        notes = world.current().transport.all_reduce(sent, note)
        if sent is not flat:
            flat.copy_(compression.decompress(sent, ctx))
        return notes

    def _header(self, here: world.World, batch: Batch) -> StepHeader:
        ticket = batch.ticket
        return StepHeader(
            generation=here.id.number,
            step=boundary.steps_decided(),
            plan=self._plan.digest,
            epoch=ticket.epoch,
            start=ticket.start,
            stop=ticket.stop,
            samples=ticket.samples,
            prepared=boundary.prepared(),
            ids_hash=recording.intend(batch),
        )

    def _publish(self) -> None:
        for bucket in self._plan.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view if parameter.requires_grad else None

    # From gradient to step -------------------------------------------------------------------------------

    def step(self, batch: Batch, apply: Callable[..., Any], closure: Callable[[], float] | None) -> bool:
        """Apply the reduced gradients by `apply`. True: applied by all. False: not applied."""
        if closure is not None:
            raise StepError(
                "step(closure) would run several backward passes in one step, which would be reduced "
                "separately; call backward() first and step() without a closure"
            )
        if not batch.is_last:
            return False
        self.reduce_rest(batch)
        if step.state() == "aborted":
            return False
        self._refuse_unfrozen()
        self._has_stepped = True
        apply(gradients=[bucket.flat for bucket in self._plan.buckets])
        step.decided()
        return True

    def _refuse_unfrozen(self) -> None:
        """A parameter without a place in a bucket would be trained on local gradients: workers would drift apart."""
        for index, parameter in enumerate(self._parameters()):
            if parameter.requires_grad and not self._plan.holds(parameter):
                raise StepError(
                    f"parameter {index} of shape {tuple(parameter.shape)} did not require gradients in the first "
                    f"step, and does now; unfreeze it before the first step, or add it with add_param_group()"
                )

    def begin_zeroing(self, batch: Batch) -> bool:
        """Whether zero_grad() may go on: not while the micro-batches of a global batch are being accumulated."""
        self._pass_is_open = False
        return not (batch.index > 0 and step.state() == "open")
