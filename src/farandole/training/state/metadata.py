"""Handlers, with which a TorchState saves, restores and synchronizes the values that are not plain.

The sync() of a handler copies from rank 0. Inside `elastic.run`, the values of the built-in handlers are synchronized
together instead, from the rank with the newest commit (sync.py). The functions at the end serve the states of
both rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader

from farandole.errors import ConfigError
from farandole.integrations.horovod.named.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from farandole.training.collectives.connection_pair import bytes_of
from farandole.training.state.deep_copy import (
    TensorPair,
    ValueSnapshot,
    finish_all,
    finish_all_to_restore,
    finish_before_loading,
    tensors_in,
)
from farandole.training.state.optimizer_state import (
    Entries,
    GroupOptions,
    OptimizerState,
    is_torchs_own,
    load_state_dict_in_place,
)
from farandole.training.state.packing import Packed, pack, unpack


class StateHandler:
    """The handler of one value of a TorchState. Users derive from it for types of their own, and register the class.

    Args:
        value: The value to handle.

    Examples:
        ```python
        class ListHandler(fd.elastic.StateHandler):
            def save(self):
                self.saved = list(self.value)

            def restore(self):
                self.value[:] = self.saved

            def sync(self):
                self.value[:] = fd.broadcast_object(self.value)
                self.save()


        class History(list):
            pass


        fd.elastic.get_handler_registry().insert(0, (History, ListHandler))
        state = fd.elastic.TorchState(model, optimizer, history=History())
        ```
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Remember the value as it is now."""
        raise NotImplementedError(f"{type(self).__name__} has no save()")

    def restore(self) -> None:
        """Return the value to the state of the last save()."""
        raise NotImplementedError(f"{type(self).__name__} has no restore()")

    def sync(self) -> None:
        """Make the value of all ranks equal to rank 0's. A collective."""
        raise NotImplementedError(f"{type(self).__name__} has no sync()")

    def set_value(self, value: Any) -> None:
        """Handle another object from now on, since the attribute was assigned. The object is saved as it is.

        Args:
            value: The new object.
        """
        self.value = value
        self.save()


