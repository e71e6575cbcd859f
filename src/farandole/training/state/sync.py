"""Agreement on the state: ranks compare progress and digests; those that are behind or differ copy from the source."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

from farandole.base.membership import Progress
from farandole.errors import FatalError
from farandole.training.collectives.connection_pair import bytes_of
from farandole.training.collectives.transport import Transport
from farandole.training.state import packing
from farandole.training.state.optimizer_state import outline
from farandole.training.state.state_digest import STRIKES, StateDigest
from farandole.training.state.state_kinds import nested_values
from farandole.training.state.tensor_digest import digest_of


class Kept(Protocol):
    """A state as a checkpoint sees it: a StepState, or one of the commit rule."""

    is_holder: bool

    @property
    def progress(self) -> Progress: ...

    def capture(self) -> None:
        """Remember the metadata as it is now."""
        ...

    def captured(self) -> packing.Packed:
        """Return the metadata of the last capture(); the caller must not change it."""
        ...

    def load_metadata(self, metadata: Mapping[str, Any]) -> None: ...

    def live_tensors(self) -> dict[str, Any]:
        """Return {"parameters": {module: {name: tensor}}, "optimizer": OptimizerState.entries()}; live, not copied."""
        ...

    def load_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Load tensors of the source. Raises ConfigError, with nothing changed, when the source has another model."""
        ...


class Shared(Kept, Protocol):
    """A state as a sync sees it."""

    @property
    def digests(self) -> StateDigest | None:
        """Digests that show whether holders at the same step are equal, as they must be; the majority is right. None
        where holders may differ: then all tensors are compared, and the source is right."""
        ...


class Standing(msgspec.Struct, frozen=True):
    """The situation of one rank at the start of a sync.

    is_holder   its state may be the source of others
    progress    its progress
    metadata    bytes of its metadata: (skeleton, tensors)
    tensors     bytes of its tensors: (skeleton, tensors)
    content     hash of its metadata; 0 where that is not compared
    sample      digest of a sample of its tensors; 0 where that is not compared
    is_suspicious, local, suspects   see StateDigest
    note        numbers for all ranks, which are not of the state
    """

    is_holder: bool
    progress: Progress
    metadata: tuple[int, int]
    tensors: tuple[int, int]
    content: int = 0
    sample: int = 0
    is_suspicious: bool = False
    local: tuple[str, ...] = ()
    suspects: Mapping[str, int] = msgspec.field(default_factory=dict)
    note: tuple[int, ...] = ()


class Divergence(msgspec.Struct, frozen=True):
    """The result of a comparison of states that differ.

    step      decided steps at that time
    name      the first object that differs, as "model.0.weight"
    objects   number of objects that differ
    ranks     the ranks that differ from the source
    source    the rank that agrees with most ranks, the lowest such rank; only ranks with the most progress count
    is_trained  parameters or optimizer state differ, not only buffers and tracked tensors
    """

    step: int
    name: str
    objects: int
    ranks: tuple[int, ...]
    source: int
    is_trained: bool

    def __str__(self) -> str:
        more = f" and {self.objects - 1} more" if self.objects > 1 else ""
        who = "rank" if len(self.ranks) == 1 else "ranks"
        ranks = ", ".join(map(str, self.ranks))
        return f"at step {self.step} {self.name}{more} of {who} {ranks} differed from that of rank {self.source}"


@dataclass(frozen=True)
class SyncReport:
    """The result of a sync.

    behind        ranks that copied the tensors
    divergence    ranks at the same step had different states; they are equal now
    local         tensors that have turned out to be computed from each rank's own local batch
    notes         the note of each rank, by rank
    """

    source: int
    behind: tuple[int, ...]
    divergence: Divergence | None = None
    local: tuple[str, ...] = ()
    notes: tuple[tuple[int, ...], ...] = ()


def choose_source(standings: list[Standing], bootstrap: bool) -> int:
    """Return the lowest rank among the holders with the highest progress; rank 0 while no worker can hold state yet."""
    if bootstrap:
        return 0
    holders = [rank for rank, standing in enumerate(standings) if standing.is_holder]
    if not holders:
        raise FatalError(
            "no worker holds the state of the job; the job ends, since it must not silently start from the beginning"
        )
    return max(holders, key=lambda rank: (standings[rank].progress, -rank))


def is_behind(standing: Standing, source: Standing) -> bool:
    """Return whether a rank has to copy the tensors, whatever they contain. At another boundary of the same step it may
    lack changes that the source has made there, such as an average of weights after the step."""
    ours, theirs = standing.progress, source.progress
    return not standing.is_holder or (ours.step, ours.boundary_number) != (theirs.step, theirs.boundary_number)


