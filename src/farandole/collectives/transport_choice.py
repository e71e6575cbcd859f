"""Which transport a world gets: the fastest one that its workers have in common. worker/ asks it for each ring."""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Literal, get_args

from farandole.collectives.hierarchical.builder import Connect, share_memory_within_hosts
from farandole.collectives.hierarchical.layout import layout
from farandole.collectives.ring import RingTransport
from farandole.collectives.shared_memory.builder import share_memory
from farandole.collectives.transport import Transport
from farandole.errors import ConfigError

Choice = Literal["auto", "shm", "tcp", "hierarchical", "gloo"]

CHOICES: tuple[str, ...] = get_args(Choice)

logger = logging.getLogger("farandole")


class Way(enum.Enum):
    """How tensors move; the values say it to a person."""

    ALONE = "nowhere, there is one worker"
    TCP = "over TCP"
    SHARED_MEMORY = "through shared memory"
    HIERARCHICAL = "through shared memory on each host, over TCP between the hosts"
    GLOO = "through torch's Gloo"


def decide(hosts: Sequence[Hashable], choice: str) -> Way:
    """What a world should have. Pure.

    hosts   where each rank is, by rank
    choice  auto          shared memory if all are on one host, hierarchical if some are together on one; else TCP
            shm           shared memory
            hierarchical  as auto
            tcp           TCP
            gloo          torch's Gloo: a reference, slower, and without proof of who connects
    Raises ConfigError for another word, and for shm on several hosts.
    """
    if choice not in CHOICES:
        raise ConfigError(f"FARANDOLE_TRANSPORT must be one of {', '.join(CHOICES)}, got {choice!r}")
    if len(hosts) == 1:
        return Way.ALONE
    if choice == "tcp":
        return Way.TCP
    if choice == "gloo":
        return Way.GLOO
    together = Counter(hosts)
    if len(together) == 1:
        return Way.SHARED_MEMORY
    if choice == "shm":
        raise ConfigError(
            f"--transport shm is for workers of one host, these are on {len(together)}: use auto, hierarchical or tcp"
        )
    return Way.TCP if max(together.values()) == 1 else Way.HIERARCHICAL


def choose(ring: Transport, hosts: Sequence[Hashable], choice: str, connect: Connect) -> tuple[Transport, Way]:
    """`ring` itself, or a transport that owns it, and what that is. All its ranks call it at once, with the same
    hosts and choice.

    connect  for the rings of some of its ranks
    With auto the ring is what there is where memory cannot be shared; a warning says so. Raises what building raises,
    and ConfigError where memory cannot be shared though `choice` says so, or as decide() does.
    """
    way = decide(hosts, choice)
    if way in (Way.ALONE, Way.TCP) or not isinstance(ring, RingTransport):
        return ring, way
    if way is Way.GLOO:
        from farandole.collectives.gloo.builder import use_gloo  # loaded by those only who ask for it

        return use_gloo(ring), way
    if way is Way.SHARED_MEMORY:
        built: Transport | str = share_memory(ring)
    else:
        built = share_memory_within_hosts(ring, layout(hosts, ring.rank), connect)
    if not isinstance(built, str):
        return built, way
    if choice != "auto":
        raise ConfigError(f"--transport {choice}: no shared memory: {built}; use auto or tcp")
    if ring.rank == 0:
        logger.warning("tensors travel over TCP, not through shared memory: %s", built)
    return ring, Way.TCP
