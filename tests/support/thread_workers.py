"""Workers as threads of one process: each sees a world, an open step and a run loop of its own.

For tests of what optimizer and loader compute together. Models and loaders are made inside the threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from farandole.base.membership import GenerationId, Placement
from farandole.integrations.torchrun.process_group import works
from farandole.training.collectives import world
from farandole.training.collectives.world import World
from farandole.training.state import step
from tests.support.thread_world import ThreadTransport, ThreadWorld

ResultT = TypeVar("ResultT")


def run_workers(size: int, function: Callable[[int], ResultT]) -> list[ResultT]:
    """Call `function(rank)` in `size` threads, each of which is a worker after init(). Return the results, by rank.

    Raises the first exception that one of them raised.
    """

    def work(transport: ThreadTransport) -> ResultT:
        placement = Placement(transport.rank, size, transport.rank, size, 0, 1)
        _here.world = World(GenerationId(1, 1, 1, ""), placement, transport)
        return function(transport.rank)

    with _globals_of_each_thread():
        results = ThreadWorld(size).run(work)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]  # the exceptions are gone


@contextlib.contextmanager
def _globals_of_each_thread() -> Iterator[None]:
    """Give each thread its own copies of the process's globals."""
    kept = step._step, world.current, works.JOB.in_operation
    step._step = _PerThread(step._OpenStep)  # type: ignore[assignment]
    works.JOB.in_operation = _PerThread(threading.Lock)  # type: ignore[assignment]
    world.current = lambda: _here.world
    try:
        yield
    finally:
        step._step, world.current, works.JOB.in_operation = kept


_here: Any = threading.local()


class _PerThread:
    """An object whose attributes are those of a separate object for each thread."""

    def __init__(self, make: Callable[[], object]) -> None:
        self.__dict__["_local"], self.__dict__["_make"] = threading.local(), make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mine(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mine(), name, value)

    def _mine(self) -> object:
        local = self.__dict__["_local"]
        if not hasattr(local, "value"):
            local.value = self.__dict__["_make"]()
        return local.value
