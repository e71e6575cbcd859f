"""The iterators of Python between a loop and its batches: enumerate(), zip(), itertools.

Where a batch comes again, what they have counted goes back, by way of CPython's own structures (3.11 to 3.14). Nothing
is written where they do not look as expected.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import operator
import sys
from collections.abc import Iterable, Iterator
from types import GeneratorType
from typing import Any

from farandole.integrations.torchrun.in_place.script_frames import frames_of_script

_SEQUENCES: tuple[Iterable[object], ...] = ([], (), "", "\N{EN DASH}")  # with one byte a letter, or more
_OVER_SEQUENCES = frozenset(type(iter(each)) for each in _SEQUENCES)
_OVER_RANGE = type(iter(range(0)))
_PASSING = (  # they give what they get, and keep nothing that a batch changes
    *(filter, itertools.chain, itertools.starmap),
    *(itertools.filterfalse, itertools.takewhile, itertools.dropwhile),
)
_TEE: object = itertools.tee(())[0]
_UNKNOWN: tuple[type, ...] = (  # what they keep of a batch cannot be brought back
    *(itertools.accumulate, itertools.compress, itertools.cycle, itertools.groupby, itertools.zip_longest),
    *(itertools.pairwise, type(_TEE), getattr(itertools, "batched", itertools.pairwise)),
)
_COUNTING = (enumerate, zip, map, itertools.islice, *_UNKNOWN)
_INSIDE = {tuple, *map(type, gc.get_referents(_TEE))} - {type}  # where some of them have others
_YOUNG = range(2 if sys.version_info < (3, 14) else 1)  # later versions collect the old ones bit by bit, in any order

NAMES = frozenset(each.__name__ for each in _COUNTING)
"""Their names, as a function that makes one has them."""


def shift_counts(by: int, loaders: Iterable[object] = (), since: object = None) -> bool:
    """Add a number to the counts of what is waiting for a batch now, and to the places of what a zip() goes through
    beside the batches. Returns whether all could be changed.

    Args:
        by: The number.
        loaders: Further iterators, which belong to Farandole, that wait for a batch.
        since: An object that is older than all that wait, to find them sooner.
    """
    asking = _asking(loaders)
    shifted = [_shift(each, by, asking) for each in _counting(asking, since)]
    return all(shifted)


def are_counted(loaders: Iterable[object] = (), since: object = None) -> bool:
    """Return whether there is something for shift_counts() to change."""
    return bool(_counting(_asking(loaders), since))


def _asking(loaders: Iterable[object]) -> set[int]:
    """Return the id() of each iterator that waits for a batch now."""
    waiting = [frame.f_locals.get("self") for frame in frames_of_script() if frame.f_code.co_name == "__next__"]
    return set(map(id, [*waiting, *loaders]))


def _counting(asking: set[int], since: object) -> list[Any]:
    """Return what counts, and waits for one of these."""
    return [each for each in _objects_since(since, _COUNTING) if _asks(each, asking)]


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


def _asks(iterator: Any, asking: set[int]) -> bool:
    """Return whether an iterator is waiting for its next value: its innermost generator is running."""
    if isinstance(iterator, GeneratorType):
        return iterator.gi_running
    if type(iterator) in _PASSING or type(iterator) in _COUNTING or type(iterator) in _INSIDE:
        return any(_asks(each, asking) for each in gc.get_referents(iterator))
    return id(iterator) in asking


def _shift(counting: Any, by: int, asking: set[int]) -> bool:
    if type(counting) is enumerate:
        return _shift_enumerate(counting, by)
    if type(counting) is itertools.islice:
        return _shift_islice(counting, by)
    if type(counting) in (zip, map):
        return _shift_beside(counting, by, asking)
    return False


# One kind each --------------------------------------------------------------------------------------------------------


def _fields(value: object, place: int, count: int) -> Any:
    """Return whole numbers in an object, behind `place` other fields of the same size."""
    size = ctypes.sizeof(ctypes.c_ssize_t)
    return (ctypes.c_ssize_t * count).from_address(id(value) + object.__basicsize__ + place * size)


def _shift_enumerate(counting: enumerate[Any], by: int) -> bool:
    """The count is the first field, and is read after the batch has come (Objects/enumobject.c, en_index)."""

    def count() -> int:
        arguments: Any = counting.__reduce__()[1]
        return int(arguments[1])

    wanted, fields = count() + by, _fields(counting, 0, 1)
    if fields[0] + by == wanted >= 0:
        fields[0] = wanted
    return count() == wanted


def _shift_islice(counting: Any, by: int) -> bool:
    """Behind the iterator are the number of the next item, the end, the width of a step, and the count, which grows
    when the batch has come (Modules/itertoolsmodule.c, isliceobject)."""
    fields = _fields(counting, 1, 4)
    following, stop, step, count = fields
    if not _KNOWS_ISLICE or step != 1 or following != count or count + by < 0 or (stop != -1 and count > stop):
        return False
    fields[0], fields[3] = following + by, count + by
    return True


_KNOWS_ISLICE = [*_fields(itertools.islice((), 3, 8, 2), 1, 4)] == [3, 8, 2, 0]


def _shift_beside(counting: Any, by: int, asking: set[int]) -> bool:
    """Move the iterators of a zip() or a map() beside the one that is waiting. Those before it have given their value
    already: where a zip() keeps it in the tuple of its last result, it is replaced there."""
    referents = [each for each in gc.get_referents(counting) if type(each) is tuple]
    iterators = next(each for each in referents if _asks(each, asking))
    result = next((each for each in referents if each is not iterators), ())
    waiting = next(place for place, each in enumerate(iterators) if _asks(each, asking))
    moved = [_give_again(each, by, result, place) for place, each in enumerate(iterators[:waiting])]
    moved += [_move(each, by) for each in iterators[waiting + 1 :]]
    return all(moved)


def _give_again(iterator: Any, by: int, result: tuple[Any, ...], place: int) -> bool:
    """Move an iterator whose last value is in a tuple, and put the value there that it gives instead."""
    if len(result) <= place or not _move(iterator, -1):
        return False
    value = next(iterator)
    is_last = result[place] is value or (type(value) in (int, str) and result[place] == value)
    if not is_last:
        return False  # the script has the last result, so that another tuple is made
    if not _move(iterator, by - 1):
        return False
    value = next(iterator)
    fields = (ctypes.c_void_p * len(result)).from_address(id(result) + tuple.__basicsize__)
    former = result[place]
    if fields[place] != id(former):
        return False
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    fields[place] = id(value)
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(former))
    return True


def _move(iterator: Any, by: int) -> bool:
    """Move an iterator over known values forwards, or back."""
    if type(iterator) in _OVER_SEQUENCES:
        reduced = iterator.__reduce__()
        if len(reduced) < 3 or reduced[2] + by < 0:  # it has ended, or begins
            return False
        iterator.__setstate__(reduced[2] + by)
        return True
    if type(iterator) is _OVER_RANGE:
        return _move_range(iterator, by)
    return type(iterator) is itertools.count and _move_count(iterator, by)


def _move_range(iterator: Iterator[int], by: int) -> bool:
    """The fields are the next number, the width of a step and the count of what is left; up to Python 3.11 the number
    of those given, the first one, and the width (Objects/rangeobject.c, _PyRangeIterObject)."""
    left, fields = operator.length_hint(iterator), _fields(iterator, 0, 3)
    if sys.version_info < (3, 12):
        if fields[0] + by < 0:
            return False
        fields[0] += by
    elif fields[2] == left:
        fields[0], fields[2] = fields[0] + by * fields[1], left - by
    return operator.length_hint(iterator) == left - by


def _move_count(iterator: Any, by: int) -> bool:
    """The number is the first field, if it is a small one and the steps are 1 (Modules/itertoolsmodule.c)."""
    field = _fields(iterator, 0, 1)
    if repr(iterator) != f"count({field[0]})":
        return False
    field[0] += by
    return True
