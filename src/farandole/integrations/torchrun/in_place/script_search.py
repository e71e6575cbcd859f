"""The search for what only the script knows: what holds values, from the variables of its functions on."""

from __future__ import annotations

import argparse
import enum
import functools
import hashlib
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence, Set
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from farandole.integrations.torchrun.in_place.script_frames import frames_of_script
from farandole.integrations.torchrun.in_place.script_holder import PLAIN, Holder, Values, kept_by
from farandole.integrations.torchrun.in_place.script_many import Many, bulk_of
from farandole.integrations.torchrun.in_place.script_memory import (
    LARGE_BYTES,
    as_tensor,
    is_memory,
    shared_data,
    size_of,
)
from farandole.integrations.torchrun.in_place.script_places import (
    generators_of_process,
    is_iterator,
    is_random,
    place_of,
)
from farandole.training.state.tensor_digest import digest_of

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_LONG = 1000  # a container with more items is looked at as a whole, or
_ENDS = 32  # the first and the last of its items are looked at, if they are no plain values
_MOST_NAMES = 12
MOST_HOLDERS = 500  # in a copy at a boundary; of more, only those in which something has changed
_MOST_DEPTH = 12
SAMPLED_BYTES = 64 << 20  # a larger tensor is compared where it may have changed; and only a sample of it, if it has
MOST_WHOLE = 1 << 30  # more than these
_CONTAINERS = frozenset({list, tuple, set, frozenset, deque, dict})
_NAMESPACES = (SimpleNamespace, argparse.Namespace, threading.local, torch.nn.Module)
_NOT_ENTERED = (torch.Tensor, np.ndarray, ModuleType, torch.distributed.ProcessGroup, Sampler, BatchSampler)
_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),  # torch/nn/modules/module.py
    "_post_accumulate_grad_hooks",  # torch/_tensor.py
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),  # torch/optim/optimizer.py
)
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "farandole", "builtins"}


def _is_plain(value: Any) -> bool:
    """Return whether it is a plain value, or a container of those. By the depth, not one by one: a profiler of the
    script would note a call for each, maybe in the very list that is looked at."""
    level, seen = [value], set[int]()
    while level:
        kinds = set(map(type, level)) - PLAIN
        if not all(kind in _CONTAINERS or issubclass(kind, np.generic | enum.Enum) for kind in kinds):
            return False
        held = [each for each in level if type(each) in _CONTAINERS and id(each) not in seen] if kinds else []
        seen.update(map(id, held))
        values = (each.values() for each in held if type(each) is dict)
        level = [*chain.from_iterable(map(list, [*held, *values]))]  # copies first: other threads may add to them
    return True


def _is_value(value: Any) -> bool:
    """Return whether a value is compared and carried as a whole."""
    if isinstance(value, torch.Tensor):
        return type(value) in _TENSORS and value.grad_fn is None and _has_bytes(value)
    if is_iterator(value) or is_random(value):
        return place_of(value) is not None
    return bool(value.dtype != object) if isinstance(value, np.ndarray) else _is_plain(value)


def is_object_of_values(holder: Holder) -> bool:
    """Return whether it is an object that holds values, and no other objects."""
    is_object = holder.kind == "object" and not isinstance(holder.target, type | torch.nn.Module)
    return is_object and all(map(_is_value, holder.read().values()))


def some(names: Sequence[str]) -> str:
    """Return the first of these names, and how many more there are, for people."""
    return ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if names[_MOST_NAMES:] else "")


def _has_bytes(tensor: torch.Tensor) -> bool:
    is_usual = tensor.layout is torch.strided and tensor.device.type != "meta"
    return is_usual and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


