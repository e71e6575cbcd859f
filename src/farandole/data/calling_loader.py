"""Which data set will be read at the indices that a sampler hands out: that of the DataLoader that iterates it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

_DEPTH = 8  # the loader's iterator is 2 to 4 calls up: batch samplers may be wrapped


def dataset_of_caller() -> Any:
    """The data set of the DataLoader that has called, however indirectly; None when there is none.

    A DataLoader tells its sampler nothing of its data set, and a sampler that was made for a smaller one trains a part
    of it without an error. So we look at who calls: once for each loop over the loader.
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
