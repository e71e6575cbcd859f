"""What this rank has submitted and what has not ended yet. Callers put in, the collectives' thread takes out."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Sequence

from farandole.collectives.named.operation import Operation
from farandole.collectives.named.operation_requests import Key
from farandole.collectives.named.wake import Wake


class Submitted:
    """Thread-safe. After end() nothing can be put in any more.

    wake  set while there is something that was not said yet; None where no thread waits for it
    """

    def __init__(self, wake: Wake | None) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._unsaid: list[Operation] = []
        self._in_flight: dict[Key, Operation] = {}
        self._error: BaseException | None = None

    @property
    def has_unsaid(self) -> bool:
        return bool(self._unsaid)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits for its end."""
        return not self._in_flight

    def add(self, operations: Sequence[Operation]) -> None:
        """All of them or none. Raises ValueError for a name that is in flight, what end() was told if it was called,
        and RuntimeError in a forked child."""
        with self._lock:
            if self._error is not None:
                raise copy.copy(self._error) from self._error.__cause__
            by_key = {operation.key: operation for operation in operations}
            twice = [key for key in by_key if key in self._in_flight and not self._in_flight[key].has_ended]
            if twice or len(by_key) < len(operations):
                name = twice[0].name if twice else "a name of this group"
                raise ValueError(
                    f"{name} was submitted twice: an operation of this name is in flight. Call synchronize() on its "
                    f"handle first, or give this one another name"
                )
            self._set_wake()
            self._unsaid += operations
            self._in_flight |= by_key

    def wake(self) -> None:
        """Let the collectives' thread look around."""
        with self._lock:
            self._set_wake()

    def _set_wake(self) -> None:
        if self._wake is None:
            return
        try:
            self._wake.set()
        except OSError:
            raise RuntimeError(
                "collectives work only in the process that called init(), not in one forked from it (a loader worker?)"
            ) from None

    def take_unsaid(self) -> list[Operation]:
        """What the other ranks are to hear of now."""
        with self._lock:
            if self._wake is not None:
                self._wake.clear()
            unsent, self._unsaid = self._unsaid, []
        for operation in unsent:
            operation.was_sent = True
        return unsent

    def find(self, key: Key) -> Operation | None:
        """What was submitted as `key`, if the other ranks have heard of it."""
        operation = self._in_flight.get(key)
        return operation if operation is not None and operation.was_sent else None

    def in_flight(self) -> list[Operation]:
        with self._lock:
            return list(self._in_flight.values())

    def forget(self, ended: Iterable[Operation | None]) -> None:
        """These have ended; a new one of the same name may have come already."""
        with self._lock:
            for operation in ended:
                if operation is not None and self._in_flight.get(operation.key) is operation:
                    del self._in_flight[operation.key]

    def end(self, error: BaseException) -> None:
        """Nothing will be carried out any more: whatever waits fails, and so does whatever comes later."""
        with self._lock:
            if self._error is None:
                self._error = error
            waiting = [operation for operation in self._in_flight.values() if not operation.has_ended]
            self._in_flight.clear()
            self._unsaid.clear()
        for operation in waiting:
            operation.fail(error)
