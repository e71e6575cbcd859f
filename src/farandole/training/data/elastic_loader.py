"""The base of both loaders: epochs, the loop over batches and its boundaries, wherever the samples come from; the run
loop as they call it; and batches that do not count: those of rehearsals, and padding."""

from __future__ import annotations

import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar

from farandole.errors import ConfigError, DataError, StepError
from farandole.training.data.epochs import Epoch, EpochRecord
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.step import StepStatus

if TYPE_CHECKING:
    from farandole.training.data.balance import Balance
    from farandole.training.data.partition import BatchLayout, Sizes
    from farandole.training.data.prefetch import Prefetch

LayoutT = TypeVar("LayoutT", "BatchLayout", "Sizes")

_ABSENT: Mapping[str, int | str] = {"tail": "short"}
"""Values of entries that a saved state lacks."""

_CHANGED: Mapping[str, str] = {
    "size": "; samples were added to the data set, or removed from it",
    "order": "; the last digits of an order are a hash of its weights, labels, lengths or shard sizes",
}
"""Reasons, besides other arguments, for which a saved state may not fit."""


class ElasticLoader(ABC):
    """The base of DataLoader and StreamLoader.

    Attributes, besides those of DataLoader:
        elder: An object that is older than each iterator over the batches of this epoch; None: there is none.
        rows_on_trial: Digests of samples in the last rehearsal's batch.
        seed: Seed of random numbers.
        hooks: The run loop, which is called at each boundary.
        record: The record of the epochs.
        balance: The division of global batches by the speed of the workers; None: they are divided evenly.
        has_own_bodies: Workers may run the loop body for a global batch a different number of times.
    """

    _layout: BatchLayout | Sizes
    _prefetch: Prefetch[Any]

    def __init__(self, seed: int, accumulates: bool) -> None:
        if not hasattr(seed, "__index__"):
            raise DataError(f"seed must be a whole number, the same on all workers and in each run, got {seed!r}")
        self.seed, self.epoch = seed, 0
        self.hooks = LoaderHooks()
        self.record = EpochRecord()
        self.batch: Batch | None = None
        self.indices: list[int] = []
        self.elder: list[object] | None = None
        self.rows_on_trial: dict[str, int] = {}
        self.balance: Balance | None = None
        self.has_own_bodies = False
        self._rank, self._world = 0, 1
        self._padding = Padding(is_allowed=accumulates)
        self._is_ended = False  # the epoch is through, also where `break` has left samples
        self._is_asked_early = False  # an iterator was asked for before epochs() has begun an epoch
        self._is_pending = False  # a batch was handed out whose global batch is not committed
        self._has_regrouped = False  # since a batch was handed out
        self._has_to_leave = False  # a batch of the epoch was handed out, and the loop over them has not ended

    is_stream = False  # samples cannot be read by index

    # What depends on the samples ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def cursor(self) -> int:
        """Number of samples of the epoch that were trained, by all workers together."""

    @abstractmethod
    def _next(self, goes_on: bool) -> Any:
        """Hand out the next batch, or raise StopIteration behind the last one. `goes_on`: it is another micro-batch of
        the current global batch."""

    @abstractmethod
    def _advance(self) -> None:
        """Move on to the next epoch."""

    @abstractmethod
    def _restart(self) -> None:
        """Fetch again from the current position, for the current world; the current batch will be handed out again."""

    @property
    @abstractmethod
    def _identity(self) -> Mapping[str, int | str]:
        """The values on which the meaning of a saved position depends, as they are saved. They never change."""

    @abstractmethod
    def close(self) -> None:
        """End the loader processes. Iterating again starts new ones. Idempotent."""

    # Iterating -------------------------------------------------------------------------------------------

    def epochs(self, total: int | None = None, *, steps: int | None = None) -> Iterator[Epoch]:
        """Yield the numbers of the epochs from the current one to `total` - 1, counted from the start of the job; or as
        many as `steps` steps take, the last one of which ends behind the last of these steps.

        The number advances when every worker has come back for the next one. After a regroup in the tail of an epoch
        (an evaluation) its number comes again, with the remaining batches, often none. `break` in the loop over batches
        ends the epoch for good, and the next one begins with its first sample; all workers must take it at the same
        step.

        Args:
            total: Number of epochs of the job.
            steps: Number of steps of the job, instead.

        Returns:
            An iterator over Epoch, a subclass of int.

        Raises:
            ConfigError: Not exactly one of the two is given.
        """
        if (total is None) == (steps is None):
            raise ConfigError("epochs() takes a number of epochs, epochs(5), or one of steps, epochs(steps=600)")
        self.record.promise(total, steps)
        while not self.record.is_done(self.epoch):
            epoch = self.epoch
            self.record.enter(self.cursor)
            if self.elder is None and not self._is_asked_early:
                self.elder = []
            yield Epoch.of(self)
            step.end_body()  # after `break`
            if step.is_aborted():
                self.hooks.reach_boundary()  # decisions of an aborted loop body, such as `break`, do not count
                continue
            self._is_ended = self.epoch == epoch  # or a regroup has advanced it
            if self._has_to_leave and not self._leave():
                continue
            if self.hooks.reach_epoch_end():
                self._advance()
                self.elder = None
                self.hooks.begin_epoch()

    def __iter__(self) -> Self:
        """Return an iterator from the cursor to the end of the epoch. The current batch comes again if its step is not
        decided.

        Raises:
            StepError: The epoch is through already and epochs() has not advanced to the next one.
        """
        step.end_body()
        self._is_asked_early |= self.elder is None
        self.record.refuse_second_pass(self.epoch)
        if self._is_pending and not step.is_aborted():  # the run loop has to see the aborted step
            step.close()
        self._prefetch.renew()  # code of the script may have changed the data set
        self._restart()
        return self

    def __next__(self) -> Any:
        """Return the next batch, collated. After an error epoch and cursor are as before.

        Raises:
            StepError: The loop body made no step for the last batch.
            Exception: The errors of the data set.
        """
        step.end_body()
        if self._padding.is_due(self.batch):
            self.batch, self.indices, data = self._padding.next(self.batch)
            return data
        self.hooks.reach_boundary()
        return self._next(self._settle())

    def _settle(self) -> bool:
        """Determine the outcome of the current batch. True: another micro-batch of its global batch follows."""
        if self.batch is None or not self._is_pending:
            return False
        if step.expects_micro_batch():
            return True
        status = step.status()
        if status not in (StepStatus.NONE, StepStatus.ABORTED):
            raise StepError(without_step(self.batch.global_batch, status))
        self._restart()
        return False

    def note_untrained(self, is_all: bool) -> None:
        """Record that the step which is decided has trained none of its samples; or not all of them."""
        if is_all:
            self.record.skipped += 1
        else:
            self.record.partial += 1

    @property
    def shards(self) -> int:
        """Number of loop bodies that make a global batch in strict mode, all workers together; 0: not strict."""
        return 0

    @property
    def divides_local_batches(self) -> bool:
        """True where the loop body may run several times for a local batch."""
        return (self._layout.max_local_batch or self._layout.global_batch_size) < self._layout.global_batch_size

    @property
    def epoch_samples(self) -> int:
        """Number of samples of the current epoch; 0: it is not known in advance."""
        return 0

    def _leave(self) -> bool:
        """End the loop over the batches. False: workers have regrouped, and it may continue."""
        if not self.hooks.leave_batches():
            return False
        self._has_to_leave = False
        self.batch, self.indices, self._is_pending = None, [], False
        step.close()
        self._prefetch.renew()
        return True

    @property
    def accumulates(self) -> bool:
        """True when a loop body need not call step(): micro_batch_size was given."""
        return self._padding.is_allowed

    @property
    def global_batch(self) -> GlobalBatch | None:
        """The global batch of the current batch."""
        return self.batch.global_batch if self.batch is not None else None

    def set_world(self, rank: int, size: int) -> None:
        """Set rank and size of the world from the next batch on. Batches fetched ahead are dropped.

        Args:
            rank: Rank of this worker.
            size: Number of workers.

        Raises:
            DataError: The rank is not in 0..size - 1; or there are more workers than shards, in strict mode.
        """
        if not 0 <= rank < size:
            raise DataError(f"rank must be in 0..{size - 1}, got {rank}")
        if 0 < self.shards < size:
            raise DataError(
                f"{size} workers, but each global batch has {self.shards} shards, so that some would have none: use "
                f"--max-np {self.shards}, or shards={size} or more from the start of the job"
            )
        self._rank, self._world, self._has_regrouped = rank, size, True
        self.record.is_through = False
        self._restart()

    # Rehearsals ------------------------------------------------------------------------------------------

    @abstractmethod
    def start_rehearsal(self, rank: int, size: int, is_at_tail: bool) -> int:
        """Hand out the local batch of rank `rank` of `size` from now on, at the start of an epoch or at its last global
        batch. It must not be trained. Returns the number of samples of its first batch; 0: it has none of its own."""

    def end_rehearsals(self) -> None:
        """End the rehearsals without a trace: load_state_dict() has to follow."""
        self._has_to_leave, self.record = False, EpochRecord()
        self._restart()

    def _rehearsed_division(self, layout: LayoutT) -> tuple[LayoutT, int, int]:
        """Return the layout, rank and world of a rehearsal's batch: that of a trial, or a division that a change of the
        world may bring.

        With max_local_batch the loop body may have to run several times for one step: the rehearsal checks that it can.
        A compiled body gets another number of samples, fewer, so that it is compiled for any number of them before a
        fault brings another one.
        """
        samples, most, least = layout.global_batch_size, layout.max_local_batch, layout.min_local_batch
        largest = -(-samples // self._world)
        part = self.hooks.part_on_trial()
        if part is not None:
            # An even number if possible: about as many as a worker has, of which either half may be a local batch.
            usual = min(largest, most or samples) // 2 * 2
            on_trial = min(max(usual, 2 * least), samples)
            return dataclasses.replace(layout, global_batch_size=on_trial, max_local_batch=None), part[0], part[1]
        if most is None or most >= samples:
            return layout, self._rank, self._world + has_compiled()
        half = max(-(-largest // 2), 2 * least - 1)
        if half < largest <= most:
            layout = dataclasses.replace(layout, max_local_batch=half)
        return layout, self._rank, self._world

    # State that survives ---------------------------------------------------------------------------------

    def _refuse_another(self, state: Mapping[str, Any]) -> None:
        """Raise DataError where the saved position would not mean the same samples here."""
        for name in dict.fromkeys((*self._identity, *_ABSENT)):
            theirs, ours = (each.get(name, _ABSENT.get(name)) for each in (state, self._identity))
            if theirs != ours:
                raise DataError(
                    f"the saved loader has {name}={theirs}, this one {ours}; use the values it was saved with, or do "
                    f"not load it{_CHANGED.get(name, '')}"
                )


# Divisions of a rehearsal ---------------------------------------------------------------------------------------------


def rehearsed_place(shards: int, rank: int, world: int) -> tuple[int, int]:
    """Return rank and world for a rehearsal's batch in strict mode: the worker has a shard of its own in it, and
    another one, where there are several, since the loss of a worker may make the loop body run more often."""
    from farandole.training.collectives.shard_tree import divide_evenly  # loaded only in strict mode

    most = -(-shards // 2)
    if world <= most:
        return rank, world
    own, _ = divide_evenly(shards, world).ranges[rank]
    ranges = divide_evenly(shards, most).ranges
    return next(place for place, (_, stop) in enumerate(ranges) if own < stop), most


def has_compiled() -> bool:
    """Return whether torch.compile has compiled something in this process; False where this torch does not say so."""
    # No public API counts compiled graphs (torch 2.13, torch/_dynamo/utils.py, `counters`). torch's compile
    # troubleshooting guide reads the same counters.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return counters is not None and bool(counters["stats"]["unique_graphs"])


# The run loop, as a loader calls it -----------------------------------------------------------------------------------


class LoaderHooks:
    """The calls of a loader at its boundaries, where workers may regroup: before each batch, and at the end of an
    epoch. The run loop overrides them; these are for a worker without one."""

    def reach_boundary(self) -> None:
        """Handle that a batch is about to be handed out. May regroup, and call set_world() and load_state_dict()."""

    def rehearses(self) -> bool:
        """Return whether the next batch is a rehearsal's: it has no effect, and comes again."""
        return False

    def part_on_trial(self) -> tuple[int, int] | None:
        """Return the part of the first rank's samples of the global batch that a rehearsal is to have, and the number
        of parts; None: its batch is the worker's own."""
        return None

    def begin_shard(self, batch: Batch) -> None:
        """Handle that a batch of strict mode is handed out: seed its random numbers."""

    def leave_batches(self) -> bool:
        """Handle the end of the epoch's batches, before the code after them. False: there was a regroup instead, and
        the loader's epoch and cursor are those on which the workers agreed."""
        return True

    def reach_epoch_end(self) -> bool:
        """Handle this worker's end of an epoch. True: all workers have ended it, and the epoch's number advances.
        False: there was a regroup instead, and the loader's epoch and cursor are those on which the workers agreed."""
        return True

    def begin_epoch(self) -> None:
        """Handle that the epoch's number has advanced."""

    def once(self, epoch: int, call: int, function: Callable[[], object]) -> None:
        """Call the function, the `call`-th one of this epoch, when all workers have arrived at it."""
        function()


# Loop bodies behind the last micro-batch: padding, where a body accumulates; and the message where it does not --------

_MOST_PADDING = 10_000


class Padding:
    """The padding of a loader: batches that do not count, until a body that accumulates has called step().

    is_allowed  the user accumulates; else a body without step() is an error
    """

    def __init__(self, is_allowed: bool) -> None:
        self.is_allowed = is_allowed
        self._data: Any = None
        self._count = 0

    def keep(self, data: Any) -> None:
        """Keep the batch that is handed out, to hand it out once more."""
        self._count = 0
        if self.is_allowed:
            self._data = data

    def is_due(self, batch: Batch | None) -> bool:
        """Return whether all gradients are reduced and the loop body has neither stepped nor dropped them."""
        is_reduced = batch is not None and batch.is_last and step.status() is StepStatus.REDUCED
        return self.is_allowed and is_reduced and not step.facts().is_dropped

    def next(self, batch: Batch | None) -> tuple[Batch, list[int], Any]:
        """Return a batch that does not count, its samples (none), and the last micro-batch's data again. Raises
        StepError when the body never steps."""
        assert batch is not None
        self._count += 1
        if self._count > _MOST_PADDING:
            raise StepError(
                f"the loop body ran {_MOST_PADDING} times since the gradients of samples [{batch.global_batch.start}, "
                f"{batch.global_batch.stop}) were reduced, without a call of optimizer.step()"
            )
        padding = batch.padding()
        step.pad(padding)
        return padding, [], self._data


def without_step(global_batch: GlobalBatch, status: StepStatus) -> str:
    """Return the message for a loop body that has made no step."""
    what = f"samples [{global_batch.start}, {global_batch.stop}) of epoch {global_batch.epoch}"
    if status is StepStatus.DECIDED:
        return (
            f"the step for {what} was applied, but the loader has no commit for it: pass the loader to "
            f"TorchState(loader=...), or call loader.commit(loader.global_batch) after the step"
        )
    if status is StepStatus.OPEN and not step.is_noticed():
        return (
            f"the next batch was requested, and no DistributedOptimizer has reduced gradients for {what}: an optimizer "
            f"of torch trains this worker's part only. Write optimizer = fd.DistributedOptimizer(optimizer) and pass "
            f"it to TorchState(optimizer=...), or pass a DistributedDataParallel as the model of TorchState"
        )
    missing = "optimizer.step()" if status is StepStatus.REDUCED else "backward() and optimizer.step()"
    return (
        f"the next batch was requested without {missing} for {what}: a run of the loop body calls step() of a "
        f"DistributedOptimizer, and all workers together may leave out single batches"
    )
