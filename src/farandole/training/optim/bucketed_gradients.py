"""The reduction of gradients to those of the global batch, in buckets, which all ranks reduce in the same order.

With several buckets, complete ones are reduced while backward continues. The last one is always reduced by the main
thread, at the end: it carries the step header.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from farandole.base.machine import now_s, usable_cores
from farandole.errors import CollectiveMismatch, StepError
from farandole.training.collectives import world
from farandole.training.collectives.background import of_gradients
from farandole.training.collectives.shared_memory_tensors import shareable_zeros
from farandole.training.collectives.shared_memory_transport import SharedMemoryTransport
from farandole.training.collectives.transport import Transport
from farandole.training.collectives.transport_choice import host_transport
from farandole.training.collectives.world import World
from farandole.training.optim.bucket_size import BucketAutotune, bucket_sizes, fastest, has_core_to_spare
from farandole.training.optim.buckets import Arrivals, Bucket, Buckets, is_same_memory
from farandole.training.optim.compression import BF16Compressor, Compressor, FP16Compressor, NoneCompressor
from farandole.training.optim.step_agreement import (
    HEADER_BYTES,
    StepHeader,
    conclude,
    describe,
    header_of,
    packed_at_end,
)
from farandole.training.state.batch import Batch

logger = logging.getLogger("farandole")

_MOST_OTHERS = 2
"""Buckets that wait until nobody refers to them any more; further ones belong to whoever does."""


class BucketedGradients:
    """Gradients in buckets. `.grad` becomes a view of a bucket, so that nothing is copied back. Main thread only.

    names         the parameters, with their names for errors
    reduce        adds up a bucket over all ranks
    pinned_bytes  least size of a bucket requested by the user, 0 for one bucket; None: it is chosen

    note, notes   bytes of this rank that travel with each step, of the same length on all ranks, and those of all ranks
    """

    def __init__(
        self, names: Mapping[torch.Tensor, str], digest: int, reduce: Reduce, pinned_bytes: int | None
    ) -> None:
        self._names, self._digest, self._pinned_bytes = names, digest, pinned_bytes
        self.parameters = list(names)
        self._buckets = Buckets(self.parameters)
        self._are_shown = False  # `.grad` shows the buckets, and nothing was written since
        self._others: list[Buckets] = []  # whose gradients somebody has put aside
        self._reduce = reduce
        self.note, self.notes = b"", [b""]
        self._agreed_in: world.World | None = None
        self._autotune: BucketAutotune | None = None  # during the first steps, while the fastest size is unknown
        self._fastest: int | None = None  # result of the autotune
        self._began_s: float | None = None  # time of the first gradient of this pass
        self._place: dict[int, int] = {}  # number of the bucket of each parameter
        self._missing: list[int] = []  # number of gradients that each bucket still lacks in this pass
        self._arrivals: list[Arrivals] = []  # in each bucket
        self._given = 0  # number of buckets that are reduced or submitted
        self._overlaps_on: Transport | None = None

    # From gradient to bucket -----------------------------------------------------------------------------

    def put(self, parameter: torch.Tensor, factor: float, adds: bool, is_final: bool = True) -> None:
        """Take `factor` times the parameter's `.grad`, in addition to the bucket's content or instead of it.

        is_final  publish() follows this pass; else `.grad` is zeroed afterwards, so that code which inspects gradients,
                  clips them or steps a GradScaler finds the expected values in each micro-batch
        """
        if self._are_shown:
            self._begin_writing()
        if is_final and factor and not adds and self._buckets.small.take(parameter, factor):
            return
        self._buckets.small.write()
        view = self._buckets.view(parameter)
        gradient = self._dense_gradient(parameter, view)
        if not adds:
            if factor:
                torch.mul(gradient, factor, out=view)
            else:
                view.zero_()  # not multiplied: a dummy batch's inf times 0 would be NaN
        elif factor:
            view.add_(gradient, alpha=factor)
        # Its values are taken: the next micro-batch must not accumulate on top of them.
        if is_final or gradient is not parameter.grad or gradient.data_ptr() == view.data_ptr():
            parameter.grad = None
        else:
            gradient.zero_()

    def _dense_gradient(self, parameter: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
        """Return the parameter's `.grad` outside autograd. Raises StepError unless it has the shape of the bucket's
        part."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.requires_grad:  # backward(create_graph=True)
            gradient = gradient.detach()
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.shape != view.shape or gradient.dtype is not view.dtype:
            raise StepError(
                f"the gradient of {self._names[parameter]} has shape {tuple(gradient.shape)} and {gradient.dtype}, but "
                f"the parameter had shape {tuple(view.shape)} and {view.dtype} when its bucket was made: change the "
                f"model before the first step, and wrap the optimizer afterwards"
            )
        return gradient

    def zero(self, parameter: torch.Tensor) -> None:
        """Zero the bucket's part of a parameter that has no gradient."""
        if self._are_shown:
            self._begin_writing()
        self._buckets.small.write()
        self._buckets.view(parameter).zero_()

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether the parameter's `.grad` is its part of a bucket."""
        return any(is_same_memory(parameter.grad, each.view(parameter)) for each in (self._buckets, *self._others))

    def _begin_writing(self) -> None:
        """Take other buckets if a script has put gradients of these aside, e.g. to combine them with those of another
        pass, or of the next step."""
        self._are_shown = False
        if not self._buckets.is_kept():
            return
        former = self._buckets
        free = next((each for each in self._others if not each.is_kept()), None) or Buckets(self.parameters)
        self._others = [former, *(each for each in self._others if each is not free)][:_MOST_OTHERS]
        self._buckets = free
        if free.least_bytes != former.least_bytes:
            free.cut(former.least_bytes)

    def complete(self, filled: Collection[int], factor: float, is_kept: bool) -> None:
        """Complete the gradients after the backward passes: zeros for the parameters that are not filled.

        filled   parameters, by id, whose gradients were put
        factor   that of this loop body
        is_kept  parameters that are not filled keep the gradients that they have: reduced ones of an earlier pass, or
                 of the last step if the script does not zero them
        """
        if len(filled) == len(self.parameters):
            return
        for parameter in self.parameters:
            if id(parameter) in filled:
                continue
            if is_kept and parameter.grad is not None and parameter.requires_grad:
                self.put(parameter, factor, adds=False)
            else:
                self.zero(parameter)

    # While backward continues ----------------------------------------------------------------------------

    def may_overlap(self) -> bool:
        """Return whether complete buckets can be reduced while backward continues; then each arrived() counts."""
        self._began_s = now_s() if self._autotune is not None else None
        buckets = self._buckets.buckets
        if len(buckets) == 1 or self._agreed_in is not world.current() or not self._reduce.may_overlap:
            return False
        self._missing = [len(bucket.parameters) for bucket in buckets]
        self._arrivals = [Arrivals(self._buckets.device) for _ in buckets]
        return True

    def arrived(self, parameter: torch.Tensor) -> None:
        """Note that the parameter's gradient is final on this rank. A complete bucket is submitted, but only after all
        buckets before it: ranks differ in the bucket that is complete first."""
        place = self._place[id(parameter)]
        self._missing[place] -= 1
        self._arrivals[place].record()
        transport = self._overlaps_on = world.current().transport
        while self._given < len(self._missing) - 1 and not self._missing[self._given]:
            self._buckets.small.write()
            task = partial(self._all_reduce, transport, self._given, b"")
            of_gradients.add(self._arrivals[self._given].before(task))
            self._given += 1

    def is_overlapping(self) -> bool:
        """Return whether a bucket was submitted, and reduce() was not called."""
        return self._given > 0

    def end_overlap(self, reason: str) -> None:
        """Wait until no reduction is under way; the transport is aborted if one was."""
        if self._given and self._overlaps_on is not None:
            # Other ranks wait for the remaining buckets, which will not come.
            self._overlaps_on.abort(reason)
            of_gradients.finish()
            self._given = 0

    # From bucket to the sum ------------------------------------------------------------------------------

    def add_up(self, batch: Batch, own_weight: float) -> None:
        """Reduce the remaining buckets to the gradients of the global batch, proved by the step header."""
        headers = self.reduce(header_of(batch, self._digest, own_weight))
        self.scale(conclude(headers, batch))

    def reduce(self, header: StepHeader) -> list[StepHeader]:
        """Add up the remaining buckets over all ranks. Returns the headers of all ranks, by rank. Raises the errors of
        transports."""
        self._buckets.small.write()
        here, trailer = world.current(), packed_at_end(header) + self.note
        if self._agreed_in is not here:
            self._agree(here)
        given, self._given = self._given, 0
        if given:
            of_gradients.land(here.transport)
        *others, last = range(len(self._buckets.buckets))
        for place in others[given:]:
            self._all_reduce(here.transport, place, b"")
        if self._autotune is not None and self._autotune.is_over:
            # Before the last bucket, since ranks differ in the buckets submitted so far.
            self._end_autotune(here, self._autotune)
        trailers = self._all_reduce(here.transport, last, trailer)
        self.notes = [each[HEADER_BYTES:] for each in trailers]
        self._take_turns()
        return [StepHeader.unpack(each[:HEADER_BYTES]) for each in trailers]

    def _all_reduce(self, transport: Transport, place: int, trailer: bytes) -> list[bytes]:
        return self._reduce.all_reduce(transport, self._buckets.buckets, place, trailer)

    def _agree(self, here: world.World) -> None:
        """Agree on the buckets, once in each generation and after each change of the parameters."""
        total = self._buckets.total_bytes
        described = describe(self._names)
        is_on_device = self._buckets.device.type != "cpu"
        sizes = agree_on_buckets(here, self._digest, described, total, self._pinned_bytes, is_on_device, self._fastest)
        self._autotune = BucketAutotune(sizes) if len(sizes) > 1 else None
        self._cut(sizes[0])
        self._agreed_in = here
        if self._autotune is None and sizes[0] and here.placement.rank == 0:
            logger.info("%.1f MB of gradients are reduced in buckets of %s", total / 2**20, _format_size(sizes[0]))

    def _cut(self, least_bytes: int) -> None:
        self._next_bytes = least_bytes
        self._buckets.cut(least_bytes)
        self._reduce.forget()
        buckets = enumerate(self._buckets.buckets)
        self._place = {id(each): place for place, bucket in buckets for each in bucket.parameters}

    def _take_turns(self) -> None:
        """Advance the autotune after each reduction."""
        began_s, self._began_s = self._began_s, None
        if self._autotune is not None:
            self._autotune.record(None if began_s is None else now_s() - began_s)
            self._next_bytes = self._autotune.size
        if self._next_bytes != self._buckets.least_bytes:
            self._cut(self._next_bytes)

    def _end_autotune(self, here: world.World, autotune: BucketAutotune) -> None:
        """Choose the same size on all ranks; it applies from the next step on."""
        medians = struct.Struct(f"<{len(autotune.sizes)}d")
        by_rank = [medians.unpack(each) for each in here.transport.all_gather(medians.pack(*autotune.medians_s()))]
        self._autotune = None
        self._fastest = self._next_bytes = fastest(autotune.sizes, by_rank)
        if here.placement.rank == 0:
            times = zip(autotune.sizes, map(max, zip(*by_rank, strict=True)), strict=True)
            logger.info(
                "%.1f MB of gradients are reduced in buckets of %s, after the autotune; first gradient to last sum: %s",
                self._buckets.total_bytes / 2**20,
                _format_size(self._fastest),
                ", ".join(f"{1e3 * seconds:.1f} ms with {_format_size(size)}" for size, seconds in times),
            )

    def scale(self, factor: float) -> None:
        """Multiply all gradients, after reduce()."""
        if factor != 1.0:
            for flat in self._buckets.flats:
                flat.mul_(factor)

    # From the sum to .grad -------------------------------------------------------------------------------

    def publish(self) -> None:
        """Set every `.grad` to its part of the bucket."""
        self._buckets.show_all()
        self._are_shown = True

    def tensors(self) -> list[torch.Tensor]:
        """Return all gradients, in as few tensors as possible."""
        return self._buckets.flats

    def memory(self) -> list[torch.Tensor]:
        """Return all tensors that put() writes."""
        self._buckets.small.write()
        return self._buckets.flats


