"""From a ring to a transport through Gloo. transport_choice.py uses it."""

from __future__ import annotations

import threading
from datetime import timedelta

import msgspec
import torch.distributed as dist

from farandole.collectives.duplex import Broken
from farandole.collectives.gloo.group import GlooGroup
from farandole.collectives.gloo.sockets import Listening, listens_at
from farandole.collectives.gloo.store import ExchangedStore
from farandole.collectives.gloo.transport import GlooTransport
from farandole.collectives.ring import RingTransport
from farandole.collectives.ring_header import Header, Operation
from farandole.errors import ConfigError

_CONNECT_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.002


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """What each rank tells the others: where it listens, or why it has no Gloo."""

    listening: Listening | None = None
    problem: str = ""


def use_gloo(ring: RingTransport) -> GlooTransport:
    """The transport, which closes the ring when it is closed. All ranks of the ring call it at once.

    Raises PeerLost and GenerationEnded; on all ranks alike ConfigError when one of them has no Gloo.
    """
    device, problem = _device(ring.host)
    _refuse(ring, _Said(problem=problem))
    construction = _Construction(ring, device)
    try:
        group = construction.carry_words()
        own = listens_at(b"".join(construction.store.mine.values()))
        said = _refuse(ring, _Said(own, "" if own else f"rank {ring.rank} cannot tell which sockets are Gloo's"))
    except BaseException:
        construction.store.abandon()
        raise
    addresses = [each.listening for each in said if each.listening]
    return GlooTransport(ring, GlooGroup(group, addresses[ring.rank], addresses))


class _Construction:
    """A group in the making, in a thread of its own: its constructor blocks for as long as a peer does not answer."""

    def __init__(self, ring: RingTransport, device: object) -> None:
        self.store = ExchangedStore(_CONNECT_TIMEOUT_S)
        self._ring, self._device = ring, device
        self._group: dist.ProcessGroupGloo | None = None
        self._error: Exception | None = None
        self._has_ended = threading.Event()
        # No daemon: a process that ends must wait for it. A daemon inside of torch would take the process down.
        threading.Thread(target=self._construct, name="farandole-gloo").start()

    def carry_words(self) -> dist.ProcessGroupGloo:
        """The group, once it has heard from all ranks around the ring and is connected to them."""
        self._wait_for(self.store.has_spoken)
        said = self._ring.all_gather(msgspec.msgpack.encode(self.store.mine))
        self.store.bring([msgspec.msgpack.decode(each, type=dict[str, bytes]) for each in said])
        self._wait_for(self._has_ended)
        if self._group is None:
            self._ring.end_by(Broken("receive", f"Gloo cannot connect: {self._error}"), self._header())
        return self._group

    def _wait_for(self, event: threading.Event) -> None:
        while not event.wait(_LOOK_EVERY_S):
            interruption = self._ring.interruption()
            if isinstance(interruption, Broken):  # a call would be from a rank that is a bit ahead
                self._ring.end_by(interruption, self._header())

    def _construct(self) -> None:
        try:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices, options._threads = [self._device], 1
            options._timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
            self._group = dist.ProcessGroupGloo(self.store, self._ring.rank, self._ring.size, options)
        except Exception as error:  # noqa: BLE001 - carry_words() tells
            self._error = error
        finally:
            self.store.has_spoken.set()
            self._has_ended.set()

    def _header(self) -> Header:
        return Header(Operation.BARRIER, self._ring.next_sequence, note_bytes=1)


def _device(host: str) -> tuple[object, str]:
    """Where Gloo shall listen: at the address by which the ring goes; and what is wrong."""
    try:
        return dist.ProcessGroupGloo.create_device(hostname=host), ""
    except (AttributeError, RuntimeError) as error:  # a torch without Gloo; an address that it cannot use
        return None, f"cannot listen at {host}: {error}"


def _refuse(ring: RingTransport, mine: _Said) -> list[_Said]:
    """What all ranks say, by rank. Raises ConfigError, on all alike, when one of them has a problem."""
    said = [msgspec.msgpack.decode(each, type=_Said) for each in ring.all_gather(msgspec.msgpack.encode(mine))]
    for rank, each in enumerate(said):
        if each.problem:
            raise ConfigError(f"--transport gloo: rank {rank}: {each.problem}; use auto, shm or tcp")
    return said
