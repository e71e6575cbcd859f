"""The user's numbers of `State.log()`: of each name the newest one is kept, until it is written to the status page.

To read a loss takes as long as everything else that observation adds to a step, and two values a second are shown. So a
tensor that has its graph is read only where none of its name was read within the last 50 ms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from farandole.base.machine import now_ns

SAMPLE_EVERY_NS = 50_000_000
"""The shortest time between two tensors with a graph that are read for a name."""

WRITE_EVERY_NS = 500_000_000
"""The shortest time between two times that the numbers are written."""

MOST_NAMES = 50
"""The number of names that are shown; later ones are not."""


class LoggedNumbers:
    """The numbers of this process."""

    def __init__(self) -> None:
        self._newest: dict[str, Any] = {}
        self._sample_ns: dict[str, int] = {}  # by name: when a tensor that has its graph is read again
        self._is_new = False
        self._write_ns = 0

    def log(self, numbers: Mapping[str, Any]) -> None:
        """Keep numbers, each in place of the former one of its name. Raises TypeError as `number_of()` does, for the
        values that are read."""
        at_ns = now_ns()
        newest, sample_ns = self._newest, self._sample_ns
        for name, value in numbers.items():
            if type(value) is float:
                newest[name] = value
            elif not getattr(value, "requires_grad", False):
                newest[name] = number_of(name, value)
            elif at_ns >= sample_ns.get(name, 0):
                newest[name] = number_of(name, value)
                sample_ns[name] = at_ns + SAMPLE_EVERY_NS
        self._is_new = True

    def is_due(self) -> bool:
        """Return whether there are numbers to write, and the former ones were written long enough ago."""
        return self._is_new and now_ns() >= self._write_ns

    def take(self) -> dict[str, float]:
        """Return the numbers, to write them. A tensor of a device is waited for now; one that cannot be read any more,
        because the device is lost, is left out."""
        self._is_new = False
        taken = {}
        for name, value in list(self._newest.items())[:MOST_NAMES]:
            with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
                taken[name] = self._newest[name] = float(value)
        self._write_ns = now_ns() + WRITE_EVERY_NS
        return taken


def number_of(name: str, value: Any) -> Any:
    """Return a value that float() accepts later, without the graph of a tensor. Raises TypeError for what is neither a
    number nor a tensor with one element."""
    try:
        if getattr(value, "is_cpu", False):
            return float(value.item())
        if getattr(value, "numel", lambda: 0)() == 1:
            return value.detach()
    except (TypeError, ValueError, RuntimeError):
        pass
    if hasattr(value, "__float__") and not hasattr(value, "numel"):
        return value  # also an int
    raise TypeError(f"state.log({name}=...): a number or a tensor with one element, got {type(value).__name__}")
