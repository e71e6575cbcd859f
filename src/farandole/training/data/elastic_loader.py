"""The base of both loaders: epochs, the loop over batches and its boundaries, wherever the samples come from."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

import torch

from farandole.base.env import prepare_for_strict_mode, read_job_env, read_rank_and_size
from farandole.errors import ConfigError, DataError, StepError
from farandole.training.data.boundary_hooks import LoaderHooks, NoLoaderHooks
from farandole.training.data.epochs import Epoch, EpochRecord
from farandole.training.data.padding import Padding, without_step
from farandole.training.state import step
from farandole.training.state.batch import Batch, GlobalBatch
from farandole.training.state.step import StepStatus

if TYPE_CHECKING:
    from farandole.training.data.balance import Balance
    from farandole.training.state.shard_audit import AuditRule


MOST_SHARDS = 4096
"""A step sums up the shards of a worker one after the other; more of them would only be a mistake."""


class ElasticLoader(ABC):
    """The base of DataLoader and StreamLoader.

    Attributes:
        epoch: The current epoch. Position and epoch change with decided steps only, through commit(); fetching ahead
            and handing out batches change nothing that is saved.
        batch: The current batch; None before the first and after the last one.
        indices: The samples of the data set in it, in order; none for a dummy batch.
        elder: An object that is older than each iterator over the batches of this epoch; None: there is none.
        rows_on_trial: Digests of samples in the last rehearsal's batch.
        seed: Seed of random numbers.
        hooks: The run loop, which is called at each boundary.
        record: The record of the epochs.
        balance: The division of global batches by the speed of the workers; None: they are divided evenly.
        has_own_bodies: Workers may run the loop body for a global batch a different number of times.
    """

    def __init__(self, seed: int, accumulates: bool) -> None:
        if not hasattr(seed, "__index__"):
            raise DataError(f"seed must be a whole number, the same on all workers and in each run, got {seed!r}")
        self.seed, self.epoch = seed, 0
        self.hooks: LoaderHooks = NoLoaderHooks()
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

    @abstractmethod
    def _renew(self) -> None:
        """End the loader processes, unless they are to be kept: code of the script may change the data set before the
        next batch is fetched."""

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
        self._renew()
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
        return False

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
        self._renew()
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


def most_samples(max_local_batch: int | None, micro_batch_size: int | None) -> int | None:
    """Return the most samples of one loop body, of which the user gives one name at most.

    Raises:
        DataError: Both are given.
    """
    if max_local_batch is not None and micro_batch_size is not None:
        raise DataError(
            f"micro_batch_size={micro_batch_size} and max_local_batch={max_local_batch} both limit the samples of one "
            f"loop body; give one"
        )
    return max_local_batch if micro_batch_size is None else micro_batch_size


def rehearsed_division(
    global_batch_size: int, max_local_batch: int | None, min_local_batch: int, world: int
) -> tuple[int | None, int]:
    """Return max_local_batch and number of workers for a rehearsal's batch: a division that a change of the world may
    bring.

    With max_local_batch the loop body may have to run several times for one step: the rehearsal checks that it can. A
    compiled body gets another number of samples, fewer, so that it is compiled for any number of them before a fault
    brings another one.
    """
    if max_local_batch is not None and max_local_batch < global_batch_size:
        largest = -(-global_batch_size // world)
        half = max(-(-largest // 2), 2 * min_local_batch - 1)
        return (half if half < largest <= max_local_batch else max_local_batch), world
    return max_local_batch, world + has_compiled()


def samples_on_trial(global_batch_size: int, max_local_batch: int | None, min_local_batch: int, world: int) -> int:
    """Return the number of samples of a trial's batch, an even number if possible: about as many as a worker has, of
    which either half may be a local batch."""
    usual = min(-(-global_batch_size // world), max_local_batch or global_batch_size) // 2 * 2
    return min(max(usual, 2 * min_local_batch), global_batch_size)


def number_of_shards(strict: bool | None, shards: int | None, global_batch_size: int, most: int | None) -> int:
    """Return the number of shards of a global batch; 0: not strict.

    Args:
        strict: The user's argument; None: as the job.
        shards: The user's argument; None: as the job.
        global_batch_size: Samples of the global batch.
        most: Most samples of one loop body; None: any number.

    Raises:
        DataError: The number of shards does not divide the global batch.
        ConfigError: Arguments contradict each other.
    """
    job = read_job_env()
    if strict is False and shards is not None:
        raise ConfigError(f"DataLoader: strict=False and shards={shards} contradict each other; give one")
    if strict is False or not (strict or shards is not None or job.strict):
        return 0
    wanted = shards if shards is not None else job.shards or read_rank_and_size()[1]
    if not 1 <= wanted <= MOST_SHARDS:
        raise DataError(f"shards must be in 1..{MOST_SHARDS}, got {wanted}")
    if global_batch_size % wanted:
        from farandole.training.collectives.shard_tree import shards_that_fit

        fitting = ", ".join(map(str, shards_that_fit(global_batch_size, wanted))) or "none of at least so many"
        raise DataError(
            f"global_batch_size={global_batch_size} cannot be divided into {wanted} equal shards. Numbers of shards "
            f"that fit: {fitting}; a global batch that fits: {-(-global_batch_size // wanted) * wanted}"
        )
    return wanted * (1 if most is None else -(-(global_batch_size // wanted) // most))


def pin_arithmetic() -> None:
    """Compute with one thread, unless the job was started with a number for all workers (--strict)."""
    prepare_for_strict_mode()
    if not read_job_env().strict:
        torch.set_num_threads(1)


def audit_rule(audit: float | None, seed: int, shards: int) -> AuditRule | None:
    """Return the rule by which shards are computed again; None: the loader is not strict.

    Args:
        audit: The user's argument; None: as the job.
        seed: That of the loader.
        shards: Number of shards of a global batch; 0: not strict.

    Raises:
        ConfigError: It is no fraction, or the loader is not strict.
    """
    if not shards:
        if audit:
            raise ConfigError(f"DataLoader: audit={audit:g} needs strict mode: give strict=True, or leave it out")
        return None
    from farandole.training.state.shard_audit import AuditRule  # loaded only in strict mode

    fraction = read_job_env().audit if audit is None else audit
    if not 0 <= fraction <= 1:
        raise ConfigError(f"DataLoader: audit is a fraction of the shards, from 0 to 1, got {fraction:g}")
    return AuditRule(fraction, seed)


def follows_speed(balance: str | None) -> bool:
    """Return whether local batches follow the speed of the workers.

    Args:
        balance: The user's argument; None: as the job.

    Raises:
        ConfigError: The argument has another value.
    """
    if balance not in (None, "auto", "off"):
        raise ConfigError(f'DataLoader: balance must be "auto" or "off", got {balance!r}')
    return (balance or read_job_env().balance) == "auto"


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
