"""What only the script knows: the variables of its functions, their objects, and the tensors in them.

    boundary        everything that holds values is copied, so that a loop body that comes again begins as it began
    some boundaries all workers compare what has changed since the start: what differs is each worker's own
    regroup         a newcomer, or a worker that is behind, receives what has changed and is the same on all workers

Nothing is chosen by its type: a value belongs to the training if the script has changed it, and all workers have
changed it alike. docs/decisions/0066-state-of-the-script.md.
"""

from __future__ import annotations

import argparse
import enum
import functools
import hashlib
import logging
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from farandole.in_place.script_frames import frames_of_script, set_locals, shift_counts
from farandole.in_place.script_places import (
    Place,
    copied,
    generators_of_process,
    is_iterator,
    is_random,
    mark_of,
    moved,
    place_of,
    set_state,
    state_of,
)
from farandole.state.metadata import load_value
from farandole.state.state_digest import digest_of

logger = logging.getLogger("farandole")

_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_LONG = 1000  # a list with more items is looked at as a whole
_MOST_HOLDERS = 500  # in a copy at a boundary; of more, only those in which something has changed
_MOST_DEPTH = 12
_SELDOM_CHANGING = (torch.nn.Module, dict, list)
_SAMPLED_BYTES = 64 << 20  # of a larger tensor, a sample is compared
_SMALL_BYTES = 64 << 10  # most of a tensor in an object that a loop body has made
_NAMESPACES = (SimpleNamespace, argparse.Namespace, threading.local, torch.nn.Module)
_MODULE_KEYS = frozenset(vars(torch.nn.Module())) - {"training", "_parameters", "_buffers", "_modules"}
_DATA = (DataLoader, Dataset, Sampler, BatchSampler)
_NOT_ENTERED = (torch.Tensor, np.ndarray, ModuleType, torch.distributed.ProcessGroup, *_DATA)
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "farandole", "builtins"}


