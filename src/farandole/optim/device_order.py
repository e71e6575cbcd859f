"""The order of what a device does in several streams: gradients come in those of backward(), a thread of ours reduces
them in another one. buckets.py and bucketed_gradients.py use it. On the CPU there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def wait_for_device(device: torch.device) -> None:
    """Return when what the current stream was given is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Arrivals:
    """In which streams something was put into a bucket. record() is for the thread that has put it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_needed = device, device.type == "cuda"
        self._streams: set[Any] = set()

    def record(self) -> None:
        """The current stream was given something just now."""
        if self._is_needed:
            self._streams.add(torch.cuda.current_stream(self._device))

    def before(self, task: Callable[[], T]) -> Callable[[], T]:
        """The same for another thread: what it gives its current stream comes after all that was noted. Not after what
        these streams are given later, so that backward() goes on meanwhile."""
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
