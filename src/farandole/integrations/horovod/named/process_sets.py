"""Process sets: some of the ranks, for operations among themselves. Scripts make them; operations.py uses them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import msgspec
import torch

from farandole.errors import CollectiveMismatch, HorovodInternalError
from farandole.integrations.horovod.named.engine import NamedCollectives, engine
from farandole.integrations.horovod.named.stages import GLOBAL_SET, Key, Kind, Request
from farandole.integrations.horovod.named.tensor_queue import Handle, Submission
from farandole.training.collectives import world
from farandole.training.collectives.extension import SomeRanks


class ProcessSet:
    """Some of the ranks, by their global numbers.

    A process set has no id until it is passed to init() or add_process_set(). After a change of the membership it
    stands for the workers that have these ranks then. When these ranks do not exist any more, it has no id, as before
    it was added.

    Args:
        ranks: The global ranks, in any order, each once.

    Attributes:
        ranks: The global ranks, sorted.
        process_set_id: The same on all ranks; None before it was added and after it was removed.

    Raises:
        ValueError: A rank is no integer from 0 on, or comes twice.

    Examples:
        >>> odd = fd.ProcessSet([3, 1])  # then fd.init(process_sets=[odd]), and fd.allreduce(tensor, process_set=odd)
        >>> odd.ranks
        [1, 3]
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        if not isinstance(ranks, Iterable):
            raise ValueError(f"a ProcessSet is made of ranks, got {ranks!r} (communicators of MPI are not supported)")
        self._ranks = sorted(ranks)
        if any(not isinstance(rank, int) or rank < 0 for rank in self._ranks):
            raise ValueError(f"the ranks of a ProcessSet are integers from 0 on, got {self._ranks}")
        if len(set(self._ranks)) < len(self._ranks):
            raise ValueError(f"a ProcessSet must not contain a rank twice, got {self._ranks}")
        self.process_set_id: int | None = None

    @property
    def ranks(self) -> list[int] | None:
        """The global ranks of its members, sorted; None for the global process set before init()."""
        return list(self._ranks)

    def size(self) -> int | None:
        """Return the number of its ranks; None before it was added."""
        return None if self.process_set_id is None else len(self._ranks)

    def rank(self) -> int | None:
        """Return this worker's place in it, from 0; None before it was added. Raises ValueError for a non-member."""
        if self.process_set_id is None:
            return None
        here = world.current().placement.rank
        if here not in self._ranks:
            raise ValueError(f"rank {here} is not in {self}")
        return self._ranks.index(here)

    def included(self) -> bool | None:
        """Return whether this worker is in it; None before init()."""
        return world.current().placement.rank in self._ranks if world.is_entered() else None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks, whatever their number."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = GLOBAL_SET

    @property
    def ranks(self) -> list[int] | None:
        return list(range(world.current().placement.size)) if world.is_entered() else None

    def size(self) -> int | None:
        return world.current().placement.size if world.is_entered() else None

    def rank(self) -> int | None:
        return world.current().placement.rank if world.is_entered() else None

    def included(self) -> bool | None:
        return True if world.is_entered() else None


global_process_set: ProcessSet = _GlobalProcessSet()
"""All ranks, whatever their number: the default of `process_set=`. See the example of `ProcessSet`."""


def process_set_of(given: SomeRanks | None) -> ProcessSet:
    """Return the process set that an optimizer was given, the global one if it was given none."""
    return global_process_set if given is None else cast(ProcessSet, given)


_added: list[ProcessSet] = []  # in the order in which they were added
_unclaimed: set[tuple[int, ...]] = set()  # added again after a regroup, and not yet by the script


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set while the job runs. All ranks call it, with the same ranks, in the same order.

    After a regroup a script may add its process sets again: they all exist already, and keep their ids. A worker that
    was started into a running job gets no id before it is admitted; then it has one if the others have this process
    set.

    See the example of `ProcessSet`.

    Args:
        process_set: The process set, or the ranks of a new one.

    Returns:
        The process set, which now has an id.

    Raises:
        ValueError: Dynamic process sets are not enabled, a process set of these ranks exists already, or other ranks
            add a different one.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    named = engine()
    _require_dynamic(named)
    ranks = tuple(added.ranks or ())
    if named.is_before_admission:
        _added.append(added)  # recreate() will give it an id
        return added
    if ranks in _unclaimed:
        _unclaimed.remove(ranks)
        added.process_set_id = _ids(named)[ranks]
        _added.append(added)
        return added
    _require_possible(ranks, named)
    _add_all([added], named)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set. All ranks call it.

    See the example of `ProcessSet`.

    Args:
        process_set: The process set to remove.

    Returns:
        False if it was not added, or is the global one.

    Raises:
        ValueError: Dynamic process sets are not enabled, or other ranks remove another one; then it still exists.
    """
    number = process_set.process_set_id
    if number is None or number == GLOBAL_SET:
        return False
    named = engine()
    _require_dynamic(named)
    try:
        _change(named, Kind.REMOVE_PROCESS_SET, [named.process_sets.get(number, ())])
    except HorovodInternalError:
        _forget(number)  # this world is over; the next one is created without it
        raise
    _forget(number)
    return True


def process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Return the global ranks of all process sets of this world by id, including those without this rank."""
    return {number: list(ranks) for number, ranks in engine().process_sets.items()}


