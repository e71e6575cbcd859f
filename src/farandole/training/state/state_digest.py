"""The digests of one rank's state, and their schedule: a block every few steps, a sample where time is short, or
everything.

sync.py compares these digests, and the step header carries them (optim/step_agreement.py). The state is hashed at
boundaries only, where the state of all ranks is that of the last decided step.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from farandole.training.collectives.connection_pair import bytes_of, memory_at
from farandole.training.state.optimizer_state import with_inner

STRIKES = 3


class StateDigest:
    """The digests of one state.

    tensors  returns all compared tensors, as they are now

    is_suspicious  a step header has shown that ranks differ: everything is to be compared
    local          names of tensors that each rank computes from its own local batch: they are not compared. Never
                   tensors of parameters and optimizers
    suspects       tensors that differed and were made equal, with the number of times that they have differed again
                   after a single step. Tensors that do so STRIKES times in a row are local
    """

    def __init__(self, tensors: Callable[[], list[NamedTensor]]) -> None:
        self._tensors = tensors
        self._layout: _BlockLayout | None = None
        self._equal_at = 0  # the step at which the suspects were made equal
        self.is_suspicious = False
        self.local: frozenset[str] = frozenset()
        self.suspects: Mapping[str, int] = {}

    def of_due_block(self, step: int) -> int:
        """Return the digest for the header of this step: that of the block that is due; 0 when none is."""
        if self.suspects and step > self._equal_at:
            if step == self._equal_at + 1:
                return self._of_suspects(step)
            self.suspects = {}
        return self._of_block(step) if is_due(step) else 0

    def of_sample(self, step: int, trained_only: bool) -> int:
        """Return a digest of a sample that is read in a few milliseconds, of the tensors as they are now."""
        layout = self._begin_layout(step, (each for each in self._tensors() if each.is_trained or not trained_only))
        return digest(layout.pieces(sample_at(step, layout.sizes, layout.blocks)) or ())

    def by_name(self) -> dict[str, int]:
        """Return the digest of each tensor that no optimizer changes. sync.py reads the others itself."""
        found = ((each.name, each.find()) for each in self._compared() if not each.is_trained)
        return {name: digest_of([tensor]) for name, tensor in found if tensor is not None}

    def resolved(self, step: int, repaired: Mapping[str, int], local: Collection[str]) -> None:
        """Note that all ranks have the same state again.

        Args:
            step: Number of decided steps.
            repaired: Names of buffers and tracked tensors that differed, as `suspects`.
            local: Names of the tensors that no comparison includes from now on.
        """
        self.is_suspicious, self._layout = False, None
        self.local, self.suspects, self._equal_at = frozenset(local), repaired, step

    def _of_block(self, step: int) -> int:
        layout = self._layout
        if layout is None or layout.is_outdated(step):
            layout = self._begin_layout(step, self._compared())
            self._layout = layout
        pieces = layout.pieces(layout.blocks[block_at(step, len(layout.blocks))])
        if pieces is None:  # the tensors are not those of the layout
            self._layout = layout = self._begin_layout(step, self._compared())
            pieces = layout.pieces(layout.blocks[block_at(step, len(layout.blocks))]) or []
        return digest(pieces)

    def _of_suspects(self, step: int) -> int:
        found = (each.find() for each in self._compared() if each.name in self.suspects)
        pieces = [bytes_of(tensor) for tensor in found if tensor is not None]
        block = self._of_block(step) if is_due(step) else 0
        return (digest(pieces) ^ block) or 1

    def _compared(self) -> Iterator[NamedTensor]:
        return (each for each in self._tensors() if each.name not in self.local)

    def _begin_layout(self, step: int, tensors: Iterable[NamedTensor]) -> _BlockLayout:
        return _BlockLayout(step, list(tensors))


class _BlockLayout:
    """The tensors of a state, and the blocks into which they are cut.

    It is made anew in each turn, after a sync, and when a tensor was replaced, on all ranks at the same step. In the
    first steps it is made more often, since optimizers create their state in their first step.
    """

    def __init__(self, step: int, tensors: Sequence[NamedTensor]) -> None:
        self._step, self._tensors = step, tensors
        self._shapes = []
        self.sizes = []
        for each in tensors:
            tensor = each.find()
            assert tensor is not None, "the tensor was found before"
            self._shapes.append((tensor.shape, tensor.dtype))
            self.sizes.append(tensor.numel() * tensor.element_size())
        self.blocks = cut(self.sizes)

    def is_outdated(self, step: int) -> bool:
        return step // TURN != self._step // TURN or step <= 16

    def pieces(self, parts: Sequence[ByteRange]) -> list[Piece] | None:
        """Return the bytes of these parts; None when a tensor does not exist any more, or has another shape."""
        found: list[Piece] = []
        for place, start, stop in parts:
            tensor = self._tensors[place].find()
            if tensor is None or (tensor.shape, tensor.dtype) != self._shapes[place]:
                return None
            found.append(_bytes(tensor, start, stop))
        return found


def _bytes(tensor: torch.Tensor, start: int, stop: int) -> Piece:
    """Return bytes [start, stop) of a tensor in its logical order. Of a tensor that is not contiguous, only the needed
    rows are copied."""
    if tensor.is_contiguous() or tensor.dim() == 0:
        if tensor.is_cpu and stop - start < LONG_BYTES:
            return memory_at(tensor, start, stop)
        return bytes_of(tensor)[start:stop]
    row = tensor.numel() * tensor.element_size() // tensor.shape[0]
    first, last = start // row, -(-stop // row)
    return bytes_of(tensor[first:last])[start - first * row : stop - first * row]


# A 64-bit digest of tensors, which tells copies of one state apart at memory speed; not for security ------------------
#
# Long pieces are hashed multilinearly: each 32-bit word is multiplied by a random odd 64-bit number that belongs to
# its place, and the products are added up modulo 2^64; the sums of rows of words are the coefficients of a polynomial
# (D. Lemire and O. Kaser, "Strongly universal string hashing is fast", 2014). Shorter pieces go through CRC-32: in a
# step, where neither torch's operations nor their operands are in the caches, the sums take 0.3 ms more. A change of
# a single word always changes the digest. Any other change, such as swapped values or signs, changes it except with a
# probability of about 2^-32.
#
# Words of 64 bits would be three times as fast, and would miss every pair of changed signs of float64: their highest
# bits cancel modulo 2^64.

_ROW_WORDS = 8192
_ROWS = 4  # at once: their products stay in the cache
LONG_BYTES = 1 << 19
"""Pieces that are shorter are hashed by CRC-32."""

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


Piece: TypeAlias = torch.Tensor | memoryview
"""A 1-D uint8 tensor of any length on any device, or its memory, if that is shorter than LONG_BYTES."""


def digest(pieces: Iterable[Piece]) -> int:
    """Return the digest of the pieces.

    The digest depends on the bytes and the lengths alone. It is never 0, which stands for "nothing was hashed".
    """
    value, crc = 1, 0
    elsewhere: dict[torch.device, list[torch.Tensor]] = {}
    for piece in pieces:
        if isinstance(piece, memoryview):
            value, crc = (value * _MULTIPLIER + len(piece)) & _MASK, zlib.crc32(piece, crc)
            continue
        length = piece.numel()
        value = (value * _MULTIPLIER + length) & _MASK
        if length >= LONG_BYTES:  # whatever its alignment: all ranks must compute the same
            whole = length // 4 * 4
            value = _add(value, piece[:whole])
            piece = piece[whole:]
        if piece.device.type == "cpu":
            crc = zlib.crc32(piece.numpy().data, crc)
        else:
            elsewhere.setdefault(piece.device, []).append(piece)
    for short in elsewhere.values():
        crc = zlib.crc32(torch.cat(short).cpu().numpy().data, crc)
    return ((value * _MULTIPLIER + crc) & _MASK) or 1


def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the digest of whole tensors, in their logical order."""
    return digest(bytes_of(tensor) for tensor in tensors)