class Holder:
    """Something that holds values by key: variables of a function, attributes of an object, a dictionary, a list."""

    def __init__(self, path: str, target: Any, kind: str) -> None:
        self.path, self.target, self.kind = path, target, kind

    def read(self) -> dict[Any, Any]:
        """Return the values by key."""
        target = self.target
        if self.kind == "frame":
            return dict(target.f_locals)
        if self.kind == "object":
            return _attributes(target)
        if self.kind == "cell":
            return {"": target.cell_contents} if _is_filled(target) else {}
        if self.kind == "globals":
            # A copy first: another thread may add to it.
            return {key: value for key, value in dict(target).items() if not key.startswith("__")}
        if self.kind == "set":
            return {"": frozenset(target)}
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
        elif self.kind == "cell":
            target.cell_contents = values[""]
        elif self.kind in ("dict", "globals"):
            target.update(values)
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

    def name_of(self, key: Any) -> str:
        if self.kind in ("frame", "object", "globals"):
            return f"{self.path}.{key}" if self.path else str(key)
        return self.path if self.kind == "cell" else f"{self.path}[{key!r}]"


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
    if type(value) in _PLAIN or isinstance(value, np.generic | enum.Enum):
        return True
    if type(value) in (list, tuple, set, frozenset, deque):
        return _PLAIN.issuperset(map(type, value)) or all(map(_is_plain, value))
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
def _digest(value: Any) -> int:
    if isinstance(value, np.ndarray):
        if value.nbytes > _SAMPLED_BYTES:
            value = value.reshape(-1)[:: max(1, value.size // 65536)]
        value = torch.from_numpy(np.frombuffer(np.ascontiguousarray(value).tobytes() or b"\0", dtype=np.uint8).copy())
    if isinstance(value, torch.Tensor):
        size, value = value.numel() * value.element_size(), value.detach()
        if size > _SAMPLED_BYTES and value.is_contiguous():
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
    roots = [Holder(name, each.__dict__, "globals") for name, each in _own_modules(len(sys.modules)).items()]
    inner = [each for each in frames if each.f_code.co_name != "<module>"]
    roots.append(Holder("random numbers", generators_of_process(), "object"))
    return [*roots, *(Holder(f"{each.f_code.co_qualname}()", each, "frame") for each in inner)]


@functools.lru_cache(maxsize=1)
def _own_modules(_: int) -> dict[str, ModuleType]:
    """Return the modules that belong to the script; its main one without a name. `_`: the number of all modules."""
    found: dict[str, ModuleType] = {"": sys.modules["__main__"]}
    for name, module in list(sys.modules.items()):
        if type(module) is not ModuleType or module is found[""] or name == "__mp_main__":
            continue
        file = vars(module).get("__file__")  # an attribute of a module may run code
        if isinstance(file, str) and _is_own(file):
            found[name] = module
    return found


_INSTALLED = (
    *(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["farandole"])),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_PACKAGES = tuple(f"{path}/" for path in _INSTALLED)


@functools.cache
def _is_own(file: str) -> bool:
    """Return whether a file belongs to the script, and to no installed package."""
    return file.endswith(".py") and not file.startswith(_PACKAGES) and "site-packages" not in file


def _holder(path: str, value: Any) -> Holder | None:
    """Return the holder that a value is; None for one that holds nothing of the script's."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, _NOT_ENTERED):
        return None
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
        is_own = value.__closure__ and _is_own(value.__code__.co_filename)
        return Holder(path, value.__closure__, "tuple") if is_own else None
    if isinstance(value, MethodType):
        return _holder(path, value.__self__)
    if isinstance(value, type):
        file = getattr(sys.modules.get(value.__module__), "__file__", None)
        is_own = value.__module__ == "__main__" or (file is not None and _is_own(file))
        return Holder(path, value, "object") if is_own and not issubclass(value, enum.Enum) else None
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
    """

    def __init__(self, roots: Iterable[Holder], skipped: Iterable[object]) -> None:
        self.copies: list[tuple[Holder, dict[Any, Any]]] = []
        self.entries: dict[str, tuple[Holder, Any, Any]] = {}
        self.holders: dict[str, Holder] = {}
        self.randoms: list[Any] = []
        self.generators: dict[str, GeneratorType[Any, Any, Any]] = {}
        self._seen = set(map(id, skipped))
        self._kept: list[object] = []  # what was seen stays, so that no id is used twice
        for root in roots:
            self._visit(root, 0)

    def _visit(self, holder: Holder, depth: int) -> None:
        values = holder.read() if not isinstance(holder.target, list | deque) else self._items(holder)
        self.holders[holder.path] = holder
        if holder.kind != "tuple":
            self.copies.append((holder, _kept_of(values)))
        self._kept.append(holder.target)
        for key, value in values.items():
            if type(key) in _PLAIN or type(key) is tuple:
                self._look_at(holder, key, value, depth)

    def _items(self, holder: Holder) -> dict[Any, Any]:
        return holder.read() if len(holder.target) <= _LONG else {}

    def _look_at(self, holder: Holder, key: Any, value: Any, depth: int) -> None:
        is_new = type(value) in _PLAIN or id(value) not in self._seen
        if not is_new:
            return
        if type(value) not in _PLAIN:
            self._seen.add(id(value))
            self._kept.append(value)
        if is_random(value):
            self.randoms.append(value)
        elif isinstance(value, GeneratorType):
            self.generators[holder.name_of(key)] = value
        inner = _holder(holder.name_of(key), value) if depth < _MOST_DEPTH else None
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
            if type(value) in _PLAIN or id(value) in self._seen or depth >= _MOST_DEPTH:
                continue
            self._seen.add(id(value))
            self._kept.append(value)
            inner = _holder(holder.name_of(key), value)
            if inner is not None:
                self._visit_plain(inner, depth + 1)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors, by name."""
        return {name: each for name, (_, _, each) in self.entries.items() if isinstance(each, torch.Tensor)}


# The state ------------------------------------------------------------------------------------------------------------


class ScriptState:
    """The values of the script that are in no TorchState.

    Args:
        owned: Returns the objects that are restored and carried in another way.
        roots: Returns where to search.

    Attributes:
        batches: The number of batches that the script has in this iteration, as its enumerate() counts them.
        iteration: The number of the iteration for which torch would have drawn the seed of its loader processes.
        of_first: Names of what only the worker of rank 0 has changed, or has another value of in a module.
        going_on: Generators of Python that go on in the loop body, by name: they can be neither brought back nor
            carried.
    """

    def __init__(
        self, owned: Callable[[], Iterable[object]], roots: Callable[[], list[Holder]] = roots_of_script
    ) -> None:
        self._owned, self._roots = owned, roots
        self.batches = 0
        self.iteration = -1
        self._batches_then = 0
        self._of: list[object] = []  # where the search began
        self._copies: list[tuple[Holder, dict[Any, Any]]] = []
        self._watched: list[Holder] = []
        self._learns_from: list[tuple[Holder, dict[Any, Any]]] = []  # all of many holders, for one loop body
        self._changing: set[str] = set()  # paths of those that loop bodies have changed
        self._young = _Young()
        self._last: dict[str, int] | None = None  # digests of the last search
        self._changed: set[str] = set()  # names of what has changed since the start
        self._unequal: set[str] = set()  # of these, what has differed between workers
        self._tensors = _Tensors()
        self._randoms: list[tuple[Any, Any]] = []  # with their states
        self._generators: dict[str, tuple[GeneratorType[Any, Any, Any], object]] = {}
        self._has_gone_on: set[str] = set()  # of these, in a loop body that came again
        self.going_on: set[str] = set()  # of these, in a loop body
        self.of_first: set[str] = set()

    # A loop body that comes again ---------------------------------------------------------------------------

    def take(self, is_due: bool) -> None:
        """Remember everything, at a boundary; search anew where it is due, or the functions are others."""
        self.going_on |= {name for name, (each, mark) in self._generators.items() if _has_moved(each, mark)}
        roots = self._roots()
        of = [each.target for each in roots]
        if is_due or len(of) != len(self._of) or any(one is not other for one, other in zip(of, self._of, strict=True)):
            self._of = of
            self._search(roots)
        else:
            self._watched += self._young.grown_up()
            self._watch_changed()
            before = {id(each): values for each, values in self._copies}
            self._copies = [(each, _kept_of(each.read())) for each in self._watched]
            self._copies += self._young.take(self._copies, before, self._owned)
            self._tensors.take()
            self._take_places([each for each, _ in self._randoms], {n: g for n, (g, _) in self._generators.items()})
        self._batches_then = self.batches

    def roll_back(self, has_left: bool = False) -> None:
        """Return to the last take(). `has_left`: the script has left the loop meanwhile, and its variables are those of
        the code behind it; only tensors and random numbers return."""
        for holder, values in () if has_left else self._copies:
            try:
                holder.restore(values)
            except (AttributeError, TypeError, ValueError, RuntimeError) as error:
                logger.warning("%s of the script has changed in an aborted step, and stays so: %s", holder.path, error)
        self._tensors.put_back()
        self._young.put_back()
        for each, state in self._randoms:
            set_state(each, state)
        if has_left:
            return
        self._has_gone_on |= {name for name, (each, mark) in self._generators.items() if _has_moved(each, mark)}
        self.set_batches(self._batches_then)

    def _take_places(self, randoms: Sequence[Any], generators: Mapping[str, GeneratorType[Any, Any, Any]]) -> None:
        self._randoms = [(each, state_of(each)) for each in randoms]
        self._generators = {name: (each, mark_of(each)) for name, each in generators.items()}

    def take_gone_on(self) -> list[str]:
        """Return the names of the generators that have gone on in a loop body that came again, since the last call:
        they cannot be brought back."""
        gone_on, self._has_gone_on = sorted(self._has_gone_on), set()
        return gone_on

    def look(self) -> None:
        """Notice which tensors the loop body has changed before its step."""
        self._tensors.look()

    def save(self) -> None:
        """Copy the tensors that the rest of the loop body changes: its step is aborted."""
        self._tensors.save()

    def set_batches(self, batches: int) -> None:
        """Let enumerate() go on from another number of batches."""
        if batches != self.batches and not shift_counts(batches - self.batches):
            logger.warning("enumerate() over the batches goes on from %d instead of %d", self.batches, batches)
        self.batches = batches

    def _search(self, roots: list[Holder]) -> Found:
        self._watch_changed()
        found, self._young = Found(roots, self._owned()), _Young()
        self._copies = found.copies
        self._watched = [each for each, _ in found.copies]
        if len(found.copies) > _MOST_HOLDERS:
            self._watched = [each for each in self._watched if self._is_watched(each)]
            self._learns_from = found.copies
        digests = {name: _digest(value) for name, (_, _, value) in found.entries.items()}
        if self._last is not None:
            self._changed |= {name for name, each in digests.items() if self._last.get(name) != each}
        self._last = digests
        self._tensors.learn(found.tensors(), digests)
        self._take_places(found.randoms, found.generators)
        return found

    def _is_watched(self, holder: Holder) -> bool:
        """Return whether a holder of many is copied at each boundary: its values have changed, or often change."""
        often_changes = holder.kind in ("frame", "globals") or not isinstance(holder.target, _SELDOM_CHANGING)
        return often_changes or holder.path in self._changing

    def _watch_changed(self) -> None:
        """Watch, from now on, those of many holders that the loop body after the last search has changed."""
        learns_from, self._learns_from = self._learns_from, []
        watched = set(map(id, self._watched)) if learns_from else set()
        for holder, then in learns_from:
            if id(holder) not in watched:
                now = _kept_of(holder.read())
                if now.keys() != then.keys() or any(now[key] is not each for key, each in then.items()):
                    self._changing.add(holder.path)
                    self._watched.append(holder)

    # Between workers ----------------------------------------------------------------------------------------

    def changed(self) -> dict[str, int]:
        """Return the digests of what has changed since the start, as far as it may be the same on all workers."""
        digests = self._last or {}
        return {name: digests[name] for name in self._changed - self._unequal if name in digests}

    def compare(self, tables: Sequence[Mapping[str, int]]) -> None:
        """Note what differs between workers: the changed() of each."""
        for name in set().union(*tables):
            if len({table.get(name) for table in tables}) > 1:
                self._unequal.add(name)
                is_alone = not any(name in table for table in tables[1:])
                if is_alone or _is_of_module(name):
                    self.of_first.add(name)

    def digests_of_tensors(self) -> dict[str, int]:
        """Return the digests of tensors of real numbers, by name."""
        tensors = Found(self._roots(), self._owned()).tensors()
        return {name: _digest(each) for name, each in tensors.items() if each.is_floating_point()}

    def pack(self) -> dict[str, Any]:
        """Return what other workers need: the values themselves, not copies."""
        found = self._search(self._roots())
        # An average of weights whose start differed between workers is better than its start, which a newcomer has.
        carried = self._changed - {name for name in self._unequal if not _is_of_module(name)}
        names = [name for name in found.entries if name in carried]
        entries = []
        for name in names:
            holder, key, value = found.entries[name]
            sent = value.detach() if isinstance(value, torch.Tensor) else place_of(value) or value
            entries.append((name, holder.path, key, sent))
        tensors = self._tensors.known()
        counts = {"batches": self.batches, "iteration": self.iteration}
        return {"entries": entries, "unequal": sorted(self._unequal), "tensors": tensors, **counts}

    def apply(self, packed: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Load what another worker has packed where this one is. Returns the names of what was loaded, and of what has
        no place here."""
        found = Found(self._roots(), self._owned())
        loaded, missing = [], []
        for name, path, key, value in packed["entries"]:
            holder = found.holders.get(path)
            if holder is None or (holder.kind == "tuple" and name not in found.entries):
                missing.append(name)
                continue
            live = found.entries[name][2] if name in found.entries else holder.read().get(key)
            if isinstance(live, torch.Tensor) == isinstance(value, torch.Tensor) and _digest(live) == _digest(value):
                continue
            try:
                _load(holder, key, live, value)
            except TypeError:
                missing.append(name)
            else:
                loaded.append(name)
        self.set_batches(packed["batches"])
        self.iteration = packed["iteration"]
        self._unequal |= set(packed["unequal"])
        self._changed |= {name for name, *_ in packed["entries"]} | self._unequal
        self._copies, self._last = [], None
        self._tensors.know(packed["tensors"])
        self._search(self._roots())
        return loaded, missing


def _is_of_module(name: str) -> bool:
    """Return whether a value is a parameter or a buffer of a module, and no statistic of a worker's own samples."""
    is_tensor = "._parameters[" in name or "._buffers[" in name
    return is_tensor and not name.endswith(("['running_mean']", "['running_var']", "['num_batches_tracked']"))


def _has_moved(generator: GeneratorType[Any, Any, Any], mark: object) -> bool:
    return mark is not None and mark_of(generator) != mark


def _kept_of(values: dict[Any, Any]) -> dict[Any, Any]:
    kept = {key: each for key, each in values.items() if not _is_passing(each)}
    return {key: copied(each) if is_iterator(each) else each for key, each in kept.items()}


@torch.no_grad()
def _load(holder: Holder, key: Any, live: Any, value: Any) -> None:
    if isinstance(value, Place):
        there = moved(live, value)
        if there is not live:
            holder.write({key: there})
        return
    if isinstance(value, torch.Tensor):
        if isinstance(live, torch.Tensor) and (live.shape, live.dtype) == (value.shape, value.dtype):
            live.detach().copy_(value)
            return
        made = value.to(live.device) if isinstance(live, torch.Tensor) else value
        is_parameter = isinstance(live, torch.nn.Parameter)
        holder.write({key: torch.nn.Parameter(made, live.requires_grad) if is_parameter else made})
    elif isinstance(live, np.ndarray) and isinstance(value, np.ndarray) and live.shape == value.shape:
        live[...] = value
    elif isinstance(value, deque) and isinstance(live, deque):
        live.clear()
        live.extend(value)
    else:
        loaded = load_value(live, value)
        if loaded is not live:
            holder.write({key: loaded})


class _Young:
    """What loop bodies have made since the last search: objects that hold values, such as a meter. Most are made anew
    in each body, and go with it; others stay, and are watched from the second boundary on."""

    def __init__(self) -> None:
        self._made: list[tuple[Holder, Any, object, Found]] = []  # holder, key and value, what is in it
        self._staying: list[torch.Tensor] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []  # with their values

    def grown_up(self) -> list[Holder]:
        """Return the holders of what is still where it was at the last boundary."""
        stay = [found for holder, key, value, found in self._made if holder.read().get(key) is value]
        self._made = []
        self._staying += [each for found in stay for each in _small(found)]
        return [holder for found in stay for holder, _ in found.copies]

    @torch.no_grad()
    def take(
        self,
        copies: Sequence[tuple[Holder, dict[Any, Any]]],
        before: Mapping[int, Mapping[Any, Any]],
        owned: Callable[[], Iterable[object]],
    ) -> list[tuple[Holder, dict[Any, Any]]]:
        """Return the values of what is new in these holders, which had the values `before`."""
        self._tensors = [(each, each.detach().clone()) for each in self._staying]
        new = [
            (holder, key, value, inner)
            for holder, values in copies
            for key, value in values.items()
            if before.get(id(holder), values).get(key) is not value
            and type(value) not in _PLAIN
            and (inner := _holder(holder.name_of(key), value)) is not None
        ]
        if not new or len(copies) + len(new) > _MOST_HOLDERS:
            return []
        known = [*owned(), *(holder.target for holder, _ in copies)]
        taken: list[tuple[Holder, dict[Any, Any]]] = []
        for holder, key, value, inner in new:
            if any(value is each for each in known):
                continue
            found = Found([inner], known)
            known += [each.target for each, _ in found.copies]
            taken += found.copies
            self._made.append((holder, key, value, found))
            self._tensors += [(each, each.detach().clone()) for each in _small(found)]
        return taken

    @torch.no_grad()
    def put_back(self) -> None:
        for live, value in self._tensors:
            live.detach().copy_(value)


def _version(tensor: torch.Tensor) -> int:
    """Return a number that is another one when autograd has counted a write, or the tensor has another memory."""
    return tensor._version + tensor.data_ptr()


def _small(found: Found) -> list[torch.Tensor]:
    return [each for each in found.tensors().values() if each.nbytes <= _SMALL_BYTES]


class _Tensors:
    """The bytes of the script's tensors. Only tensors that the loop body is known to change are copied: before its
    step at each boundary, after it where the step is aborted."""

    def __init__(self) -> None:
        self._live: dict[str, torch.Tensor] = {}
        self._digests: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        self._early: set[str] = set()
        self._late: set[str] = set()
        self._is_learning = False
        self._has_learned = False  # from a whole loop body, here or on another worker
        self._copies: dict[str, torch.Tensor] = {}

    def known(self) -> tuple[list[str], list[str]]:
        """Return the names of the tensors that a loop body changes before its step, and after it."""
        return sorted(self._early), sorted(self._late)

    def know(self, names: Sequence[Sequence[str]]) -> None:
        """Take over the known() of another worker: the first loop body of this one may be aborted."""
        self._early |= set(names[0])
        self._late = (self._late | set(names[1])) - self._early
        self._has_learned = True

    def learn(self, tensors: Mapping[str, torch.Tensor], digests: Mapping[str, int]) -> None:
        """Watch these tensors from now on, and find out what the next loop body changes."""
        self._has_learned |= bool(self._live)
        same = {name for name, each in tensors.items() if self._live.get(name) is each}
        self._late |= {name for name in same if self._digests[name] != digests[name]} - self._early
        self._live, self._digests = dict(tensors), {name: digests[name] for name in tensors}
        self._is_learning = True
        self._copy()

    def take(self) -> None:
        """Remember the tensors, at a boundary."""
        self._late |= self._written() - self._early
        self._is_learning, self._has_learned = False, True
        self._copy()

    def look(self) -> None:
        self._early |= self._written()
        if self._is_learning:
            self._early |= {name for name, each in self._live.items() if _digest(each) != self._digests[name]}

    @torch.no_grad()
    def save(self) -> None:
        written = self._written()
        for name in self._late - self._early - self._copies.keys():
            if name in self._live and name not in written:
                self._copies[name] = self._live[name].detach().clone()

    @torch.no_grad()
    def put_back(self) -> None:
        for name, copy in self._copies.items():
            self._live[name].detach().copy_(copy)
        self._versions = {name: _version(each) for name, each in self._live.items()}

    @torch.no_grad()
    def _copy(self) -> None:
        self._versions = {name: _version(each) for name, each in self._live.items()}
        if self._has_learned:
            names = self._early & self._live.keys()
        else:  # the first loop body of the job may change any of them
            names = {name for name, each in self._live.items() if each.nbytes <= _SAMPLED_BYTES}
        self._copies = {name: self._live[name].detach().clone() for name in names}

    def _written(self) -> set[str]:
        return {name for name, each in self._live.items() if _version(each) != self._versions[name]}