def synchronize(
    state: Shared,
    transport: Transport,
    bootstrap: bool,
    compares_all: bool = False,
    note: tuple[int, ...] = (),
    gather: Callable[[bytes], list[bytes]] | None = None,
) -> SyncReport:
    """Make the state of all ranks equal to the source's. All ranks of a generation call it.

    The metadata has been captured (state.capture()). Copies arrive in staging memory, are checked, and only then
    replace the old state: if the source dies during the transfer, all ranks keep their state. Raises PeerLost or
    GenerationEnded in this case, with this rank's state unharmed; FatalError on a rank whose copy differs from the
    source's state.

    Args:
        bootstrap: No worker holds state yet, and rank 0 is the source.
        compares_all: All ranks are at the same boundary, and compare every tensor, also those of the metadata.
        note: Numbers that all ranks receive.
        gather: The first exchange, where ranks may still be busy with something else; None: transport.all_gather.
    """
    metadata, tensors = state.captured(), packing.pack(state.live_tensors())
    is_compared = state.is_holder and not bootstrap and transport.size > 1
    mine = _standing(state, metadata, tensors, is_compared, note)
    packed = (gather or transport.all_gather)(msgspec.msgpack.encode(mine))
    standings = [msgspec.msgpack.decode(each, type=Standing) for each in packed]
    source = choose_source(standings, bootstrap)
    findings = _SyncFindings(standings, source)
    behind = {rank for rank, each in enumerate(standings) if rank != source and is_behind(each, standings[source])}
    if bootstrap:
        pass
    elif state.digests is None:
        if not behind:
            behind = findings.differing_from(source, _tables(transport, _by_name(state.live_tensors())))
    elif compares_all or findings.are_in_doubt():
        source = findings.judge(_tables(transport, _by_name(state.live_tensors())))
        behind |= findings.differing
        if compares_all:
            source = findings.judge_metadata(_tables(transport, state.digests.by_name()))
    new_tensors, copied = None, set[int]()
    while behind:
        received = receive(transport, source, tensors, standings[source].tensors, needed=transport.rank in behind)
        new_tensors = received or new_tensors
        copied |= behind
        tables = _tables(transport, _by_name(new_tensors or state.live_tensors()))
        if transport.rank in behind and tables[transport.rank] != tables[source]:
            raise FatalError(
                f"the state of rank {source} has another digest after its transfer: check whether anything, for "
                "example another thread, changes parameters or the optimizer's state while workers regroup"
            )
        if not bootstrap and state.digests is not None:
            source = findings.judge(tables, without=copied)
        behind = findings.differing_from(source, tables)
    if copied or compares_all or not _have_same_metadata(standings):
        new_metadata = receive(transport, source, metadata, standings[source].metadata, needed=True)
        if transport.rank != source:
            if new_tensors is not None:
                state.is_holder = False  # incomplete from the first byte until the last
                state.load_tensors(new_tensors)
            state.load_metadata(new_metadata)
            state.capture()
    state.is_holder = True
    if state.digests is not None:
        state.digests.resolved(state.progress.step, findings.repaired, findings.all_local)
    notes = tuple(each.note for each in standings)
    return SyncReport(source, tuple(sorted(copied)), findings.divergence, findings.local, notes)


def _standing(
    state: Shared, metadata: packing.Packed, tensors: packing.Packed, is_compared: bool, note: tuple[int, ...]
) -> Standing:
    digests, progress = state.digests, state.progress
    return Standing(
        is_holder=state.is_holder,
        progress=progress,
        metadata=(len(metadata.skeleton), packing.total_bytes(metadata.tensors)),
        tensors=(len(tensors.skeleton), packing.total_bytes(tensors.tensors)),
        content=_hash(metadata) if digests is not None and is_compared else 0,
        sample=digests.of_sample(progress.step, trained_only=True) if digests is not None and is_compared else 0,
        is_suspicious=digests.is_suspicious if digests is not None else False,
        local=tuple(sorted(digests.local)) if digests is not None else (),
        suspects=digests.suspects if digests is not None else {},
        note=note,
    )


# After the loss of a worker the survivors mostly have the same metadata, which then need not be sent. Each exchange has
# to wake every rank, which takes milliseconds where other processes use the cores.

_MOST_HASHED_BYTES = 256 << 10  # some 0.3 ms


def _hash(metadata: packing.Packed) -> int:
    """Return the hash of metadata; 0 if it takes longer to hash it than to send it. Equal values may be pickled
    differently: only equal hashes tell something."""
    if len(metadata.skeleton) + packing.total_bytes(metadata.tensors) > _MOST_HASHED_BYTES:
        return 0
    hashed = hashlib.blake2b(metadata.skeleton, digest_size=7)
    for tensor in metadata.tensors:
        hashed.update(bytes_of(tensor.cpu()).numpy().data)
    return int.from_bytes(hashed.digest(), "big") or 1


def _have_same_metadata(standings: Sequence[Standing]) -> bool:
    contents = {each.content for each in standings}
    return len(contents) == 1 and 0 not in contents


Tables = Sequence[Mapping[str, int]]
"""Digests by name, of each rank."""


