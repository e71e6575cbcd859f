"""Turn a call of a public function into submissions: the checks that one rank can make alone, and the submission.

operations.py and asynchronous.py call it. All functions raise ValueError for an invalid tensor, name or process set. A
public function makes its Call before it checks any other argument: so an unnamed operation takes its number first, and
the ranks' counts stay equal when one of them made a mistake.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Sized
from dataclasses import dataclass

import torch

from farandole.errors import HorovodInternalError
from farandole.integrations.horovod.named import adasum
from farandole.integrations.horovod.named.engine import engine
from farandole.integrations.horovod.named.process_sets import ProcessSet, global_process_set
from farandole.integrations.horovod.named.stages import CPU, GLOBAL_SET, Key, Kind, Request
from farandole.integrations.horovod.named.tensor_queue import Handle, Submission
from farandole.training.collectives.transport import Reduction

REDUCIBLE = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool)


class Call:
    """One call of a public function: its process set, its name, its handle, and its submissions, one for each tensor.

    Args:
        name: The user's name; None for a running number.
        group: The tensors of a grouped function; None for the plain one.
        is_awaited: The function waits for its result.

    Raises:
        ValueError: The process set was not added, or lacks this rank.
    """

    def __init__(
        self,
        kind: Kind,
        name: str | None,
        process_set: ProcessSet,
        group: Sequence[torch.Tensor] | None = None,
        *,
        is_awaited: bool = False,
    ) -> None:
        self.named, self._is_awaited = engine(), is_awaited
        self.kind, self.process_set = kind, process_set
        number = process_set.process_set_id
        prefix = ("" if group is None else "grouped_") + kind.name.lower()
        if name is None:
            name = f"noname.{self.named.next_number(kind, -1 if number is None else number)}"
        self.name = f"{prefix}.{name}"
        if number is None or number not in self.named.process_sets:
            raise ValueError(
                f"{self.name}: {process_set} is not one of the process sets of this world. It was not added, was "
                f"removed, or names ranks beyond the {len(self.named.process_sets[GLOBAL_SET])} that there are now"
            )
        self.id, self.ranks = number, self.named.process_sets[number]
        if self.named.rank not in self.ranks:
            raise ValueError(f"{self.name}: rank {self.named.rank} is not in {process_set}")
        if group is not None and not isinstance(group, Sized):
            raise ValueError(f"{self.name}: expected a list of tensors, got {type(group).__name__}")
        self._tensors = None if group is None else len(group)
        parts = 1 if self._tensors is None else self._tensors
        self.handle = Handle(parts, is_group=group is not None, run_until_done=self.named.run_until_done)
        self.submissions: list[Submission] = []

    def add(
        self,
        tensor: torch.Tensor | None = None,
        *,
        in_place: bool = False,
        shape: Sequence[int] | None = None,
        op: Reduction = Reduction.SUM,
        root: int = 0,
        prescale: float = 1.0,
        postscale: float = 1.0,
        splits: Sequence[int] = (),
    ) -> None:
        """Add the call's next tensor, or its only one."""
        part, name, group = len(self.submissions), self.name, ""
        if self._tensors is not None:
            name, group = f"{name}_{part + 1}of{self._tensors}", name
        key = Key(self.id, self.kind, name)
        if tensor is None:
            request = Request(key)
        else:
            request = Request(
                key,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape if shape is None else shape),
                int(op),
                root,
                float(prescale),
                float(postscale),
                CPU if tensor.device.type == "cpu" else tensor.device.index or 0,
                tuple(splits),
                group,
                self._tensors or 0,
            )
        self.submissions.append(Submission(request, tensor, in_place, self.handle, part))

    def submit(self) -> Handle:
        """Submit all tensors at once."""
        if self.submissions:
            self.named.submit(self.submissions, is_awaited=self._is_awaited)
        return self.handle


# Submit ---------------------------------------------------------------------------------------------------------------


