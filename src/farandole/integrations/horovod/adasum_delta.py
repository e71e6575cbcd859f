"""DistributedOptimizer(op=Adasum), which combines the workers' local steps instead of their gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from farandole.errors import StepError
from farandole.integrations.horovod.named.adasum import is_power_of_two, require_power_of_two
from farandole.integrations.horovod.named.calls import Reduced, allreduce_together_
from farandole.integrations.horovod.named.negotiation import Adasum, Average
from farandole.integrations.horovod.named.tensor_queue import synchronize
from farandole.training.collectives import world
from farandole.training.collectives.extension import are_all
from farandole.training.optim.optimizer_mixin import WrappedOptimizer, closure_of, counts_passes, zeroing
from farandole.training.optim.options import Options
from farandole.training.state import step
from farandole.training.state.session import SESSION


class DeltaOptimizer(WrappedOptimizer):
    """An optimizer that steps on local gradients and replaces its changes of the parameters by all workers' changes,
    combined by Adasum (adasum.py). Momentum and other state stay each worker's own. Mixed in before the user's class.

    - Raises NotImplementedError for process sets other than the global one, and when it is made in a world whose size
      is not a power of two, unless an elastic function runs.
    - In an elastic job the size changes. At a size that is not a power of two, the changes are averaged instead of
      combined by Adasum (4 workers become 3), with one warning; back at a power of two it is Adasum again. A worker
      alone takes its own step; when others join (1 becomes 2), changes are combined from the next step on.
    - `synchronize()` does nothing: there is nothing to reduce before `step()`. `skip_synchronize()` raises
      AssertionError.
    - After a failed collective the parameters are as before the step; the state of the user's class (momentum) has
      changed. A TorchState restores both.
    """

    farandole_attributes = WrappedOptimizer.farandole_attributes | {"_compression", "_has_warned"}

    def distribute(self, named_parameters: Iterable[Any] | None, passes_per_step: int, options: Options) -> None:
        if not are_all(options.process_set):
            raise NotImplementedError("op=Adasum combines all workers only; leave process_set out, or use Average")
        if not SESSION.is_elastic:
            require_power_of_two(world.current().placement.size)
        self._compression = options.compression
        self._has_warned = False
        self._set_up(named_parameters, passes_per_step)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        _refuse_batch()
        if counts_passes():
            self._passes.count(id(parameter))

    def step(self, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Step, combine the changes, and apply the result. Returns the closure's loss, or True without a closure."""
        _refuse_batch()
        closure, apply = closure_of(self, closure, args, kwargs)
        moved = [parameter for parameter in self._parameter_names if parameter.requires_grad]
        is_alone = world.current().placement.size == 1
        before = [] if is_alone else [parameter.detach().clone() for parameter in moved]
        loss = apply(gradients=self._gradients()) if closure is None else apply(self._counted(closure))
        self._passes.forget()
        if not is_alone:
            self._combine(moved, before)
        step.mark_stepped(self)
        return loss if closure is not None else True

    # torch wraps step() of every optimizer class with a profiler range and hooks; the base class's step() is wrapped
    # already.
    step.hooked = True  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Do nothing: changes are combined in step()."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise AssertionError: step() is the collective."""
        raise AssertionError("skip_synchronize() is not possible with op=Adasum: call step() without it")
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients as torch does. Raises AssertionError between backward() and step()."""
        self._passes.refuse_zeroing()
        super().zero_grad(**zeroing(set_to_none))

    def _counted(self, closure: Callable[[], float]) -> Callable[[], float]:
        def counted() -> float:
            self._passes.restart()  # each call counts as all passes of a step
            return closure()

        return counted

    def _combine(self, moved: list[torch.Tensor], before: list[torch.Tensor]) -> None:
        """Replace this worker's changes by the combined ones. Any error leaves the parameters as they were before."""
        changes = [
            self._compression.compress(parameter.detach() - start)
            for parameter, start in zip(moved, before, strict=True)
        ]
        sent = [tensor.contiguous() for tensor, _ in changes]
        names = [f"delta.{self._parameter_names[parameter]}" for parameter in moved]
        reduced = [Reduced(name, [tensor]) for name, tensor in zip(names, sent, strict=True)]
        with torch.no_grad():
            try:
                synchronize(allreduce_together_(reduced, self._operation()))
            finally:
                for parameter, start in zip(moved, before, strict=True):
                    parameter.copy_(start)
            for parameter, tensor, (_, ctx) in zip(moved, sent, changes, strict=True):
                parameter.add_(self._compression.decompress(tensor, ctx))

    def _operation(self) -> Any:
        size = world.current().placement.size
        if is_power_of_two(size):
            return Adasum
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Adasum needs a power of two as the number of workers, which is {size} now: steps are averaged until "
                f"it is a power of two again",
                RuntimeWarning,
                stacklevel=4,
            )
        return Average


def _refuse_batch() -> None:
    if step.batch() is not None:
        raise StepError(
            "op=Adasum combines whole steps, and cannot be used with a DataLoader of Farandole, which weights "
            "gradients by the size of each worker's local batch; use op=Average with it, or torch's DataLoader"
        )
