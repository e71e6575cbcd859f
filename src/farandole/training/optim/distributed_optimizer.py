"""DistributedOptimizer: an optimizer whose gradients are those of the global batch when backward() returns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol, cast

import torch

from farandole.errors import StepError
from farandole.registry import factory
from farandole.training.collectives.extension import SomeRanks
from farandole.training.collectives.transport import Reduction
from farandole.training.optim.compression import Compression, Compressor
from farandole.training.optim.loader_path import LoaderPath
from farandole.training.optim.optimizer_mixin import (
    OptimizerT,
    WrappedOptimizer,
    become,
    closure_of,
    protect,
    wrap,
    zeroing,
)
from farandole.training.optim.options import Options, groups_of, recommend_fused
from farandole.training.state import step
from farandole.training.state.batch import Batch
from farandole.training.state.optimizer_state import refuse_shards
from farandole.training.state.step import StepStatus


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: OptimizerT,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: Reduction = Reduction.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: SomeRanks | None = None,
    *,
    loss: Literal["mean", "sum"] = "mean",
    bucket_mb: float | None = None,
) -> OptimizerT:
    """Make an optimizer train data-parallel. Call it after `init()`.

    With a DataLoader of Farandole:

    - Gradients are final when `backward()` returns: summed over all workers, weighted so that the sum is the gradient
      of the mean loss over the global batch. Clip, unscale or log them as usual. Parameters without a gradient on this
      worker hold the others' (or zeros).
    - `step()` returns True when the step was applied, False when it was not: a fault came first and the loader hands
      out the same global batch again, or a global batch of several micro-batches is still open.
    - `zero_grad()` does nothing while the micro-batches of a global batch are being accumulated.
    - Several backward passes before `step()` add up, as with DDP: each of them reduces. With micro-batches or
      loss="sum", the second one raises StepError.
    - Gradients that the script sets itself, as by `torch.autograd.grad()`, are those of the global batch after
      `synchronize()`, which each loop body calls when the last one is set, or after a `backward()` that follows. With
      several workers a step without either raises StepError.
    - `step(closure)` returns the closure's loss. Methods that the optimizer's class adds, such as SAM's `first_step()`,
      are part of the step, and a method inside which an optimizer steps decides it. With micro-batches they raise
      StepError.
    - Several optimizers in one loop body (a GAN) make one step together when a TorchState has them all. Each batch is
      trained with the optimizers that step in its body: a generator may step for every fifth batch only.
    - Of the arguments only `compression`, `loss` and `bucket_mb` may differ from their defaults; else the first batch
      raises StepError. It raises ConfigError for parameters that are not on one device, and CollectiveMismatch when
      workers reduce different steps or have different models.

    Without one, as in Horovod:

    - Gradients are averaged over the workers by named operations: all dense ones on the CPU by one for each dtype,
      `gradients.NAME` with the name of the first parameter; the others by `gradient.NAME`. They are final when
      `backward()` returns if it left no parameter of the optimizer without its gradients; in any case when
      `synchronize()` or `step()` returns. Parameters without a gradient take part with zeros.
    - `step(closure)` reduces after each call of the closure. `step()` without a closure returns True.
    - Horovod's scripts call `synchronize()` before they change gradients, and `step()` inside `with
      skip_synchronize():`; the first without the second gives a warning.
    - After a failed collective (HorovodInternalError) nothing of the step is left: gradients are None.

    A RuntimeWarning is given once if a large model is stepped by a slow loop although the optimizer has a faster
    implementation (`fused=True`).

    Args:
        optimizer: The optimizer to wrap.
        named_parameters: `model.named_parameters()`. Without it, names are made of the parameters' places.
        compression: A class with compress() and decompress(), applied around the reduction.
        backward_passes_per_step: Number of passes that are summed on each worker before a gradient is reduced; the sum
            is not divided by it. One more pass raises AssertionError, as does `zero_grad()` between `backward()` and
            `step()`.
        op: Average, Sum, ...; for Adasum see adasum_delta.DeltaOptimizer.
        gradient_predivide_factor: Factor f: gradients are divided by f before the sum, and by (workers / f) after it.
        num_groups: Horovod's older name for `groups`.
        groups: A number of groups, or lists of parameters that are reduced all or none.
        sparse_as_dense: Convert sparse gradients to dense ones for the reduction; else they are gathered.
        process_set: A fd.ProcessSet, the workers that reduce with each other; others keep their own gradients. None:
            all workers.
        loss: With a loader of Farandole: "mean", the loss is a mean over the samples of the batch, or over the number
            of items given to `fd.weight(n)`; "sum", it is a sum, and nothing is divided.
        bucket_mb: With a loader of Farandole: the minimum size in megabytes of the buckets into which gradients are cut
            and which are reduced while backward continues; 0: one bucket, reduced at its end. Chosen automatically
            unless given here or in FARANDOLE_BUCKET_MB; the value of rank 0 counts.

    Returns:
        An instance of the same class (isinstance holds), sharing state, defaults and parameter groups with `optimizer`.

    Raises:
        ValueError: An argument is invalid.
        StepError: The optimizer was wrapped before.
        NotInitialized: `init()` was not called.

    Examples:
        >>> optimizer = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    """
    groups = groups_of(groups, num_groups)
    options = Options(
        compression, Reduction(op), gradient_predivide_factor, groups, sparse_as_dense, process_set, loss, bucket_mb
    )
    mixin = factory("Adasum's optimizer") if options.op == Reduction.ADASUM else ReducingOptimizer
    wrapped: Any = wrap(optimizer, mixin)
    wrapped.distribute(named_parameters, backward_passes_per_step, options)
    recommend_fused(wrapped)
    return cast(OptimizerT, wrapped)


def reduce_in_place(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer a DistributedOptimizer with default arguments: the same object, which scripts refer to."""
    become(optimizer, ReducingOptimizer)
    assert isinstance(optimizer, ReducingOptimizer)
    optimizer.distribute(None, 1, Options())


class PathWithoutLoader(Protocol):
    """From gradient to step where there is no batch of a loader: the NamedPath of Horovod's scripts."""

    was_synchronized: bool

    def name(self, names: dict[torch.Tensor, str]) -> None: ...
    def on_gradient(self, parameter: torch.Tensor) -> None: ...
    def reduce_rest(self) -> bool: ...
    def synchronize(self) -> None: ...
    def begin(self, parameter: torch.Tensor) -> tuple[Any, Any]: ...
    def forget(self) -> None: ...


class ReducingOptimizer(WrappedOptimizer):
    """An optimizer that reduces gradients, then steps. Mixed in before the user's optimizer class."""

    farandole_attributes = WrappedOptimizer.farandole_attributes | {
        "_loader_path",
        "_path_without_loader",
        "_reduces_in_step",
        "_loss",
    }

    def distribute(self, named_parameters: Iterable[Any] | None, passes_per_step: int, options: Options) -> None:
        refuse_shards(self._all_parameters())
        self._set_up(named_parameters, passes_per_step)
        self._loader_path = LoaderPath(self._all_parameters, lambda: self._parameter_names, options, self._passes)
        self._path_without_loader: PathWithoutLoader = factory("path without a loader")(
            self._parameter_names, options, self._passes
        )
        self._reduces_in_step = True
        self._loss = options.loss

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # a Function that returns no gradient for it
            return
        batch = step.batch()
        if batch is not None:
            if self._loader_path.waits_in is not batch:
                self._loader_path.on_gradient(parameter, batch)
        else:
            self._path_without_loader.on_gradient(parameter)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self.groups_changed()
        self._path_without_loader.name(self._parameter_names)

    def groups_changed(self) -> None:
        """Note that the optimizer has other groups than before."""
        self._loader_path.plan_anew()

    # Methods that the user calls -------------------------------------------------------------------------

    def step(self, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Reduce the remaining gradients, and apply all of them (see DistributedOptimizer). Arguments other than a
        closure are those of the optimizer's class."""
        closure, apply = closure_of(self, closure, args, kwargs)
        batch = step.batch()
        if batch is not None:
            return step_along([self._loader_path], self, batch, apply, closure)
        if self._loss == "sum":
            raise StepError('loss="sum" needs a batch of a DataLoader of Farandole, and there is none; use op=Sum')
        if closure is None:
            self._reduce_for_step()
        loss = apply(gradients=self._gradients()) if closure is None else apply(self._reduced(closure))
        self._path_without_loader.forget()
        step.mark_stepped(self)
        return loss if closure is not None else True

    # torch wraps step() of every optimizer class with a profiler range and hooks; the base class's step() is wrapped
    # already.
    step.hooked = True  # type: ignore[attr-defined]

    def _decide_within(self, batch: Batch) -> None:
        decide_along([self._loader_path], self, batch)

    def synchronize(self) -> None:
        """Reduce the remaining gradients, and those that the script has set; afterwards gradients may be changed."""
        batch = step.batch()
        if batch is not None:
            self._loader_path.synchronize(batch)
        else:
            self._path_without_loader.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which step() reduces nothing: for use after synchronize()."""
        self._reduces_in_step = False
        try:
            yield
        finally:
            self._reduces_in_step = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients as torch does. With a loader it does nothing while the micro-batches of a global batch are
        being accumulated; without one it raises AssertionError between backward() and step()."""
        batch = step.batch()
        if batch is not None:
            if not self._loader_path.begin_zeroing(batch):
                return
            set_to_none |= batch.is_strict  # 0 plus a negative zero is a positive one, which depends on the world
        else:
            self._passes.refuse_zeroing()
            self._path_without_loader.forget()
        super().zero_grad(**zeroing(set_to_none))
        if not set_to_none:
            self._loader_path.zeroed()

    def abandon_step(self) -> None:
        super().abandon_step()
        self._path_without_loader.forget()
        self._loader_path.forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._path_without_loader.forget()
        super().load_state_dict(state_dict)

    # Without a loader ------------------------------------------------------------------------------------

    def _allreduce_grad_async(self, p: torch.Tensor) -> tuple[Any, Any]:
        """Do as Horovod's method of this name, by which libraries recognize a distributed optimizer: begin the
        reduction of one gradient, and return its handle and what its decompression needs."""
        return self._path_without_loader.begin(p)

    def _reduce_for_step(self) -> None:
        if not self._reduces_in_step:
            return
        if self._path_without_loader.was_synchronized:
            self._path_without_loader.was_synchronized = False
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): "
                "gradients that were changed or added to since then may be reduced once more. Write "
                "`with optimizer.skip_synchronize(): optimizer.step()`",
                stacklevel=3,
            )
        if self._path_without_loader.reduce_rest():
            self._look_for_inf_again()

    def _reduced(self, closure: Callable[[], float]) -> Callable[[], float]:
        """Return the closure with a reduction after it."""

        def reduced() -> float:
            self._passes.restart()  # each call counts as all passes of a step
            loss = closure()
            self._reduce_for_step()
            return loss

        return reduced

    def _look_for_inf_again(self) -> None:
        """Check the reduced gradients for inf again. A GradScaler has checked them before the reduction, and all
        workers must decide alike."""
        found = self.__dict__.get("found_inf")
        if found is None:
            return
        has_inf = any(not bool(torch.isfinite(_values(gradient)).all()) for gradient in self._gradients())
        self.found_inf = torch.full_like(found, float(has_inf)) if isinstance(found, torch.Tensor) else has_inf


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.is_sparse else gradient


# The step along one path of gradients, or along several: one for each module in DistributedDataParallel ---------------


def step_along(
    paths: Sequence[LoaderPath],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    apply: Callable[..., Any],
    closure: Callable[[], float] | None,
) -> Any:
    """Apply the reduced gradients of the paths by `apply`. True: applied by all workers. False: not applied. With a
    closure, its loss."""
    _refuse_untracked(optimizer)
    for path in paths:
        path.notice(batch)
    if closure is not None:
        return _step_with(closure, paths, optimizer, batch, apply)
    if not batch.is_last:
        step.facts().has_early_step = True
        for path in paths:
            path.end_body(batch)
        return False
    for path in paths:
        path.reduce_rest(batch)
    step.begin_applying(optimizer)
    if step.is_aborted():
        return False
    for path in paths:
        path.refuse_second_step()
        path.refuse_unplanned()
    if step.awaits_others(optimizer):
        protect(optimizer)
    for path in paths:
        path.applied()
    apply(gradients=[each for path in paths for each in path.tensors()])
    step.mark_stepped(optimizer)
    return True


def _step_with(
    closure: Callable[[], Any],
    paths: Sequence[LoaderPath],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    apply: Callable[..., Any],
) -> Any:
    """Step with a closure. The optimizer runs backward passes itself, each of which reduces; it may change parameters
    between them."""
    if batch.global_batch.is_divided or batch.is_padding:
        raise StepError(
            "step(closure) with micro-batches of a DataLoader of Farandole: the closure's backward pass would be one "
            "of several. Call backward() first and step() without a closure, or leave micro_batch_size out"
        )
    if step.is_aborted():
        with torch.enable_grad():
            return closure()  # its loss may be needed, its gradients do not count
    for path in paths:
        path.refuse_unplanned()
    step.begin_applying(optimizer)
    protect(optimizer)
    loss = apply(closure)
    if not step.is_aborted():
        decide_along(paths, optimizer, batch)
    return loss


def decide_along(paths: Sequence[LoaderPath], optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Decide a step whose reduced gradients the optimizer has applied by itself. Raises StepError if they were not."""
    _refuse_untracked(optimizer)
    for path in paths:
        path.notice(batch)
        path.refuse_second_step()
    if step.status() is not StepStatus.REDUCED:
        raise StepError(
            f"{type(optimizer).__name__} has stepped without the gradients of the global batch: each loop body "
            f"needs a backward pass between zero_grad() and the step"
        )
    for path in paths:
        path.refuse_unplanned()
        path.applied()
    step.mark_stepped(optimizer)


def _refuse_untracked(optimizer: torch.optim.Optimizer) -> None:
    if not step.is_tracked(optimizer):
        raise StepError(
            "optimizer.step() of an optimizer that belongs to no TorchState, within the loop over a DataLoader of "
            "Farandole, whose steps all workers decide: pass it to the state, TorchState(..., NAME=optimizer), or "
            "call its step() outside of the loop"
        )
