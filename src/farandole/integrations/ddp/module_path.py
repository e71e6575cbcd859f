"""The gradients of a DistributedDataParallel. Those of the parameters that one optimizer has, and those that none has,
go the way of a DistributedOptimizer (training/optim/loader_path.py); without a batch of a loader, Mean reduces them.

torch's rules decide which passes reduce: the one after a forward pass outside of no_sync(), as soon as all parameters
have a gradient, or, with find_unused_parameters, at its end. Gradients of other passes stay in `.grad`, and are reduced
with the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from farandole.errors import StepError
from farandole.integrations.ddp.comm_hook import CommHook, HookedReduce
from farandole.training.collectives import world
from farandole.training.collectives.background import of_gradients
from farandole.training.optim.bucketed_gradients import BucketedGradients
from farandole.training.optim.buckets import Buckets, is_same_memory
from farandole.training.optim.loader_path import GradientStatus, LoaderPath
from farandole.training.optim.optimizer_mixin import at_end_of_pass
from farandole.training.optim.options import Options
from farandole.training.optim.passes import Passes
from farandole.training.optim.step_reduction import StepReduction
from farandole.training.state import step
from farandole.training.state.batch import Batch

LOCAL, REDUCED = GradientStatus.LOCAL, GradientStatus.REDUCED


class ModuleGradients:
    """The gradients of one DistributedDataParallel.

    names        the parameters that it reduces, with their names
    accumulates  returns whether the loop body may run without step() (the loader's micro_batch_size)
    hook         the user's communication hook
    finds_unused  find_unused_parameters was given
    bucket_mb    least size of a bucket for a hook
    """

    def __init__(
        self,
        names: Mapping[torch.Tensor, str],
        accumulates: Callable[[], bool],
        hook: CommHook | None,
        finds_unused: bool,
        bucket_mb: float,
    ) -> None:
        self.names, self.finds_unused = dict(names), finds_unused
        self.keys = frozenset(map(id, self.names))
        self._accumulates, self._bucket_mb = accumulates, bucket_mb
        self._mean = Mean(list(names), finds_unused, int(bucket_mb * (1 << 20)))
        self._owned: list[frozenset[int]] = []  # parameters, by id, of each optimizer
        self.paths: list[ModulePath] = []
        self._path_of: dict[int, ModulePath] = {}
        self.reduces = False  # the next pass
        self.number = 0  # of the last forward pass
        self.set_hook(hook)
        for parameter in self.names:
            is_trained = parameter.requires_grad  # torch accepts hooks only then, and keeps them
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(is_trained)

    @property
    def hook(self) -> CommHook | None:
        return self._mean.hook

    def set_hook(self, hook: CommHook | None) -> None:
        """Let a hook reduce."""
        self._mean.hook = hook
        self._divide()

    def own(self, keys: Collection[int]) -> ModulePath:
        """Return a path of their own for the parameters of an optimizer, by id."""
        self._owned.append(self.keys.intersection(keys))
        self._divide()
        return self.paths[len(self._owned) - 1]

    def _divide(self) -> None:
        parts = [*self._owned, self.keys.difference(*self._owned)]
        for place, keys in enumerate(parts):
            names = {parameter: name for parameter, name in self.names.items() if id(parameter) in keys}
            if place == len(self.paths):
                self.paths.append(ModulePath(self))
            self.paths[place].set_names(names, place, self._options())
        if not parts[-1] and len(parts) > 1:
            self.paths.pop()
        self._path_of = {key: path for path, keys in zip(self.paths, parts, strict=False) for key in keys}

    def _options(self) -> Options:
        if self.hook is None:
            return Options()
        compression = self.hook.compression
        return Options(bucket_mb=self._bucket_mb) if compression is None else Options(compression)

    def hooked(self, place: int) -> HookedReduce | None:
        """Return what reduces the buckets of a path, if it is the user's hook."""
        hook = self.hook
        if hook is None or hook.compression is not None:
            return None
        return HookedReduce(hook, place, len(self.paths))

    # Passes ----------------------------------------------------------------------------------------------

    def begin_forward(self, is_asked_to_reduce: bool) -> Batch | None:
        """Note that a forward pass begins, whose backward pass reduces; not in no_sync(), if the module asked for that.
        Returns the batch of a step that is not decided."""
        batch = step.batch() if step.is_undecided() else None
        self.number += 1
        if batch is None:
            self.reduces = is_asked_to_reduce
            self._mean.begin_forward(is_asked_to_reduce)
            return None
        # Where the loader accumulates, `no_sync()` does not decide which loop body is the last one.
        self.reduces = batch.is_last and not batch.is_padding and (is_asked_to_reduce or self._accumulates())
        for path in self.paths:
            path.begin_forward(batch)
        return batch

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Handle a gradient. Runs inside backward(), once for each parameter, while the gradient is in the cache."""
        if parameter.grad is None:  # a Function that returns no gradient for it
            return
        batch = step.batch() if step.is_undecided() else None
        if batch is None:
            self._mean.on_gradient(parameter)
            return
        if len(self.paths) > 1:  # all reduce in each pass, in the same order on all ranks
            for path in self.paths:
                path.join_pass(batch)
        self._path_of[id(parameter)].on_gradient(parameter, batch)


class ModulePath(LoaderPath):
    """Gradients of a module's parameters that one optimizer has, or none."""

    _ADVICE = (
        "Call zero_grad() in each loop body, and use fd.DistributedOptimizer for gradients that no backward pass leaves"
    )

    def __init__(self, module: ModuleGradients) -> None:
        self._module, self._known = module, dict[torch.Tensor, str]()
        self._place = 0
        self._has_stale = False  # `.grad` may hold gradients of an aborted step
        self._arrived: set[int] = set()  # parameters, by id, with a gradient since the last forward pass
        self._used: set[int] = set()  # parameters with a gradient in this global batch, other than of dummy batches
        self._unused: list[torch.Tensor] = []  # without one on all ranks, whose `.grad` stays None
        self._note = b""  # for each parameter, whether this rank has a gradient
        self._reduced_for = 0  # number of the forward pass
        passes, options = Passes(1), Options()
        reduction = StepReduction(
            lambda: self._known, options, passes, lambda: module.hooked(self._place), plans_frozen=True
        )
        super().__init__(lambda: list(self._known), lambda: self._known, options, passes, reduction)

    def set_names(self, names: Mapping[torch.Tensor, str], place: int, options: Options) -> None:
        """Set the parameters, and the place among the paths of the module."""
        self._known, self._place = dict(names), place
        self._reduction.set_options(options)
        self.plan_anew()

    def forget(self) -> None:
        super().forget()
        self._used = set()
        self._unused = []

    def notice(self, batch: Batch) -> None:
        last = self._batch
        is_next = last is None or (
            batch is not last and (batch.index == 0 or batch.global_batch is not last.global_batch)
        )
        super().notice(batch)
        if is_next and self._has_stale:
            self._has_stale = False
            for parameter in self._known:
                parameter.grad = None

    # Passes ----------------------------------------------------------------------------------------------

    def begin_forward(self, batch: Batch) -> None:
        """Note that a forward pass begins."""
        self.notice(batch)
        self._pass_is_open, self.waits_in = False, None  # of a pass that raised
        self._arrived.clear()

    def on_gradient(self, parameter: torch.Tensor, batch: Batch) -> None:
        if self._batch is not batch:
            self.notice(batch)
        self._arrived.add(id(parameter))
        if not batch.is_dummy:
            self._used.add(id(parameter))
        if not self._pass_is_open and self._is_withheld(batch):
            step.begin_pass(batch)
        else:
            super().on_gradient(parameter, batch)

    def join_pass(self, batch: Batch) -> None:
        """Take part in a pass of the module, even if it leaves no gradient here."""
        if self._batch is not batch:
            self.notice(batch)
        if not self._pass_is_open and not self._is_withheld(batch):
            self._open_pass(batch)

    def _is_withheld(self, batch: Batch) -> bool:
        """Return whether the gradients of this pass stay in `.grad`, for the next one."""
        if not batch.is_last or batch.is_padding or self._status is not LOCAL:
            return False
        return not self._module.reduces or self._reduced_for == self._module.number

    def _is_complete(self) -> bool:
        return self._module.finds_unused or len(self._arrived) >= len(self._known)

    def _complete(self) -> None:
        self._reduced_for = self._module.number
        gradients = self._reduction.gradients
        if self._module.finds_unused:
            self._note = bytes(map(self._is_given, self._known))
            if isinstance(gradients, BucketedGradients):
                gradients.note = self._note
        super()._complete()

    def _is_given(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank has a gradient of the parameter."""
        key = id(parameter)
        return key in self._used if key in self._filled else parameter.grad is not None

    def _add_up(self, batch: Batch) -> None:
        super()._add_up(batch)
        if not self._module.finds_unused:
            return
        gradients = self._reduction.gradients
        notes: Sequence[bytes] = gradients.notes if isinstance(gradients, BucketedGradients) else [self._note]
        self._unused = [
            each for each, given in zip(self._known, zip(*notes, strict=True), strict=True) if not any(given)
        ]
        self._hide_unused()

    def _hide_unused(self) -> None:
        for parameter in self._unused:
            parameter.grad = None

    def _take_back(self) -> None:
        super()._take_back()
        self._hide_unused()

    def end_overlap(self, reason: str) -> None:
        """Note that the step ends undecided, and wait until no reduction is under way."""
        self._has_stale = True
        super().end_overlap(reason)
        if self._module.hook is not None:
            self._module.hook.undo()

    # Calls of the optimizer ------------------------------------------------------------------------------

    def reduce_rest(self, batch: Batch) -> None:
        """Raise StepError for gradients that are not reduced: workers would diverge."""
        self.notice(batch)
        if step.is_aborted() or not batch.is_last or self._status not in (LOCAL, GradientStatus.REOPENED):
            return
        raise StepError(
            "optimizer.step() of a batch whose gradients were not reduced: each loop body needs a backward pass "
            "outside of no_sync(), of an output of the DistributedDataParallel itself (not of its .module); where "
            "some parameters get no gradient in it, pass find_unused_parameters=True"
        )

    def refuse_unplanned(self) -> None:
        """Do nothing: the optimizer compares its parameters with those of all its modules."""

    def tensors(self) -> list[torch.Tensor]:
        """Return the gradients as the script has left them: it may have replaced some."""
        return [each.grad for each in self._known if each.grad is not None]

    def begin_zeroing(self, batch: Batch) -> bool:
        self.notice(batch)
        if self._status is REDUCED and not batch.global_batch.is_divided and not batch.is_padding:
            return True  # what the script makes of the gradients of the step counts
        return super().begin_zeroing(batch)


# The mean over all workers, where there is no batch of a loader -------------------------------------------------------
#
# Under the commit rule, in a static job, between steps. As in torch, but with the same buckets on all workers at all
# times: torch's reducer cuts them anew after the first pass, which a worker that joins would do alone.


class Mean:
    """The mean of these gradients. Raises the errors of transports.

    finds_unused  parameters without a gradient on all ranks keep none; else a pass reduces when all have one
    least_bytes   the size of a bucket at least
    hook          the user's
    """

    hook: CommHook | None = None

    def __init__(self, parameters: Sequence[torch.Tensor], finds_unused: bool, least_bytes: int) -> None:
        self._parameters, self._finds_unused, self._least_bytes = parameters, finds_unused, least_bytes
        self._buckets: Buckets | None = None
        self._arrived: set[int] = set()  # parameters, by id, since the last forward pass
        self._reduces = self._closes = False

    def begin_forward(self, reduces: bool) -> None:
        """Note that a forward pass begins. Raises RuntimeError, as torch does, if the last one was not reduced."""
        if reduces and self._reduces and self._arrived and not self._finds_unused:
            self._reduces = False
            raise RuntimeError(
                f"Expected to have finished reduction in the prior iteration before starting a new one: "
                f"{len(self._parameters) - len(self._arrived)} parameters of the DistributedDataParallel got no "
                f"gradient in it. Pass find_unused_parameters=True"
            )
        self._reduces, self._closes = reduces, False
        self._arrived.clear()

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Handle a gradient. Runs inside backward()."""
        self._arrived.add(id(parameter))
        if self._reduces and not self._closes:
            self._closes = True
            at_end_of_pass(self._close)

    def _close(self) -> None:
        self._closes = False
        if not self._reduces or not (self._finds_unused or len(self._arrived) >= len(self._parameters)):
            return
        self._reduces = False
        transport = world.current().transport
        if transport.size > 1 or self.hook is not None:
            self._reduce()

    def _reduce(self) -> None:
        transport = world.current().transport
        unused = self._unused_everywhere()
        buckets = self._filled()
        of_gradients.wait()
        reduce = None if self.hook is None else HookedReduce(self.hook)
        for place, bucket in enumerate(buckets.buckets):
            if reduce is not None:
                reduce.reduce(buckets.buckets, place, None)
            else:
                transport.all_reduce(bucket.flat.div_(transport.size))
        buckets.show_all()
        for parameter in unused:
            parameter.grad = None

    def _unused_everywhere(self) -> list[torch.Tensor]:
        if not self._finds_unused:
            return []
        counts = torch.tensor([each.grad is not None for each in self._parameters], dtype=torch.int32, device="cpu")
        world.current().transport.all_reduce(counts)
        return [each for each, count in zip(self._parameters, counts.tolist(), strict=True) if not count]

    def _filled(self) -> Buckets:
        """Return buckets with this rank's gradients."""
        buckets = self._buckets
        if buckets is None or buckets.is_kept():
            buckets = self._buckets = Buckets(self._parameters)
            buckets.cut(self._least_bytes)
        for parameter in self._parameters:
            view, gradient = buckets.view(parameter), parameter.grad
            if gradient is None:
                view.zero_()
            elif not is_same_memory(gradient, view):
                view.copy_(gradient.detach())
        return buckets
