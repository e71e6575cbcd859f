"""Build a transport through Gloo from a ring. transport_choice.py uses it."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import torch.distributed as dist

from farandole.collectives.connection_pair import Broken
from farandole.collectives.gloo.gloo_group import GlooGroup
from farandole.collectives.gloo.gloo_transport import GlooTransport
from farandole.collectives.gloo.sockets import Listening, listens_at
from farandole.collectives.ring import RingTransport
from farandole.collectives.ring_header import Header, Operation
from farandole.collectives.torch_groups.construction import Construction
from farandole.collectives.torch_groups.ring_store import ExchangedStore
from farandole.errors import ConfigError

_CONNECT_TIMEOUT_S = 5.0


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """The answer of one rank to the others: the address at which it listens, or the reason why it has no Gloo."""

    listening: Listening | None = None
    problem: str = ""


def use_gloo(ring: RingTransport) -> GlooTransport:
    """Return the transport, which closes the ring when it is closed. All ranks of the ring call it at once.

    Raises PeerLost and GenerationEnded, and ConfigError, on all ranks alike, when one of them has no Gloo.
    """
    return GlooTransport(ring, connect_gloo(ring))


def connect_gloo(ring: RingTransport) -> GlooGroup:
    """The group of all ranks. Raises as use_gloo() does."""
    device, problem = _device(ring.host)
    _refuse(ring, _Said(problem=problem))

    def make(store: ExchangedStore) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads = [device], 1
        options._timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
        return dist.ProcessGroupGloo(store, ring.rank, ring.size, options)

    construction = Construction(ring, make, lambda _: None, lambda _: None, _CONNECT_TIMEOUT_S, "gloo")
    group = construction.finish()
    if isinstance(group, str):
        header = Header(Operation.BARRIER, ring.next_sequence, trailer_bytes=1)
        ring.end_by(Broken("receive", f"Gloo cannot connect: {group}"), header)
    own = listens_at(b"".join(construction.store.mine.values()))
    said = _refuse(ring, _Said(own, "" if own else f"rank {ring.rank} cannot tell which sockets are Gloo's"))
    addresses = [each.listening for each in said if each.listening]
    return GlooGroup(group, addresses[ring.rank], addresses)


def _device(host: str) -> tuple[object, str]:
    """Return Gloo's device at the address that the ring uses, and the problem with it, if any."""
    try:
        return dist.ProcessGroupGloo.create_device(hostname=host), ""
    except (AttributeError, RuntimeError) as error:  # a torch without Gloo; an address that it cannot use
        return None, f"cannot listen at {host}: {error}"


def _refuse(ring: RingTransport, mine: _Said) -> list[_Said]:
    """Return the answers of all ranks, by rank. Raises ConfigError, on all alike, when one of them has a problem."""
    said = [msgspec.msgpack.decode(each, type=_Said) for each in ring.all_gather(msgspec.msgpack.encode(mine))]
    for rank, each in enumerate(said):
        if each.problem:
            raise ConfigError(f"--transport gloo: rank {rank}: {each.problem}; use auto, shm or tcp")
    return said
