"""A world of threads in one process: collectives through shared memory of the interpreter, no socket, no clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from farandole.errors import GenerationEnded, PeerLost

ResultT = TypeVar("ResultT")

_DEADLINE_S = 30.0


class ThreadWorld:
    """`size` transports whose ranks are threads.

    kill(rank, before=n) makes a rank die at its n-th collective, counted from 0: it raises SystemExit there, and
    PeerLost is raised on everybody else.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.transports = [ThreadTransport(self, rank) for rank in range(size)]
        self._barrier = threading.Barrier(size, timeout=_DEADLINE_S)
        self._slots: list[Any] = [None] * size
        self._deaths: dict[int, int] = {}

    def kill(self, rank: int, before: int) -> None:
        self._deaths[rank] = before

    def run(self, function: Callable[[ThreadTransport], ResultT]) -> list[ResultT | BaseException]:
        """Call `function(transport)` in one thread for each rank; what it returned, or raised, by rank."""
        results: list[Any] = [None] * self.size

        def call(rank: int) -> None:
            try:
                results[rank] = function(self.transports[rank])
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                results[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_DEADLINE_S)
        return results

    def exchange(self, rank: int, count: int, op: str, value: Any) -> list[Any]:
        """Everybody's value, by rank; the heart of all collectives."""
        if self._deaths.get(rank) == count:
            self._barrier.abort()
            raise SystemExit(1)
        try:
            self._slots[rank] = value
            self._barrier.wait()
            values = list(self._slots)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost(op, 0, (rank + 1) % self.size) from None
        return values


class ThreadTransport:
    """One rank of a ThreadWorld; a Transport (collectives/transport.py)."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self._count = 0
        self._aborted: str | None = None
        self.rank = rank
        self.size = world.size

    def all_reduce(self, tensor: torch.Tensor, note: bytes = b"") -> list[bytes]:
        values = self._exchange("all_reduce", (tensor.clone(), note))
        tensor.copy_(torch.stack([value for value, _ in values]).sum(dim=0))
        return [note for _, note in values]

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self._exchange("all_gather", payload)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self._exchange("broadcast", tensor.clone())[source])

    def barrier(self) -> None:
        self._exchange("barrier", None)

    def abort(self, reason: str) -> None:
        self._aborted = reason
        self._world._barrier.abort()

    def close(self) -> None:
        pass

    def _exchange(self, op: str, value: Any) -> list[Any]:
        if self._aborted is not None:
            raise GenerationEnded(op, 0, self._aborted)
        self._count += 1
        return self._world.exchange(self.rank, self._count - 1, op, value)
