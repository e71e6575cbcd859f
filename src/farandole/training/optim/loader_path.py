"""The path from gradient to step with a loader of Farandole: the use of each backward pass, and the time of the
reduction.

DistributedOptimizer takes this path whenever the loader has handed out a batch. step_reduction.py reduces. All
optimizers share the status of the step (state/step.py). Here each one has the status of its own gradients in the global
batch, and of its passes in the current loop body:

    LOCAL ── backward() of the last micro-batch ends ──► REDUCED ── step() ──► APPLIED
    LOCAL ── step() or synchronize() without such a backward() ──► REDUCED
    REDUCED ── one more backward() begins ──► REOPENED ── it ends ──► REDUCED
    REDUCED, REOPENED ── zero_grad() after backward() ──► LOCAL

    FRESH ── backward() begins ──► PASSED ── step(), further micro-batches follow ──► STEPPED
    PASSED ── zero_grad() ──► FRESH

A new global batch begins with LOCAL, each loop body with FRESH. REDUCED does not mean that the step has an effect:
after a fault the gradients are zeros, and the step is aborted.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping

import torch

from farandole.errors import RecoverableError, StepError
from farandole.training.optim.bucketed_gradients import BucketedGradients
from farandole.training.optim.optimizer_mixin import STEPPED_TWICE, at_end_of_pass
from farandole.training.optim.options import Options
from farandole.training.optim.passes import Passes
from farandole.training.optim.step_agreement import Weights
from farandole.training.optim.step_reduction import LocalGradients, StepReduction
from farandole.training.state import step
from farandole.training.state.batch import Batch
from farandole.training.state.session import SESSION
from farandole.training.state.step import StepStatus


class GradientStatus(enum.Enum):
    """The status of one optimizer's gradients in the current global batch."""

    LOCAL = enum.auto()  # of this worker: backward passes add to them
    REDUCED = enum.auto()  # of all workers; zeros if the reduction failed
    REOPENED = enum.auto()  # reduced, and a further backward pass adds to them
    APPLIED = enum.auto()  # the optimizer has stepped: further backward passes do not count


class BodyStatus(enum.Enum):
    """The status of one optimizer's backward passes in the current loop body."""

    FRESH = enum.auto()  # no pass counts yet
    PASSED = enum.auto()  # a pass counts, and zero_grad() may still drop it
    STEPPED = enum.auto()  # step() was called before the last micro-batch: further passes do not count


# Compared for each parameter; a look-up in an Enum takes 0.3 us in Python 3.11.
_APPLIED, _STEPPED = GradientStatus.APPLIED, BodyStatus.STEPPED


