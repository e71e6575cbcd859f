"""Base classes of loaders: subclasses define how to read batches, and may have a thread read ahead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_LOOK_S = 0.2  # a waiting thread notices within this time that the loader was closed
_CLOSE_S = 10.0


class BaseDataLoader:
    """A loader. Subclasses define `__len__`, the number of batches, and `_iterate`, which yields them."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _iterate(self) -> Iterator[Any]:
        raise NotImplementedError

    def _process_batch(self, batch: Any) -> Any:
        """Transform a batch before the training loop gets it, in the loop's thread."""
        return batch


class AsyncDataLoaderMixin:
    """Reads ahead in a thread; named before a BaseDataLoader: `class Mine(AsyncDataLoaderMixin, Loader)`. The thread
    runs `_iterate` repeatedly, and keeps up to `async_loader_queue_size` batches; with 0 there is no thread.

    The remaining batches of an interrupted pass come first in the next one, as in Horovod. An exception of `_iterate`
    is raised in the training loop; the pass after that one begins anew. `debug_data_loader` has no effect.
    """

    _iterate: Callable[[], Iterator[Any]]
    _process_batch: Callable[[Any], Any]

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._ahead: queue.Queue[_Read] = queue.Queue(max(0, async_loader_queue_size))
        self._is_closed = threading.Event()
        self._reader: threading.Thread | None = None
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches. Raises RuntimeError after close_async_loader()."""
        if self.async_loader_queue_size <= 0:
            for batch in self._iterate():
                yield self._process_batch(batch)
            return
        if self._reader is None:
            self._reader = threading.Thread(target=self._read_ahead, name="horovod-data", daemon=True)
            self._reader.start()
        while not (read := self._take()).is_end:
            yield self._process_batch(read.batch)
        if read.error is not None:
            raise read.error

    def close_async_loader(self) -> None:
        """End the thread, and wait until it has finished the batch that it reads, up to 10 s. Idempotent."""
        self._is_closed.set()
        if self._reader is not None:
            self._reader.join(_CLOSE_S)

    def _take(self) -> _Read:
        while not self._is_closed.is_set():
            try:
                return self._ahead.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
        raise RuntimeError("the loader was closed by close_async_loader(); make a new one")

    def _read_ahead(self) -> None:
        while not self._is_closed.is_set():
            end = _Read(is_end=True)
            try:
                for batch in self._iterate():
                    if not self._keep(_Read(batch)):
                        return
            except Exception as error:  # noqa: BLE001 - raised in the training loop
                end.error = error
            self._keep(end)

    def _keep(self, read: _Read) -> bool:
        """Put it into the queue, once there is room. Return False if the loader was closed first."""
        while not self._is_closed.is_set():
            try:
                self._ahead.put(read, timeout=_LOOK_S)
            except queue.Full:
                continue
            return True
        return False


@dataclass
class _Read:
    """A batch, or the end of one pass: success, or the exception of `_iterate`."""

    batch: Any = None
    is_end: bool = False
    error: Exception | None = None
