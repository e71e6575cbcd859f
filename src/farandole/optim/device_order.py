"""The order of a device's operations in several streams. Gradients are written in the streams of backward(), and a
thread reduces them in another stream. buckets.py and bucketed_gradients.py use it. On the CPU there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def wait_for_device(device: torch.device) -> None:
    """Wait until the operations queued in the current stream have completed."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Arrivals:
    """The streams that have written to a bucket. The writing thread calls record()."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_needed = device, device.type == "cuda"
        self._streams: set[Any] = set()

    def record(self) -> None:
        """Note that the current stream has just received a write."""
        if self._is_needed:
            self._streams.add(torch.cuda.current_stream(self._device))

    def before(self, task: Callable[[], T]) -> Callable[[], T]:
        """Return the task for another thread, ordered after all recorded writes. It is not ordered after later
        operations of these streams, so that backward() continues meanwhile."""
        if not self._is_needed:
            return task
        events = [stream.record_event() for stream in self._streams]
        self._streams.clear()
        return partial(self._run, events, task)

    def _run(self, events: list[Any], task: Callable[[], T]) -> T:
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for event in events:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            return task()
