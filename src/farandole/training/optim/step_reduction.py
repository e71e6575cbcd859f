"""The reduction of one global batch's gradients from this rank's to the sum over all ranks, proved by the step header.
loader_path.py decides its time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from farandole.errors import ConfigError, StepError
from farandole.training.collectives import world
from farandole.training.optim.bucketed_gradients import BucketedGradients, CompressedReduce, Reduce
from farandole.training.optim.compression import NoneCompressor
from farandole.training.optim.options import Options, refuse_for_loader
from farandole.training.optim.passes import Passes
from farandole.training.optim.step_agreement import check_devices, conclude_alone, digest
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.session import SESSION

if TYPE_CHECKING:
    from farandole.training.optim.shard_gradients import ShardGradients


Gradients: TypeAlias = "BucketedGradients | LocalGradients"
"""The gradients of one optimizer's parameters in a global batch: LocalGradients where no other gradients have to be
added to those of one backward pass. BucketedGradients explains the methods of both; those that take a gradient are only
its own."""


class StepReduction:
    """The reduction of one optimizer's gradients.

    names         returns its parameters, with their names, when the first batch comes: those that require gradients
                  then are reduced from then on
    hook          returns what reduces the buckets; None: the transport, with the compressor of the options
    plans_frozen  parameters that require no gradients in the first batch are reduced, too
    """

    def __init__(
        self,
        names: Callable[[], Mapping[torch.Tensor, str]],
        options: Options,
        passes: Passes,
        hook: Callable[[], Reduce | None] = lambda: None,
        plans_frozen: bool = False,
    ) -> None:
        self._names, self._options, self._passes = names, options, passes
        self._hook, self._plans_frozen = hook, plans_frozen
        self._batch: Batch | None = None
        self._kept: Gradients | None = None  # gradients of this global batch
        self._forget_plan()

    def _forget_plan(self) -> None:
        self._planned: dict[torch.Tensor, str] | None = None
        self._forms: list[Any] = []  # of the planned parameters, as the buckets have them
        self._ids: frozenset[int] = frozenset()
        self._own: LocalGradients | None = None
        self._bucketed: BucketedGradients | None = None
        self._sharded: ShardGradients | None = None

    def set_options(self, options: Options) -> None:
        """Set other options, before plan_anew()."""
        self._options = options

    def plan_anew(self) -> None:
        """Plan the reduction again, since the parameters have changed."""
        self.end_overlap("parameters were added inside of backward()")
        self._forget_plan()
        self._kept = None

    def _plan(self) -> dict[torch.Tensor, str]:
        if self._planned is None:
            refuse_for_loader(self._options, self._passes.per_step)
            names = self._names()
            named = {
                parameter: name for parameter, name in names.items() if parameter.requires_grad or self._plans_frozen
            }
            if not named:
                raise ConfigError(
                    f"none of the optimizer's {len(names)} parameters requires gradients, so it has nothing to train: "
                    f"unfreeze its parameters before the first step, or do not call its step()"
                )
            check_devices(named)
            self._planned, self._digest = named, digest(named)
            self._ids, self._forms = frozenset(map(id, named)), _forms(named)
        return self._planned

    def concerns(self, parameter: torch.Tensor) -> bool:
        """Return whether the parameter's gradients are reduced. Raises StepError or ConfigError for gradients that
        cannot be."""
        if self._planned is None:
            self._plan()
        return id(parameter) in self._ids

    def begin(self, batch: Batch) -> None:
        """Begin a global batch, with the first of its batches in which the optimizer takes part."""
        self._batch, self._kept = batch, None
        if self._planned is not None and (forms := _forms(self._planned)) != self._forms:
            # A module was cast, or moved to another memory format, and its buckets have the former one.
            check_devices(self._planned)
            self._digest, self._forms = digest(self._planned), forms
            self._own = self._bucketed = self._sharded = None
        _active.add(id(self), batch.global_batch)

    @property
    def gradients(self) -> Gradients:
        """Gradients of this global batch. They are copied, into memory allocated for it, only if necessary."""
        if self._kept is None:
            self._kept = self._keep()
        return self._kept

    def _keep(self) -> Gradients:
        assert self._batch is not None
        planned, options = self._plan(), self._options
        if self._batch.is_strict:
            return self._keep_shards(planned)
        global_batch, hook = self._batch.global_batch, self._hook()
        has_one_factor = global_batch.micro_batches == 1 and global_batch.added <= 1
        if (
            world.current().placement.size == 1
            and has_one_factor
            and options.compression is NoneCompressor
            and hook is None
        ):
            if self._own is None:
                self._own = LocalGradients(list(planned))
            return self._own
        if self._bucketed is None:
            reduce = hook or CompressedReduce(options.compression)
            self._bucketed = BucketedGradients(planned, self._digest, reduce, options.pinned_bytes)
        return self._bucketed

    def _keep_shards(self, planned: Mapping[torch.Tensor, str]) -> ShardGradients:
        assert self._batch is not None
        if self._sharded is None:
            from farandole.training.optim.shard_gradients import ShardGradients  # loaded only in strict mode

            options = self._options
            is_mean = options.loss == "mean"
            self._sharded = ShardGradients(planned, self._digest, options.compression, options.pinned_bytes, is_mean)
        self._sharded.begin(self._batch.global_batch)
        return self._sharded

    def begin_shard(self, batch: Batch) -> None:
        """Begin a batch of strict mode, once."""
        if self.gradients is self._sharded:
            self._sharded.begin_shard(batch)

    def drop_shown(self) -> None:
        """Drop what `.grad` has shown in a batch of strict mode, before the next one."""
        if self._sharded is not None:
            self._sharded.drop_shown()

    def reopen_shard(self) -> None:
        """Drop what was put of the current batch, in strict mode; put_back() restores the rest."""
        if self._sharded is not None:
            self._sharded.reopen_shard()

    def copies(self) -> list[torch.Tensor]:
        """Return copies of the tensors of `gradients.memory()`."""
        return [tensor.clone() for tensor in self.gradients.memory()]

    def put_back(self, copies: list[torch.Tensor]) -> None:
        """Restore the values of copies()."""
        # Private, but without it each tensor is a call: torch 2.13 uses it in torch/optim/asgd.py.
        torch._foreach_copy_(self.gradients.memory(), copies)

    # While backward continues ----------------------------------------------------------------------------

    def begin_overlap(self, batch: Batch) -> bool:
        """Return whether gradients are reduced in the background from now on: only if no other optimizer's gradients
        can come between the buckets of this one."""
        if step.is_shared() or not _active.is_alone(id(self)) or not self.gradients.may_overlap():
            return False
        world.raise_if_refused("gradients cannot be reduced")
        SESSION.recorder.intend(batch)  # before anything is contributed
        _active.begin_overlap(id(self))
        return True

    def end_overlap(self, reason: str) -> None:
        """Wait until no reduction runs in the background."""
        if self._kept is not None:
            self._kept.end_overlap(reason)
        _active.end_overlap(id(self))

    def refuse_half_reduced(self) -> None:
        """Raise StepError if the last backward pass has raised during an overlapped reduction."""
        if self._kept is not None and self._kept.is_overlapping():
            raise StepError(
                "backward() has raised an exception after the reduction of some of its gradients had started; the "
                "batch cannot be repeated. Let the exception leave the elastic function, or set FARANDOLE_BUCKET_MB=0 "
                "so that nothing is reduced before backward() has ended"
            )

    # At its end ------------------------------------------------------------------------------------------

    def add_up(self, batch: Batch, own_weight: float) -> None:
        """Reduce the remaining gradients; every `.grad` is that of the global batch afterwards. Raises the errors of
        transports, and CollectiveMismatch, alike on every rank, unless all reduce the same step."""
        world.raise_if_refused("gradients cannot be reduced")
        gradients = self.gradients
        if not isinstance(gradients, LocalGradients):
            _active.refuse_reducing(id(self))
        try:
            gradients.add_up(batch, own_weight)
        finally:
            _active.end_overlap(id(self))
        gradients.publish()

    def drop(self) -> None:
        """Set every `.grad` to zero: the step does not count."""
        self.end_overlap("its step was aborted")
        for parameter in self.gradients.parameters:
            self.gradients.zero(parameter)
        self.gradients.publish()


def _forms(parameters: Iterable[torch.Tensor]) -> list[Any]:
    # A tensor's device is slow to ask for; that of a gradient on another one is an error of torch.
    return [(each.dtype, each.is_cpu, each.is_contiguous() or each.stride()) for each in parameters]


# The optimizers that reduce gradients for the same global batch -------------------------------------------------------
#
# Only a single optimizer may reduce in the background: with two, ranks could begin with different ones.


class ActiveOptimizers:
    """The active optimizers; one object in each process. Optimizers are told apart by `id`."""

    def __init__(self) -> None:
        self._global_batch: GlobalBatch | None = None
        self._now: set[int] = set()
        self._before: set[int] = set()  # for the last global batch
        self._overlapping: int | None = None

    def add(self, key: int, global_batch: GlobalBatch) -> None:
        """Note that an optimizer takes part in this global batch."""
        if global_batch is not self._global_batch:
            self._global_batch, self._before, self._now = global_batch, self._now, set()
        self._now.add(key)

    def is_alone(self, key: int) -> bool:
        """Return whether no other optimizer took part in this global batch and the last one."""
        return self._before == self._now == {key}

    def begin_overlap(self, key: int) -> None:
        """Note that the optimizer's reduction overlaps with backward, until end_overlap()."""
        self._overlapping = key

    def end_overlap(self, key: int) -> None:
        if self._overlapping == key:
            self._overlapping = None

    def refuse_reducing(self, key: int) -> None:
        """Raise StepError while another optimizer reduces in the background."""
        if self._overlapping not in (None, key):
            raise StepError(
                "an optimizer that was not used in the last steps is used in the backward pass of another optimizer; "
                "set FARANDOLE_BUCKET_MB=0 so that nothing is reduced before backward() has ended"
            )


