"""elastic.EvalLoader: every sample exactly once over all workers, for evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from farandole.collectives import world
from farandole.data.loader import MapDataset, Rows, SmallByValue, are_rows, as_it_is, size_of
from farandole.data.sample_order import even_slice
from farandole.errors import DataError, StepError
from farandole.liveness.status_reporting import report_progress

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext


class EvalLoader:
    """Divides a data set among the current workers, in order, and yields this worker's part in batches.

    No sample is repeated to make the parts equal: they differ by one sample at most. So workers may have different
    numbers of batches, and with fewer samples than workers some have none. Weighted with `samples`, fd.mean is exactly
    the mean over the data set. For this reason the loop body must not call collectives.

    The loader has no saved position. A worker that is lost meanwhile is noticed by the next collective, that of
    fd.mean: its error leaves the elastic function, which is called again, and the evaluation after an epoch is repeated
    from its beginning, among the workers of that time.

    Iterating, len() and samples raise NotInitialized before init().

    Args:
        dataset: A data set with a length; an empty one has no batches.
        batch_size: Most samples of one batch of one worker.
        num_workers: As in torch's DataLoader, like the following arguments. Loader workers live until close().
        collate_fn: See torch.
        pin_memory: See torch.
        timeout: Seconds to wait for a batch of a loader process; 0: for ever.
        prefetch_factor: See torch.
        worker_init_fn: See torch.
        multiprocessing_context: See torch.

    Raises:
        DataError: The data set is iterable-style, or batch_size is below 1.

    Examples:
        ```python
        validation = fd.elastic.EvalLoader(validation_set, batch_size=64)
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum().item() for x, y in validation)
        accuracy = fd.mean(right / max(1, validation.samples), weight=validation.samples)
        ```
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int = 1,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size must be 1 or more, got {batch_size}")
        self.dataset, self.batch_size = dataset, batch_size
        self._size = size_of(dataset)
        self._part = _RangeBatchSampler(batch_size)
        inner_dataset: Any = dataset
        if collate_fn is None and are_rows(dataset):
            inner_dataset, collate_fn = Rows(dataset), as_it_is
        self._inner: TorchDataLoader[Any] = TorchDataLoader(
            inner_dataset,
            batch_sampler=self._part,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            prefetch_factor=prefetch_factor,
            worker_init_fn=SmallByValue(worker_init_fn),
            multiprocessing_context=multiprocessing_context,
            persistent_workers=num_workers > 0,
            generator=torch.Generator(),
        )

    @property
    def samples(self) -> int:
        """Number of samples of this worker."""
        low, high = self._share()
        return high - low

    def __len__(self) -> int:
        """Return the number of batches of this worker."""
        return -(-self.samples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches, collated, from the first one on.

        Raises:
            StepError: The workers have changed since the first batch, which a training loader's next batch inside the
                loop body may cause: the samples would now be divided among others.
            Exception: The errors of the data set.
        """
        generation = world.current().id
        self._part.low, self._part.high = self._share()
        # As in Prefetch: an evaluation must not change the random numbers of the training.
        generator = self._inner.generator
        assert generator is not None
        generator.manual_seed(torch.initial_seed())
        for data in self._inner:
            if world.current().id != generation:
                raise StepError(
                    "the workers have changed within an evaluation; finish it before the next training batch"
                )
            report_progress()
            yield data

    def close(self) -> None:
        """End the loader workers. Iterating again starts new ones. Idempotent."""
        shut_down = getattr(self._inner._iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
        self._inner._iterator = None

    def _share(self) -> tuple[int, int]:
        placement = world.current().placement
        return even_slice(0, self._size, placement.rank, placement.size)


class _RangeBatchSampler:
    """The batch sampler: samples low, ..., high - 1, set before each iteration."""

    def __init__(self, batch_size: int) -> None:
        self.low = self.high = 0
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for begin in range(self.low, self.high, self._batch_size):
            yield list(range(begin, min(begin + self._batch_size, self.high)))
