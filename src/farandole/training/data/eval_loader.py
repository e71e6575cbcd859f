"""elastic.EvalLoader: every sample exactly once over all workers, for evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from farandole.base.liveness.status_reporting import report_progress
from farandole.errors import DataError, StepError
from farandole.training.collectives import world
from farandole.training.data.fetching import MapDataset, fetch, size_of
from farandole.training.data.index_stream import IndexedBatch, IndexStream
from farandole.training.data.partition import BatchLayout, even_slice
from farandole.training.data.prefetch import Prefetch

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
        num_workers: As in torch's DataLoader, like the following arguments.
        collate_fn: See torch.
        pin_memory: See torch.
        timeout: Seconds to wait for a batch of a loader process; 0: for ever.
        prefetch_factor: See torch.
        worker_init_fn: See torch.
        multiprocessing_context: See torch.
        persistent_workers: True keeps the loader processes from one evaluation to the next. They have the data set as
            it was when they were started.

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
        persistent_workers: bool = False,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size must be 1 or more, got {batch_size}")
        self.dataset, self.batch_size = dataset, batch_size
        size_of(dataset)  # refuses a stream
        self._arguments: dict[str, Any] = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "prefetch_factor": prefetch_factor,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "persistent_workers": persistent_workers and num_workers > 0,
        }
        self._kept: tuple[IndexStream, Prefetch[IndexedBatch]] | None = None

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
        low, high = self._share()
        if low == high:
            return
        layout = BatchLayout(high, min(self.batch_size, high))
        index_stream, prefetch = self._kept or self._open(layout)
        self._kept, has_ended = None, False
        try:
            index_stream.restart(layout, 0, low, 0, 1)
            for _ in range(len(self)):
                _, data = prefetch.take()
                if world.current().id != generation:
                    raise StepError(
                        "the workers have changed within an evaluation; finish it before the next training batch"
                    )
                report_progress()
                yield data
            has_ended = True
        finally:
            if has_ended and self._arguments["persistent_workers"]:
                self._kept = index_stream, prefetch
            else:
                prefetch.close()

    def _open(self, layout: BatchLayout) -> tuple[IndexStream, Prefetch[IndexedBatch]]:
        index_stream = IndexStream(layout, lambda _epoch, positions: positions)
        return index_stream, fetch(self.dataset, index_stream, self._arguments)

    def close(self) -> None:
        """End the loader processes. Iterating again starts new ones. Idempotent."""
        if self._kept is not None:
            self._kept[1].close()
        self._kept = None

    def _share(self) -> tuple[int, int]:
        placement = world.current().placement
        return even_slice(0, size_of(self.dataset), placement.rank, placement.size)
