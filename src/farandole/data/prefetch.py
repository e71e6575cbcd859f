"""Fetching ahead with torch's DataLoader, whose loader workers live on when place or world change."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader


class OnWay(Protocol):
    """What was asked for: `deal` numbers the restart it came from."""

    @property
    def deal(self) -> int: ...


OnWayT = TypeVar("OnWayT", bound=OnWay)


class Asking(Protocol[OnWayT]):
    """Who says what to fetch next (dealer.py, stream_requests.py)."""

    on_way: deque[OnWayT]

    @property
    def deal(self) -> int: ...


class Prefetch(Generic[OnWayT]):
    """Takes batches out of a torch DataLoader whose sampler is `dealer`.

    Its loader workers are started by the first take() and end with close(), or when this object is freed:
    nothing that the iterator holds leads back here.
    """

    def __init__(self, loader: TorchDataLoader[Any], dealer: Asking[OnWayT]) -> None:
        self._loader, self._dealer = loader, dealer
        self._iterator: Iterator[Any] | None = None

    def take(self) -> tuple[OnWayT, Any]:
        """The next batch of the current deal, collated; those of older deals are dropped. Raises what the
        data set raised; then, as after any other error here, close() is needed before the next call."""
        if self._iterator is None:
            self._iterator = self._start()
        while True:
            data = next(self._iterator)
            dealt = self._dealer.on_way.popleft()
            if dealt.deal == self._dealer.deal:
                return dealt, data

    def close(self) -> None:
        """End the loader workers and forget what they were fetching. Idempotent."""
        # Private, but all torch has: without it they would live as long as the traceback of an error does.
        shut_down = getattr(self._iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
        self._iterator = None
        self._dealer.on_way.clear()

    def _start(self) -> Iterator[Any]:
        # As in torch, the loader workers' seeds follow from the main process's seed; but no number is taken
        # from its generator: a step that is done again would see other ones.
        generator = self._loader.generator
        if generator is not None:
            generator.manual_seed(torch.initial_seed())
        return iter(self._loader)
