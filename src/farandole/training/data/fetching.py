"""The way from a data set to its batches: torch's DataLoader with our index stream as its sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from farandole.training.data.augmentation import with_places
from farandole.training.data.index_stream import IndexedBatch, IndexStream
from farandole.training.data.map_dataset import MapDataset
from farandole.training.data.prefetch import Prefetch, SmallByValue
from farandole.training.data.tensor_rows import RowReader, Rows, are_rows, as_it_is


def fetch(
    dataset: MapDataset,
    index_stream: IndexStream,
    seed: int,
    arguments: Mapping[str, Any],
    seed_of_processes: Callable[[], int],
) -> Prefetch[IndexedBatch]:
    """Return the source of the batches that the index stream asks for.

    Args:
        dataset: The data set.
        index_stream: The batches to fetch.
        seed: Seed of the random numbers that samples draw.
        arguments: Those of torch's DataLoader; persistent_workers says whether loader processes outlive an epoch.
        seed_of_processes: Returns the seed from which torch derives those of new loader processes.
    """
    options = {**arguments}
    keeps_processes, worker_init_fn = options.pop("persistent_workers"), options.pop("worker_init_fn")
    collate_fn = options.pop("collate_fn")
    inner_dataset: Any = dataset
    batch_sampler: Iterable[Any] = index_stream
    if are_rows(dataset):  # rows of tensors draw no random numbers
        inner_dataset, collate_fn = (Rows(dataset), as_it_is) if collate_fn is None else (dataset, collate_fn)
    else:
        inner_dataset, batch_sampler = with_places(dataset, index_stream, seed)
    inner: TorchDataLoader[Any] = TorchDataLoader(
        inner_dataset,
        batch_sampler=batch_sampler,
        collate_fn=collate_fn,
        worker_init_fn=SmallByValue(worker_init_fn),
        persistent_workers=options["num_workers"] > 0,
        generator=torch.Generator(),
        **options,
    )
    reads_here = collate_fn is as_it_is and not options["num_workers"] and not options["pin_memory"]
    return Prefetch(
        RowReader(inner_dataset, index_stream) if reads_here else inner,
        index_stream,
        keeps_processes,
        seed_of_processes,
    )
