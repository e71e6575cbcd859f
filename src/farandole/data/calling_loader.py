"""Search for the data set that will be read at a sampler's indices: that of the DataLoader that iterates the
sampler."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

_DEPTH = 8  # the loader's iterator is 2 to 4 calls up: batch samplers may be wrapped


def dataset_of_caller() -> Any:
    """Return the data set of the DataLoader that has called, also indirectly; None when there is none.

    A DataLoader does not tell its sampler its data set, and a sampler made for a smaller one trains a part of it
    without an error. So the callers are inspected, once for each loop over the loader.
    """
    for frame in islice(_callers(inspect.currentframe()), _DEPTH):
        caller = frame.f_locals.get("self")
        if isinstance(caller, _BaseDataLoaderIter):
            return caller._dataset
    return None


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