class LoaderPath:
    """Gradients of one optimizer with a loader.

    parameters  returns the optimizer's current parameters
    names       returns the parameters known to the optimizer, with their names
    """

    _ADVICE = (
        "Call optimizer.synchronize() when all gradients of the loop body are set, and before they are clipped or "
        "unscaled: it makes them those of the global batch"
    )

    def __init__(
        self,
        parameters: Callable[[], list[torch.Tensor]],
        names: Callable[[], Mapping[torch.Tensor, str]],
        options: Options,
        passes: Passes,
        reduction: StepReduction | None = None,
    ) -> None:
        self._parameters, self._names = parameters, names
        self._options = options
        self._batch: Batch | None = None  # the batch to which the following state belongs
        self.waits_in: Batch | None = None  # further gradients of the current pass of this batch need no handling
        self._pass_is_open = False  # also reset by zero_grad(), for a pass that raised
        self._factor = 0.0  # for the gradients of the last pass
        self._was_zeroed = False  # since the last step, gradients were set to zeros that are left in `.grad`
        self._weights = Weights(options.loss)
        step.add_losses(options.loss == "sum")
        self._reduction = reduction or StepReduction(names, options, passes)
        self.forget()

    def plan_anew(self) -> None:
        """Plan the reduction again, since the parameters have changed."""
        self._reduction.plan_anew()
        self._pass_is_open = False
        self.forget()

    def forget(self) -> None:
        """Reset the state for the time after a step."""
        self._status, self._body = GradientStatus.LOCAL, BodyStatus.FRESH
        self._filled: set[int] = set()  # parameters whose gradient of this global batch is taken
        self._taken: set[int] = set()  # those whose gradient of this loop body is taken
        self._is_final = False  # in this pass: no micro-batch follows
        self._overlaps = False  # in this pass: complete buckets are reduced while backward continues
        self._before: tuple[list[torch.Tensor], set[int]] | None = None  # gradients without this loop body
        self._kept_for_padding: list[torch.Tensor] | None = None  # reduced gradients
        self._weights.forget()

    # From gradient to that of the global batch -----------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor, batch: Batch) -> None:
        """Handle a gradient. Runs inside backward(), once for each parameter, while the gradient is in the cache."""
        if not self._pass_is_open or self._batch is not batch:  # a pass that raised is never closed
            self._open_pass(batch)
        if self._status is _APPLIED or batch.is_padding or not self._reduction.concerns(parameter):
            return  # e.g. a generator's loss passes through the discriminator; or see refuse_unplanned()
        if self._body is _STEPPED:
            parameter.grad = None
            return
        gradients, key = self._reduction.gradients, id(parameter)
        if isinstance(gradients, LocalGradients):
            self.waits_in = batch
            return
        gradients.put(parameter, self._factor, adds=key in self._filled, is_final=self._is_final)
        self._filled.add(key)
        self._taken.add(key)
        if self._overlaps:
            gradients.arrived(parameter)

    def _open_pass(self, batch: Batch) -> None:
        self.notice(batch)
        step.begin_pass(batch)
        self._reduction.refuse_half_reduced()
        self._factor = self._factor_of(batch)
        self._overlaps, self._is_final = False, batch.is_last
        is_second = self._body is BodyStatus.PASSED or (step.has_passed() and batch.global_batch.is_divided)
        if batch.is_strict and is_second and not batch.is_padding:
            raise StepError(
                "a second backward pass for the same batch, in strict mode: the gradient of a shard is that of one "
                "pass. Add the losses and call backward() once. What one optimizer's step() changes for the loss of "
                "another one, as in a GAN, depends on the number of loop bodies of a step, and so on that of workers"
            )
        if self._status is not _APPLIED and self._body is not _STEPPED and not batch.is_padding:
            if self._status is GradientStatus.REDUCED:
                self._reopen(batch)
            else:
                self._keep_before(batch)
                is_open = step.status() is StepStatus.OPEN
                self._overlaps = self._is_final and is_open and self._reduction.begin_overlap(batch)
            self._body = BodyStatus.PASSED
        self._pass_is_open = True
        at_end_of_pass(self._close_pass)

    def _factor_of(self, batch: Batch) -> float:
        """Return the factor of this loop body's gradients. Raises StepError."""
        return self._weights.record(batch) * (batch.global_batch.added or 1)

    def _reopen(self, batch: Batch) -> None:
        """Reopen a reduced batch, as with DDP: this pass's gradients are reduced together with the present ones, which
        are equal on all ranks. The present ones result unchanged, because the factors of all ranks add up to 1."""
        if batch.global_batch.is_divided or self._options.loss == "sum":
            raise StepError(
                "a second backward pass for the same batch before optimizer.step(), with micro-batches or "
                'loss="sum": its gradients are reduced already. Add the losses and call backward() once'
            )
        self._filled.clear()
        self._taken.clear()
        self._status = GradientStatus.REOPENED

    def _close_pass(self) -> None:
        """Close the pass. Runs at the end of backward(), on the thread that called it."""
        self._pass_is_open, self.waits_in = False, None
        batch = step.batch()
        if self._status is _APPLIED or batch is None:
            return
        if batch.is_strict and not (batch.is_padding or step.is_aborted()):
            step.end_pass(batch)
        if batch.is_padding:
            self._take_back()
            return
        if self._body is not _STEPPED and not step.is_aborted():
            self._take_set(batch)  # before the pass: they are reduced with its own
        if batch.is_last and self._is_complete():
            self._reduce(batch)

    def _is_complete(self) -> bool:
        """Return whether the gradients of the last micro-batch are complete at the end of this pass."""
        return True

    def notice(self, batch: Batch) -> None:
        """Set the current batch. The state belongs to the last global batch, which was decided or aborted if there is a
        new one."""
        last, self._batch = self._batch, batch
        if batch is last:
            return
        if batch.index == 0 or last is None or batch.global_batch is not last.global_batch:
            self.forget()
            self._reduction.begin(batch)
            step.take_part(self)
        if batch.is_strict and not batch.is_padding:
            self._reduction.begin_shard(batch)
        self._before, self._body = None, BodyStatus.FRESH
        self._taken.clear()

    # Gradients that no backward pass has left ------------------------------------------------------------
    #
    # They are those of torch.autograd.grad(), or computed in any other way, and `.grad` is set to them. Nobody but the
    # script knows when the last one is set. A reduction in step() would come after clipping, and after what a
    # GradScaler looks for.

    def synchronize(self, batch: Batch) -> None:
        """Reduce the gradients, those that the script has set included; between micro-batches, take them."""
        self.notice(batch)
        counts = not (batch.is_padding or step.is_aborted())
        if self._status in (GradientStatus.LOCAL, GradientStatus.REOPENED):
            self._factor = self._factor_of(batch)
            if counts:
                self._take_set(batch)
            self.reduce_rest(batch)
        elif counts and self._status is GradientStatus.REDUCED:
            self._taken.clear()
            for other in self._set_by_script():
                raise StepError(
                    f"the gradient of {self._names()[other]} was set after those of this batch were reduced, and they "
                    f"are not reduced once more: set gradients before the backward pass, or call zero_grad() first"
                )

    def _take_set(self, batch: Batch) -> None:
        """Take the gradients of this loop body that the script has set."""
        gradients, found = self._reduction.gradients, self._set_by_script()
        if isinstance(gradients, LocalGradients) or not found:
            return
        step.begin_pass(batch)  # in the count of samples that are trained
        if self._body is BodyStatus.FRESH:
            self._keep_before(batch)
            self._body = BodyStatus.PASSED
            if batch.is_strict and not step.has_passed():
                step.end_pass(batch)
        for parameter in found:  # a copy: it may be another one's, and the script's own is not to be changed
            parameter.grad = parameter.grad.detach().clone() if parameter.grad is not None else None
        for parameter in found:
            gradients.put(parameter, self._factor, adds=id(parameter) in self._filled)
            parameter.grad = None if batch.is_last else torch.zeros_like(parameter, requires_grad=False)
            self._filled.add(id(parameter))
            self._taken.add(id(parameter))

    def _keep_before(self, batch: Batch) -> None:
        """Keep the gradients without those of this loop body, which zero_grad() may drop."""
        if batch.index > 0 and step.is_shared() and self._before is None:
            self._before = self._reduction.copies(), set(self._filled)

    def _set_by_script(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients the script has set, unless they stay where they are."""
        gradients = self._reduction.gradients
        if isinstance(gradients, LocalGradients):
            return []
        return [each for each in gradients.parameters if self._is_set(each, gradients)]

    def _is_set(self, parameter: torch.Tensor, gradients: BucketedGradients) -> bool:
        gradient = parameter.grad
        if gradient is None or id(parameter) in self._taken or not parameter.requires_grad:
            return False
        if gradients.holds(parameter) and not self._was_zeroed:
            return False  # of the last step: the script has not zeroed it
        return bool(_has_values(gradient))

    def _refuse_set(self) -> None:
        """Raise StepError for gradients that the script has set, and not reduced by synchronize()."""
        for parameter in self._set_by_script():
            raise StepError(
                f"the gradient of {self._names()[parameter]} comes from no backward pass, but from "
                f"torch.autograd.grad() or from p.grad = ...: it is that of this worker's samples alone. {self._ADVICE}"
            )

    def _note_set_alone(self, batch: Batch) -> None:
        """Count the samples of a worker alone, whose gradients stay where the script has set them."""
        gradients = self._reduction.gradients
        if isinstance(gradients, LocalGradients) and not step.facts().passed:
            set_ = (each.grad for each in gradients.parameters if each.grad is not None)
            if any(bool(_has_values(gradient)) for gradient in set_):
                step.begin_pass(batch)

    def zeroed(self) -> None:
        """Note that zero_grad() has set gradients to zeros, and left the tensors."""
        self._was_zeroed = True

    # Loop bodies that do not count -----------------------------------------------------------------------

    def begin_micro_batch(self) -> None:
        """Drop what `.grad` has shown in the last loop body, whose gradients are taken: zeros, or what the script has
        made of them. Only what it makes of the gradients of the global batch counts."""
        if self._batch is None or self._batch.is_padding or self._status is not GradientStatus.LOCAL:
            return
        if not step.is_aborted() and self._body is not _STEPPED:
            self._refuse_set()
        if self._batch.is_strict:
            self._reduction.drop_shown()
        for parameter in self._reduction.gradients.parameters:
            if id(parameter) in self._taken:
                parameter.grad = None

    def begin_padding(self) -> None:
        """Remember the reduced gradients: autograd adds to them in place."""
        if self._status is GradientStatus.REDUCED:
            self._kept_for_padding = self._reduction.copies()

    def _take_back(self) -> None:
        if self._kept_for_padding is not None:
            self._reduction.gradients.publish()
            self._reduction.put_back(self._kept_for_padding)

    # Reduction over all ranks ----------------------------------------------------------------------------

    def reduce_rest(self, batch: Batch) -> None:
        """Reduce the gradients that no backward pass has reduced: the other workers wait for this one."""
        self.notice(batch)
        if batch.is_last and self._status in (GradientStatus.LOCAL, GradientStatus.REOPENED):
            self._factor = self._factor_of(batch)
            if not step.is_aborted():
                self._refuse_set()
                self._note_set_alone(batch)
            self._reduce(batch)

    def _reduce(self, batch: Batch) -> None:
        """Make every `.grad` that of the global batch. A fault is absorbed where the loader can repeat the batch:
        gradients are zeroed and the step is marked as aborted."""
        self._complete()
        self._status, self._was_zeroed = GradientStatus.REDUCED, False
        if step.is_aborted():  # aborted by another optimizer of this step
            self._reduction.drop()
            return
        try:
            self._add_up(batch)
        except RecoverableError:
            self._reduction.drop()
            step.abort()
            if not SESSION.run_loop.can_repeat():
                raise
        else:
            step.mark_reduced()

    def _add_up(self, batch: Batch) -> None:
        self._reduction.add_up(batch, self._weights.header_weight())

    def _complete(self) -> None:
        """Complete the gradients of the parameters that got none in this global batch."""
        is_kept = self._status is GradientStatus.REOPENED or (
            self._batch is not None and self._batch.global_batch.micro_batches == 1 and not self._was_zeroed
        )
        self._reduction.gradients.complete(self._filled, self._factor, is_kept)

    def end_overlap(self, reason: str) -> None:
        """Wait until no reduction runs in the background."""
        self._reduction.end_overlap(reason)

    # From gradient to step: distributed_optimizer.py -----------------------------------------------------

    def end_body(self, batch: Batch) -> None:
        """Note that step() was called, and further micro-batches follow."""
        self._weights.record(batch)
        if not (batch.is_padding or step.is_aborted()):
            self._refuse_set()
        self._body = _STEPPED

    def refuse_second_step(self) -> None:
        """Raise StepError if the optimizer has applied its gradients."""
        if self._status is _APPLIED:
            raise StepError(STEPPED_TWICE)

    def applied(self) -> None:
        """Note that the optimizer applies its gradients: further backward passes do not count."""
        self._status = _APPLIED

    def tensors(self) -> list[torch.Tensor]:
        """Return all gradients of the global batch, in as few tensors as possible."""
        return self._reduction.gradients.tensors()

    def refuse_unplanned(self) -> None:
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
        self.notice(batch)
        if self._status is _APPLIED or step.is_aborted():
            return True
        self._reduction.refuse_half_reduced()
        if (batch.is_padding or batch.global_batch.is_divided) and step.drops_reduced(batch):
            return True
        if batch.is_padding:
            return False
        if self._body is BodyStatus.PASSED and (not batch.global_batch.is_divided or step.is_shared()):
            self._drop_pass()
            return True
        # After backward(), the first loop body may be the last one, too, whose gradients count as those of all others.
        return batch.index == 0 and self._body is not BodyStatus.PASSED

    def _drop_pass(self) -> None:
        if self._before is None:
            self._filled = set()
        else:
            copies, filled = self._before
            self._filled = set(filled)
            self._reduction.put_back(copies)
        self._taken.clear()
        self._reduction.reopen_shard()
        self._before, self._body = None, BodyStatus.FRESH
        self._status = GradientStatus.LOCAL


def _has_values(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient._values() if gradient.is_sparse else gradient.detach()).any()
