"""Fetching ahead with torch's DataLoader, whose loader workers continue when position or world change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader


class OnWay(Protocol):
    """A requested batch; `restart_id` numbers the restart that it belongs to."""

    @property
    def restart_id(self) -> int: ...


OnWayT = TypeVar("OnWayT", bound=OnWay)


class RequestStream(Protocol[OnWayT]):
    """An endless stream of the batches to fetch next (index_stream.py, stream_requests.py)."""

    on_way: deque[OnWayT]

    @property
    def restart_id(self) -> int: ...


class Prefetch(Generic[OnWayT]):
    """Takes batches out of a torch DataLoader whose sampler is `requests`.

    Its loader workers are started by the first take() and end with close(), or when this object is freed: the iterator
    holds no reference to it.
    """

    def __init__(self, loader: TorchDataLoader[Any], requests: RequestStream[OnWayT]) -> None:
        self._loader, self._requests = loader, requests
        self._iterator: Iterator[Any] | None = None

    def take(self) -> tuple[OnWayT, Any]:
        """Return the next batch since the last restart, collated; batches of earlier restarts are dropped. Raises the
        errors of the data set; then, as after any other error here, close() is needed before the next call."""
        if self._iterator is None:
            self._iterator = self._start()
        while True:
            data = next(self._iterator)
            requested = self._requests.on_way.popleft()
            if requested.restart_id == self._requests.restart_id:
                return requested, data

    def close(self) -> None:
        """End the loader workers and drop the batches being fetched. Idempotent."""
        # Private, but torch has no public way: without it they would live as long as the traceback of an error.
        shut_down = getattr(self._iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
        self._iterator = None
        self._requests.on_way.clear()

    def _start(self) -> Iterator[Any]:
        # As in torch, the loader workers' seeds depend on the main process's seed; but no number is taken from its
        # generator: a repeated step would see other ones.
        generator = self._loader.generator
        if generator is not None:
            generator.manual_seed(torch.initial_seed())
        return iter(self._loader)
