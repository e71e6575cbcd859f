"""Functions that the states of both rules share: they pack metadata, and load and compare values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from farandole.errors import ConfigError
from farandole.training.collectives.connection_pair import bytes_of
from farandole.training.state.packing import Packed, pack, unpack


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
            try:
                pack(value)
            except Exception:  # noqa: BLE001 - pickle raises any error of the value's own methods
                raise ConfigError(
                    f"state.{name} of type {type(value).__name__} cannot be pickled ({error}); other workers could not "
                    f"receive it: use values in TorchState that can be pickled, or objects with state_dict()"
                ) from error
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


# A copy of the metadata, made at every boundary and read only when a step is repeated or on request -------------------
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
