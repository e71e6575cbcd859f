"""Rings over loopback whose ranks are threads of this process, built like those of real workers."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import pytest
import torch

from farandole.base.membership import Address, GenerationId, Peer, Placement
from farandole.base.wire.authentication import DialerHandshake, Introduction, Purpose
from farandole.base.wire.encryption import Certificates
from farandole.base.wire.link_messages import Start
from farandole.training.collectives.data_listener import DataListener
from farandole.training.collectives.device_transport import DeviceTransport, StagedTransport
from farandole.training.collectives.hierarchical_transport import layout, share_memory_within_hosts
from farandole.training.collectives.kept_group import KeptGroup
from farandole.training.collectives.nccl_transport import NcclGroups
from farandole.training.collectives.point_to_point import Endpoint, PointToPoint
from farandole.training.collectives.ring import OnBroken, RingTransport
from farandole.training.collectives.ring_builder import RingBuilder
from farandole.training.collectives.shared_memory_transport import share_memory
from farandole.training.collectives.torch_versions import can_reconfigure
from farandole.training.collectives.transport import Reduction, Transport
from farandole.training.collectives.transport_choice import choose
from tests.support.gloo_transport import GlooGroup, connect_gloo, use_gloo

DEADLINE_S = 20.0
KEY = secrets.token_bytes(32)

P2P_GENERATION = GenerationId(1, 1, 7, "nonce")
"""That of p2p_group()."""

HOSTS = {1: [0], 2: [0, 1], 3: [0, 0, 1], 4: [0, 0, 1, 1]}
"""For a hierarchical transport: where each rank is, for each size."""

LASTING_GLOO = "gloo, one process group for all generations"
"""A choice for ring(): torch 2.14 and newer."""

needs_reconfigure = pytest.mark.skipif(
    not can_reconfigure(), reason=f"torch {torch.__version__} cannot exchange the members of process groups"
)

T = TypeVar("T")

CHALLENGE_BYTES = 4 + 42
"""Bytes of the answer to hello()."""


def hello(introduction: Introduction) -> bytes:
    """What a dialer of a data connection says first."""
    return DialerHandshake(Purpose.DATA, KEY, introduction.encode()).begin()


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
        bootstrap=True,
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
def listeners(size: int, tls: Certificates | None = None) -> Iterator[list[DataListener]]:
    opened = [DataListener(tls=tls) for _ in range(size)]
    try:
        yield opened
    finally:
        for listener in opened:
            listener.close()


def build(
    opened: list[DataListener],
    number: int = 1,
    check: Callable[[], None] | None = None,
    choice: str = "tcp",
    on_hosts: dict[int, list[int]] | None = None,
    kept: Sequence[KeptGroup | None] | None = None,
) -> Ring:
    """A ring of one rank for each listener, or the transport of this choice upon it; for a hierarchical one, `on_hosts`
    says where each rank is, for each size. `kept` holds each rank's process group between generations."""
    if choice == LASTING_GLOO:
        return second_generation(opened, number, check)
    size = len(opened)
    addresses = [listener.address for listener in opened]
    peers = [Peer(f"w{rank}", rank, address) for rank, address in enumerate(addresses)]
    hints: list[list[tuple[str, str, str]]] = [[] for _ in range(size)]

    def connect(rank: int) -> Transport:
        def hint(peer: str, direction: str, detail: str) -> None:
            hints[rank].append((peer, direction, detail))

        def among(ranks: Sequence[int], number: int) -> RingTransport:
            subset = msgspec.structs.replace(
                start,
                placement=Placement(place := ranks.index(rank), len(ranks), 0, 1, place, len(ranks)),
                previous=peers[ranks[place - 1]],
                next=peers[ranks[(place + 1) % len(ranks)]],
            )
            connected = RingBuilder(opened[rank], subset, f"w{rank}", DEADLINE_S, hint, check, 1 + number).build()
            assert isinstance(connected, RingTransport)
            return connected

        start = make_start(rank, addresses, number)
        built = RingBuilder(opened[rank], start, f"w{rank}", DEADLINE_S, hint, check).build()
        hosts = (on_hosts or HOSTS)[size] if choice == "hierarchical" else [0] * size
        if choice == "hierarchical" and isinstance(built, RingTransport):
            # Also where nobody shares a host: what is special about that must hold, too.
            hierarchical = share_memory_within_hosts(built, layout(hosts, rank), among)
            assert not isinstance(hierarchical, str), hierarchical
            return hierarchical
        if choice in ("device", "cuda", "nccl"):
            return with_devices(built, choice)
        if choice == "gloo":
            return use_gloo(built, kept[rank] if kept else None) if isinstance(built, RingTransport) else built
        return choose(built, hosts, choice, among)[0]

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


