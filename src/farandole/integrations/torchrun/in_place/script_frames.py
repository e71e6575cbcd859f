"""The frames of the script, from its first function to the loop over its batches: its variables, and the counts of
enumerate(). Both can be written, by way of CPython's own structures. script_state.py reads and writes them.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType, GeneratorType
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

_SEQUENCES: tuple[Iterable[object], ...] = ([], (), "", "\N{EN DASH}", range(0))  # with one byte a letter, or more
_OVER_SEQUENCES = frozenset(type(iter(each)) for each in _SEQUENCES)
_YOUNG = range(2 if sys.version_info < (3, 14) else 1)  # later versions collect the old ones bit by bit, in any order
_PACKAGES = tuple(f"{Path(module.__file__ or '').parent}/" for module in (torch, sys.modules["farandole"]))


def frames_of_script() -> list[FrameType]:
    """Return the frames that belong to none of torch, Farandole and the start of Python, the outermost one first."""
    frames = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not frame.f_code.co_filename.startswith((*_PACKAGES, "<frozen")):
            frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def runs_in_autograd_function() -> bool:
    """Return whether the code that has called runs in the forward() of a torch.autograd.Function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        first = frame.f_code.co_varnames[:1]
        if frame.f_code.co_name == "forward" and first and isinstance(frame.f_locals.get(first[0]), FunctionCtx):
            return True
        frame = frame.f_back
    return False


def set_locals(frame: FrameType, values: Mapping[str, Any]) -> None:
    """Write variables of a function that is running. They have to exist."""
    frame.f_locals.update(values)
    if sys.version_info < (3, 13):  # later versions write through (PEP 667)
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def shift_counts(by: int, loaders: Iterable[object] = (), since: object = None) -> bool:
    """Add a number to the count of each enumerate() that is waiting for a batch now, and to the places of the sequences
    that a zip() goes through beside the batches. Returns whether all could be changed.

    The count has no name in Python: it is the first field of the object (CPython 3.11 to 3.14, Objects/enumobject.c,
    en_index), and is read after the batch has come. A write that does not show in `__reduce__()` is reported.

    Args:
        by: The number.
        loaders: Further iterators, which belong to Farandole, that wait for a batch.
        since: An object that is older than all of these enumerate() and zip(), to find them sooner.
    """
    asking, done = _asking(loaders), True
    for each in _counting(asking, since):
        if type(each) is enumerate:
            count = _count_of(each)
            place = ctypes.c_ssize_t.from_address(id(each) + object.__basicsize__)
            if place.value == count and count + by >= 0:
                place.value = count + by
            done &= _count_of(each) == count + by
        else:
            done &= _shift_beside(list(each.__reduce__()[1]), by, asking)
    return done


def are_counted(loaders: Iterable[object] = (), since: object = None) -> bool:
    """Return whether there is something for shift_counts() to change."""
    return bool(_counting(_asking(loaders), since))


def _asking(loaders: Iterable[object]) -> set[int]:
    """Return the id() of each iterator that waits for a batch now."""
    waiting = [frame.f_locals.get("self") for frame in frames_of_script() if frame.f_code.co_name == "__next__"]
    return set(map(id, [*waiting, *loaders]))


def _counting(asking: set[int], since: object) -> list[Any]:
    """Return each enumerate() and zip() that waits for one of these."""
    return [each for each in _objects_since(since, (enumerate, zip)) if _asks(each, asking)]


def _objects_since(since: object, kinds: tuple[type, ...]) -> list[Any]:
    """Return all objects of these types that are younger than another one, and perhaps older ones.

    The garbage collection moves what is older at least as far up as what is younger. Among the 300,000 objects of a
    process with torch it takes 60 ms to find a few, but less than 1 ms if they have not come to its last generation; or
    in a worker that was forked, whose older objects it leaves out.
    """
    found = dict[int, Any]()
    for generation in range(3):
        objects = gc.get_objects(generation=generation)
        found.update((id(each), each) for each in objects if type(each) in kinds)
        if generation in _YOUNG and any(each is since for each in objects):
            break
    return list(found.values())


def _shift_beside(iterators: list[Any], by: int, asking: set[int]) -> bool:
    """Move the iterators of a zip() that come behind the one that is waiting: those before it have given their value
    already. Returns whether all could be moved."""
    place = next(place for place, each in enumerate(iterators) if _asks(each, asking))
    for each in iterators[place + 1 :]:
        if type(each) not in _OVER_SEQUENCES:
            return False
        reduced = each.__reduce__()
        if len(reduced) < 3:  # it has ended
            return False
        each.__setstate__(reduced[2] + by)
    return place == 0


def _count_of(each: enumerate[Any]) -> int:
    arguments: Any = each.__reduce__()[1]
    return int(arguments[1])


def _asks(iterator: Any, asking: set[int]) -> bool:
    """Return whether an iterator is waiting for its next value: its innermost generator is running."""
    if isinstance(iterator, GeneratorType):
        return iterator.gi_running
    if type(iterator) in (enumerate, zip, map, filter):
        return any(_asks(each, asking) for each in iterator.__reduce__()[1])
    return id(iterator) in asking
