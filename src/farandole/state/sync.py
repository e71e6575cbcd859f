"""Everyone agrees on the state: progress is compared, and whoever is behind copies from the source rank."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from farandole.collectives.transport import Transport
from farandole.errors import FatalError
from farandole.membership import Progress
from farandole.state import packing, streaming
from farandole.state.optimizer_state import outline


class Shared(Protocol):
    """A state as a sync sees it: StepState, or the one of commit_sync.py."""

    is_holder: bool
    is_equal_by_rule: bool
    """Whether holders at the same step cannot differ in their large state: it is compared only where it is copied."""

    @property
    def progress(self) -> Progress: ...

    def capture(self) -> None:
        """Remember the small state as it is now."""
        ...

    def captured(self) -> packing.Packed:
        """What capture() remembered; the caller must not change it."""
        ...

    def load_small(self, small: Mapping[str, Any]) -> None: ...

    def large(self) -> dict[str, Any]:
        """{"parameters": {module: {name: tensor}}, "optimizer": OptimizerState.entries()}; live, not copied."""
        ...

    def load_large(self, large: Mapping[str, Any]) -> None:
        """Raises ConfigError, with nothing changed, when the source has another model."""
        ...


class Standing(msgspec.Struct, frozen=True):
    """How one rank enters a sync.

    is_holder   whether its state may be anybody's source
    progress    how far it is
    small       bytes of its small state: (skeleton, tensors)
    large       bytes of its large state: (skeleton, tensors)
    """

    is_holder: bool
    progress: Progress
    small: tuple[int, int]
    large: tuple[int, int]


@dataclass(frozen=True)
class SyncReport:
    """What a sync did. `behind`: ranks that copied the large state; `copied_bytes`: what each of them received."""

    source: int
    behind: tuple[int, ...]
    copied_bytes: int


def choose_source(standings: list[Standing], founding: bool) -> int:
    """The lowest rank among the holders with the highest progress; rank 0 when nobody can hold state yet."""
    if founding:
        return 0
    holders = [rank for rank, standing in enumerate(standings) if standing.is_holder]
    if not holders:
        raise FatalError("no worker holds the state of the job; it would have to start over, and does not")
    return max(holders, key=lambda rank: (standings[rank].progress, -rank))


def is_behind(standing: Standing, source: Standing) -> bool:
    """Whether a rank has to copy the large state, whatever is in it."""
    return not standing.is_holder or standing.progress.step != source.progress.step


def synchronize(state: Shared, transport: Transport, founding: bool) -> SyncReport:
    """Make the state of all ranks equal to the source's. All ranks of a generation call it.

    The small state has been captured (state.capture()). Copies arrive in staging memory, are checked, and only
    then take the place of the old state: a source that dies in the middle leaves everyone as they were.
    Raises PeerLost or GenerationEnded for that, with this rank's state unharmed; FatalError on a rank whose copy is
    not what the source has.
    """
    small, large = state.captured(), packing.pack(state.large())
    mine = Standing(
        is_holder=state.is_holder,
        progress=state.progress,
        small=(len(small.skeleton), streaming.total_bytes(small.tensors)),
        large=(len(large.skeleton), streaming.total_bytes(large.tensors)),
    )
    packed = transport.all_gather(msgspec.msgpack.encode(mine))
    standings = [msgspec.msgpack.decode(each, type=Standing) for each in packed]
    source = choose_source(standings, founding)
    wanted = standings[source]
    new_small = _receive(transport, source, small, wanted.small, needed=True)
    new_large = None
    behind = {rank for rank, each in enumerate(standings) if rank != source and is_behind(each, wanted)}
    if not behind and not state.is_equal_by_rule:
        behind = _differing(state.large(), transport, source)
    copied = set[int]()
    while behind:
        received = _receive(transport, source, large, wanted.large, needed=transport.rank in behind)
        new_large = received or new_large
        copied |= behind
        behind = _differing(new_large or state.large(), transport, source)
        if transport.rank in behind & copied:
            raise FatalError(
                f"the state of rank {source} arrived as another one: its digest differs. Does anything change "
                "parameters or the optimizer's state while workers regroup, for example another thread?"
            )
    if transport.rank != source:
        if new_large is not None:
            state.is_holder = False  # torn from the first byte until the last
            state.load_large(new_large)
        state.load_small(new_small)
        state.capture()
    state.is_holder = True
    return SyncReport(source, tuple(sorted(copied)), sum(wanted.large) if copied else 0)


def _differing(large: dict[str, Any], transport: Transport, source: int) -> set[int]:
    """The ranks whose large state is not the source's. All read theirs at the same time."""
    digests = transport.all_gather(_digest(large, packing.pack(large).tensors))
    return {rank for rank, digest in enumerate(digests) if digest != digests[source]}


def _receive(transport: Transport, source: int, mine: packing.Packed, sizes: tuple[int, int], needed: bool) -> Any:
    """Broadcast one packed value from `source`; the value in staging memory where it is needed, else None."""
    skeleton = torch.empty(sizes[0], dtype=torch.uint8)
    if transport.rank == source:
        skeleton.copy_(torch.frombuffer(bytearray(mine.skeleton), dtype=torch.uint8))
    transport.broadcast(skeleton, source)
    if transport.rank == source:
        streaming.broadcast_all(transport, mine.tensors, sizes[1], source)
        return None
    if not needed:
        streaming.broadcast_all(transport, None, sizes[1], source)
        return None
    value, room = packing.make_room(skeleton.numpy().tobytes())
    streaming.broadcast_all(transport, room, sizes[1], source)
    return value


def _digest(large: dict[str, Any], tensors: list[torch.Tensor]) -> bytes:
    """Of contents and structure. Not of the skeleton's bytes: equal values may be pickled differently."""
    structure = {
        "parameters": {name: list(group) for name, group in large["parameters"].items()},
        "optimizer": {name: outline(entry) for name, entry in large["optimizer"].items()},
    }
    text = repr(sorted((name, repr(part)) for name, part in structure.items()))
    return hashlib.blake2b(text.encode() + streaming.digest(tensors), digest_size=16).digest()