@contextmanager
def p2p_group(
    size: int,
    on_broken: OnBroken | None = None,
    memories: Sequence[str | None] | None = None,
    check: Callable[[], None] | None = None,
) -> Iterator[list[PointToPoint]]:
    """The messages of each rank of a generation; `memories` says with whom each one can share memory."""
    opened = [DataListener() for _ in range(size)]
    endpoints = [
        Endpoint(f"w{rank}", listener.address, memories[rank] if memories else None)
        for rank, listener in enumerate(opened)
    ]
    made = [
        PointToPoint(listener, P2P_GENERATION, KEY, rank, endpoints, on_broken, check)
        for rank, listener in enumerate(opened)
    ]
    for p2p in made:
        p2p.open()
    try:
        yield made
    finally:
        for p2p in made:
            p2p.close()


def second_generation(opened: list[DataListener], number: int, check: Callable[[], None] | None) -> Ring:
    """Transports through Gloo whose process groups were used by a generation before."""
    kept = [KeptGroup() for _ in opened]
    first = build(opened, number - 1, choice="gloo", kept=kept)
    first.run(lambda transport: transport.all_reduce(torch.ones(10)))
    second = build(opened, number, check, "gloo", kept=kept)
    for transport in first.transports:
        transport.close()
    return second


# Tensors on devices ------------------------------------------------------------------------------------------


def with_devices(built: Transport, choice: str) -> Transport:
    """What takes tensors on devices, upon a ring and shared memory.

    device  every tensor goes through a process group, as if that were NCCL's: it is Gloo's
    cuda    tensors are on the one CUDA device, and staged
    nccl    each rank's are on a CUDA device of its own
    """
    if not isinstance(built, RingTransport):
        return OnDevice(built, "cuda:0") if choice in ("cuda", "nccl") else built
    host = share_memory(built)
    assert not isinstance(host, str), host
    if choice == "device":
        return DeviceTransport(host, built, GlooDevices(built.rank), is_required=True)
    if choice == "cuda":
        return OnDevice(StagedTransport(host), "cuda:0")
    return OnDevice(DeviceTransport(host, built, NcclGroups(), is_required=True), f"cuda:{built.rank}")


class GlooDevices:
    """DeviceGroups of ranks whose device is the host's memory; they share it if they have the same number."""

    name = "Gloo"

    def __init__(self, number: int) -> None:
        self._number = number

    def takes(self, tensor: torch.Tensor) -> bool:
        return True

    def identity(self, device: torch.device) -> str:
        return str(self._number)

    def connect(self, ring: RingTransport, device: torch.device) -> GlooGroup | str:
        return connect_gloo(ring)


class OnDevice:
    """A Transport whose tensors are on a device while it moves them."""

    def __init__(self, inner: Transport, device: str) -> None:
        self._inner, self._device = inner, device
        self.rank, self.size = inner.rank, inner.size
        self.all_gather, self.barrier = inner.all_gather, inner.barrier
        self.wait_for_peer, self.abort, self.close = inner.wait_for_peer, inner.abort, inner.close

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        moved = tensor.detach().to(self._device)
        trailers = self._inner.all_reduce(moved, trailer, op)
        tensor.detach().copy_(moved)
        return trailers

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        moved = tensor.detach().to(self._device)
        self._inner.broadcast(moved, source)
        tensor.detach().copy_(moved)
