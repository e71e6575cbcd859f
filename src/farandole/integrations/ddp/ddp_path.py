"""The path from gradient to step with a DistributedDataParallel and a loader of Farandole: the use of each backward
pass.

It is the counterpart of loader_path.py for a DistributedOptimizer. The module calls it before each forward pass, its
reducer with each bucket, and the optimizers (stepping.py) when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from farandole.base.machine import usable_cores
from farandole.errors import RecoverableError, StepError
from farandole.integrations.ddp.comm_hook import CommHook
from farandole.integrations.ddp.ddp_passes import Accumulated, DroppedPass, Pass, PlainPass, StepPass
from farandole.training.collectives import world
from farandole.training.collectives.shared_memory_transport import SharedMemoryTransport
from farandole.training.collectives.transport_choice import host_transport
from farandole.training.collectives.world import World
from farandole.training.optim.end_of_pass import at_end_of_pass
from farandole.training.optim.step_agreement import Weights, absorb, conclude_alone, digest, header_of
from farandole.training.state import step
from farandole.training.state.batch import Batch


class DdpPath:
    """The state of one DistributedDataParallel.

    names        the parameters that its reducer reduces, with their names
    accumulates  returns whether the loop body may run without step() (the loader's micro_batch_size)
    hook         the user's
    finds_unused  find_unused_parameters was given
    """

    def __init__(
        self,
        names: Mapping[torch.Tensor, str],
        accumulates: Callable[[], bool],
        hook: CommHook | None,
        finds_unused: bool = False,
    ) -> None:
        self.parameters = list(names)
        self.keys = frozenset(map(id, self.parameters))
        self.hook = hook
        self._accumulates = accumulates
        self._digest = digest(names)
        self.batch: Batch | None = None  # the batch to which the following state belongs
        self._pass: Pass = PlainPass(None)
        self._has_stale = False  # `.grad` may hold gradients of an aborted step
        self._taken: list[torch.Tensor] = []  # parameters whose gradients of this pass are accumulated
        self._zeroed: list[torch.Tensor] = []  # parameters whose `.grad` is zeros for that reason
        self._is_watching = False  # gradients are also seen when they arrive
        self._weights = Weights("mean")
        self._accumulated = Accumulated()
        self._owned: set[int] = set()  # parameters that optimizers step
        self.has_passed = False  # buckets were reduced since the reducer was reset
        self._reduces = False  # the next backward pass reduces
        self._finds_unused = finds_unused
        self.is_alone = False  # the next backward pass needs no reducer: gradients of a single worker are final
        self._arrived: set[int] = set()  # parameters, by id, that have gradients since that forward pass
        self._closes = False  # the end of this pass is handled
        self._weighed: set[int] = set()  # parameters whose `.grad` was multiplied in this pass
        self._forget()

    def _forget(self) -> None:
        """Reset the state for a global batch."""
        self.is_reduced = False
        self._stepped: set[int] = set()
        self._kept_for_padding: list[torch.Tensor | None] | None = None  # reduced gradients
        self._restored_in: Batch | None = None
        self._weights.forget()
        self._accumulated.forget()

    # Calls of the module ---------------------------------------------------------------------------------

    def begin_forward(self, is_asked_to_reduce: bool) -> bool:
        """Return whether the backward pass of this forward pass reduces by the reducer; not in no_sync(), if the module
        asked for that."""
        batch = _undecided()
        self._watch()
        self._weighed.clear()
        for parameter in self._zeroed:  # the reducer compares with the gradients of this pass
            parameter.grad = None
        self._zeroed.clear()
        self._taken.clear()  # of a pass that raised
        if batch is None:
            self._reduces = is_asked_to_reduce
        else:
            self._notice(batch)
            # Where the loader accumulates, `no_sync()` does not decide which loop body is the last one.
            self._reduces = batch.is_last and not batch.is_padding and (is_asked_to_reduce or self._accumulates())
        self.is_alone = self._reduces and batch is not None and self._needs_no_reducer(batch)
        if self.is_alone:
            self._reduces = self._closes = False
            self._arrived.clear()
        return self._reduces

    def _needs_no_reducer(self, batch: Batch) -> bool:
        """Return whether `.grad` has its final value at the end of the pass: a mean over all items of a single worker
        has weight 1 for any `fd.weight`. The reducer takes a tenth of a step of 4 ms."""
        return (
            world.current().transport.size == 1
            and self.hook is None
            and not (
                self._finds_unused or batch.global_batch.is_divided or batch.global_batch.added or self._accumulates()
            )
        )

    def _notice(self, batch: Batch) -> None:
        """Set the current batch. The state belongs to the last global batch, which was decided or aborted if there is a
        new one."""
        last, self.batch = self.batch, batch
        if batch is last:
            return
        if batch.index == 0 or last is None or batch.global_batch is not last.global_batch:
            self._forget()
            step.take_part(self)
            if self._has_stale:
                self._has_stale = False
                for parameter in self.parameters:
                    parameter.grad = None
        else:
            self._accumulated.begin_body()

    # Calls of the reducer --------------------------------------------------------------------------------

    def on_bucket(self, _: object, bucket: GradBucket) -> Future[torch.Tensor]:
        """Handle a bucket: the communication hook of DistributedDataParallel, which runs inside backward()."""
        if bucket.index() == 0:
            self._pass = self._begin_pass()
        future = self._pass.take(bucket)
        if bucket.is_last():
            self.has_passed = self.is_reduced = True
            self._reduces = False
            self._weighed.clear()
        return future

    def used_before(self) -> list[int]:
        """Return the places of the parameters that have gradients of earlier micro-batches."""
        keys = self._accumulated.keys()
        return [place for place, each in enumerate(self.parameters) if id(each) in keys] if keys else []

    def _begin_pass(self) -> Pass:
        self._pass.end_overlap("a backward pass ended before its last bucket, and another one was begun")
        batch = _undecided()
        if batch is None:
            return PlainPass(self.hook)
        self._notice(batch)
        if step.is_aborted() or (self._owned and self._owned <= self._stepped):
            return DroppedPass()
        if self.is_reduced and batch.global_batch.micro_batches > 1:
            raise StepError(
                "a second backward pass for the same batch before optimizer.step(), with micro-batches: its gradients "
                "are reduced already. Add the losses and call backward() once"
            )
        step.begin_pass(batch)
        factor = self._factor(batch)
        header = header_of(batch, self._digest, self._weights.header_weight())
        overlaps = may_overlap(world.current())
        return StepPass(batch, header, factor, self._accumulated, self.hook, self._weighed, overlaps)

    def _factor(self, batch: Batch) -> float:
        """Return the factor of this batch's gradients."""
        factor = self._weights.record(batch)
        return factor * (batch.global_batch.added or 1)

    # Micro-batches before the last one, and loop bodies that do not count -----------------------------------

    def _watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            for parameter in self.parameters:
                is_trained = parameter.requires_grad  # torch accepts hooks only then, and keeps them
                parameter.requires_grad_(True)
                parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
                parameter.requires_grad_(is_trained)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Handle a gradient. Runs inside backward(), once for each parameter."""
        batch = _undecided()
        if batch is None:
            return
        self._notice(batch)
        step.begin_pass(batch)
        if batch.is_last and not batch.is_padding:
            if self.is_alone:
                self._arrived.add(id(parameter))
                if not self._closes:
                    self._closes = True
                    at_end_of_pass(self._close_alone)
            elif self._reduces and not step.is_aborted():
                self._weigh(parameter, batch)
        elif batch.is_padding:
            if self._restored_in is not batch:
                self._restored_in = batch
                at_end_of_pass(self._restore)
        else:
            if not self._taken:
                at_end_of_pass(self._show_zeros)
            self._taken.append(parameter)
            self._accumulated.take(parameter, self._factor(batch), may_be_dropped=step.is_shared())

    def _close_alone(self) -> None:
        """Conclude a pass without the reducer. Runs at the end of backward(). As with the reducer, gradients are those
        of the step once all parameters have one."""
        self._closes = False
        batch = _undecided()
        if batch is None or len(self._arrived) < len(self.parameters):
            return
        self.is_reduced = True
        if step.is_aborted() or (self._owned and self._owned <= self._stepped):
            self._drop()
            return
        self._weights.record(batch)
        try:
            conclude_alone(batch)
        except RecoverableError:
            self._drop()
            if not absorb():
                raise
        else:
            step.mark_reduced()

    def _drop(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.detach().zero_()

    def _show_zeros(self) -> None:
        """Set `.grad` to zeros where gradients were accumulated, so that code which inspects gradients, clips them or
        steps a GradScaler finds the expected values in each micro-batch. Runs at the end of backward(): the reducer
        takes a parameter with a gradient for one that its own next pass has to reduce."""
        for parameter in self._taken:
            parameter.grad = torch.zeros_like(parameter)
        self._zeroed += self._taken
        self._taken.clear()

    def _weigh(self, parameter: torch.Tensor, batch: Batch) -> None:
        """Multiply a gradient before the reducer copies it into its bucket, while it is in the cache."""
        factor = self._factor(batch) * (1.0 if self.hook is None else float(world.current().transport.size))
        gradient = parameter.grad
        if gradient is not None and factor:  # a dummy batch's inf times 0 would be NaN: its buckets are zeroed
            self._weighed.add(id(parameter))
            if factor != 1.0:
                (gradient.detach() if gradient.requires_grad else gradient).mul_(factor)

    def begin_micro_batch(self) -> None:
        """Do nothing: the next forward pass drops what is left of the last one."""

    def begin_padding(self) -> None:
        """Remember the reduced gradients: autograd adds to them in place."""
        if self.is_reduced:
            self._kept_for_padding = [None if each.grad is None else each.grad.clone() for each in self.parameters]

    def _restore(self) -> None:
        if self._kept_for_padding is None:
            return
        for parameter, gradient in zip(self.parameters, self._kept_for_padding, strict=True):
            if gradient is None or parameter.grad is None:
                parameter.grad = None if gradient is None else gradient.clone()
            else:
                parameter.grad.copy_(gradient)

    def end_overlap(self, reason: str) -> None:
        """Note that the step ends undecided, and wait until no reduction is under way."""
        self._has_stale = True
        self._pass.end_overlap(reason)
        if self.hook is not None:
            self.hook.undo()

    # Calls of the optimizers -----------------------------------------------------------------------------

    def own(self, keys: Collection[int]) -> None:
        """Note that an optimizer has these parameters, by id."""
        self._owned.update(self.keys.intersection(keys))

    def stepped(self, keys: Collection[int]) -> None:
        """Note that the optimizer of these parameters has stepped. Later passes do not count once all optimizers
        have."""
        self._stepped.update(keys)

    def begin_step(self, batch: Batch, keys: Collection[int]) -> bool:
        """Begin step() of an optimizer of the parameters `keys`. Returns whether their gradients are those of the
        global batch."""
        self._notice(batch)
        if not batch.is_last:
            self._weights.record(batch)
            self._refuse_set()
            self._accumulated.close_body(keys)
            return False
        if batch.is_padding and self._restored_in is not batch:
            self._restored_in = batch
            self._restore()
        return self.is_reduced

    def _refuse_set(self) -> None:
        """Raise StepError for gradients of a micro-batch that come from no backward pass: they are weighted by none."""
        known = set(map(id, self._zeroed))
        for place, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is not None and id(parameter) not in known and not step.is_aborted() and gradient.any():
                raise StepError(
                    f"the gradient of parameter {place} of the DistributedDataParallel, of shape "
                    f"{tuple(parameter.shape)}, comes from no backward pass of this micro-batch, but from p.grad = ... "
                    f"or from an earlier step: call zero_grad() in each loop body, and use fd.DistributedOptimizer for "
                    f"gradients of torch.autograd.grad()"
                )

    def begin_zeroing(self, batch: Batch, keys: Collection[int]) -> bool:
        """Return whether zero_grad() may proceed: not while the micro-batches of a global batch are being
        accumulated."""
        self._notice(batch)
        if step.is_aborted() or (batch.global_batch.micro_batches == 1 and not batch.is_padding):
            return True
        if step.drops_reduced(batch):
            return True
        if batch.is_padding:
            return False
        if step.is_shared():  # e.g. gradients of a generator's loss in the discriminator
            self._accumulated.drop_body(keys)
            self.is_reduced = False
            return True
        return batch.index == 0


def may_overlap(here: World) -> bool:
    """Return whether buckets are reduced during backward: where tensors travel between hosts, so that a reduction
    mostly waits, or over connections within a host that has a core for it."""
    placement = here.placement
    if placement.size == 1 or isinstance(host_transport(here.transport), SharedMemoryTransport):
        return False
    return placement.size > placement.local_size or usable_cores() > placement.local_size * torch.get_num_threads()


def _undecided() -> Batch | None:
    """Return the current batch, if its step is not decided."""
    return step.batch() if step.is_undecided() else None
