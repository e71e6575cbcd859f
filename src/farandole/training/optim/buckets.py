"""Flat buffers into which gradients are copied while they are in the cache, small ones some at a time, and from which
they are reduced; and the order of what writes them on a device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch

from farandole.training.collectives.shared_memory_tensors import reserve_zeros, shareable_zeros
from farandole.training.optim.bucket_size import cut


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced at once. `flat` is a part of a buffer, `parameters` those whose gradients are in
    it."""

    flat: torch.Tensor
    parameters: tuple[torch.Tensor, ...]


class Part(NamedTuple):
    """The part of a buffer that belongs to a parameter.

    place    number of the buffer, and of the element where the part begins
    pointer  address of its first byte
    """

    place: tuple[int, int]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    pointer: int


class Buckets:
    """Buffers, one for each dtype, on the parameters' device, with their partition into buckets. Their order is that in
    which gradients arrive: the last parameter's first.

    allocate  returns a buffer of zeros

    flats    the buffers
    buckets  at least one; empty if there are no parameters
    least_bytes  the size that they have at least
    """

    buckets: list[Bucket]

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor] = shareable_zeros,
    ) -> None:
        self._order = list(reversed(parameters))
        self.device = self._order[0].device if self._order else torch.device("cpu")
        self.flats = []
        self._view: dict[int, torch.Tensor] = {}
        self._parts: dict[int, Part] = {}
        for number, (dtype, members) in enumerate(_by_dtype(self._order).items()):
            flat = allocate(sum(member.numel() for member in members), dtype, self.device)
            self.flats.append(flat)
            self._lay_out(number, flat, members)
        if self.device.type == "cuda":  # other streams that write gradients here need not know the current one
            torch.cuda.current_stream(self.device).synchronize()
        # Of our own, as this Python counts them.
        self._known_references = max(map(sys.getrefcount, self._view.values()), default=0), self._most_apart()
        self.known_uses = self.uses()
        self.cut(0)

    def _lay_out(self, number: int, flat: torch.Tensor, members: Sequence[torch.Tensor]) -> None:
        sizes, begin = [member.numel() for member in members], 0
        for member, piece in zip(members, torch.split(flat, sizes), strict=True):
            self._view[id(member)] = view = laid_out(piece, member)
            part = Part((number, begin), view.shape, view.stride(), flat.dtype, view.data_ptr())
            self._parts[id(member)] = part
            begin += part.shape.numel()

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the buffer part for the parameter's gradient; same shape, dtype and order in memory."""
        view = self._view[id(parameter)]
        return view if view.data_ptr() == self._parts[id(parameter)].pointer else self._again(parameter)

    @cached_property
    def small(self) -> SmallGradients:
        """The small gradients that wait to be written here."""
        return SmallGradients(self, self._order)

    def part(self, parameter: torch.Tensor) -> Part:
        return self._parts[id(parameter)]

    def _again(self, parameter: torch.Tensor) -> torch.Tensor:
        """Make the view of a part anew. show_all() had made it the `.grad`, and `.grad.data = ...`, which the casts of
        a module use, too, has led it to another memory."""
        part = self._parts[id(parameter)]
        number, begin = part.place
        flat = self.flats[number]
        view = flat.as_strided(part.shape, part.stride, flat.storage_offset() + begin)
        self._view[id(parameter)] = view
        return view

    def show_all(self) -> None:
        """Set every `.grad` to its part, or to None if the parameter needs none, as publish() does, but to the same
        tensor each time, which takes a quarter of the time."""
        for parameter in self._order:
            part, view = self._parts[id(parameter)], self._view[id(parameter)]
            if not parameter.requires_grad:
                parameter.grad = None
            elif not part.shape.numel():
                parameter.grad = torch.zeros_like(view)
            else:
                parameter.grad = view if view.data_ptr() == part.pointer else self._again(parameter)

    def publish(self, parameter: torch.Tensor) -> None:
        """Set the parameter's `.grad` to its part. It is a tensor of its own: `.grad.data = ...`, which the casts of a
        module use, too, leads another memory to it, and must not lead it to view()."""
        view = self._view[id(parameter)]
        parameter.grad = view.detach() if view.numel() else torch.zeros_like(view)

    def apart(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Return a gradient that is to be copied into its part, outside of autograd: a copy if it is anywhere in the
        buffers."""
        if gradient is None:
            return None
        gradient = gradient.detach()
        if gradient.layout != torch.strided:
            return gradient
        start = gradient.data_ptr()
        is_here = any(0 <= start - flat.data_ptr() < flat.nbytes for flat in self.flats)
        return gradient.clone() if is_here else gradient

    @property
    def total_bytes(self) -> int:
        return sum(flat.nbytes for flat in self.flats)

    def is_kept(self) -> bool:
        """Return whether somebody else refers to a gradient that show_all() has shown, and that is not `.grad` any
        more, or to a part of one: it was put aside, and must not change when the next gradients are written."""
        if self.uses() > self.known_uses:
            return True
        counts = map(sys.getrefcount, self._view.values())  # the fast way, in which `.grad` itself may count
        return max(counts, default=0) > self._known_references[0] and self._most_apart() > self._known_references[1]

    def _most_apart(self) -> int:
        """Return the most references to a view that is not `.grad`."""
        most = 0
        for parameter in self._order:
            view = self._view[id(parameter)]
            if parameter.grad is not view:
                most = max(most, sys.getrefcount(view))
        return most

    def uses(self) -> int:
        """Return the number of tensors on the buffers, of which `known_uses` are those of this object."""
        # Private; torch 2.13 uses it for the memory of CUDA graphs (torch/_inductor/cudagraph_trees.py).
        return sum(torch._C._storage_Use_Count(flat.untyped_storage()._cdata) for flat in self.flats)

    def cut(self, least_bytes: int) -> None:
        """Make buckets of at least this size; with 0 one for each dtype."""
        before, self.least_bytes = self.uses(), least_bytes
        sizes = [parameter.nbytes for parameter in self._order]
        groups = cut(sizes, [str(parameter.dtype) for parameter in self._order], least_bytes)
        self.buckets = [self._bucket([self._order[place] for place in group]) for group in groups]
        if not self.buckets:
            self.buckets = [Bucket(torch.empty(0, dtype=torch.float32, device="cpu"), ())]
        self.known_uses += self.uses() - before

    def _bucket(self, parameters: list[torch.Tensor]) -> Bucket:
        """Make a bucket of parameters that are adjacent in a buffer: they have one dtype, and follow each other."""
        first = self.view(parameters[0])
        flat = next(each for each in self.flats if each.dtype == first.dtype)
        begin = first.storage_offset() - flat.storage_offset()
        count = sum(parameter.numel() for parameter in parameters)
        return Bucket(flat[begin : begin + count], tuple(parameters))


def reserve(parameters: Iterable[torch.Tensor]) -> None:
    """Allocate the memory that Buckets of these parameters will need, if they are on the CPU. A newcomer does so, so
    that no worker waits for it in its first step."""
    trained = [parameter for parameter in parameters if parameter.requires_grad and parameter.device.type == "cpu"]
    for dtype, members in _by_dtype(trained).items():
        reserve_zeros(sum(member.numel() for member in members), dtype)


def _by_dtype(parameters: Iterable[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return found


# Small gradients on the CPU -------------------------------------------------------------------------------------------
#
# They are copied into their bucket some at a time: an operation takes longer to call than to copy a few values.

_MOST_ELEMENTS = 4096
_MOST_WAITING = 32
"""Gradients are copied while they are in the cache."""


class SmallGradients:
    """Gradients that wait for write(). Each belongs into its parameter's part of `buckets`, times a factor."""

    def __init__(self, buckets: Buckets, parameters: list[torch.Tensor]) -> None:
        self._flats = buckets.flats
        self._places = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in buckets.flats]
        is_on_cpu = buckets.device.type == "cpu"
        self._parts = {id(each): buckets.part(each) for each in parameters if is_on_cpu and _is_small(each)}
        self._waiting: dict[tuple[int, int], torch.Tensor] = {}  # by their place
        self._factor = 1.0

    def take(self, parameter: torch.Tensor, factor: float) -> bool:
        """Take `factor` times the parameter's `.grad`, for its part. False: it has to be written at once."""
        part, gradient = self._parts.get(id(parameter)), parameter.grad
        if (
            part is None
            or type(gradient) is not torch.Tensor
            or gradient.is_sparse
            or gradient.requires_grad
            or gradient.shape != part.shape
            or gradient.dtype is not part.dtype
            or not gradient.is_contiguous()
            # In a bucket: autograd has added to the gradient of the last step, or the script has set another one's.
            or any(begin <= gradient.data_ptr() < end for begin, end in self._places)
        ):
            return False
        if len(self._waiting) == _MOST_WAITING or factor != self._factor:
            self.write()
            self._factor = factor
        self._waiting[part.place] = gradient
        parameter.grad = None  # nobody else writes to its memory
        return True

    def write(self) -> None:
        """Write all that wait: those that are adjacent in one operation."""
        if not self._waiting:
            return
        run: list[torch.Tensor] = []
        number = begin = end = 0
        for place, gradient in sorted(self._waiting.items(), key=_place):
            if run and place != (number, end):
                self._write(run, self._flats[number][begin:end])
                run = []
            if not run:
                number, begin = place
                end = begin
            run.append(gradient)
            end += gradient.numel()
        self._write(run, self._flats[number][begin:end])
        self._waiting.clear()

    def _write(self, run: list[torch.Tensor], part: torch.Tensor) -> None:
        if len(run) == 1:
            torch.mul(run[0].view(-1), self._factor, out=part)
            return
        torch.cat([each if each.dim() == 1 else each.view(-1) for each in run], out=part)
        if self._factor != 1.0:
            part.mul_(self._factor)


