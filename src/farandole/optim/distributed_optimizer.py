"""DistributedOptimizer: an optimizer whose gradients are those of the global batch when backward() returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from farandole.collectives import world
from farandole.errors import RecoverableError, StepError
from farandole.optim.buckets import BucketPlan
from farandole.optim.header import StepHeader, check
from farandole.state import boundary, step
from farandole.state.ticket import Batch

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def DistributedOptimizer(optimizer: OptimizerT) -> OptimizerT:  # noqa: N802 - Horovod's name
    """Make an optimizer train data-parallel. Returns an instance of the same class (isinstance holds),
    sharing state, defaults and parameter groups with `optimizer`.

    - Gradients are final when `backward()` returns: summed over all workers, weighted so that the sum is the
      gradient of the mean loss over the global batch. Clip, unscale or log them as usual. Parameters that
      got no gradient on this worker hold the others' (or zeros).
    - `step()` returns True when the step was applied, False when it was not: a fault came first and the
      loader hands out the same global batch again, or a global batch of several micro-batches is still open.
    - `zero_grad()` does nothing while a global batch is open.

    Without a loader of Farandole, gradients are averaged over the workers. Call it after `init()`; one
    backward pass for each batch. Raises ConfigError for parameters that are not on the CPU, StepError for a
    second backward pass before `step()`, CollectiveMismatch when workers reduce different steps.
    """
    if isinstance(optimizer, _Distributed):
        raise StepError("this optimizer is a DistributedOptimizer already; wrap it once")
    world.current()  # NotInitialized here is clearer than in the first backward pass
    base = optimizer.__class__
    wrapped_class = type(base.__name__, (_Distributed, base), {"__module__": base.__module__})
    wrapped: OptimizerT = object.__new__(wrapped_class)
    wrapped.__dict__.update(optimizer.__dict__)
    wrapped.__dict__.pop("step", None)  # a scheduler made before patched the step of the original into it
    wrapped._distribute()  # type: ignore[attr-defined]
    return wrapped


class _Distributed(torch.optim.Optimizer):
    """Mixed in before the user's optimizer class."""

    # GradScaler then always calls our step(), also when it would skip: a skipped step is decided too.
    _step_supports_amp_scaling = True

    def _distribute(self) -> None:
        # Fused optimizers unscale and skip by themselves; they say so on the instance or on their class.
        self._base_scales = self.__dict__.pop("_step_supports_amp_scaling", False)
        self._hooks: list[RemovableHandle] = []
        self._plan_buckets()

    def _plan_buckets(self) -> None:
        for hook in self._hooks:
            hook.remove()
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._plan = BucketPlan(parameters)
        self._filled: set[int] = set()  # parameters whose gradient of this ticket is in its bucket
        self._pass_is_open = False  # reset by zero_grad() too: a backward pass that raised never closes
        self._is_reduced = False
        self._has_stepped = False
        self._batch: Batch | None = None  # the one that all of this belongs to
        self._hooks = [p.register_post_accumulate_grad_hook(self._on_gradient) for p in parameters]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the new parameters are reduced from the next backward pass on."""
        super().add_param_group(param_group)
        self._plan_buckets()

    # From gradient to bucket -----------------------------------------------------------------------------

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Runs inside backward(), once for each parameter, while its gradient is hot in the cache."""
        if not self._pass_is_open:
            self._open_pass()
        if self._has_stepped:  # e.g. a generator's loss that runs through the discriminator
            return
        batch = step.batch()
        view, gradient = self._plan.view(parameter), parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if batch is None:
            weight = 1.0 / world.current().placement.size
        else:
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

    def _open_pass(self) -> None:
        self._notice_batch()
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
        if not self._has_stepped and (batch is None or batch.is_last):
            self._reduce()

    def _notice_batch(self) -> None:
        """What was kept belongs to the last global batch, which was decided or aborted, if there is a new one."""
        batch = step.batch()
        if batch is None:
            if self._has_stepped:
                self._forget()
        elif batch is not self._batch:
            self._batch = batch
            if batch.index == 0:
                self._forget()

    def _forget(self) -> None:
        self._filled.clear()
        self._is_reduced = self._has_stepped = False

    # From bucket to final gradient -----------------------------------------------------------------------

    def _reduce(self) -> None:
        """Make every `.grad` that of the global batch. A fault is absorbed where the loader can repeat
        the batch: gradients are zeroed and the step is marked as aborted."""
        for bucket in self._plan.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if id(parameter) not in self._filled:
                    view.zero_()
        try:
            self._reduce_buckets()
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

    def _reduce_buckets(self) -> None:
        here = world.current()
        buckets = self._plan.buckets
        for bucket in buckets[:-1]:
            here.transport.all_reduce(bucket.flat)
        last = buckets[-1].flat if buckets else torch.empty(0)
        notes = here.transport.all_reduce(last, self._header(here).pack())
        headers = [StepHeader.unpack(note) for note in notes]
        check(headers)
        boundary.agree([header.prepared for header in headers])

    def _header(self, here: world.World) -> StepHeader:
        batch = step.batch()
        ticket = batch.ticket if batch is not None else None
        return StepHeader(
            generation=here.id.number,
            step=boundary.steps_decided(),
            plan=self._plan.digest,
            epoch=ticket.epoch if ticket else -1,
            start=ticket.start if ticket else -1,
            stop=ticket.stop if ticket else -1,
            samples=ticket.samples if ticket else 0,
            prepared=boundary.prepared(),
        )

    def _publish(self) -> None:
        for bucket in self._plan.buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view if parameter.requires_grad else None

    # From gradient to step -------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Apply the reduced gradients. True: applied by all. False: not applied (see DistributedOptimizer)."""
        if closure is not None:
            raise StepError(
                "step(closure) would run several backward passes in one step, which would be reduced "
                "separately; call backward() first and step() without a closure"
            )
        batch = step.batch()
        if batch is not None and not batch.is_last:
            return False
        self._notice_batch()
        if not self._is_reduced:
            self._reduce()  # no backward pass reached our parameters; the other workers wait for us
        if step.state() == "aborted":
            return False
        self._refuse_unfrozen()
        self._has_stepped = True
        if self._base_scales:
            super().step()
        else:
            self._step_for_scaler()
        step.decided()
        return True

    # torch wraps step() of every optimizer class with a profiler range and hooks; the base class's is wrapped.
    step.hooked = True  # type: ignore[attr-defined]

    def _step_for_scaler(self) -> None:
        """What torch.amp.GradScaler leaves to optimizers that support it: unscale, and skip on inf or NaN.

        It has put `grad_scale` and `found_inf` on us, which the user's class must not see, and takes them off."""
        names = ("grad_scale", "found_inf")
        asked: dict[str, Any] = {name: self.__dict__.pop(name) for name in names if name in self.__dict__}
        scale, found_inf = asked.get("grad_scale"), asked.get("found_inf")
        try:
            if found_inf is not None and bool(found_inf):
                return
            if scale is not None:
                inverse = scale.double().reciprocal().float()
                for bucket in self._plan.buckets:
                    bucket.flat.mul_(inverse.to(bucket.flat.dtype))
            super().step()
        finally:
            self.__dict__.update(asked)

    def _refuse_unfrozen(self) -> None:
        """A parameter without our hook would be trained on local gradients: workers would drift apart."""
        for index, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            if parameter.requires_grad and not self._plan.holds(parameter):
                raise StepError(
                    f"parameter {index} of shape {tuple(parameter.shape)} did not require gradients when the "
                    f"DistributedOptimizer was made, and does now; unfreeze it before, or add it with "
                    f"add_param_group()"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; does nothing while the micro-batches of a global batch are being accumulated."""
        self._pass_is_open = False
        batch = step.batch()
        if batch is None:
            self._forget()  # nobody else tells us where the next batch begins
        elif batch.index > 0 and step.state() == "open":
            return
        super().zero_grad(set_to_none=set_to_none)
