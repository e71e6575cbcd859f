"""The search for what only the script knows: what holds values, from the variables of its functions on."""

from __future__ import annotations

import argparse
import enum
import functools
import hashlib
import sys
import sysconfig
import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Set
from contextvars import ContextVar
from pathlib import Path
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from farandole.integrations.torchrun.in_place.script_frames import frames_of_script, set_locals
from farandole.integrations.torchrun.in_place.script_memory import (
    as_tensor,
    is_memory,
    read_context,
    read_memory,
    shared_data,
    write_memory,
)
from farandole.integrations.torchrun.in_place.script_places import (
    copied,
    generators_of_process,
    is_iterator,
    is_random,
    place_of,
)
from farandole.training.state.tensor_digest import digest_of

PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_LONG = 1000  # a list with more items is looked at as a whole
MOST_HOLDERS = 500  # in a copy at a boundary; of more, only those in which something has changed
_MOST_DEPTH = 12
SAMPLED_BYTES = 64 << 20  # of a larger tensor, a sample is compared
_NAMESPACES = (SimpleNamespace, argparse.Namespace, threading.local, torch.nn.Module)
_MODULE_KEYS = frozenset(vars(torch.nn.Module())) - {"training", "_parameters", "_buffers", "_modules"}
_NOT_ENTERED = (torch.Tensor, np.ndarray, ModuleType, torch.distributed.ProcessGroup, Sampler, BatchSampler)
_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),  # torch/nn/modules/module.py
    "_post_accumulate_grad_hooks",  # torch/_tensor.py
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),  # torch/optim/optimizer.py
)
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "farandole", "builtins"}


class Holder:
    """Something that holds values by key: variables of a function, or what it keeps from call to call; attributes of an
    object, a dictionary, a list."""

    def __init__(self, path: str, target: Any, kind: str) -> None:
        self.path, self.target, self.kind = path, target, kind

    def read(self) -> dict[Any, Any]:
        """Return the values by key."""
        target = self.target
        if self.kind == "frame":
            return dict(target.f_locals)
        if self.kind == "object":
            return _attributes(target)
        if self.kind == "function":
            return _kept_by(target)
        if self.kind == "data":  # plain values, as the stage of a curriculum; the samples may be many
            own = vars(target).items()
            return {key: value for key, value in own if type(value) in PLAIN or isinstance(value, Dataset)}
        if self.kind == "cell":
            return {"": target.cell_contents} if _is_filled(target) else {}
        if self.kind == "globals":
            # A copy first: another thread may add to it.
            return {key: value for key, value in dict(target).items() if not key.startswith("__")}
        if self.kind == "set":
            return {"": frozenset(target)}
        if self.kind == "memory":
            return {"": read_memory(target)}
        if self.kind == "context":
            return read_context(target)
        # Not dict(target): a class may construct what it is asked for, as that of transformers' activations does.
        return dict(dict.items(target)) if self.kind == "dict" else dict(enumerate(target))

    def write(self, values: Mapping[Any, Any]) -> None:
        """Set some of the values."""
        target = self.target
        if self.kind == "frame":
            set_locals(target, values)
        elif self.kind == "object":
            for key, value in values.items():
                _set_attribute(target, key, value)
        elif self.kind in ("function", "data"):
            vars(target).update(values)
        elif self.kind == "cell":
            target.cell_contents = values[""]
        elif self.kind in ("dict", "globals"):
            if isinstance(target, Counter):
                dict.update(target, values)  # its own method adds
            else:
                target.update(values)
        elif self.kind == "memory":
            write_memory(target, values[""])
        elif self.kind == "context":
            target.set(values[""])
        elif self.kind == "set":
            target.clear()
            target.update(values[""])
        else:
            for place, value in values.items():
                if place < len(target):
                    target[place] = value
                else:
                    target.append(value)

    def restore(self, values: Mapping[Any, Any]) -> None:
        """Return to the values of an earlier read()."""
        now = self.read()
        if self.kind in ("dict", "list"):
            gone = [key for key in now if key not in values]
            if self.kind == "dict":
                for key in gone:
                    if not _is_passing(now[key]):
                        del self.target[key]
            else:
                for _ in gone:
                    self.target.pop()
        is_set = self.kind == "set"
        changed = values if is_set else {key: each for key, each in values.items() if now.get(key, now) is not each}
        if changed:
            self.write({key: copied(each) if is_iterator(each) else each for key, each in changed.items()})

    def is_object_of_values(self) -> bool:
        """Return whether it is an object that holds values, and no other objects."""
        is_object = self.kind == "object" and not isinstance(self.target, type | torch.nn.Module)
        return is_object and all(map(_is_value, self.read().values()))

    def name_of(self, key: Any) -> str:
        if self.kind in ("frame", "object", "globals", "function", "data"):
            return f"{self.path}.{key}" if self.path else str(key)
        return self.path if self.kind in ("cell", "memory", "context") else f"{self.path}[{key!r}]"