def _add(value: int, raw: torch.Tensor) -> int:
    """Append bytes to the digest `value`. Their number must be divisible by 4."""
    if raw.storage_offset() % 4:
        raw = raw.clone()  # words have to be aligned
    for total in _row_sums(raw.view(torch.int32)):
        value = (value * _MULTIPLIER + total) & _MASK
    return value


def _row_sums(words: torch.Tensor) -> Iterator[int]:
    weights = _weights(words.device)
    whole = words.numel() // _ROW_WORDS * _ROW_WORDS
    rows = words[:whole].view(-1, _ROW_WORDS)
    if words.device.type == "cpu":
        room = _room()
        for some in torch.split(rows, _ROWS):
            widened = room[: len(some)]
            widened.copy_(some)
            yield from torch.mv(widened, weights).tolist()
    else:
        yield from (rows.long() * weights).sum(dim=1).tolist()
    rest = words[whole:].long()
    yield int((rest * weights[: rest.numel()]).sum())


@functools.cache
def _room() -> torch.Tensor:
    return torch.empty(_ROWS, _ROW_WORDS, dtype=torch.int64)


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers, equal in every process: the finalizer of splitmix64 of 1, 2, 3, ..."""
    x = np.arange(1, _ROW_WORDS + 1, dtype=np.uint64) * np.uint64(_MULTIPLIER)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)


# The schedule of digests ----------------------------------------------------------------------------------------------
#
# The schedule by which parts of the state are hashed. It depends only on the sizes of the tensors and the step, so
# that all ranks hash the same part.

EVERY = 8
"""Steps from one hashed block to the next one."""

BLOCKS = 32
"""Maximum number of blocks of a state."""

TURN = EVERY * BLOCKS
"""Steps in which every block is hashed once."""

HEAD_BYTES = 4096  # of each tensor of a sample
_WHOLE_BYTES = 6 << 20  # a state of at most this size is its own sample: some 2 ms
_MORE_BYTES = 1 << 20  # of the block in turn, in a sample
_HEADS = 400  # tensors in a sample: some 3 ms

_TENSOR_BYTES = 16 << 10  # bytes that are hashed in the time that one more tensor costs
_BLOCK_BYTES = 2 * _TENSOR_BYTES  # smallest block, where that saves steps


class ByteRange(NamedTuple):
    """Bytes [start, stop) of the tensor at `place` of the list."""

    place: int
    start: int
    stop: int


def is_due(step: int) -> bool:
    """Return whether a block is hashed at the boundary before this step."""
    return step % EVERY == 0


def cut(sizes: Sequence[int]) -> list[list[ByteRange]]:
    """Cut tensors of these sizes in bytes into at most BLOCKS blocks that take about the same time; at least one."""
    total = sum(sizes) + _TENSOR_BYTES * len(sizes)
    blocks = max(1, min(BLOCKS, total // _BLOCK_BYTES))
    length = -(-total // blocks)
    cuts: list[list[ByteRange]] = [[] for _ in range(blocks)]
    position = 0
    for place, size in enumerate(sizes):
        position += _TENSOR_BYTES
        start = 0
        while start < size:
            block = min((position + start) // length, blocks - 1)
            end = size if block == blocks - 1 else (block + 1) * length - position
            stop = min(size, -(-end // 64) * 64)
            cuts[block].append(ByteRange(place, start, stop))
            start = stop
        position += size
    return cuts


def block_at(step: int, blocks: int) -> int:
    """Return the number of the block that is due at this step, or was due last."""
    return step // EVERY % blocks


def sample_at(step: int, sizes: Sequence[int], blocks: Sequence[Sequence[ByteRange]]) -> list[ByteRange]:
    """Return the parts that are compared where time is short. A state of a few MiB is compared whole. Of a larger one,
    the parts are the beginning of each tensor (with very many tensors, of some of them in turn) and the beginning of
    one block in turn."""
    if sum(sizes) <= _WHOLE_BYTES and len(sizes) <= _HEADS:
        return [ByteRange(place, 0, size) for place, size in enumerate(sizes)]
    stride = -(-len(sizes) // _HEADS)
    heads = [
        ByteRange(place, 0, min(size, HEAD_BYTES)) for place, size in enumerate(sizes) if (place + step) % stride == 0
    ]
    return [*heads, *_beginning(blocks[block_at(step, len(blocks))])]


def _beginning(block: Sequence[ByteRange]) -> Iterator[ByteRange]:
    left = _MORE_BYTES
    for place, start, stop in block:
        if left > 0:
            yield ByteRange(place, start, min(stop, start + left))
        left -= stop - start


# Divergence -----------------------------------------------------------------------------------------------------------


class Divergence(msgspec.Struct, frozen=True):
    """The result of a comparison.

    step      decided steps at that time
    name      the first object that differs, as "model.0.weight"
    objects   number of objects that differ
    ranks     the ranks that differ from the source
    source    the rank that agrees with most ranks, the lowest such rank; only ranks with the most progress count
    is_trained  parameters or optimizer state differ, not only buffers and tracked tensors
    """

    step: int
    name: str
    objects: int
    ranks: tuple[int, ...]
    source: int
    is_trained: bool

    def __str__(self) -> str:
        more = f" and {self.objects - 1} more" if self.objects > 1 else ""
        who = "rank" if len(self.ranks) == 1 else "ranks"
        ranks = ", ".join(map(str, self.ranks))
        return f"at step {self.step} {self.name}{more} of {who} {ranks} differed from that of rank {self.source}"


def choose_right(table: Sequence[Mapping[str, int]], names: Sequence[str], ranks: Collection[int]) -> int:
    """Return the rank that agrees with the majority on most of the objects `names`; among several, the lowest rank.

    Args:
        table: Digests by name, of each rank.
        ranks: The ranks that are considered.
    """
    scores = dict.fromkeys(sorted(ranks), 0)
    for name in names:
        counts = Counter(table[rank].get(name) for rank in ranks)
        for rank in scores:
            scores[rank] += counts[table[rank].get(name)]
    return max(scores, key=lambda rank: scores[rank])


def differing(table: Sequence[Mapping[str, int]], ranks: Collection[int]) -> list[str]:
    """Return the names of the objects that are not equal on all of `ranks`, in their order in the tables.

    Args:
        table: Digests by name, of each rank.
    """
    first, *others = (table[rank] for rank in sorted(ranks))
    names = dict.fromkeys([*first, *(name for other in others for name in other)])
    return [name for name in names if any(other.get(name) != first.get(name) for other in others)]


# The tensors of a state, by name --------------------------------------------------------------------------------------
#
# Names of all tensors of a StepState that must be equal on all ranks, and access to them by name. Only this module
# has this knowledge.


class Kinds(Protocol):
    """The values that a state was given, by name; see step_state.py."""

    @property
    def modules(self) -> dict[str, torch.nn.Module]: ...
    @property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]: ...
    @property
    def stateful(self) -> dict[str, Any]: ...
    @property
    def values(self) -> list[str]: ...


class NamedTensor(NamedTuple):
    """A tensor of a state.

    name      as "model.0.weight", "optimizer.0.exp_avg" or "ema.module.0.bias"
    owner     the object that contains it, and stays the same; looked up by the keys of `path`, it gives the live tensor
    is_trained  parameters and optimizer state, which only an optimizer's step changes
    """

    name: str
    owner: Any
    path: tuple[Any, ...]
    is_trained: bool

    def find(self) -> torch.Tensor | None:
        """Return the live tensor; None when it does not exist any more."""
        value = self.owner
        for key in self.path:
            try:
                if isinstance(value, dict) and key not in value:  # reading a defaultdict would add it
                    return None
                value = value[key]
            except (LookupError, TypeError):
                return None
        return value if _is_plain(value) else None


def named_tensors(kinds: Kinds, attributes: Mapping[str, Any], has_all_buffers: bool = False) -> list[NamedTensor]:
    """Return all tensors of a state, each once, in the same order on all ranks.

    Running statistics of BatchNorm are excluded unless `has_all_buffers`: except in strict mode, each rank computes its
    own from its local batch. So are buffers of a DistributedDataParallel that broadcasts them: each forward pass begins
    with those of rank 0, and may change them by its local batch. Sparse tensors are excluded too, and tensors of other
    classes, such as those of a sharded model, whose parts differ by rank.

    Args:
        kinds: The values that the state was given.
        attributes: The attributes of the state, which contain its plain values.
        has_all_buffers: Include running statistics.
    """
    seen: dict[int, torch.Tensor] = {}  # kept alive during the loop: state_dict() may create them anew
    found = []
    for each in _all(kinds, attributes, has_all_buffers):
        tensor = each.find()
        if tensor is not None and id(tensor) not in seen:
            seen[id(tensor)] = tensor
            found.append(each)
    return found


def tensors_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the values in nested containers, with the keys that lead to them; not the containers themselves."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from tensors_in(each, (*path, key))
    elif isinstance(value, list | tuple):
        for key, each in enumerate(value):
            yield from tensors_in(each, (*path, key))
    else:
        yield path, value


def _all(kinds: Kinds, attributes: Mapping[str, Any], has_all_buffers: bool) -> Iterator[NamedTensor]:
    for name, module in kinds.modules.items():
        yield from _of_module(f"{name}.", module, has_all_buffers)
    for name, optimizer in kinds.optimizers.items():
        for inner, each in with_inner(name, optimizer).items():
            yield from _of_optimizer(inner, each)
    for name, value in kinds.stateful.items():
        yield from _nested(name, _StateDict(value), (), value.state_dict())
    for name in kinds.values:
        yield from _nested(name, attributes, (name,), attributes[name])


def _of_module(
    prefix: str, module: torch.nn.Module, has_all_buffers: bool, are_broadcast: bool = False
) -> Iterator[NamedTensor]:
    for key in module._parameters:
        yield NamedTensor(prefix + key, module._parameters, (key,), is_trained=True)
    if isinstance(module, DistributedDataParallel):
        are_broadcast |= bool(module.broadcast_buffers)
    # The base class of all BatchNorm and InstanceNorm layers (torch 2.13, torch/nn/modules/batchnorm.py).
    if has_all_buffers or not (are_broadcast or isinstance(module, _NormBase)):
        for key in module._buffers:
            yield NamedTensor(prefix + key, module._buffers, (key,), is_trained=False)
    for key, child in module._modules.items():
        if child is not None:
            yield from _of_module(f"{prefix}{key}.", child, has_all_buffers, are_broadcast)


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer) -> Iterator[NamedTensor]:
    """Yield the tensors of an optimizer. Parameters in no module are included; those of modules came before.
    optimizer.state is another object after load_state_dict()."""
    owner, number = optimizer.__dict__, 0
    for place, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield NamedTensor(f"{name}.{number}", owner, ("param_groups", place, "params", index), is_trained=True)
            if parameter in optimizer.state:
                path = ("state", parameter)
                entry = optimizer.state[parameter]
                for keys, _ in tensors_in({key: entry[key] for key in sorted(entry, key=str)}):
                    path_text = ".".join(map(str, (number, *keys)))
                    yield NamedTensor(f"{name}.{path_text}", owner, (*path, *keys), is_trained=True)
            number += 1


def _nested(name: str, owner: Any, path: tuple[Any, ...], value: Any) -> Iterator[NamedTensor]:
    for keys, each in tensors_in(value):
        if isinstance(each, torch.Tensor):
            yield NamedTensor(".".join(map(str, (name, *keys))), owner, (*path, *keys), is_trained=False)


class _StateDict:
    """Access to an object whose tensors are reachable only through its state_dict()."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, key: Any) -> Any:
        return self._value.state_dict()[key]


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and value.device.type != "meta"
    )