class SnapshotHandler(StateHandler):
    """Base class of the built-in handlers. They remember a deep copy of the value's state_dict()."""

    is_on_host = False
    """True when load_state_dict() moves CPU tensors to their devices: the copy then needs no device memory."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._snapshot = ValueSnapshot(self.is_on_host)
        self.save()

    def save(self) -> None:
        finish_all()  # a copy that a commit has begun would be finished into this one's memory
        self.begin_save(frozenset())

    def begin_save(self, optimized: Collection[int]) -> list[TensorPair]:
        """Save everything now except tensors that only an optimizer's step changes. Their copies are returned; the
        caller has to carry them out before the next step.

        optimized  data_ptr() of the parameters that optimizers own
        """
        return self._snapshot.take(self.value.state_dict())

    def restore(self) -> None:
        finish_all_to_restore()
        self.value.load_state_dict(self._snapshot.copy())


class ModelStateHandler(SnapshotHandler):
    """Handler of a torch.nn.Module: parameters, persistent buffers, extra state.

    See the example of `StateHandler`.

    Args:
        model: The module.
    """

    is_on_host = True

    def __init__(self, model: torch.nn.Module) -> None:
        finish_before_loading(model)
        super().__init__(model)

    def begin_save(self, optimized: Collection[int]) -> list[TensorPair]:
        return self._snapshot.take(self.value.state_dict(), lambda tensor: tensor.data_ptr() in optimized)

    def restore(self) -> None:
        finish_all_to_restore()
        self.value.load_state_dict(self._snapshot.view())  # load_state_dict() copies out of the tensors

    def sync(self) -> None:
        finish_all()
        state = self.value.state_dict()
        broadcast_parameters({key: value for key, value in state.items() if isinstance(value, torch.Tensor)}, 0)
        self.save()

    def set_value(self, value: torch.nn.Module) -> None:
        finish_before_loading(value)
        super().set_value(value)


class OptimizerStateHandler(SnapshotHandler):
    """Handler of a torch.optim.Optimizer. For a class of torch it keeps the state_dict(). For any other class it keeps
    the whole state (optimizer_state.py), and the state_dict() if the class defines one. Tensors in both are copied
    once.

    See the example of `StateHandler`.

    Args:
        value: The optimizer.
    """

    is_on_host = True

    def begin_save(self, optimized: Collection[int]) -> list[TensorPair]:
        state, (entries, options) = self._state_dict(), self._whole()
        # The groups are saved now: outside of step(), a scheduler changes a learning rate that is a tensor.
        now = [options, *(each for key, each in state.items() if key != "state")]
        others = {id(tensor) for tensor in tensors_in(now)}
        saved = {"state_dict": state, "entries": entries, "options": options}
        return self._snapshot.take(saved, (lambda tensor: id(tensor) not in others) if optimized else None)

    def restore(self) -> None:
        finish_all_to_restore()
        saved = self._snapshot.copy()
        if saved["state_dict"]:
            load_state_dict_in_place(self.value, self.value.load_state_dict, saved["state_dict"])
        self._load_whole(saved["entries"], saved["options"])

    def sync(self) -> None:
        finish_all()
        broadcast_optimizer_state(self.value, 0)
        if not is_torchs_own(self.value):
            self._load_whole(*broadcast_object(self._whole(), 0))
        self.save()

    def _state_dict(self) -> dict[str, Any]:
        if is_torchs_own(self.value) or type(self.value).state_dict is not torch.optim.Optimizer.state_dict:
            return dict(self.value.state_dict())
        return {}  # the base's method fails where a class does not call the base's __init__()

    def _whole(self) -> tuple[Entries, GroupOptions]:
        if is_torchs_own(self.value):
            return {}, {}
        whole = OptimizerState("optimizer", self.value)
        return whole.entries(), whole.options()

    def _load_whole(self, entries: Entries, options: GroupOptions) -> None:
        if not is_torchs_own(self.value):
            whole = OptimizerState("optimizer", self.value)
            whole.load(entries)
            whole.load_options(options)


@runtime_checkable
class RecordingSampler(Protocol):
    """A sampler that knows which samples were trained, as ElasticSampler does."""

    def record_batch(self, batch_idx: int, batch_size: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class SamplerStateHandler(SnapshotHandler):
    """Handler of a sampler that records progress. Loading its state also divides the remaining samples among the
    current world.

    Sets of trained samples, which differ by rank, are united; everything else is taken from rank 0.

    See the example of `StateHandler`.

    Args:
        value: The sampler.
    """

    def sync(self) -> None:
        self.load_united(allgather_object(self.value.state_dict()))
        self.save()

    def load_united(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the first state, with the sets of all states."""
        source = states[0]
        if any(isinstance(value, set | frozenset) for state in states for value in state.values()):
            merge = getattr(self.value, "merge", _merge)  # an ElasticSampler merges its states more precisely
            source = merge([state for state in states if state.get("epoch") == source.get("epoch")])
        self.value.load_state_dict(source)


class StatefulHandler(SnapshotHandler):
    """Handler of any other object with state_dict() and load_state_dict(): a scheduler, a GradScaler, a meter.

    The object stays the same one, so that it stays bound to its optimizer.
    """

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0))
        self.save()


class LoaderHandler(StateHandler):
    """Handler of a torch DataLoader: each worker keeps its own. A copy of rank 0's loader would have rank 0's sampler,
    and so rank 0's part of the data."""

    def save(self) -> None:
        """Do nothing: the position is known to the loader's sampler, or to a value of the script."""

    def restore(self) -> None:
        """Do nothing, as in save()."""

    def sync(self) -> None:
        """Do nothing, as in save()."""


