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
from farandole.optim.weighting import Weights, total
from farandole.state import boundary, recording, step
from farandole.state.ticket import Batch
from farandole.state.undo import Undo


class NativePath:
    """`parameters` gives all of the optimizer's, whenever a plan is made."""

    def __init__(self, parameters: Callable[[], list[torch.Tensor]], options: Options, passes: Passes) -> None:
        self._parameters = parameters
        self._options = options
        self._passes = passes
        self._buckets: BucketPlan | None = None
        self._batch: Batch | None = None  # the one that all of this belongs to
        self._pass_is_open = False  # reset by zero_grad() too: a backward pass that raised never closes
        self._weights = Weights(options.loss)
        self.forget()

    @property
    def _plan(self) -> BucketPlan:
        """Made for the first batch: scripts without a loader do not need the memory."""
        if self._buckets is None:
            if self._passes.per_step != 1:
                raise StepError(
                    f"backward_passes_per_step={self._passes.per_step} is for scripts without a DataLoader of "
                    f"Farandole, which accumulates by itself: DataLoader(global_batch_size=..., micro_batch_size=...)"
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
        self._is_again = False  # another pass goes on top of gradients that are reduced
        self._has_passed = False  # a pass of this loop body is in the buckets, and step() was not called since
        self._is_closed = False  # step() was called in this loop body, and more micro-batches follow
        self._before: tuple[list[torch.Tensor], set[int]] | None = None  # buckets without this loop body
        self._reduced: list[torch.Tensor] | None = None  # kept while loop bodies run that do not count
        self._weights.forget()

    # From gradient to bucket -----------------------------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor, batch: Batch) -> None:
        """Runs inside backward(), once for each parameter, while its gradient is hot in the cache."""
        if not self._pass_is_open:
            self._open_pass(batch)
        if self._has_stepped or batch.is_padding or not self._plan.holds(parameter):
            return  # e.g. a generator's loss that runs through the discriminator; or see _refuse_unfrozen
        if self._is_closed:
            parameter.grad = None
            return
        view, gradient = self._plan.view(parameter), parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if id(parameter) in self._filled:
            if self._factor:
                view.add_(gradient, alpha=self._factor)
        else:
            _scale(gradient, self._factor, view)
        self._filled.add(id(parameter))
        # The next micro-batch must not accumulate on top of what is in the bucket already.
        parameter.grad = None

    def _open_pass(self, batch: Batch) -> None:
        self._notice(batch)
        self._factor = self._weights.note(batch)
        if not self._has_stepped and not self._is_closed and not batch.is_padding:
            if self._is_reduced:
                self._begin_again(batch)
            elif batch.index > 0 and step.is_shared() and self._before is None:
                self._before = ([bucket.flat.clone() for bucket in self._plan.buckets], set(self._filled))
            self._has_passed = True
        self._pass_is_open = True
        torch.autograd.Variable._execution_engine.queue_callback(self._close_pass)

    def _begin_again(self, batch: Batch) -> None:
        """As with DDP: what this pass adds is reduced together with the gradients that are here, which are the same
        on all ranks; they come out as they went in, because the factors of all ranks add up to 1."""
        if batch.ticket.micro_batches > 1 or self._options.loss == "sum":
            raise StepError(
                "a second backward pass for the same batch before optimizer.step(), with micro-batches or "
                'loss="sum": its gradients are reduced already. Add the losses and call backward() once'
            )
        self._filled.clear()
        self._is_reduced, self._is_again = False, True

    def _close_pass(self) -> None:
        """Runs at the end of backward(), on the thread that called it."""
        self._pass_is_open = False
        batch = step.batch()
        if self._has_stepped or batch is None:
            return
        if batch.is_padding:
            self._take_back()
        elif batch.is_last:
            self._reduce(batch)

    def _notice(self, batch: Batch) -> None:
        """What was kept belongs to the last global batch, which was decided or aborted, if there is a new one."""
        last, self._batch = self._batch, batch
        if batch is last:
            return
        if batch.index == 0 or last is None or batch.ticket is not last.ticket:
            self.forget()
            step.take_part(self)
        self._before, self._has_passed, self._is_closed = None, False, False

    # Loop bodies that do not count -----------------------------------------------------------------------

    def begin_padding(self) -> None:
        """Remember the reduced gradients: autograd adds to them in place."""
        if self._is_reduced and not self._has_stepped:
            self._reduced = [bucket.flat.clone() for bucket in self._plan.buckets]

    def _take_back(self) -> None:
        if self._reduced is not None:
            torch._foreach_copy_([bucket.flat for bucket in self._plan.buckets], self._reduced)
            self._publish()

    # From bucket to final gradient -----------------------------------------------------------------------

    def reduce_rest(self, batch: Batch) -> None:
        """What no backward pass has reduced: the other workers wait for us."""
        self._notice(batch)
        if batch.is_last and not self._is_reduced:
            self._weights.note(batch)
            self._reduce(batch)

    def _reduce(self, batch: Batch) -> None:
        """Make every `.grad` that of the global batch. A fault is absorbed where the loader can repeat
        the batch: gradients are zeroed and the step is marked as aborted."""
        for bucket in self._plan.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if id(parameter) in self._filled:
                    continue
                if self._is_again and parameter.grad is not None:
                    _scale(parameter.grad, self._factor, view)
                else:
                    view.zero_()
        self._is_reduced = True
        if step.state() == "aborted":  # by another optimizer of this step
            self._drop()
            return
        try:
            self._reduce_buckets(batch)
        except RecoverableError:
            self._drop()
            step.aborted()
            if not boundary.can_repeat():
                raise
        else:
            self._publish()
            step.reduced()

    def _drop(self) -> None:
        for bucket in self._plan.buckets:
            bucket.flat.zero_()
        self._publish()

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
        weight = total([header.weight for header in headers])
        if weight:  # with 0, nothing was added up
            for bucket in buckets:
                bucket.flat.mul_(batch.ticket.global_samples / weight)
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
            weight=self._weights.said(),
            ids_hash=recording.intend(batch),
        )

    def _publish(self) -> None:
        for bucket in self._plan.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view if parameter.requires_grad else None

    # From gradient to step -------------------------------------------------------------------------------

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
        apply: Callable[..., Any],
        closure: Callable[[], float] | None,
    ) -> bool:
        """Apply the reduced gradients by `apply`. True: applied by all. False: not applied."""
        if closure is not None:
            raise StepError(
                "step(closure) would run several backward passes in one step, which would be reduced "
                "separately; call backward() first and step() without a closure"
            )
        self._notice(batch)
        if not batch.is_last:
            self._weights.note(batch)
            self._has_passed, self._is_closed = False, True
            return False
        self.reduce_rest(batch)
        if step.state() == "aborted":
            return False
        if self._has_stepped:
            raise StepError("optimizer.step() twice for one batch of the loader; call it once in each loop body")
        self._refuse_unfrozen()
        if step.awaits_others(optimizer):
            step.undo_by(Undo(optimizer).put_back)
        self._has_stepped = True
        apply(gradients=[bucket.flat for bucket in self._plan.buckets])
        step.stepped(optimizer)
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
        """Whether zero_grad() may go on: not while the micro-batches of a global batch are being accumulated.

        Between backward() and step() of one loop body it drops what that body has left, e.g. a generator's loss in
        the discriminator; but that of a single optimizer with micro-batches counts."""
        self._pass_is_open = False
        self._notice(batch)
        if self._has_stepped or step.state() == "aborted":
            return True
        if batch.is_padding:
            return False
        if self._has_passed and (batch.ticket.micro_batches == 1 or step.is_shared()):
            self._drop_pass()
            return True
        return batch.index == 0

    def _drop_pass(self) -> None:
        flats, self._filled = ([], set()) if self._before is None else self._before
        for bucket, flat in zip(self._plan.buckets, flats, strict=False):
            bucket.flat.copy_(flat)
        self._before, self._has_passed = None, False
        self._is_reduced = self._is_again = False


def _scale(gradient: torch.Tensor, factor: float, view: torch.Tensor) -> None:
    if factor:
        torch.mul(gradient, factor, out=view)
    else:
        view.zero_()  # not multiplied: a ghost's inf times 0 would be NaN
