"""Handlers, with which a TorchState saves, restores and synchronizes the values that are not plain.

The sync() of a handler copies from rank 0. Inside `elastic.run`, the values of the built-in handlers are synchronized
together instead, from the rank with the newest commit (committed_state.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader

from farandole.integrations.horovod.named.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
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
from farandole.training.state.packed_metadata import is_stateful


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
    """Handler of any other object with state_dict() and load_state_dict(): a scheduler, a GradScaler, a meter. The
    object stays the same one, so that it stays bound to its optimizer."""

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