def _attributes(value: Any) -> dict[str, Any]:
    if isinstance(value, type):
        return {key: each for key, each in vars(value).items() if not key.startswith("__") and not callable(each)}
    if isinstance(value, torch.nn.Module):
        return {key: each for key, each in vars(value).items() if key not in _MODULE_KEYS}
    found = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _kept_by(function: FunctionType) -> dict[str, Any]:
    """Return what a function keeps from call to call: the variables around it, containers that are defaults of its
    arguments, and its attributes."""
    code, cells = function.__code__, function.__closure__ or ()
    defaults, named = function.__defaults__ or (), function.__kwdefaults__ or {}
    arguments = code.co_varnames[: code.co_argcount]
    by_name = {**dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)), **named}
    containers = {name: each for name, each in by_name.items() if isinstance(each, dict | list | set | deque)}
    return {**dict(zip(code.co_freevars, cells, strict=True)), **containers, **vars(function)}


def _set_attribute(target: Any, key: str, value: Any) -> None:
    if isinstance(target, type) or key not in getattr(target, "__dict__", ()):
        object.__setattr__(target, key, value) if not isinstance(target, type) else setattr(target, key, value)
    else:
        vars(target)[key] = value


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_passing(value: Any) -> bool:
    """Return whether a value is a result with a graph: it is computed anew in each loop body, and may be large."""
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _is_plain(value: Any) -> bool:
    if type(value) in PLAIN or isinstance(value, np.generic | enum.Enum):
        return True
    if type(value) in (list, tuple, set, frozenset, deque):
        return PLAIN.issuperset(map(type, value)) or all(map(_is_plain, value))
    return type(value) is dict and all(map(_is_plain, value)) and all(map(_is_plain, value.values()))


def _is_value(value: Any) -> bool:
    """Return whether a value is compared and carried as a whole."""
    if isinstance(value, torch.Tensor):
        return type(value) in _TENSORS and value.grad_fn is None and _has_bytes(value)
    if is_iterator(value) or is_random(value):
        return place_of(value) is not None
    return bool(value.dtype != object) if isinstance(value, np.ndarray) else _is_plain(value)


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
    """Return the holder that a value is; None for one that holds nothing of the script's."""
    kind = type(value)
    if kind in PLAIN or isinstance(value, _NOT_ENTERED):
        return None
    if isinstance(value, DataLoader):
        return Holder(path, (value.dataset,), "tuple")
    if isinstance(value, Dataset):
        return Holder(path, value, "data")
    if isinstance(value, functools.partial):
        return Holder(path, (value.func, *value.args, *value.keywords.values()), "tuple")
    if isinstance(value, dict):
        return Holder(path, value, "dict")
    if isinstance(value, list | deque):
        return Holder(path, value, "list")
    if isinstance(value, set):
        return Holder(path, value, "set")
    if isinstance(value, tuple):
        return Holder(path, value, "tuple")
    if isinstance(value, CellType):
        return Holder(path, value, "cell")
    if isinstance(value, FunctionType):
        is_own = _is_own(value.__code__.co_filename) or is_of_own_module(value)  # also where torch has decorated it
        return Holder(path, value, "function") if is_own and _kept_by(value) else None
    if isinstance(value, MethodType):
        return holder_of(path, value.__self__)
    if isinstance(value, ContextVar):
        return Holder(path, value, "context")
    if is_memory(data := shared_data(value)):
        return Holder(path, data, "memory")
    if isinstance(value, type):
        is_own = is_of_own_module(value) and not issubclass(value, enum.Enum)
        return Holder(path, value, "object") if is_own else None
    if isinstance(value, enum.Enum):
        return None
    if kind.__module__.partition(".")[0] in _FOREIGN and not isinstance(value, _NAMESPACES):
        return None
    return Holder(path, value, "object") if hasattr(value, "__dict__") or hasattr(kind, "__slots__") else None


class Found:
    """The result of a search.

    copies   of each holder that can change: its values
    entries  the values that are compared and carried, by their names
    randoms  generators of random numbers
    generators  Python's, by their names

    Args:
        roots: Where the search begins.
        skipped: id() of objects that are not looked at.
    """

    def __init__(self, roots: Iterable[Holder], skipped: Set[int]) -> None:
        self.copies: list[tuple[Holder, dict[Any, Any]]] = []
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
            self.copies.append((holder, kept_of(values)))
        self._kept.append(holder.target)
        for key, value in values.items():
            if type(key) in PLAIN or type(key) is tuple:
                self._look_at(holder, key, value, depth)

    def _items(self, holder: Holder) -> dict[Any, Any]:
        return holder.read() if len(holder.target) <= _LONG else {}

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
        if holder.kind not in ("dict", "set", "list", "tuple") or len(holder.target) > _LONG:
            return
        values = holder.read()
        if holder.kind != "tuple":
            self.copies.append((holder, values))
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


def kept_of(values: dict[Any, Any]) -> dict[Any, Any]:
    if PLAIN.issuperset(map(type, values.values())):  # as of most layers of a model
        return values
    kept = {key: each for key, each in values.items() if not _is_passing(each)}
    return {key: copied(each) if is_iterator(each) else each for key, each in kept.items()}