def reduction(op: int | None, average: bool | None = None) -> Reduction:
    """Return the operator that `op` and the deprecated `average` select. Raises ValueError if both are given, or for
    another op."""
    if average is None:
        try:
            return Reduction.AVERAGE if op is None else Reduction(op)
        except ValueError:
            names = ", ".join(each.name.capitalize() for each in Reduction)
            raise ValueError(f"op must be one of {names}, got {op!r}") from None
    if op is not None:
        raise ValueError(f"op and average exclude each other; give op only (got op={op!r} and average={average!r})")
    warnings.warn("average= is deprecated; give op=Average or op=Sum instead", DeprecationWarning, stacklevel=3)
    return Reduction.AVERAGE if average else Reduction.SUM


def submit_reduction(
    call: Call,
    tensors: Sequence[torch.Tensor],
    op: Reduction,
    prescale: float,
    postscale: float,
    *,
    in_place: bool = False,
) -> Handle:
    """Submit an allreduce or reducescatter of these tensors as `call`."""
    _add_reductions(call, tensors, op, (prescale, postscale), in_place)
    return call.submit()


def _add_reductions(
    call: Call, tensors: Sequence[torch.Tensor], op: Reduction, scales: tuple[float, float], in_place: bool
) -> None:
    scatters = call.kind is Kind.REDUCESCATTER
    if scatters and op not in (Reduction.SUM, Reduction.AVERAGE):
        # Horovod's error for this case, which scripts may catch; all ranks are concerned, not one rank's tensor.
        raise HorovodInternalError(f"{call.name}: a reducescatter takes op=Sum or op=Average, got {op.name}")
    for tensor in tensors:
        check_tensor(call, tensor, at_least_1d=scatters)
        check_reduction(call, tensor, op, scales)
    check_same_device(call, tensors)
    for tensor in tensors:
        call.add(tensor, in_place=in_place, op=op, prescale=scales[0], postscale=scales[1])


def submit_gathering(call: Call, tensors: Sequence[torch.Tensor]) -> Handle:
    """Submit an allgather of these tensors as `call`."""
    for tensor in tensors:
        check_tensor(call, tensor)
    check_same_device(call, tensors)
    for tensor in tensors:
        call.add(tensor, shape=tensor.shape or (1,))
    return call.submit()


def submit_broadcast(call: Call, tensor: torch.Tensor, root_rank: int, *, in_place: bool = False) -> Handle:
    """Submit a broadcast of this tensor as `call`."""
    check_tensor(call, tensor)
    if root_rank not in call.ranks:
        raise ValueError(f"{call.name}: root_rank must be one of the global ranks {list(call.ranks)}, got {root_rank}")
    call.add(tensor, root=root_rank, in_place=in_place)
    return call.submit()


def submit_exchange(call: Call, tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None) -> Handle:
    """Submit an alltoall of this tensor as `call`."""
    check_tensor(call, tensor, at_least_1d=True)
    call.add(tensor, splits=splits_of(call, tensor, splits))
    call.handle.counts_on = splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")
    return call.submit()


# Submit many allreduces of an optimizer -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reduced:
    """Tensors to be reduced in place under one name. With `is_group` as by grouped_allreduce_async_(); else there is
    one tensor, as by allreduce_async_()."""

    name: str
    tensors: Sequence[torch.Tensor]
    is_group: bool = False