_active = ActiveOptimizers()


# Gradients of a single worker without accumulation: `.grad` has its final value already -------------------------------
#
# A mean over all items of a single worker has weight 1 for any `fd.weight`: nothing is multiplied.


class LocalGradients:
    """Gradients in the tensors that autograd has created; the methods are those of BucketedGradients."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters

    def may_overlap(self) -> bool:
        return False

    def is_overlapping(self) -> bool:
        return False

    def end_overlap(self, reason: str) -> None:
        """Do nothing: no reduction is under way."""

    def complete(self, filled: Collection[int], factor: float, is_kept: bool) -> None:
        """Complete the gradients, as with several workers. Factor 0: zeros only."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None or not factor:  # not multiplied: inf times 0 would be NaN
                self.zero(parameter)
            elif gradient.is_sparse or gradient.requires_grad:  # of backward(create_graph=True)
                gradient = gradient.detach()
                parameter.grad = gradient.to_dense() if gradient.is_sparse else gradient

    def zero(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse or gradient.requires_grad:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        else:
            gradient.zero_()

    def add_up(self, batch: Batch, own_weight: float) -> None:
        """Conclude the step of a single worker."""
        conclude_alone(batch)

    def publish(self) -> None:
        for parameter in self.parameters:
            if not parameter.requires_grad:
                parameter.grad = None  # frozen since: an old gradient would change it

    def tensors(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def memory(self) -> list[torch.Tensor]:
        return self.tensors()
