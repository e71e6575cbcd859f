"""The path from gradient to step without a loader of Farandole: named reductions, as Horovod's scripts expect them.

When the last parameter has had its backward passes, all gradients are reduced, still inside backward(). If some
parameters got no gradient on this rank (their part of the model was not used, or comes in another backward pass),
nothing is reduced before step() or synchronize(): backward() could wait for them forever. A rank that has all gradients
waits in backward() for such ranks, so these must not wait for it elsewhere, in a collective between backward() and
step().
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from farandole.errors import HorovodInternalError
from farandole.integrations.horovod.named.asynchronous import allreduce_async_, sparse_allreduce_async
from farandole.integrations.horovod.named.calls import Reduced, allreduce_together_
from farandole.integrations.horovod.named.engine import engine
from farandole.integrations.horovod.named.negotiation import Average, Sum
from farandole.integrations.horovod.named.process_sets import process_set_of
from farandole.integrations.horovod.named.tensor_queue import Handle, synchronize
from farandole.integrations.horovod.named.timeline import process_timeline
from farandole.integrations.horovod.named_buckets import NamedBuckets, fits, may_use_buckets
from farandole.integrations.horovod.undivided_check import UndividedCheck
from farandole.training.collectives import world
from farandole.training.optim.compression import Compressor, NoneCompressor
from farandole.training.optim.optimizer_mixin import at_end_of_pass, counts_passes
from farandole.training.optim.options import Options
from farandole.training.optim.passes import Passes

# Sets of parameters whose gradients one optimizer reduces together, and for which it keeps buckets: all of them, and
# those that a script trains without the others in some steps.
_MOST_SETS = 2


class NamedPath:
    """Named reductions of one optimizer.

    names  names of all its parameters, in its order
    """

    def __init__(self, names: dict[torch.Tensor, str], options: Options, passes: Passes) -> None:
        self._options, self._process_set = options, process_set_of(options.process_set)
        self._passes = passes
        self._sparse_dims: dict[int, int] = {}
        self._buckets: dict[tuple[Any, ...], NamedBuckets] = {}  # by the parameters: ids, dtypes and strides
        self._newest: NamedBuckets | None = None  # those of the last reduction
        self._check = UndividedCheck(options)
        self._pass_id: int | None = None
        self.was_synchronized = False
        self.name(names)

    def name(self, names: dict[torch.Tensor, str]) -> None:
        """Set the current parameters."""
        self._buckets.clear()
        self._newest = None
        groups = _groups(list(names), self._options.groups)
        self._named = [Named(parameter, name, groups.get(id(parameter))) for parameter, name in names.items()]

    # In backward() ---------------------------------------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Handle a gradient. Runs inside backward(), once for each parameter that got one."""
        if not self._is_active():
            return
        self._passes.count(id(parameter))
        if self._newest is not None:
            self._newest.take(parameter)
        # Private, but the only identity of a backward pass: torch 2.13, torch/autograd/graph.py, uses it so, too.
        pass_id = torch._C._current_graph_task_id()
        if pass_id != self._pass_id:  # a backward pass within a backward pass (checkpointing) has an end of its own
            self._pass_id = pass_id
            at_end_of_pass(self._end_pass)

    def _end_pass(self) -> None:
        """End the pass. Runs at the end of backward(), on the thread that called it."""
        self._pass_id = None
        participants = self._participants()
        if not self._passes.are_due(id(each.parameter) for each in participants):
            return
        reduction = self._begin(participants)
        # Queued after the ends of other optimizers' passes: they submit first, then all wait.
        at_end_of_pass(lambda: self._finish(reduction))

    # In step() and synchronize() -------------------------------------------------------------------------

    def reduce_rest(self) -> bool:
        """Reduce the remaining gradients, with zeros where there is no gradient. Returns whether there were any. Raises
        HorovodInternalError when a collective failed; then nothing of this step is left."""
        if not self._is_active():
            return False
        reduction = self._begin(self._participants())
        self._finish(reduction)
        return reduction is not None

    def synchronize(self) -> None:
        self.reduce_rest()
        self._passes.restart()
        self.was_synchronized = True

    def begin(self, parameter: torch.Tensor) -> tuple[Handle | Callable[[], torch.Tensor], Any]:
        """Begin the reduction of a single gradient, apart from all others. Return its handle, for synchronize(), and
        what its decompression needs. All ranks call it for the same parameters."""
        (named,) = (each for each in self._named if each.parameter is parameter)
        reduction = NamedReduction([named], self._options, self._sparse_dims, None)
        return reduction.begin(named)

    def forget(self) -> None:
        """Reset the state for the time after a step."""
        self._passes.forget()
        self.was_synchronized = False

    def _is_active(self) -> bool:
        return bool(self._process_set.included()) and counts_passes()

    def _participants(self) -> list[Named]:
        """Return the parameters without frozen ones, unless these were frozen after their backward pass."""
        has_counted = self._passes.has_counted
        return [each for each in self._named if each.parameter.requires_grad or has_counted(id(each.parameter))]

    def _begin(self, participants: Sequence[Named]) -> NamedReduction | None:
        keys = self._passes.unreduced(id(each.parameter) for each in participants)
        if not keys:
            return None
        named = [each for each in participants if id(each.parameter) in keys]
        reduction = NamedReduction(named, self._options, self._sparse_dims, self._buckets_of(named))
        compared = self._check.begin(named[0].name) if named[0] is self._named[0] else None
        try:
            reduction.submit(compared)
        except HorovodInternalError:
            self._abandon()
            raise
        self._passes.reduced(keys)
        return reduction

    def _buckets_of(self, named: Sequence[Named]) -> NamedBuckets | None:
        """Return the buckets of those that can be in one; None if there are none, or no other worker."""
        self._newest = None
        if world.current().placement.size == 1 or not may_use_buckets(self._options):
            return None
        dense = [each for each in named if fits(each.parameter) and not self._is_sparse(each.parameter)]
        if not dense:
            return None
        # A module can be cast, or moved to another memory format, between two steps.
        key = tuple([(id(each.parameter), each.parameter.dtype, each.parameter.stride()) for each in dense])
        if key not in self._buckets:
            if len(self._buckets) == _MOST_SETS:
                del self._buckets[next(iter(self._buckets))]
            self._buckets[key] = NamedBuckets([(each.parameter, each.name) for each in dense])
        self._newest = self._buckets[key]
        return self._newest

    def _is_sparse(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._sparse_dims or (parameter.grad is not None and parameter.grad.is_sparse)

    def _finish(self, reduction: NamedReduction | None) -> None:
        if reduction is None:
            return
        try:
            reduction.finish()
        except HorovodInternalError:
            self._abandon()
            raise
        self._check.end()

    def _abandon(self) -> None:
        """Drop all gradients. They may be partly reduced, so they must not be used or added to."""
        self.forget()
        for buckets in self._buckets.values():
            buckets.forget()
        for each in self._named:
            each.parameter.grad = None


def _groups(parameters: list[torch.Tensor], asked: int | Sequence[Sequence[torch.Tensor]] | None) -> dict[int, int]:
    """Return the group numbers by id of the parameter; parameters without a group are missing."""
    if not asked:
        return {}
    if isinstance(asked, int):
        count = min(asked, len(parameters))
        return {id(parameter): place * count // len(parameters) for place, parameter in enumerate(parameters)}
    return {id(parameter): number for number, group in enumerate(asked) for parameter in group}


# One named reduction: gradients are submitted together, then waited for, then written to `.grad` ----------------------
#
# Submitting and waiting are two steps, so that two optimizers whose gradients come from one backward pass can both
# submit before either waits, in any order on other ranks.


@dataclass(frozen=True)
class Named:
    """A parameter whose gradient is reduced.

    name   its name, equal on all ranks
    group  parameters with equal numbers are reduced together; None: by itself
    """

    parameter: torch.Tensor
    name: str
    group: int | None = None


Packed: TypeAlias = tuple[Reduced, Callable[[], None]]
"""Dense gradients in the form in which they are sent, and what brings the results to where they belong."""

_under_way: dict[str, NamedReduction] = {}
"""Running reductions by name of a gradient. Two optimizers may use a name twice; then one is finished before the other
begins."""


class NamedReduction:
    """Reduction of some gradients of one optimizer. They must not be changed between submit() and finish().

    sparse_dims  number of sparse dimensions of a parameter's sparse gradients, by its id; grows
    buckets      they have some of the gradients; None: none of them
    """

    def __init__(
        self, named: Sequence[Named], options: Options, sparse_dims: dict[int, int], buckets: NamedBuckets | None
    ) -> None:
        self._named, self._buckets = named, buckets
        self._apart = [each for each in named if buckets is None or not buckets.have(each.parameter)]
        self._options, self._process_set = options, process_set_of(options.process_set)
        self._sparse_dims = sparse_dims
        self._waits: list[Callable[[], None]] = []

    def submit(self, also: Reduced | None = None) -> None:
        """Submit all gradients, and what is reduced with them. Parameters without a gradient take part with zeros.
        Raises the errors of the operations."""
        if self._is_alone():
            return
        for other in {id(each): each for each in map(_under_way.get, self._names()) if each is not None}.values():
            other.finish()
        _under_way.update(dict.fromkeys(self._names(), self))
        try:
            units = self._units()
            dense = [self._pack(unit) for unit in units if not self._is_gathered(unit[0].parameter)]
            in_buckets = self._pack_buckets()
            reduced = [each for each, _ in (*in_buckets, *dense)]
            if also is not None:
                reduced.append(also)
            handle = allreduce_together_(reduced, self._options.op, *self._scales(), self._process_set)
            self._waits.append(lambda: self._unpack(in_buckets, dense, handle))
            for unit in units:
                if self._is_gathered(unit[0].parameter):
                    take = self._gather(unit[0])
                    self._waits.append(partial(_take_gradient, unit[0].parameter, take))
        except Exception:
            self._end()
            raise

    def begin(self, each: Named) -> tuple[Handle | Callable[[], torch.Tensor], Any]:
        """Begin the reduction of one gradient in place, for a caller who waits for it. Return the handle, and what the
        decompression needs."""
        if self._is_gathered(each.parameter):
            return self._gather(each), None
        options = self._options
        tensor, ctx = options.compression.compress(_dense(self._gradient(each.parameter)))
        name, (before, after) = f"gradient.{each.name}", self._scales()
        return allreduce_async_(tensor, None, name, options.op, before, after, self._process_set), ctx

    def finish(self) -> None:
        """Wait for all operations; then every `.grad` is the reduced one. Raises the first error, after all operations
        have ended: some gradients are reduced then, and some are not."""
        error = self._end()
        if error is not None:
            raise error

    def _is_alone(self) -> bool:
        """Return whether a reduction would change nothing, since there is only one worker. Raises as a reduction
        would."""
        may_differ = self._options.compression is not NoneCompressor or process_timeline.is_on
        if world.current().placement.size > 1 or may_differ or self._options.op not in (Average, Sum):
            return False
        if any(self._gradient(each.parameter).is_sparse for each in self._named):
            return False
        world.raise_if_refused("gradients cannot be reduced")
        engine().raise_if_ended()
        return True

    def _end(self) -> Exception | None:
        first: Exception | None = None
        for wait in self._waits:
            try:
                wait()
            except Exception as error:  # noqa: BLE001 - returned
                first = first or error
        self._waits.clear()
        for name in self._names():
            if _under_way.get(name) is self:
                del _under_way[name]
        return first

    def _names(self) -> list[str]:
        return [each.name for each in self._named]

    def _units(self) -> list[list[Named]]:
        """Return the groups of gradients that are reduced all or none. Sparse gradients are alone: they are
        gathered."""
        units: dict[object, list[Named]] = {}
        for each in self._apart:
            self._gradient(each.parameter)
            is_alone = each.group is None or self._is_gathered(each.parameter)
            units.setdefault(each.name if is_alone else each.group, []).append(each)
        return list(units.values())

    def _is_gathered(self, parameter: torch.Tensor) -> bool:
        return self._gradient(parameter).is_sparse and not self._options.sparse_as_dense

    def _scales(self) -> tuple[float, float]:
        factor = self._options.predivide_factor if self._options.op == Average else 1.0
        return 1.0 / factor, factor

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = self._zeros(parameter)
        if gradient.is_sparse:
            self._sparse_dims[id(parameter)] = gradient.sparse_dim()
        return gradient

    def _zeros(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return zeros in the layout of the parameter's earlier gradients: sparse ones are not reduced like dense
        ones."""
        sparse_dim = self._sparse_dims.get(id(parameter))
        if sparse_dim is None:
            return torch.zeros_like(parameter, requires_grad=False)
        nowhere = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
        nothing = parameter.detach().new_empty(0, *parameter.shape[sparse_dim:])
        return torch.sparse_coo_tensor(nowhere, nothing, parameter.shape, check_invariants=False)

    def _pack(self, unit: list[Named]) -> Packed:
        compression = self._options.compression
        compressed = [compression.compress(_dense(self._gradient(each.parameter))) for each in unit]
        tensors = [tensor.contiguous() for tensor, _ in compressed]

        def unpack() -> None:
            for each, tensor, (_, ctx) in zip(unit, tensors, compressed, strict=True):
                _write(each.parameter, compression.decompress(tensor, ctx))

        return Reduced(f"gradient.{unit[0].name}", tensors, is_group=unit[0].group is not None), unpack

    def _pack_buckets(self) -> list[Packed]:
        if self._buckets is None:
            return []
        self._buckets.fill()
        compression, packed = self._options.compression, list[Packed]()
        for name, flat in self._buckets.flats():
            sent, ctx = compression.compress(flat)
            packed.append((Reduced(name, [sent]), partial(_decompress, flat, sent, ctx, compression)))
        return packed

    def _unpack(self, in_buckets: Sequence[Packed], dense: Sequence[Packed], handle: Handle) -> None:
        synchronize(handle)  # in place: the sent tensors hold the result
        for _, unpack in in_buckets:
            unpack()
        if self._buckets is not None:
            self._buckets.publish()
        for _, unpack in dense:
            unpack()

    def _gather(self, each: Named) -> Callable[[], torch.Tensor]:
        gradient = self._gradient(each.parameter)
        return sparse_allreduce_async(gradient, f"gradient.{each.name}", self._options.op, self._process_set)


def _take_gradient(parameter: torch.Tensor, take: Callable[[], torch.Tensor]) -> None:
    parameter.grad = take()


def _decompress(flat: torch.Tensor, sent: torch.Tensor, ctx: Any, compression: Compressor) -> None:
    if sent is not flat:
        flat.copy_(compression.decompress(sent, ctx))


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient.detach()


def _write(parameter: torch.Tensor, reduced: torch.Tensor) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        parameter.grad = reduced.to(gradient.dtype).to_sparse(gradient.sparse_dim())
    elif reduced.data_ptr() != gradient.data_ptr() or reduced.stride() != gradient.stride():
        gradient.detach().copy_(reduced)