def register_static(process_sets: Sequence[ProcessSet], *, is_newcomer: bool = False) -> None:
    """Add the process sets of init(process_sets=...). All ranks call it, also with an empty list. With `is_newcomer`
    this worker is alone until it is admitted: recreate() adds the process sets then. Raises ValueError, on all ranks,
    when they differ, name a rank that does not exist, or contain one twice."""
    named = engine()
    named.is_before_admission = is_newcomer
    if is_newcomer:
        _added.extend(process_sets)
        return
    wanted = [tuple(each.ranks or ()) for each in process_sets]
    by_rank = _gather(wanted, named)
    if any(theirs != wanted for theirs in by_rank):
        raise ValueError(f"init(): ranks disagree on process_sets; by rank: {by_rank}")
    for place, ranks in enumerate(wanted):
        _require_possible(ranks, named)
        if ranks in wanted[:place]:
            raise ValueError(f"init(): process_sets has {list(ranks)} twice")
    _add_all(process_sets, named)


def has_added() -> bool:
    """Return whether this worker has process sets that a new generation must have too."""
    return bool(_added)


def recreate(is_newcomer: bool) -> None:
    """Add all process sets again, in a new generation.

    All ranks call it before any other named operation, if has_added() is true for one of them. The order is that of the
    lowest rank that is not a newcomer; further sets of the others follow. Process sets that only newcomers have were
    removed before they came, and stay so. A process set with a rank that does not exist any more is not added: its
    object has no id for now.
    """
    named = engine()
    mine = [tuple(each.ranks or ()) for each in _added]
    by_rank = _gather([*mine, (-1,)] if is_newcomer else mine, named)
    members = [theirs for theirs in by_rank if (-1,) not in theirs]
    everything = dict.fromkeys(ranks for theirs in members or by_rank for ranks in theirs if ranks != (-1,))
    size = len(named.process_sets[GLOBAL_SET])
    possible = [ranks for ranks in everything if ranks and ranks[-1] < size and len(ranks) < size]
    _change(named, Kind.ADD_PROCESS_SET, possible)
    _added[:] = [each for each in _added if tuple(each.ranks or ()) in everything]
    ids = _ids(named)
    for each in _added:
        each.process_set_id = ids.get(tuple(each.ranks or ()))
    _unclaimed.clear()
    _unclaimed.update(possible)


def forget_all() -> None:
    """Remove the ids of all process sets, after shutdown()."""
    for each in _added:
        each.process_set_id = None
    _added.clear()
    _unclaimed.clear()


def _add_all(process_sets: Sequence[ProcessSet], named: NamedCollectives) -> None:
    numbers = _change(named, Kind.ADD_PROCESS_SET, [tuple(each.ranks or ()) for each in process_sets])
    for each, number in zip(process_sets, numbers, strict=True):
        each.process_set_id = number
        _added.append(each)


def _change(named: NamedCollectives, kind: Kind, all_ranks: Sequence[tuple[int, ...]]) -> Sequence[int]:
    """Add or remove process sets, all in one round. Raises ValueError where other ranks request a different change."""
    if not all_ranks:
        return ()
    handle = Handle(len(all_ranks), is_group=True)
    submissions = []
    for part, ranks in enumerate(all_ranks):
        name = f"{kind.name.lower()}.{named.next_number(kind, GLOBAL_SET)}"
        submissions.append(Submission(Request(Key(GLOBAL_SET, kind, name), ranks=ranks), handle=handle, part=part))
    named.submit(submissions)
    try:
        numbers: Sequence[int] = handle.take()
    except CollectiveMismatch as error:
        raise ValueError(str(error)) from error
    return numbers


def _gather(mine: Sequence[tuple[int, ...]], named: NamedCollectives) -> list[list[tuple[int, ...]]]:
    """Return the process sets of every rank, by rank."""
    payload = msgspec.json.encode(mine)
    name = f"process_sets.{named.next_number(Kind.ALLGATHER, -1)}"
    request = Request(Key(GLOBAL_SET, Kind.ALLGATHER, name), "uint8", (len(payload),))
    submission = Submission(request, torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    named.submit([submission])
    parts = submission.handle.take().split(submission.handle.received[0])
    return [msgspec.json.decode(bytes(part.tolist()), type=list[tuple[int, ...]]) for part in parts]


def _ids(named: NamedCollectives) -> dict[tuple[int, ...], int]:
    return {ranks: number for number, ranks in named.process_sets.items()}


def _require_dynamic(named: NamedCollectives) -> None:
    if not named.settings.dynamic_process_sets:
        raise ValueError(
            "process sets can be added and removed only if that is enabled, on all ranks: "
            'init(process_sets="dynamic"), or HOROVOD_DYNAMIC_PROCESS_SETS=1 in the environment'
        )


def _require_possible(ranks: tuple[int, ...], named: NamedCollectives) -> None:
    size = len(named.process_sets[GLOBAL_SET])
    if not ranks or ranks[-1] >= size:
        raise ValueError(f"a process set of ranks {list(ranks)} is not possible: there are ranks 0 to {size - 1}")
    number = _ids(named).get(ranks)
    if number is not None:
        raise ValueError(f"there is a process set of ranks {list(ranks)} already, with id {number}")


def _forget(number: int) -> None:
    for each in [each for each in _added if each.process_set_id == number]:
        _unclaimed.discard(tuple(each.ranks or ()))
        each.process_set_id = None
        _added.remove(each)
