"""The digests of one rank's state, and their schedule: a block every few steps, a sample where time is short, or
everything.

sync.py compares these digests, and the step header carries them (optim/step_agreement.py). The state is hashed at
boundaries only, where the state of all ranks is that of the last decided step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from farandole.training.collectives.connection_pair import bytes_of, memory_at
from farandole.training.state.digest_schedule import TURN, ByteRange, block_at, cut, is_due, sample_at
from farandole.training.state.optimizer_state import with_inner
from farandole.training.state.tensor_digest import LONG_BYTES, Piece, digest, digest_of

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
