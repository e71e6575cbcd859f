"""Objects of the script of which only a place is state: generators of random numbers, and iterators over values.

A random generator is moved to another place; an iterator is replaced by one that stands there. Python's generators can
be neither moved nor copied: it is only noticed that one has gone on.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
import pickle
import random
from types import GeneratorType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

_OVER_SEQUENCES: tuple[type, ...] = (type(iter([])), type(iter(())))
_COUNTS = (itertools.count, type(iter(range(0))))
ITERATORS = frozenset({*_OVER_SEQUENCES, *_COUNTS})
_RANDOM = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)

RandomGenerator = torch.Generator | random.Random | np.random.RandomState | np.random.Generator


class Place(NamedTuple):
    """A place, for other workers: where an object of the same kind stands."""

    kind: str
    at: int | bytes | str


def generators_of_process() -> SimpleNamespace:
    """Return the generators from which random numbers are drawn without naming one; the same object each time."""
    return _generators_of_process(torch.cuda.is_available() and bool(torch.cuda.is_initialized()))  # type: ignore[no-untyped-call]


@functools.cache
def _generators_of_process(has_cuda: bool) -> SimpleNamespace:
    of_cuda = {f"cuda{number}": each for number, each in enumerate(torch.cuda.default_generators if has_cuda else ())}
    of_python, of_numpy = random._inst, np.random.mtrand._rand
    return SimpleNamespace(torch=torch.default_generator, python=of_python, numpy=of_numpy, **of_cuda)


def is_iterator(value: object) -> bool:
    """Return whether a value is an iterator that can be copied."""
    return type(value) in ITERATORS


def is_random(value: object) -> bool:
    """Return whether a value is a generator of random numbers."""
    return isinstance(value, _RANDOM)


def place_of(value: Any) -> Place | None:
    """Return where an object stands; None: it is none of these, or an iterator that has ended."""
    kind = type(value).__name__
    if isinstance(value, torch.Generator):  # a pickled tensor has other bytes each time
        return Place(kind, value.get_state().numpy().tobytes())
    if is_random(value):
        return Place(kind, pickle.dumps(state_of(value)))
    if type(value) in _OVER_SEQUENCES:
        reduced = value.__reduce__()
        return Place(kind, reduced[2]) if len(reduced) > 2 else None
    if type(value) is itertools.count:
        return Place(kind, repr(value))  # from Python 3.14 on it cannot be pickled
    return Place(kind, pickle.dumps(value)) if type(value) in _COUNTS else None


def moved(live: Any, place: Place) -> Any:
    """Return this object at another place: itself, or another one. Raises TypeError where it cannot be."""
    if type(live).__name__ != place.kind:
        raise TypeError(f"{type(live).__name__} instead of {place.kind}")
    if isinstance(live, torch.Generator):
        live.set_state(torch.frombuffer(bytearray(place.at), dtype=torch.uint8))  # type: ignore[arg-type]
        return live
    if is_random(live):
        set_state(live, pickle.loads(place.at))  # type: ignore[arg-type]  # from a member of the job
        return live
    if type(live) in _OVER_SEQUENCES:
        reduced = live.__reduce__()
        if len(reduced) < 3:
            raise TypeError("the iterator has ended")
        there = iter(reduced[1][0])
        there.__setstate__(place.at)
        return there
    if type(live) is itertools.count:
        start, *step = ast.literal_eval(f"({str(place.at).removeprefix('count(').removesuffix(')')},)")
        return itertools.count(start, *step)
    return pickle.loads(place.at)  # type: ignore[arg-type]  # a range, from a member of the job


def copied(iterator: Any) -> Any:
    """Return another iterator at the same place."""
    place = place_of(iterator)
    return moved(iterator, place) if type(iterator) is itertools.count and place else copy.copy(iterator)


def state_of(generator: RandomGenerator) -> Any:
    """Return the state of a generator of random numbers."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def set_state(generator: RandomGenerator, state: Any) -> None:
    """Set the result of state_of()."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


_ENDED = "ended"


def mark_of(generator: GeneratorType[Any, Any, Any]) -> object:
    """Return something that is another one once a generator has gone on, as far as can be seen; None for one that runs,
    as one that yields the batches of the training does."""
    frame = generator.gi_frame
    if generator.gi_running:
        return None
    if frame is None:
        return _ENDED
    plain = {key: each for key, each in frame.f_locals.items() if type(each) in (int, float, str, bool)}
    iterators = {key: place_of(each) for key, each in frame.f_locals.items() if is_iterator(each)}
    return frame.f_lasti, plain, iterators