def _format_size(least_bytes: int) -> str:
    if not least_bytes:
        return "any size, after the end of backward"
    return f"{least_bytes / 2**20:.1f} MB, during backward"


# An all-reduce with fewer bytes on the wire ---------------------------------------------------------------------------
#
# All ranks add rounded values and receive the rounded sum: their results are bitwise equal, on the owner of a part
# too.

_COMPRESSED_DTYPES: dict[object, torch.dtype] = {BF16Compressor: torch.bfloat16, FP16Compressor: torch.float16}


class Reduce(Protocol):
    """What adds up buckets over all ranks."""

    @property
    def may_overlap(self) -> bool:
        """Whether another thread than the main one may call all_reduce()."""
        ...

    def forget(self) -> None:
        """Note that other buckets follow."""
        ...

    def all_reduce(self, transport: Transport, buckets: Sequence[Bucket], place: int, trailer: bytes) -> list[bytes]:
        """Overwrite a bucket with its sum. Returns the trailers of all ranks. Raises the errors of transports."""
        ...


class CompressedReduce:
    """All-reduce with a compressor. It keeps the memory of the sent tensors, whose sizes are equal in each step.

    Farandole's own compressors cost only the casts in both directions; others return new tensors each time.
    """

    may_overlap = True

    def __init__(self, compression: Compressor) -> None:
        self._compression = compression
        self._dtype = _COMPRESSED_DTYPES.get(compression)
        self._sent: dict[tuple[int, int], torch.Tensor] = {}

    def forget(self) -> None:
        """Drop the buffers, since other tensors will follow."""
        self._sent.clear()

    def all_reduce(self, transport: Transport, buckets: Sequence[Bucket], place: int, trailer: bytes) -> list[bytes]:
        flat = buckets[place].flat
        if self._compression is NoneCompressor or flat.dtype == self._dtype:
            return transport.all_reduce(flat, trailer)
        if self._dtype is None or not flat.is_floating_point():
            sent, ctx = self._compression.compress(flat)
            trailers = transport.all_reduce(sent, trailer)
            if sent is not flat:
                flat.copy_(self._compression.decompress(sent, ctx))
            return trailers
        key = (flat.data_ptr(), flat.numel())
        small = self._sent.get(key)
        if small is None:
            small = self._sent[key] = shareable_zeros(flat.numel(), self._dtype, flat.device)
        small.copy_(flat)
        trailers = transport.all_reduce(small, trailer)
        flat.copy_(small)
        return trailers