class LoaderSamplerHandler(SamplerStateHandler):
    """Handler of a torch DataLoader whose sampler records progress: it keeps the state of the sampler."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader.sampler)

    def set_value(self, value: DataLoader[Any]) -> None:
        super().set_value(value.sampler)


Registry = list[tuple[type, Callable[[Any], StateHandler]]]

_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (RecordingSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return the registry of handlers, which TorchState reads for each value.

    See the example of `StateHandler`.

    Returns:
        Pairs of type and handler class; the first matching type is used. It is the list itself: entries added to it
        take effect.
    """
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Replace the registry of handlers.

    See the example of `StateHandler`.

    Args:
        registry: Pairs of type and handler class; the first matching type is used.
    """
    global _registry
    _registry = registry


def handler_for(value: Any) -> StateHandler | None:
    """Return a new handler for the value, or None for a plain value."""
    for kind, make in _registry:
        if isinstance(value, kind):
            return make(value)
    if is_stateful(value):
        return StatefulHandler(value)
    if isinstance(value, DataLoader):
        return LoaderSamplerHandler(value) if isinstance(value.sampler, RecordingSampler) else LoaderHandler(value)
    return None


BUILT_IN = (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StatefulHandler,
    LoaderHandler,
    LoaderSamplerHandler,
)
"""Handlers whose values sync.py can synchronize together."""


def _merge(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first state, with the sets of all states in it."""
    sets = {key for state in states for key, value in state.items() if isinstance(value, set | frozenset)}
    return {**states[0], **{key: set().union(*(state.get(key, ()) for state in states)) for key in sorted(sets)}}


# Functions that the states of both rules share: they pack metadata, and load and compare values -----------------------


def is_stateful(value: object) -> bool:
    """Return whether an object defines its own state: a scheduler, a GradScaler."""
    return not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def load_stateful(value: Any, saved: Any) -> None:
    """Call load_state_dict(). A GradScaler also forgets its actions since its last update(): load_state_dict() keeps
    them, and the scaler would refuse to repeat the step."""
    value.load_state_dict(saved)
    if isinstance(value, torch.amp.GradScaler) and value.is_enabled():
        value._per_optimizer_states.clear()


def load_value(live: Any, saved: Any) -> Any:
    """Return `saved`, loaded into the `live` object where that can be changed in place: a script may have other
    references to a tensor, list, dictionary or set that it has given to a state."""
    if type(live) is not type(saved):
        return saved
    if isinstance(saved, torch.Tensor):
        if (live.shape, live.dtype, live.requires_grad) != (saved.shape, saved.dtype, saved.requires_grad):
            return saved
        with torch.no_grad():
            live.copy_(saved)
        return live
    if isinstance(saved, list):
        live[:] = [load_value(*both) for both in zip(live, saved, strict=False)] + saved[len(live) :]
    elif isinstance(saved, dict):
        values = {key: load_value(live.get(key), value) for key, value in saved.items()}
        live.clear()
        live.update(values)
    elif isinstance(saved, set):
        live.clear()
        live.update(saved)
    else:
        return saved
    return live


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, tensors by their bytes. Objects that cannot be compared are pickled."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bytes_of(one), bytes_of(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    equal = one == other
    if isinstance(equal, bool) and equal:
        return True
    return _pickled(one) == _pickled(other)  # NaN, NumPy arrays, objects without a usable __eq__()


def _pickled(value: Any) -> bytes:
    """Pickle a copy of the value: the bytes would otherwise show which parts are one object."""
    packed = pack(value)
    return pack(unpack(packed)).skeleton + b"".join(bytes(bytes_of(each)) for each in packed.tensors)


def pack_metadata(metadata: Mapping[str, Any]) -> Packed:
    """Pack the metadata. Raises ConfigError for the item of metadata["values"] that cannot be pickled."""
    try:
        return pack(metadata)
    except Exception as error:
        for name, value in metadata["values"].items():
            _refuse_unpicklable(name, value, error)
        raise


