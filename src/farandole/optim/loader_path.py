"""The path from gradient to step with a loader of Farandole: the use of each backward pass, and the time of the
reduction.

DistributedOptimizer takes this path whenever the loader has handed out a batch. step_reduction.py reduces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from farandole.errors import RecoverableError, StepError
from farandole.optim.optimizer_mixin import protect
from farandole.optim.options import Options
from farandole.optim.passes import Passes
from farandole.optim.scaled_step import STEPPED_TWICE, call_dropped, refuse_closure
from farandole.optim.step_reduction import LocalGradients, StepReduction
from farandole.optim.weighting import Weights
from farandole.state import loop_hooks, step
from farandole.state.global_batch import Batch


class LoaderPath:
    """Gradients of one optimizer with a loader.

    parameters  returns the optimizer's current parameters
    names       returns the parameters known to the optimizer, with their names
    """

    def __init__(
        self,
        parameters: Callable[[], list[torch.Tensor]],
        names: Callable[[], Mapping[torch.Tensor, str]],
        options: Options,
        passes: Passes,
    ) -> None:
        self._parameters, self._names = parameters, names
        self._options = options
        self._batch: Batch | None = None  # the batch to which the following state belongs
        self.waits_in: Batch | None = None  # further gradients of the current pass of this batch need no handling
        self._pass_is_open = False  # also reset by zero_grad(), for a pass that raised
        self._weights = Weights(options.loss)
        self._reduction = StepReduction(names, options, passes)
        self.forget()

    def plan_anew(self) -> None:
        """Plan the reduction again, since the parameters have changed."""
        self._reduction.plan_anew()
        self._pass_is_open = False
        self.forget()

    def forget(self) -> None:
        """Reset the state for the time after a step."""
        self._filled: set[int] = set()  # parameters whose gradient of this global batch is taken
        self._is_reduced = self._has_stepped = False
        self._is_again = False  # another pass adds to gradients that are reduced
        self._overlaps = False  # in this pass, complete buckets are reduced while backward continues
        self._is_last = False  # this pass belongs to the last micro-batch
        self._has_passed = False  # a pass of this loop body has ended, and step() was not called since
        self._is_closed = False  # step() was called in this loop body, and more micro-batches follow
        self._before: tuple[list[torch.Tensor], set[int]] | None = None  # gradients without this loop body
        self._reduced: list[torch.Tensor] | None = None  # kept during loop bodies that do not count
        self._weights.forget()

    # From gradient to that of the global batch -----------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor, batch: Batch) -> None:
        """Handle a gradient. Runs inside backward(), once for each parameter, while the gradient is in the cache."""
        if not self._pass_is_open or self._batch is not batch:  # a pass that raised is never closed
            self._open_pass(batch)
        if self._has_stepped or batch.is_padding or not self._reduction.concerns(parameter):
            return  # e.g. a generator's loss passes through the discriminator; or see _refuse_unplanned
        if self._is_closed:
            parameter.grad = None
            return
        gradients, key = self._reduction.gradients, id(parameter)
        if isinstance(gradients, LocalGradients):
            self.waits_in = batch
            return
        gradients.put(parameter, self._factor, adds=key in self._filled, is_final=self._is_last)
        self._filled.add(key)
        if self._overlaps:
            gradients.arrived(parameter)

    def _open_pass(self, batch: Batch) -> None:
        self._notice(batch)
        self._reduction.refuse_half_reduced()
        self._factor = self._weights.record(batch)
        self._overlaps, self._is_last = False, batch.is_last
        if not self._has_stepped and not self._is_closed and not batch.is_padding:
            if self._is_reduced:
                self._begin_again(batch)
            else:
                if batch.index > 0 and step.is_shared() and self._before is None:
                    self._before = self._reduction.copies(), set(self._filled)
                self._overlaps = self._is_last and step.state() == "open" and self._reduction.begin_overlap(batch)
            self._has_passed = True
        self._pass_is_open = True
        # Private, but the only hook at the end of backward(): torch 2.13 uses it in torch/nn/parallel/distributed.py.
        torch.autograd.Variable._execution_engine.queue_callback(self._close_pass)

    def _begin_again(self, batch: Batch) -> None:
        """Reopen a reduced batch, as with DDP: this pass's gradients are reduced together with the present ones, which
        are equal on all ranks. The present ones result unchanged, because the factors of all ranks add up to 1."""
        if batch.global_batch.micro_batches > 1 or self._options.loss == "sum":
            raise StepError(
                "a second backward pass for the same batch before optimizer.step(), with micro-batches or "
                'loss="sum": its gradients are reduced already. Add the losses and call backward() once'
            )
        self._filled.clear()
        self._is_reduced, self._is_again = False, True

    def _close_pass(self) -> None:
        """Close the pass. Runs at the end of backward(), on the thread that called it."""
        self._pass_is_open, self.waits_in = False, None
        batch = step.batch()
        if self._has_stepped or batch is None:
            return
        if batch.is_padding:
            self._take_back()
        elif batch.is_last:
            self._reduce(batch)

    def _notice(self, batch: Batch) -> None:
        """Set the current batch. The state belongs to the last global batch, which was decided or aborted if there is a
        new one."""
        last, self._batch = self._batch, batch
        if batch is last:
            return
        if batch.index == 0 or last is None or batch.global_batch is not last.global_batch:
            self.forget()
            self._reduction.begin(batch)
            step.take_part(self)
        self._before, self._has_passed, self._is_closed = None, False, False

    # Loop bodies that do not count -----------------------------------------------------------------------

    def begin_padding(self) -> None:
        """Remember the reduced gradients: autograd adds to them in place."""
        if self._is_reduced and not self._has_stepped:
            self._reduced = self._reduction.copies()

    def _take_back(self) -> None:
        if self._reduced is not None:
            self._reduction.gradients.publish()
            # Private, but without it each tensor is a call: torch 2.13 uses it in torch/optim/asgd.py.
            torch._foreach_copy_(self._reduction.gradients.tensors(), self._reduced)

    # Reduction over all ranks ----------------------------------------------------------------------------

    def reduce_rest(self, batch: Batch) -> None:
        """Reduce the gradients that no backward pass has reduced: the other workers wait for this one."""
        self._notice(batch)
        if batch.is_last and not self._is_reduced:
            self._weights.record(batch)
            self._reduce(batch)

    def _reduce(self, batch: Batch) -> None:
        """Make every `.grad` that of the global batch. A fault is absorbed where the loader can repeat the batch:
        gradients are zeroed and the step is marked as aborted."""
        self._complete()
        self._is_reduced = True
        if step.state() == "aborted":  # aborted by another optimizer of this step
            self._reduction.drop()
            return
        try:
            self._reduction.add_up(batch, self._weights.header_weight())
        except RecoverableError:
            self._reduction.drop()
            step.aborted()
            if not loop_hooks.can_repeat():
                raise
        else:
            step.reduced()

    def _complete(self) -> None:
        """Set the gradient of each parameter that got none in this global batch to zeros."""
        gradients = self._reduction.gradients
        if isinstance(gradients, LocalGradients):
            gradients.settle(self._factor if self._has_passed else 0.0)
        elif len(self._filled) < len(gradients.parameters):
            for parameter in gradients.parameters:
                if id(parameter) in self._filled:
                    continue
                if self._is_again and parameter.grad is not None:
                    gradients.put(parameter, self._factor, adds=False)
                else:
                    gradients.zero(parameter)

    def end_overlap(self, reason: str) -> None:
        """Wait until no reduction runs in the background."""
        self._reduction.end_overlap(reason)

    # From gradient to step -------------------------------------------------------------------------------

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
        apply: Callable[..., Any],
        closure: Callable[[], float] | None,
    ) -> Any:
        """Apply the reduced gradients by `apply`. True: applied by all workers. False: not applied. With a closure, its
        loss."""
        self._refuse_untracked(optimizer)
        self._notice(batch)
        if closure is not None:
            return self._step_with(closure, optimizer, batch, apply)
        if not batch.is_last:
            self._weights.record(batch)
            self._has_passed, self._is_closed = False, True
            return False
        self.reduce_rest(batch)
        step.applying(optimizer)
        if step.state() == "aborted":
            return False
        if self._has_stepped:
            raise StepError(STEPPED_TWICE)
        self._refuse_unplanned()
        if step.awaits_others(optimizer):
            protect(optimizer)
        self._has_stepped = True
        apply(gradients=self._reduction.gradients.tensors())
        step.stepped(optimizer)
        return True

    def _step_with(
        self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer, batch: Batch, apply: Callable[..., Any]
    ) -> Any:
        """Step with a closure. The optimizer runs backward passes itself, each of which reduces; it may change
        parameters between them."""
        refuse_closure(batch)
        if step.state() == "aborted":
            return call_dropped(closure)
        self._refuse_unplanned()
        step.applying(optimizer)
        protect(optimizer)
        loss = apply(closure)
        if step.state() != "aborted":
            self.decide_within(optimizer, batch)
        return loss

    def decide_within(self, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        """Decide a step whose reduced gradients the optimizer has applied by itself: in step(closure), or in a method
        of its own."""
        self._refuse_untracked(optimizer)
        self._notice(batch)
        if self._has_stepped:
            raise StepError(STEPPED_TWICE)
        if step.state() != "reduced":
            raise StepError(
                f"{type(optimizer).__name__} has stepped without the gradients of the global batch: each loop body "
                f"needs a backward pass between zero_grad() and the step"
            )
        self._refuse_unplanned()
        self._has_stepped = True
        step.stepped(optimizer)

    def _refuse_untracked(self, optimizer: torch.optim.Optimizer) -> None:
        if not step.is_tracked(optimizer):
            raise StepError(
                "optimizer.step() of an optimizer that belongs to no TorchState, within the loop over a DataLoader of "
                "Farandole, whose steps all workers decide: pass it to the state, TorchState(..., NAME=optimizer), or "
                "call its step() outside of the loop"
            )

    def _refuse_unplanned(self) -> None:
        """Raise StepError for a parameter whose gradients are not reduced: it would be trained on local ones, and
        workers would diverge."""
        for index, parameter in enumerate(self._parameters()):
            if not parameter.requires_grad or self._reduction.concerns(parameter):
                continue
            what = f"parameter {index} of shape {tuple(parameter.shape)}"
            if parameter in self._names():
                raise StepError(
                    f"{what} did not require gradients in the first step, and does now; unfreeze it before the first "
                    f"step, or add it with add_param_group()"
                )
            raise StepError(
                f"{what} was added to a parameter group after the optimizer was wrapped; its gradients are not "
                f"reduced: use add_param_group(), or wrap the optimizer when the model is complete"
            )

    def begin_zeroing(self, batch: Batch) -> bool:
        """Return whether zero_grad() may proceed: not while the micro-batches of a global batch are being accumulated.

        Between backward() and step() of one loop body it drops that body's gradients, e.g. those of a generator's loss
        in the discriminator. With a single optimizer and micro-batches they count.
        """
        self._pass_is_open, self.waits_in = False, None
        self._notice(batch)
        if self._has_stepped or step.state() == "aborted":
            return True
        self._reduction.refuse_half_reduced()
        if batch.is_padding:
            return False
        if self._has_passed and (batch.global_batch.micro_batches == 1 or step.is_shared()):
            self._drop_pass()
            return True
        return batch.index == 0

    def _drop_pass(self) -> None:
        if self._before is None:
            self._filled = set()
        else:
            copies, self._filled = self._before
            torch._foreach_copy_(self._reduction.gradients.tensors(), copies)
        self._before, self._has_passed = None, False
        self._is_reduced = self._is_again = False