# The agreement before the first reduction of a generation: the same gradients, in the same buckets --------------------

# Digest, bytes, whether tensors go by the network, whether there is a core to spare; the requested bytes of a bucket,
# and the bytes that were fastest in an earlier generation, each -1 if there are none.
_PROPOSAL = struct.Struct("<6q")


def agree_on_buckets(
    here: World,
    digest: int,
    described: Sequence[str],
    total_bytes: int,
    pinned_bytes: int | None,
    is_on_device: bool = False,
    tried_bytes: int | None = None,
) -> list[int]:
    """Return the candidates for the least bytes of a bucket, equal on all ranks, which all call it. Rank 0's request
    comes first, then the result of an earlier autotune.

    is_on_device  gradients and computations are on a device
    tried_bytes   the fastest size on this rank, over any connections; None: unknown

    Raises CollectiveMismatch, alike on every rank, naming the first parameter that differs, unless all have the same
    digest. Raises the errors of transports, too.
    """
    is_by_network = not isinstance(host_transport(here.transport), SharedMemoryTransport)
    has_core = has_core_to_spare(
        usable_cores(), here.placement.local_size, torch.get_num_threads(), is_by_network, is_on_device
    )
    asked, tried = (-1 if each is None else each for each in (pinned_bytes, tried_bytes))
    proposal = _PROPOSAL.pack(digest, total_bytes, is_by_network or is_on_device, has_core, asked, tried)
    proposals = [_PROPOSAL.unpack(each) for each in here.transport.all_gather(proposal)]
    if any(each[0] != digest for each in proposals):
        texts = here.transport.all_gather("\n".join(described).encode())
        raise CollectiveMismatch(difference_of_models([text.decode().split("\n") for text in texts]))
    pinned = None if proposals[0][4] < 0 else proposals[0][4]
    sizes = bucket_sizes(
        total_bytes, len(proposals), any(each[2] for each in proposals), all(each[3] for each in proposals), pinned
    )
    tried_by_some = [each[5] for each in proposals if each[5] >= 0]
    return tried_by_some[:1] if tried_by_some and len(sizes) > 1 else sizes


def difference_of_models(by_rank: Sequence[Sequence[str]]) -> str:
    """Return a text about the first difference between models, and the ranks. `by_rank`: for each rank, the result of
    describe() for its parameters."""
    places = range(max(map(len, by_rank)))
    place = next((place for place in places if len({_kind(_at(each, place)) for each in by_rank}) > 1), 0)
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(by_rank):
        ranks.setdefault(_at(each, place), []).append(rank)
    found = "; ".join(f"{text} on {_on(numbers)}" for text, numbers in ranks.items())
    return (
        f"workers have different models. The first parameter of the optimizer that differs is number {place}: {found}. "
        f"Every worker must build the same model, and pass its parameters in the same order; nothing was applied"
    )


def _at(described: Sequence[str], place: int) -> str:
    return described[place] if place < len(described) and described[place] else "nothing"


def _kind(text: str) -> str:
    """Return the text without the name."""
    return text.partition(" ")[2] or text


def _on(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