class _SyncFindings:
    """The results of the comparisons of one sync, equal on all ranks.

    peers        ranks whose tensors must be equal, since they have decided as many steps as the source
    differing    peers whose tensors differ from the source's
    repaired     names of tensors of the metadata that differed; see StateDigest.suspects
    local        names of tensors that are computed from each rank's own local batch, as this sync has shown
    all_local    the same, with those of earlier syncs
    """

    def __init__(self, standings: Sequence[Standing], source: int) -> None:
        self._standings, self._source = standings, source
        self.peers = [
            rank
            for rank, each in enumerate(standings)
            if not is_behind(each, standings[source]) and standings[source].is_holder
        ]
        self.divergence: Divergence | None = None
        self.differing: set[int] = set()
        self.repaired: dict[str, int] = {}
        self.local: tuple[str, ...] = ()
        self.all_local = {name for each in standings for name in each.local}

    def are_in_doubt(self) -> bool:
        """Return whether the samples differ, or the header of a step has shown a difference."""
        peers = [self._standings[rank] for rank in self.peers]
        return len({each.sample for each in peers}) > 1 or any(each.is_suspicious for each in peers)

    def judge(self, tables: Tables, without: Collection[int] = ()) -> int:
        """Compare the tensors of the peers, except for peers that have copied them. Return the source."""
        peers = [rank for rank in self.peers if rank not in without]
        return self._judge(tables, peers, differing(tables, peers), is_trained=True)

    def judge_metadata(self, tables: Tables) -> int:
        """Compare the other tensors of the peers. Return the source: that of the tensors, if these have differed."""
        names = differing(tables, self.peers)
        strikes = {name: max(each.suspects.get(name, -1) for each in self._standings) + 1 for name in names}
        self.local = tuple(name for name in names if strikes[name] == STRIKES)
        self.all_local.update(self.local)
        self.repaired = {name: strikes[name] for name in names if strikes[name] < STRIKES}
        return (
            self._source if self.divergence else self._judge(tables, self.peers, list(self.repaired), is_trained=False)
        )

    def differing_from(self, source: int, tables: Tables) -> set[int]:
        return {rank for rank, table in enumerate(tables) if table != tables[source]}

    def _judge(self, tables: Tables, peers: Sequence[int], names: Sequence[str], is_trained: bool) -> int:
        if not names:
            return self._source
        right = choose_right(tables, names, peers)
        values = {rank: [tables[rank].get(name) for name in names] for rank in peers}
        # Only ranks with the most progress count: the others lack a part of the metadata.
        furthest = max(self._standings[rank].progress for rank in peers)
        same = [r for r in peers if values[r] == values[right] and self._standings[r].progress == furthest]
        self._source = min(same, default=self._source)
        ranks = tuple(rank for rank in peers if values[rank] != values[self._source])
        if is_trained:
            self.differing.update(ranks)
        step = self._standings[self._source].progress.step
        self.divergence = Divergence(step, names[0], len(names), ranks, self._source, is_trained)
        return self._source


def choose_right(table: Sequence[Mapping[str, int]], names: Sequence[str], ranks: Collection[int]) -> int:
    """Return the rank that agrees with the majority on most of the objects `names`; among several, the lowest rank."""
    scores = dict.fromkeys(sorted(ranks), 0)
    for name in names:
        counts = Counter(table[rank].get(name) for rank in ranks)
        for rank in scores:
            scores[rank] += counts[table[rank].get(name)]
    return max(scores, key=lambda rank: scores[rank])


def differing(table: Sequence[Mapping[str, int]], ranks: Collection[int]) -> list[str]:
    """Return the names of the objects that are not equal on all of `ranks`, in their order in the tables."""
    first, *others = (table[rank] for rank in sorted(ranks))
    names = dict.fromkeys([*first, *(name for other in others for name in other)])
    return [name for name in names if any(other.get(name) != first.get(name) for other in others)]


def _tables(transport: Transport, mine: Mapping[str, int]) -> Tables:
    """Return the digests of each rank. All ranks read their state at the same time."""
    packed = transport.all_gather(msgspec.msgpack.encode(mine))
    return [msgspec.msgpack.decode(each, type=dict[str, int]) for each in packed]


def receive(transport: Transport, source: int, mine: packing.Packed, sizes: tuple[int, int], needed: bool) -> Any:
    """Broadcast one packed value from `source`. Returns the value in staging memory where it is needed, else None."""
    skeleton = torch.empty(sizes[0], dtype=torch.uint8, device="cpu")
    if transport.rank == source:
        skeleton.copy_(torch.frombuffer(bytearray(mine.skeleton), dtype=torch.uint8))
    transport.broadcast(skeleton, source)
    if transport.rank == source:
        packing.broadcast_all(transport, mine.tensors, sizes[1], source)
        return None
    if not needed:
        packing.broadcast_all(transport, None, sizes[1], source)
        return None
    received = skeleton.numpy().tobytes()
    room = packing.make_room(received)
    packing.broadcast_all(transport, room, sizes[1], source)
    return packing.unpack(packing.Packed(received, room))


def _by_name(tensors: Mapping[str, Any]) -> dict[str, int]:
    """Return digests of all values in the tensors of a state, not of the skeleton: equal values may differ in it."""
    found = {}
    for group in ("parameters", "optimizer"):
        for keys, value in nested_values(tensors[group]):
            name = ".".join(str(key) for key in keys if key != "")
            is_tensor = isinstance(value, torch.Tensor)
            found[name] = digest_of([value]) if is_tensor else zlib.crc32(outline(value).encode())
    return found
