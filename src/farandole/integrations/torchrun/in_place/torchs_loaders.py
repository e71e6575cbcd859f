"""DataLoaders as torch has them, beside those that are elastic in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader


def with_batches(theirs: TorchDataLoader[Any], batches: list[list[int]]) -> TorchDataLoader[Any]:
    """Return a DataLoader like that of the script, with these batches."""
    return TorchDataLoader(
        theirs.dataset,
        batch_sampler=batches,
        num_workers=theirs.num_workers,
        collate_fn=theirs.collate_fn,
        pin_memory=theirs.pin_memory,
        timeout=theirs.timeout,
        worker_init_fn=theirs.worker_init_fn,
        multiprocessing_context=theirs.multiprocessing_context,
        generator=theirs.generator,
        prefetch_factor=theirs.prefetch_factor,
    )


torchs_iterator: Callable[[TorchDataLoader[Any]], Iterator[Any]] = TorchDataLoader.__iter__
torchs_length: Callable[[TorchDataLoader[Any]], int] = TorchDataLoader.__len__
"""DataLoader.__iter__ and __len__ as torch has them, whatever replaces them later."""
