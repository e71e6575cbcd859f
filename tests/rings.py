"""Rings over loopback whose ranks are threads of this process, built like those of real workers."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from farandole.collectives.listener import DataListener
from farandole.collectives.ring_builder import RingBuilder
from farandole.collectives.transport import Transport
from farandole.collectives.transport_choice import choose
from farandole.membership import Address, GenerationId, Peer, Placement
from farandole.messages import Start

DEADLINE_S = 20.0
KEY = secrets.token_bytes(32)

T = TypeVar("T")


def make_start(rank: int, addresses: list[Address], number: int = 1, key: bytes = KEY, names: str = "w") -> Start:
    """START for one rank of a ring of workers w0, w1, ..."""
    size = len(addresses)

    def peer(other: int) -> Peer:
        return Peer(f"{names}{other % size}", other % size, addresses[other % size])

    return Start(
        id=GenerationId(1, 1, number, f"nonce of {number}"),
        placement=Placement(rank, size, rank, size, 0, 1),
        previous=peer(rank - 1),
        next=peer(rank + 1),
        founding=True,
        data_key=key,
    )


def in_threads(size: int, function: Callable[[int], T]) -> list[T]:
    """`function(rank)` for all ranks at once; what they return, by rank. Raises the first error of any."""
    outcomes = outcomes_in_threads(size, function)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes  # type: ignore[return-value]


def outcomes_in_threads(size: int, function: Callable[[int], T]) -> list[T | BaseException]:
    """The same, with errors as values."""
    outcomes: list[T | BaseException] = [TimeoutError("the rank did not end in time")] * size

    def call(rank: int) -> None:
        try:
            outcomes[rank] = function(rank)
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            outcomes[rank] = error

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return outcomes


@dataclass
class Ring:
    """The transports of all ranks, and the hints that each gave about a broken connection."""

    transports: list[Transport]
    hints: list[list[tuple[str, str, str]]]

    def run(self, function: Callable[[Transport], T]) -> list[T]:
        return in_threads(len(self.transports), lambda rank: function(self.transports[rank]))

    def outcomes(self, function: Callable[[Transport], T]) -> list[T | BaseException]:
        return outcomes_in_threads(len(self.transports), lambda rank: function(self.transports[rank]))


@contextmanager
def listeners(size: int) -> Iterator[list[DataListener]]:
    opened = [DataListener() for _ in range(size)]
    try:
        yield opened
    finally:
        for listener in opened:
            listener.close()


def build(
    opened: list[DataListener], number: int = 1, check: Callable[[], None] | None = None, choice: str = "tcp"
) -> Ring:
    """A ring of one rank for each listener, or the transport of this choice upon it."""
    size = len(opened)
    addresses = [listener.address for listener in opened]
    hints: list[list[tuple[str, str, str]]] = [[] for _ in range(size)]

    def connect(rank: int) -> Transport:
        def hint(peer: str, direction: str, detail: str) -> None:
            hints[rank].append((peer, direction, detail))

        start = make_start(rank, addresses, number)
        built = RingBuilder(opened[rank], start, f"w{rank}", DEADLINE_S, hint, check).build()
        return choose(built, start.placement, choice)

    return Ring(in_threads(size, connect), hints)


@contextmanager
def ring(size: int, check: Callable[[], None] | None = None, choice: str = "tcp") -> Iterator[Ring]:
    with listeners(size) as opened:
        built = build(opened, check=check, choice=choice)
        try:
            yield built
        finally:
            for transport in built.transports:
                transport.close()