def allreduce_together_(
    all_reduced: Sequence[Reduced],
    op: int,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Submit many allreduces at once, so that the other ranks learn of all in one round. The caller waits at once.

    All are submitted or none. Unlike in a group they need not be the same on all ranks: each is executed when all ranks
    have submitted it. Raises the errors of allreduce_async_().

    Returns:
        One handle for all: it is done when all have ended, and raises the first error of any.
    """
    submissions: list[Submission] = []
    for each in all_reduced:
        call = Call(Kind.ALLREDUCE, each.name, process_set, each.tensors if each.is_group else None)
        _add_reductions(call, each.tensors, Reduction(op), (prescale_factor, postscale_factor), in_place=True)
        submissions += call.submissions
    handle = Handle(len(submissions), is_group=True, run_until_done=engine().run_until_done)
    for part, submission in enumerate(submissions):
        submission.handle, submission.part = handle, part  # the waiting thread is woken once, not for each
    if submissions:
        engine().submit(submissions, is_awaited=True)
    return handle


# Checks ---------------------------------------------------------------------------------------------------------------


def check_tensor(call: Call, tensor: object, *, at_least_1d: bool = False) -> None:
    """Check that the tensor is dense and has values, and rows where rows are scattered."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{call.name}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"{call.name}: a dense tensor is needed, got one of layout {tensor.layout}; see sparse_allreduce_async()"
        )
    if tensor.is_meta:
        raise ValueError(
            f'{call.name}: a tensor on the device "meta" has no values; it needs memory first, by to_empty()'
        )
    if not _has_memory(tensor):
        raise ValueError(
            f"{call.name}: this tensor of shape {tuple(tensor.shape)} has no memory to read. It was freed, as by "
            f"sharding, or it is a fake, or one of torch.func's; pass a tensor that has its values"
        )
    if at_least_1d and tensor.dim() == 0:
        raise ValueError(f"{call.name}: a scalar has no rows; the tensor needs at least one dimension")


def check_same_device(call: Call, tensors: Sequence[torch.Tensor]) -> None:
    """Check that the tensors of a group lie on one device, since they travel together. Raises HorovodInternalError, as
    Horovod does."""
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise HorovodInternalError(f"{call.name}: all tensors of a group must be on one device, got {devices}")


def check_reduction(call: Call, tensor: torch.Tensor, op: Reduction, scales: tuple[float, float]) -> None:
    """Check that tensors of this dtype can be reduced by `op`."""
    if tensor.dtype not in REDUCIBLE:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE)
        raise ValueError(f"{call.name}: tensors of {tensor.dtype} cannot be reduced; convert it to one of {names}")
    if tensor.dtype is torch.bool and (op is Reduction.AVERAGE or scales != (1.0, 1.0)):
        raise ValueError(f"{call.name}: bools have no average and no scale; use op=Sum (or), Product (and), Min or Max")
    if op is Reduction.ADASUM:
        if call.id != GLOBAL_SET:
            raise NotImplementedError(f"{call.name}: Adasum works on all ranks only, not on {call.process_set}")
        adasum.require_power_of_two(len(call.ranks))
        if not tensor.is_floating_point():
            raise ValueError(f"{call.name}: Adasum takes floating point tensors, got {tensor.dtype}")


def splits_of(call: Call, tensor: torch.Tensor, splits: torch.Tensor | Sequence[int] | None) -> list[int]:
    """Return the number of rows for each member, checked against the tensor."""
    size, rows = len(call.ranks), tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(
                f"{call.name}: {rows} rows cannot be divided evenly among {size} ranks; give their numbers in splits"
            )
        return [rows // size] * size
    values = splits if isinstance(splits, torch.Tensor) else torch.tensor(splits, dtype=torch.int32, device="cpu")
    if values.is_floating_point() or values.is_complex() or values.dtype is torch.bool or values.dim() != 1:
        raise ValueError(
            f"{call.name}: splits must be one dimension of 32-bit integers, got {values.dtype} of shape "
            f"{tuple(values.shape)}"
        )
    numbers: list[int] = values.tolist()
    if len(numbers) != size:
        raise ValueError(f"{call.name}: splits must have one entry for each of {size} ranks, got {len(numbers)}")
    if min(numbers) < 0 or sum(numbers) > rows:
        raise ValueError(f"{call.name}: splits must be counts that add up to at most {rows} rows, got {numbers}")
    return numbers


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the thread that runs the rounds can read the tensor. An error in that thread would come too late:
    the other ranks rely on this one then, and it would end the generation."""
    try:
        return tensor.numel() == 0 or tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:
        return False