def refuse_other_model(
    ours: Mapping[str, Mapping[str, torch.Tensor]], theirs: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Raise ConfigError, naming the parameter, unless both have the same parameters, by module and name."""
    here = {f"{name}.{key}": tuple(p.shape) for name, group in ours.items() for key, p in group.items()}
    there = {f"{name}.{key}": tuple(p.shape) for name, group in theirs.items() for key, p in group.items()}
    for key in [*here, *there]:
        if here.get(key) != there.get(key):
            raise ConfigError(
                f"workers have different models: parameter {key} is {here.get(key, 'missing')} here and "
                f"{there.get(key, 'missing')} on the source rank; every worker must build the same model"
            )


def _refuse_unpicklable(name: str, value: object, error: Exception) -> None:
    try:
        pack(value)
    except Exception:  # noqa: BLE001 - pickle raises any error of the value's own methods
        raise ConfigError(
            f"state.{name} of type {type(value).__name__} cannot be pickled ({error}); other workers could not "
            f"receive it: use values in TorchState that can be pickled, or objects with state_dict()"
        ) from error


# A copy of the metadata, made at every boundary and read only when a step is repeated or on request.
#
# Making the copy must be fast. Tensors are copied into existing memory. The rest usually consists of immutable
# values: it is kept as it is then, and serialized when it is read.


_UNCHANGING = frozenset({int, float, bool, str, bytes, type(None)})


class MetadataSnapshot:
    """The argument of the last take(), as it was then."""

    def __init__(self) -> None:
        self._metadata: Mapping[str, Any] | None = None  # not packed yet
        self._packed = Packed(b"", [])
        self._sources: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []  # copies, sources; by device and dtype

    def take(self, metadata: Mapping[str, Any]) -> None:
        """Copy the metadata of a StepState. Its "stateful" and "values" may hold any type, the other parts only known
        types."""
        if _cannot_change(metadata):
            self._metadata, tensors = metadata, _buffers(metadata)
        else:
            packed = pack_metadata(metadata)
            self._metadata, tensors = None, packed.tensors
            self._packed = packed
        self._copy(tensors)

    def read(self) -> Packed:
        """Return the copy, which the caller must not change. An empty skeleton means that nothing was taken."""
        if self._metadata is not None:
            self._packed, self._metadata = pack_metadata(self._metadata), None
        return Packed(self._packed.skeleton, self._copies)

    def fresh(self) -> Mapping[str, Any] | None:
        """Return what was taken, of which the caller may use all but the buffers as its own. None: nothing was."""
        if self._metadata is not None:
            return self._metadata
        return unpack(self.read()) if self._packed.skeleton else None

    def put_back(self, tensors: Collection[torch.Tensor]) -> None:
        """Restore some of the buffers to their values at the last take()."""
        wanted = set(map(id, tensors))
        pairs = [(live, kept) for live, kept in zip(self._sources, self._copies, strict=True) if id(live) in wanted]
        if pairs:
            with torch.no_grad():
                torch._foreach_copy_([live for live, _ in pairs], [kept for _, kept in pairs])

    def _copy(self, tensors: list[torch.Tensor]) -> None:
        if not _are_those(tensors, self._sources, self._copies):
            self._sources = tensors
            self._copies = [tensor.detach().clone() for tensor in tensors]
            groups: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
            for tensor, copy in zip(tensors, self._copies, strict=True):
                copies, sources = groups.setdefault((tensor.device, tensor.dtype), ([], []))
                copies.append(copy)
                sources.append(tensor)
            self._groups = list(groups.values())
        else:
            with torch.no_grad():
                for copies, sources in self._groups:  # on a device each is one operation
                    torch._foreach_copy_(copies, sources)  # private; see optim/loader_path.py


def _are_those(tensors: list[torch.Tensor], before: list[torch.Tensor], copies: list[torch.Tensor]) -> bool:
    """Return whether these are the tensors that the copies were made of, as is usual."""
    return len(tensors) == len(before) and all(
        tensor is each and tensor.numel() == copy.numel()
        for tensor, each, copy in zip(tensors, before, copies, strict=True)
    )


def _cannot_change(metadata: Mapping[str, Any]) -> bool:
    """Return whether all but the buffers is immutable. Every other part is a dictionary made for this call, of such
    values."""
    if metadata["stateful"]:
        return False
    options = [group for groups in metadata["groups"].values() for group in groups]
    return all(_are_unchanging(values.values()) for values in (metadata["loader"] or {}, metadata["values"], *options))


def _are_unchanging(values: Collection[object]) -> bool:
    others = set(map(type, values)) - _UNCHANGING
    if others != {tuple}:
        return not others
    return all(_UNCHANGING.issuperset(map(type, value)) for value in values if type(value) is tuple)


def _buffers(metadata: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the buffers in the order in which they are packed, each once."""
    all_of_them = [buffer for module in metadata["buffers"].values() for buffer in module.values()]
    return list({id(buffer): buffer for buffer in all_of_them}.values())
