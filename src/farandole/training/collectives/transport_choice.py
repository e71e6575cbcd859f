"""Choose the transport of a world: the fastest one that its workers have in common.

worker/ asks for each ring, and for the ring of the steps also how to move tensors on devices.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Literal, get_args

import msgspec
import torch

from farandole.errors import ConfigError
from farandole.training.collectives.control_blocks import ControlBlocks
from farandole.training.collectives.device_transport import DeviceTransport, StagedTransport
from farandole.training.collectives.hierarchical_transport import ConnectRing, layout, share_memory_within_hosts
from farandole.training.collectives.kept_group import KeptGroup
from farandole.training.collectives.nccl_transport import NcclGroups, own_nccl_problem
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.shared_memory_transport import share_memory
from farandole.training.collectives.transport import Transport

Choice = Literal["auto", "shm", "tcp", "hierarchical", "nccl"]

CHOICES: tuple[str, ...] = get_args(Choice)

logger = logging.getLogger("farandole")


class Way(enum.Enum):
    """The way that tensors move; the values describe the transport for people."""

    ALONE = "none, there is one worker"
    TCP = "TCP"
    SHARED_MEMORY = "shared memory"
    HIERARCHICAL = "shared memory on each host, TCP between the hosts"


def decide(hosts: Sequence[Hashable], choice: str) -> Way:
    """Return the way that a world should use. Pure.

        auto: shared memory if all ranks are on one host, hierarchical if some are together on one; else TCP
        shm: shared memory
        hierarchical: as auto
        tcp: TCP
        nccl: as auto; see for_devices()

    `hosts` is the host of each rank, by rank; `choice` is one of the words above. Raises ConfigError for another word,
    and for shm on several hosts.
    """
    if choice not in CHOICES:
        raise ConfigError(f"FARANDOLE_TRANSPORT must be one of {', '.join(CHOICES)}, got {choice!r}")
    if len(hosts) == 1:
        return Way.ALONE
    if choice == "tcp":
        return Way.TCP
    together = Counter(hosts)
    if len(together) == 1:
        return Way.SHARED_MEMORY
    if choice == "shm":
        raise ConfigError(
            f"--transport shm needs all workers on one host, they are on {len(together)}: use auto, hierarchical or tcp"
        )
    return Way.TCP if max(together.values()) == 1 else Way.HIERARCHICAL


def choose(
    ring: Transport,
    hosts: Sequence[Hashable],
    choice: str,
    connect: ConnectRing,
    control_blocks: ControlBlocks | str | None = None,
) -> tuple[Transport, Way]:
    """Return `ring` itself, or a transport that owns it, and the way that it moves tensors.

    All its ranks call it at once, with the same hosts and choice. With auto, the ring is used where memory cannot be
    shared; a warning says so.

    Args:
        connect: Builds the rings of some of its ranks.
        control_blocks: Those of this rank's host, if they were shared before, or why they could not be.

    Raises:
        ConfigError: Memory cannot be shared although `choice` requires it, or as decide() does. Errors of building the
            transport are raised, too.
    """
    way = decide(hosts, choice)
    if way in (Way.ALONE, Way.TCP) or not isinstance(ring, RingTransport):
        return ring, way
    if isinstance(control_blocks, str):
        built: Transport | str = control_blocks
    elif way is Way.SHARED_MEMORY:
        built = share_memory(ring, control_blocks)
    else:
        built = share_memory_within_hosts(ring, layout(hosts, ring.rank), connect, control_blocks)
    if not isinstance(built, str):
        return built, way
    if choice not in ("auto", "nccl"):
        raise ConfigError(f"--transport {choice}: shared memory cannot be used: {built}; use auto or tcp")
    if ring.rank == 0:
        logger.warning("tensors are sent over TCP; shared memory cannot be used: %s", built)
    return ring, Way.TCP


# Tensors on devices ---------------------------------------------------------------------------------------------------


class Devices(msgspec.Struct, frozen=True, array_like=True):
    """A worker's devices for NCCL.

    Attributes:
        count: The number of CUDA devices that it sees.
        problem: The reason why it cannot use NCCL.
        slot: Its slot, which is the number of its device where it sees several.
    """

    count: int = 0
    problem: str = "its devices were not examined"
    slot: int = 0


def own_devices(choice: str, slot: int = 0) -> Devices:
    """Return this process's devices, where `choice` permits NCCL; `slot` is that of this worker.

    No device is touched: a CUDA context takes memory on it.
    """
    if choice not in ("auto", "nccl"):
        return Devices()
    return msgspec.structs.replace(_own_devices(), slot=slot)


@cache
def _own_devices() -> Devices:
    """Return the devices, counted once.

    Counting may ask the driver, which takes milliseconds that a regroup does not have.
    """
    return Devices(torch.cuda.device_count(), own_nccl_problem())


def uses_nccl(hosts: Sequence[Hashable], devices: Sequence[Devices], choice: str) -> bool:
    """Return whether CUDA tensors go through NCCL, if ranks turn out to have devices of their own. Pure.

    With auto they do if all ranks can, and there is no staging_reason().

    Args:
        hosts: The host of each rank, by rank.
        devices: The devices of each rank, by rank.

    Raises:
        ConfigError: A rank cannot use NCCL although `choice` requires it.
    """
    if choice == "nccl":
        for rank, each in enumerate(devices):
            if each.problem:
                raise ConfigError(f"--transport nccl: rank {rank} cannot use it: {each.problem}; use auto")
        return True
    return choice == "auto" and not staging_reason(hosts, devices)


def staging_reason(hosts: Sequence[Hashable], devices: Sequence[Devices]) -> str:
    """Return why CUDA tensors have to be copied through the host with auto; empty where NCCL can be tried. Pure.

    Workers of one host that see a single device each may have one of their own, as under srun --gpus-per-task=1. The
    first tensors tell.
    """
    for rank, each in enumerate(devices):
        if each.problem:
            return f"rank {rank} cannot use it: {each.problem}"
    workers = Counter(hosts)
    for rank, (host, each) in enumerate(zip(hosts, devices, strict=True)):
        if workers[host] > each.count > 1:
            return f"there are {workers[host]} workers on the host of rank {rank}, which sees {each.count} CUDA devices"
        if each.slot >= each.count > 1:
            return f"rank {rank} is in slot {each.slot}, and sees {each.count} CUDA devices"
    # A host on which some workers see one device and others see several has no rule for who uses which.
    for host in workers:
        seen = {each.count for other, each in zip(hosts, devices, strict=True) if other == host}
        if 1 in seen and len(seen) > 1:
            return "the workers of one host see different numbers of CUDA devices"
    return ""


def choice_within_tls(choice: str, hosts: Sequence[Hashable]) -> str:
    """Return the choice in a job whose connections are encrypted: NCCL, which cannot encrypt its own, must not be
    chosen automatically between hosts. Pure."""
    return "hierarchical" if choice == "auto" and len(set(hosts)) > 1 else choice


def for_devices(
    host: Transport,
    ring: Transport,
    way: Way,
    hosts: Sequence[Hashable],
    devices: Sequence[Devices],
    choice: str,
    kept: KeptGroup | None = None,
) -> tuple[Transport, str]:
    """Return `host` itself, or a transport that owns it and also takes tensors on devices; and a name for logs.

    `host` is the result of choose() for `ring`, and moves tensors in this `way`. Raises ConfigError as uses_nccl()
    does. `kept` holds NCCL's process group from one generation to the next; None: each has its own.
    """
    through_nccl = uses_nccl(hosts, devices, choice)
    if not isinstance(ring, RingTransport) or not torch.accelerator.is_available():
        return host, way.value
    if not through_nccl:
        reason = staging_reason(hosts, devices) if choice == "auto" else ""
        speaker = next((rank for rank, each in enumerate(devices) if each.count), None)
        return StagedTransport(host, reason=reason if ring.rank == speaker else ""), way.value
    transport = DeviceTransport(host, ring, NcclGroups(kept), is_required=choice == "nccl")
    return transport, f"{way.value}; torch's NCCL for CUDA tensors, if each worker has its own device"


def host_transport(transport: Transport) -> Transport:
    """Return the transport of tensors in the host's memory: the one below, where another layer handles devices."""
    while (below := getattr(transport, "below", None)) is not None:
        transport = below
    return transport
