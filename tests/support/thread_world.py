"""A world of threads in one process: collectives through shared memory of the interpreter, no clock."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from farandole.errors import GenerationEnded, PeerLost
from farandole.training.collectives.connection_pair import combiner, flat_view
from farandole.training.collectives.transport import Reduction

ResultT = TypeVar("ResultT")

_DEADLINE_S = 30.0
_SECOND_S = 1.0


class ThreadWorld:
    """A world of `size` transports whose ranks are threads.

    kill(rank, before=n) makes a rank die at its n-th collective, counted from 0: it raises SystemExit there, and
    PeerLost is raised on all others.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=_DEADLINE_S)
        self._slots: list[Any] = [None] * size
        self._deaths: dict[int, int] = {}
        self._lock = threading.Lock()
        self._worlds: dict[int, ThreadWorld] = {}
        self.transports = [ThreadTransport(self, rank) for rank in range(size)]

    def kill(self, rank: int, before: int) -> None:
        self._deaths[rank] = before

    def run(self, function: Callable[[ThreadTransport], ResultT]) -> list[ResultT | BaseException]:
        """Call `function(transport)` in one thread for each rank; return the results, or the exceptions, by rank."""
        results: list[Any] = [None] * self.size

        def call(rank: int) -> None:
            try:
                results[rank] = function(self.transports[rank])
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                results[rank] = error
                self.end()

        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_DEADLINE_S)
        return results

    def connect(self, rank: int) -> Callable[[tuple[int, ...], int], ThreadTransport]:
        """Return connect(ranks, process_set) of one rank: it returns its transport in a world of some of the ranks."""

        def connect(ranks: tuple[int, ...], process_set: int) -> ThreadTransport:
            with self._lock:
                inner = self._worlds.setdefault(process_set, ThreadWorld(len(ranks)))
            return inner.transports[ranks.index(rank)]

        return connect

    def end(self) -> None:
        """End the world: no operation completes any more."""
        self._barrier.abort()
        self.call_all()

    def call_all(self) -> None:
        """Wake all ranks that wait between operations."""
        for transport in self.transports:
            transport.call()

    @property
    def has_ended(self) -> bool:
        return self._barrier.broken

    @property
    def begun(self) -> int:
        """The number of operations that the fastest rank has begun."""
        return max(transport.begun for transport in self.transports)

    def exchange(self, rank: int, count: int, op: str, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank; all collectives use it."""
        if self._deaths.get(rank) == count:
            self.end()
            raise SystemExit(1)
        try:
            self._slots[rank] = value
            self.call_all()
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost(op, 0, (rank + 1) % self.size) from None
        values = list(self._slots)
        with contextlib.suppress(threading.BrokenBarrierError):  # Completion beats failure.
            self._barrier.wait()
        return values


class ThreadTransport:
    """A rank of a ThreadWorld; a Transport (training/collectives/transport.py)."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self._aborted: str | None = None
        self._lock = threading.Lock()
        self._call: tuple[socket.socket, socket.socket] | None = None  # while it waits between operations
        self._has_seen_end = False
        self.begun = 0
        self.rank = rank
        self.size = world.size

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        flat, combine = flat_view(tensor), combiner(op)
        values = self._exchange("all_reduce", (flat.clone(), trailer))
        flat.copy_(values[0][0])
        for other, _ in values[1:]:
            combine(flat, other, out=flat)
        return [trailer for _, trailer in values]

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self._exchange("all_gather", payload)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        tensor.copy_(self._exchange("broadcast", tensor.clone())[source])

    def barrier(self) -> None:
        self._exchange("barrier", None)

    def wait_for_peer(self, wake: int) -> bool | None:
        with self._lock:
            woken, _ = self._call = socket.socketpair()
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        poll.register(woken, select.POLLIN)
        try:
            while True:
                self._raise_if_aborted("wait")
                if self._world.begun > self.begun:
                    return True
                if self._world.has_ended and not self._has_seen_end:
                    self._has_seen_end = True
                    return False
                ready = dict(poll.poll(_SECOND_S * 1000))
                if wake in ready:
                    return False
                if not ready:
                    return None
                woken.recv(4096)
        finally:
            with self._lock:
                for sock in self._call:
                    sock.close()
                self._call = None

    def call(self) -> None:
        """Wake the rank if it waits between operations. From any thread."""
        with self._lock:
            if self._call is not None:
                self._call[1].send(b"\0")

    def abort(self, reason: str) -> None:
        self._aborted = self._aborted or reason
        self._world.end()

    def close(self) -> None:
        self.abort("its transport was closed")

    def _exchange(self, op: str, value: Any) -> list[Any]:
        self._raise_if_aborted(op)
        self.begun += 1
        try:
            return self._world.exchange(self.rank, self.begun - 1, op, value)
        except PeerLost:
            self._raise_if_aborted(op)
            raise

    def _raise_if_aborted(self, op: str) -> None:
        if self._aborted is not None:
            raise GenerationEnded(op, 0, self._aborted)