def _is_small(parameter: torch.Tensor) -> bool:
    return 0 < parameter.numel() <= _MOST_ELEMENTS and not has_own_order(parameter)


def _place(item: tuple[tuple[int, int], torch.Tensor]) -> tuple[int, int]:
    return item[0]


# The order of a gradient's elements in memory -------------------------------------------------------------------------
#
# It is that of the parameter, as for the gradients that autograd makes (torch 2.13, the "Gradient Layout Contract" in
# torch/csrc/autograd/functions/accumulate_grad.h): fused optimizers go through both in the order of their memory.


def has_own_order(parameter: torch.Tensor) -> bool:
    """Return whether gradients of the parameter are not contiguous, e.g. of one in channels_last: it fills its memory
    in another order."""
    # The operator exists in torch 2.6 to 2.15 at least; its Python form in torch/_prims_common has had several names.
    return not parameter.is_contiguous() and bool(torch.ops.aten.is_non_overlapping_and_dense(parameter))


def is_same_memory(gradient: torch.Tensor | None, view: torch.Tensor) -> bool:
    """Return whether a `.grad` is this part of a buffer, which has elements."""
    return (
        gradient is not None
        and gradient.layout == torch.strided
        and view.numel() > 0
        and gradient.data_ptr() == view.data_ptr()
        and gradient.stride() == view.stride()
        and gradient.shape == view.shape
        and gradient.dtype == view.dtype
    )


def laid_out(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of contiguous memory in the shape and order of a gradient of the parameter."""
    if has_own_order(parameter):
        return flat.view(-1).as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


# The order of a device's operations in several streams ----------------------------------------------------------------
#
# Gradients are written in the streams of backward(), and a thread reduces them in another stream. On the CPU there is
# nothing to do.

T = TypeVar("T")


class Arrivals:
    """The streams that have written to a bucket. The writing thread calls record()."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_needed = device, device.type == "cuda"
        self._streams: set[Any] = set()

    def record(self) -> None:
        """Note that the current stream has just received a write."""
        if self._is_needed:
            self._streams.add(torch.cuda.current_stream(self._device))

    def before(self, task: Callable[[], T]) -> Callable[[], T]:
        """Return the task for another thread, ordered after all recorded writes. It is not ordered after later
        operations of these streams, so that backward() continues meanwhile."""
        if not self._is_needed:
            return task
        events = [stream.record_event() for stream in self._streams]
        self._streams.clear()
        return partial(self._run, events, task)

    def _run(self, events: list[Any], task: Callable[[], T]) -> T:
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for event in events:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            return task()
