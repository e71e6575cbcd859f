"""Which transport a world gets: the fastest one that its workers have in common. worker/ asks it for each ring."""

from __future__ import annotations

import logging
from typing import Literal, get_args

from farandole.collectives.ring import RingTransport
from farandole.collectives.shared_memory.builder import share_memory
from farandole.collectives.transport import Transport
from farandole.errors import ConfigError
from farandole.membership import Placement

Choice = Literal["auto", "shm", "tcp"]

CHOICES: tuple[str, ...] = get_args(Choice)

logger = logging.getLogger("farandole")


def choose(ring: Transport, placement: Placement, choice: str) -> Transport:
    """`ring` itself, or a transport that owns it. All its ranks call it at once, with the same choice.

    auto  shared memory if all are on one host and it can be had; else the ring, with a warning if it could not
    shm   shared memory, or ConfigError
    tcp   the ring
    Raises what building raises, and ConfigError for another word.
    """
    if choice not in CHOICES:
        raise ConfigError(f"FARANDOLE_TRANSPORT must be one of {', '.join(CHOICES)}, got {choice!r}")
    if choice == "tcp" or not isinstance(ring, RingTransport):
        return ring
    if placement.cross_size > 1:
        if choice == "shm":
            raise ConfigError(
                f"--transport shm is for workers of one host, these are on {placement.cross_size}: use auto or tcp"
            )
        return ring
    built = share_memory(ring)
    if not isinstance(built, str):
        return built
    if choice == "shm":
        raise ConfigError(f"--transport shm: no shared memory: {built}; use auto or tcp")
    if ring.rank == 0:
        logger.warning("tensors travel over TCP, not through shared memory: %s", built)
    return ring