@torch.no_grad()
def digest(value: Any) -> int:
    if isinstance(value, np.ndarray):
        if value.nbytes > SAMPLED_BYTES:
            value = value.reshape(-1)[:: max(1, value.size // 65536)]
        value = torch.from_numpy(np.frombuffer(np.ascontiguousarray(value).tobytes() or b"\0", dtype=np.uint8).copy())
    if isinstance(value, torch.Tensor):
        size, value = value.numel() * value.element_size(), value.detach()
        if size > SAMPLED_BYTES and value.is_contiguous():
            flat = value.view(-1)
            return digest_of([flat[:4096], flat[:: max(1, flat.numel() // 65536)].contiguous()])
        return digest_of([value])
    value = place_of(value) or value
    text = repr(sorted(map(repr, value)) if isinstance(value, set | frozenset) else value)
    return int.from_bytes(hashlib.blake2b(f"{type(value)}{text}".encode(), digest_size=7).digest(), "big")


class Digests:
    """Digests by name. Of a large tensor or array a sample would not show that a loop body changes a few of its rows:
    all of it counts, and is read again only where it may have changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, int, int]] = {}

    @torch.no_grad()
    def of(self, name: str, value: Any, is_quick: bool) -> int:
        """Return the digest of a value. `is_quick`: an array is the same as before; autograd does not tell."""
        is_array = type(value) is np.ndarray
        if not (is_array or isinstance(value, torch.Tensor)) or not SAMPLED_BYTES < value.nbytes <= MOST_WHOLE:
            return digest(value)
        whole = as_tensor(value) if is_array else value.detach()
        if whole is None:
            return digest(value)
        then, version, known = self._known.get(name, (None, 0, 0))
        now = 0 if is_array else value._version
        if then is not value or version != now or (is_array and not is_quick):
            known = digest_of([whole])
            self._known[name] = (value, now, known)
        return known


# The search -----------------------------------------------------------------------------------------------------------


def roots_of_script() -> list[Holder]:
    """Return the variables of the script: of its modules, and of its functions up to the loop over its batches."""
    frames = frames_of_script()
    roots = [Holder(name, each.__dict__, "globals") for name, each in _own_modules().items()]
    inner = [each for each in frames if each.f_code.co_name != "<module>"]
    roots.append(Holder("random numbers", generators_of_process(), "object"))
    return [*roots, *(Holder(f"{each.f_code.co_qualname}()", each, "frame") for each in inner)]


def hooks_of(modules: Iterable[torch.nn.Module], optimizers: Iterable[object]) -> list[Holder]:
    """Return the functions that torch calls for the script: hooks of modules, of their parameters and of optimizers.
    Often nothing else knows them, and what they keep."""
    owners = [*optimizers]
    for each in modules:
        owners += [*each.modules(), *each.parameters()]
    found = [
        hook
        for owner in owners
        for name in _HOOKS
        for hook in list((getattr(owner, name, None) or {}).values())
        if holder_of("", hook) is not None
    ]
    return [Holder("hooks", (*found,), "tuple")] if found else []


_known_modules: dict[str, bool] = {}  # by name: does it belong to the script? It takes 5 ms to look at all of torch's


def _own_modules() -> dict[str, ModuleType]:
    """Return the modules that belong to the script; its main one without a name."""
    main = sys.modules["__main__"]
    for name in [name for name in list(sys.modules) if name not in _known_modules]:
        module = sys.modules.get(name)
        file = vars(module).get("__file__") if type(module) is ModuleType else None  # an attribute may run code
        _known_modules[name] = isinstance(file, str) and _is_own(file) and name not in ("__main__", "__mp_main__")
    own = {name: sys.modules.get(name) for name, is_own in _known_modules.items() if is_own}
    return {"": main} | {name: each for name, each in own.items() if type(each) is ModuleType and each is not main}


_INSTALLED = (
    *(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["farandole"])),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_PACKAGES = tuple(f"{path}/" for path in _INSTALLED)


@functools.cache
def _is_own(file: str) -> bool:
    """Return whether a file belongs to the script, and to no installed package."""
    return file.endswith(".py") and not file.startswith(_PACKAGES) and "site-packages" not in file


def is_of_own_module(value: FunctionType | type) -> bool:
    """Return whether a function or a class belongs to the script, and to no installed package."""
    module = sys.modules.get(value.__module__ or "")
    file = vars(module).get("__file__") if module is not None else None
    return value.__module__ == "__main__" or (isinstance(file, str) and _is_own(file))


def holder_of(path: str, value: Any) -> Holder | None:
    """Return the holder that a value is; None if it holds nothing of the script's. isinstance() believes proxies."""
    kind = type(value)
    if kind in PLAIN or issubclass(kind, _NOT_ENTERED):
        return None
    if issubclass(kind, DataLoader):
        return Holder(path, (value.dataset,), "tuple")
    if issubclass(kind, Dataset):
        return Holder(path, value, "data")
    if issubclass(kind, functools.partial):
        return Holder(path, (value.func, *value.args, *value.keywords.values()), "tuple")
    if issubclass(kind, dict):
        return Holder(path, value, "dict")
    if issubclass(kind, list | deque):
        return Holder(path, value, "list")
    if issubclass(kind, set):
        return Holder(path, value, "set")
    if issubclass(kind, tuple):
        return Holder(path, value, "tuple")
    if issubclass(kind, CellType):
        return Holder(path, value, "cell")
    if issubclass(kind, FunctionType):
        is_own = _is_own(value.__code__.co_filename) or is_of_own_module(value)  # also where torch has decorated it
        return Holder(path, value, "function") if is_own and kept_by(value) else None
    if issubclass(kind, MethodType):
        return holder_of(path, value.__self__)
    if issubclass(kind, ContextVar):
        return Holder(path, value, "context")
    if is_memory(data := shared_data(value)):
        return Holder(path, data, "memory")
    if issubclass(kind, type):
        is_own = is_of_own_module(value) and not issubclass(value, enum.Enum)
        return Holder(path, value, "object") if is_own else None
    if issubclass(kind, enum.Enum):
        return None
    if kind.__module__.partition(".")[0] in _FOREIGN and not issubclass(kind, _NAMESPACES):
        return None
    return Holder(path, value, "object") if hasattr(value, "__dict__") or hasattr(kind, "__slots__") else None


def _is_of_script(kind: type) -> bool:
    return kind not in PLAIN and is_of_own_module(kind) and not issubclass(kind, enum.Enum)


class Found:
    """The result of a search.

    copies   of each holder that can change: its values
    long     the same of long dictionaries and sets of plain values
    many     what is in long containers, and is not looked at one by one
    entries  the values that are compared and carried, by their names
    randoms  generators of random numbers
    generators  Python's, by their names

    Args:
        roots: Where the search begins.
        skipped: id() of objects that are not looked at.
    """

    def __init__(self, roots: Iterable[Holder], skipped: Set[int]) -> None:
        self.copies: list[tuple[Holder, Values]] = []
        self.long: list[tuple[Holder, Values]] = []
        self.many: list[Many] = []
        self.entries: dict[str, tuple[Holder, Any, Any]] = {}
        self.holders: dict[str, Holder] = {}
        self.randoms: list[Any] = []
        self.generators: dict[str, GeneratorType[Any, Any, Any]] = {}
        self._seen = set(skipped)
        self._kept: list[object] = []  # what was seen stays, so that no id is used twice
        for root in roots:
            self._visit(root, 0)

    def _visit(self, holder: Holder, depth: int) -> None:
        values = holder.read() if not isinstance(holder.target, list | deque) else self._items(holder)
        self.holders[holder.path] = holder
        if holder.kind != "tuple":
            copies = self.long if holder.kind == "memory" and size_of(holder.target) > LARGE_BYTES else self.copies
            copies.append((holder, holder.keep()))
        self._kept.append(holder.target)
        for key, value in values.items():
            if type(key) in PLAIN or type(key) is tuple:
                self._look_at(holder, key, value, depth)

    def _items(self, holder: Holder) -> Values:
        values = holder.read()
        if len(values) <= _LONG:
            return values
        items, between = [*values.values()], len(values) - _ENDS
        self._add_many(holder.path, items[_ENDS:between], is_carried=False)
        return {place: values[place] for place in (*range(_ENDS), *range(between, len(items)))}

    def _add_many(self, path: str, values: Collection[Any], is_carried: bool) -> None:
        """Note what is in a long container; what is in that, too."""
        while values:
            found = [each for each in bulk_of(values, _is_of_script) if id(each) not in self._seen]
            self._seen.update(map(id, found))
            if found:
                self._kept.append(found)
                self.many.append(Many(path, found, is_carried))
            inner = (
                [[*each.values()] if isinstance(each, dict) else each for each in found if len(each)]
                if is_carried
                else []
            )
            values = [value for each in inner for value in each if type(value) not in PLAIN]

    def _look_at(self, holder: Holder, key: Any, value: Any, depth: int) -> None:
        is_new = type(value) in PLAIN or id(value) not in self._seen
        if not is_new:
            return
        if type(value) not in PLAIN:
            self._seen.add(id(value))
            self._kept.append(value)
        if is_random(value):
            self.randoms.append(value)
        elif isinstance(value, GeneratorType):
            self.generators[holder.name_of(key)] = value
        inner = holder_of(holder.name_of(key), value) if depth < _MOST_DEPTH else None
        if _is_value(value) and (holder.kind != "tuple" or isinstance(value, torch.Tensor)):
            self.entries[holder.name_of(key)] = (holder, key, value)
            if inner is not None:
                self._visit_plain(inner, depth)
        elif inner is not None:
            if isinstance(value, DistributedDataParallel):
                inner = Holder(f"{inner.path}.module", value.module, "object")
            self._visit(inner, depth + 1)

    def _visit_plain(self, holder: Holder, depth: int) -> None:
        """Look at containers in a value that is compared and carried as a whole."""
        self.holders[holder.path] = holder
        if holder.kind not in ("dict", "set", "list", "tuple"):
            return
        is_long = len(holder.target) > _LONG
        if holder.kind != "tuple":
            copies = self.long if is_long and holder.kind != "list" else self.copies
            copies.append((holder, holder.keep(is_whole=True)))
        values = {} if is_long else holder.read()
        if is_long and holder.kind != "set":
            self._add_many(holder.path, [*(holder.target.values() if holder.kind == "dict" else holder.target)], True)
        for key, value in values.items():
            if type(value) in PLAIN or id(value) in self._seen or depth >= _MOST_DEPTH:
                continue
            self._seen.add(id(value))
            self._kept.append(value)
            inner = holder_of(holder.name_of(key), value)
            if inner is not None:
                self._visit_plain(inner, depth + 1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors, by name."""
        return {name: each for name, (_, _, each) in self.entries.items() if isinstance(each, torch.Tensor)}

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the tensors, and arrays of NumPy as tensors, by name."""
        arrays = {name: each for name, (_, _, each) in self.entries.items() if isinstance(each, np.ndarray)}
        as_tensors = ((name, as_tensor(each)) for name, each in arrays.items())
        return {**self.tensors(), **{name: each for name, each in as_tensors if each is not None}}
