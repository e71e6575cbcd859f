"""The registry of the objects that an ABORT must reach: the only way from the worker's link to a blocked collective.

While a worker connects, or runs a collective, its main thread can be blocked for as long as a peer does not answer. The
coordinator then ends the generation, and the link's thread ends the call:

    who registers    world_builder.py, each object of a generation before it can block: builders of rings, rings, the
                     transports built upon them, and the point-to-point connections. On the main thread; for a process
                     set on the thread of the named collectives.
    who aborts       link.py, on the link's thread: at an ABORT all objects of older generations, and at a STOP, when
                     the job is over, all objects.
    who closes       worker_job.py, on the main thread: the objects of all other generations when a new one is in sync
                     (`settle`), and every object at shutdown() (`leave`).
    who else reads   worker_job.py, on the link's thread: the neighbours of the newest generation, for link probes.

After an abort a registration stays, so that the object is closed with its generation. The object's calls raise
GenerationEnded, now and later. Whatever is registered for an aborted generation afterwards is aborted at once, and
register() raises GenerationEnded. An abort for a generation that was aborted before changes nothing: objects keep the
first reason.

Two things end collectives without this registry, both on the main thread. The run loops abort transports of the current
world that other workers may wait in (`Job.quiesce`, `CommitLoop`). And `collectives/world.py` refuses or interrupts
collectives before they begin.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from farandole.errors import GenerationEnded


class Abortable(Protocol):
    """A builder or a transport."""

    def abort(self, reason: str) -> None:
        """End running and later calls with GenerationEnded. Returns at once. Called from any thread, also after
        close()."""
        ...

    def close(self) -> None:
        """Release the connections. Idempotent."""
        ...


class AbortRegistry:
    """The objects of each generation, by its number. All methods may be called from any thread.

    The lock is held only while the lists are read or changed, never while an object is built, aborted or closed: an
    abort waits for no other thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._references: dict[int, list[_Reference]] = {}
        self._entered = 0
        self._aborted_below = 0
        self._reason = ""

    def register(
        self, number: int, abortable: Abortable, *, is_builder: bool = False, replaces: Abortable | None = None
    ) -> None:
        """Let aborts reach an object of generation `number` from now on.

        Args:
            number: The generation.
            abortable: The object.
            is_builder: It still connects to its neighbours. If it fails, it stays registered: the coordinator may ask
                which of them answer.
            replaces: The builder of this object, which is forgotten.

        Raises:
            GenerationEnded: The generation was aborted before; so is the object now.
        """
        with self._lock:
            others = [each for each in self._references.get(number, ()) if _is_kept(each, replaces)]
            is_weak = number == self._entered and not is_builder
            self._references[number] = [*others, _reference(abortable, is_weak)]
            is_aborted, reason = number < self._aborted_below, self._reason
        if is_aborted:
            abortable.abort(reason)
            raise GenerationEnded("regroup", number, reason)

    def enter(self, number: int) -> None:
        """Hold the objects of a generation weakly from now on, since its world is complete and holds them: process sets
        are added and removed in it. Objects of a world that was never completed are held until they are closed."""
        with self._lock:
            self._entered = number
            self._references[number] = [weakref.ref(each) for each in self._living(number)]

    def abort_below(self, number: int, reason: str) -> None:
        """Abort all objects of generations before `number`, those that are registered from now on, too."""
        with self._lock:
            if number > self._aborted_below:
                self._aborted_below, self._reason = number, reason
            ended = [each for other in self._references if other < number for each in self._living(other)]
        for each in ended:
            each.abort(reason)

    def abort_all(self, reason: str) -> None:
        """Abort all objects, since the job is over."""
        self.abort_below(sys.maxsize, reason)

    def close_all_but(self, number: int) -> None:
        """Close and forget the objects of all other generations, including those of worlds that were never
        completed."""
        with self._lock:
            ended = [each for other in self._references if other != number for each in self._living(other)]
            self._references = {other: kept for other, kept in self._references.items() if other == number}
        for each in ended:
            each.close()

    def close_all(self) -> None:
        """Close and forget all objects. The next world, of the same generation or of another one, begins anew."""
        with self._lock:
            ended = [each for number in self._references for each in self._living(number)]
            self._references, self._entered = {}, 0
        for each in ended:
            each.close()

    def newest(self) -> tuple[int, list[Abortable]]:
        """Return the number of the newest generation, and its objects; 0 and none before the first one."""
        with self._lock:
            number = max(self._references, default=0)
            return number, self._living(number)

    def _living(self, number: int) -> list[Abortable]:
        """Return the objects that still exist. Call it with the lock held."""
        return [each for reference in self._references.get(number, ()) if (each := reference()) is not None]


_Reference = Callable[[], Abortable | None]


def _reference(abortable: Abortable, is_weak: bool) -> _Reference:
    return weakref.ref(abortable) if is_weak else lambda: abortable


def _is_kept(reference: _Reference, replaced: Abortable | None) -> bool:
    """Return whether the object still exists, and is not the replaced one."""
    abortable = reference()
    return abortable is not None and abortable is not replaced
