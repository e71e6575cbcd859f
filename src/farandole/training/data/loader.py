"""fd.elastic.DataLoader: every sample exactly once per epoch, for any number of workers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
import torch

from farandole.base.membership import Shortfall
from farandole.errors import DataError
from farandole.training.data.elastic_loader import ElasticLoader, rehearsed_place
from farandole.training.data.fetching import MapDataset, fetch, row_digests, size_of
from farandole.training.data.index_stream import IndexedBatch, IndexStream
from farandole.training.data.loader_arguments import (
    audit_rule,
    follows_speed,
    most_samples,
    number_of_shards,
    order_of,
    pin_arithmetic,
    refuse_torch_arguments,
    shards_to_continue_with,
    tail_of,
)
from farandole.training.data.partition import BatchLayout, Tail, batches, global_batch_range, make_global_batch
from farandole.training.data.permutation import FORMAT_VERSION
from farandole.training.data.sample_order import Order
from farandole.training.state import step
from farandole.training.state.batch import GlobalBatch
from farandole.training.state.session import SESSION

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

logger = logging.getLogger("farandole")


class DataLoader(ElasticLoader):
    """Yields the samples of each global batch, divided among the current workers.

    As in torch, each loop over the batches starts loader processes, with the data set as it is then; they continue when
    the world changes, and where one of them dies, new ones deliver the next batch. Arguments of torch's DataLoader that
    cannot be supported are refused: batch_size, sampler, batch_sampler, generator and in_order=False.

    A worker without a sample in a global batch gets a *dummy batch*: real samples, whose gradient does not count, so
    that the loop body runs equally often on all workers.

    In an elastic function a batch may be handed out whose step is aborted, so that optimizer.step() returns False:
    after a fault, as the second batch of the job (TorchState(rehearse=...)), and after the last batch of an epoch when
    workers have regrouped there, so that the loop is never empty for a worker that joins then.

    Args:
        dataset: A data set with a length.
        global_batch_size: Samples of one optimizer step, over all workers. It is fixed, so that the learning rate can
            stay the same when workers join or leave.
        seed: Seed of the order of the samples, which is new in each epoch.
        shuffle: False: the order is always 0, 1, 2, ...
        order: Another order: Weighted, Stratified, Bucketed, ShardLocal.
        tail: The use of the last samples of an epoch, when they do not fill a global batch. "short": they form a
            shorter one, whose gradient is their mean. "carry": the batch is filled with the first samples of the next
            epoch, so that all steps have equally many. The step belongs to the epoch in which it began; the next epoch
            continues after these samples, and has one batch less now and then. This holds for the last epoch, too: its
            last step trains the first samples of one more. "drop": they are not trained in this epoch.
        drop_last: torch's name: True is tail="drop".
        num_workers: Loader processes of this worker, as in torch's DataLoader; so are the following arguments.
        collate_fn: Makes a batch of a list of samples, as in torch.
        pin_memory: As in torch.
        pin_memory_device: As in torch.
        timeout: Seconds to wait for a batch of a loader process, as in torch; 0: for ever.
        prefetch_factor: As in torch.
        worker_init_fn: As in torch.
        multiprocessing_context: As in torch.
        persistent_workers: As in torch: True keeps the loader processes from one epoch to the next, which is faster
            where epochs are short. They have the data set as it was when they were started; only shared memory shows
            them what has changed since. A newcomer starts them before the others wait for it.
        max_local_batch: Most samples of one loop body, where memory is limited. A local batch that has grown beyond it,
            because workers were lost, comes as several micro-batches, and only the last of them makes the optimizer
            step; in the others step() returns False and gradients are zeros. Without it the loop body runs once for
            each step, however large the local batch is.
        micro_batch_size: Gradient accumulation: most samples of one loop body, for any number of workers. The body of
            the last micro-batch makes the step; in the others step() returns False and zero_grad() does nothing. A body
            need not call step() each time (`if (i + 1) % 4 == 0:` around it): until it does so after the last
            micro-batch, bodies follow that do not count. Losses are means over the micro-batch: no `loss / 4`.
        min_local_batch: Fewest samples of one loop body where that is possible; 2 for models with BatchNorm.
        strict: True: the model is the same to the last bit, whatever the number of workers, and whatever happens to
            them. Each global batch is cut into `shards` shards, and each shard is one run of the loop body, whose
            random numbers depend on (seed, step, shard); a worker runs the body for several shards in each step.
            None: as with `farandole run --strict`. See docs/strict-mode.md.
        shards: Number of shards, a divisor of global_batch_size, at least the largest number of workers; it makes the
            loader strict. None: that of `farandole run --shards`, or as many as workers may ever train (--max-np); a
            resumed job keeps its number. With max_local_batch or micro_batch_size each of them is divided further.
        audit: In strict mode, the fraction of the shards that a second worker computes again, to find machines that
            compute wrongly; 0: none. Their loop bodies have no effect: `indices` is empty in them. None: that of
            `farandole run --audit`, or 0.01.
        balance: "auto": local batches follow the measured speed of the workers: a slow worker gets fewer samples of
            each global batch, or, in strict mode, fewer shards. The order of the samples, the global batch and the
            weight of each sample stay as they are. Where a local batch is several loop bodies, their number may
            differ between workers. "off": all workers get equally many. None: as with `farandole run --balance`. See
            docs/unequal-machines.md.
        **refused: Arguments of torch's DataLoader that cannot be supported: ConfigError says what to do instead.

    Attributes:
        epoch: The current epoch. Position and epoch change with decided steps only, through commit(); fetching ahead
            and handing out batches change nothing that is saved.
        cursor: The current position in the epoch's order.
        batch: The current batch; None before the first and after the last one.
        indices: The samples of the data set in it, in order; none for a dummy batch.

    Raises:
        DataError: With the values, for an empty or iterable-style data set, an order made for another one, and invalid
            sizes, such as a global batch larger than the data set, or one that its shards do not divide.
        ConfigError: Arguments contradict each other or cannot be supported.

    Examples:
        ```python
        loader = fd.elastic.DataLoader(dataset, global_batch_size=16, seed=0)
        state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)


        @fd.elastic.run
        def train(state):
            for epoch in loader.epochs(2):  # continues at the state's position, also in the middle of an epoch
                for x, y in loader:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()


        train(state)
        ```
    """

    _layout: BatchLayout
    _seed_of_processes: Callable[[], int] = staticmethod(torch.initial_seed)  # from which torch derives theirs

    def __init__(
        self,
        dataset: MapDataset,
        global_batch_size: int = 0,
        *,
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
        tail: Tail | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        pin_memory_device: str = "",
        timeout: float = 0,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        persistent_workers: bool = False,
        max_local_batch: int | None = None,
        micro_batch_size: int | None = None,
        min_local_batch: int = 1,
        strict: bool | None = None,
        shards: int | None = None,
        audit: float | None = None,
        balance: Literal["auto", "off"] | None = None,
        **refused: object,
    ) -> None:
        refuse_torch_arguments(refused, known=type(self).__init__.__annotations__)
        super().__init__(seed, accumulates=micro_batch_size is not None)
        is_balanced = follows_speed(balance)
        self.order = order_of(order, shuffle)
        most = most_samples(max_local_batch, micro_batch_size)
        self._has_default_shards = shards is None
        self._layout = BatchLayout(
            self.order.length(size_of(dataset)),
            global_batch_size,
            most,
            min_local_batch,
            tail_of(tail, drop_last),
            shards := number_of_shards(strict, shards, global_batch_size, most),
            audit_rule(audit, seed, shards),
            is_balanced,
        )
        self.dataset, self._cursor = dataset, 0
        if self._layout.shards:
            pin_arithmetic()
        if is_balanced:
            from farandole.training.data.balance import Balance  # loaded only where it is used

            self.has_own_bodies = bool(self._layout.shards or most)
            self.balance = Balance(fetched_ahead=num_workers * (2 if prefetch_factor is None else prefetch_factor))
        turns = None if self.balance is None else self.balance.turns
        self._index_stream = IndexStream(self._layout, self.order.bind(self._layout, seed), turns)
        self._open(
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            prefetch_factor=prefetch_factor,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            pin_memory_device=pin_memory_device,
            persistent_workers=persistent_workers,
        )

    def _open(self, **options: Any) -> None:
        """Fetch from now on with these arguments of torch."""
        self._options = options
        self._prefetch = fetch(self.dataset, self._index_stream, options, self.seed, self._seed_of_processes)

    # Iterating -------------------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        """Return an iterator from the cursor to the end of the epoch. The current batch comes again if its step is not
        decided.

        Raises:
            StepError: The epoch is through already and epochs() has not advanced to the next one.
            DataError: The data set has another length than at the start.
        """
        size = self.order.length(size_of(self.dataset))
        if size != self._layout.size:
            raise DataError(
                f"the data set has {size} samples now, and had {self._layout.size} when its loader was made: which of "
                f"them are trained is determined by the length at the start. Make it as long as it will become, or "
                f"another loader for another job"
            )
        return super().__iter__()

    def __len__(self) -> int:
        """Return the number of global batches, and so of steps, of the current epoch."""
        return self._layout.global_batches(self.cursor)

    @property
    def steps_done(self) -> int:
        """Number of steps of the current epoch that are decided: from 0 to len(loader), whatever the number of
        micro-batches; so it is the count for a progress bar."""
        return len(self) - self._layout.steps_left(self.cursor)

    @property
    def steps_left(self) -> int:
        """Number of steps of the current epoch that are still to come, if there is no `break`."""
        return self._layout.steps_left(self.cursor)

    @property
    def shards(self) -> int:
        """Number of loop bodies that make a global batch in strict mode, all workers together; 0: not strict."""
        return self._layout.shards

    @property
    def epoch_samples(self) -> int:
        """Number of samples of the current epoch."""
        return self._layout.end

    @property
    def fraction(self) -> float:
        """Trained fraction of the current epoch, from 0 to 1."""
        return min(1.0, self.cursor / self._layout.end)

    def __str__(self) -> str:
        """Return the position of the training, for people."""
        layout = self._layout
        return f"epoch {self.epoch}, {min(self.cursor, layout.end):,} of {layout.end:,} samples ({self.fraction:.1%})"

    @property
    def cursor(self) -> int:
        """The current position in the epoch's order."""
        return self._cursor

    @property
    def is_over(self) -> bool:
        """True when no batch of the current epoch is left."""
        return self._is_ended or self.record.has_all_steps or self.cursor >= self._layout.end

    def _next(self, goes_on: bool) -> Any:
        while not goes_on and self.is_over:
            if self._has_regrouped:
                return self._hand_out_again()
            if self._leave():
                self.record.is_through = True
                raise StopIteration
            goes_on = self._settle()
        if self.balance is not None and not goes_on:
            self.balance.handing_out()
        return self._hand_out(is_rehearsal=step.is_rehearsal() if goes_on else self.hooks.rehearses())

    def _hand_out(self, is_rehearsal: bool) -> Any:
        if is_rehearsal and not (step.is_rehearsal() or self.is_over):
            self._rehearse_a_change()
        indexed, data = self._take()
        self.batch = indexed.batch
        self.indices = [] if indexed.batch.is_dummy else indexed.indices
        self._is_pending, self._has_regrouped, self._has_to_leave = True, False, True
        step.open(indexed.batch, is_rehearsal)
        self._padding.keep(data)
        if is_rehearsal and self.hooks.part_on_trial() is not None:
            self.rows_on_trial = row_digests(data, self.indices)
        if indexed.batch.is_strict:
            self.hooks.begin_shard(indexed.batch)
        if not is_rehearsal:
            SESSION.recorder.delivered(indexed.batch, self.indices)
        return data

    def _hand_out_again(self) -> Any:
        """Hand out the first batch of an epoch whose batches are through: its step is aborted."""
        self._index_stream.restart(self._layout, self.epoch, 0, self._rank, self._world)
        return self._hand_out(is_rehearsal=True)

    def _rehearse_a_change(self) -> None:
        layout = self._layout
        if layout.shards:
            layout = dataclasses.replace(layout, audit=None)  # an aborted step compares nothing
            rank, world = rehearsed_place(layout.shards, self._rank, self._world)
        else:
            layout, rank, world = self._rehearsed_division(layout)
            if (layout, rank, world) == (self._layout, self._rank, self._world):
                return
        self._index_stream.restart(layout, self.epoch, self.cursor, rank, world)

    def _take(self) -> tuple[IndexedBatch, Any]:
        try:
            return self._prefetch.take()
        except BaseException as error:
            self.close()  # batches being fetched no longer match the requests
            if isinstance(error, StopIteration):  # would look like the end of the epoch
                raise DataError("the data set raised StopIteration for a sample below its length") from error
            raise

    def _advance(self) -> None:
        is_whole = self.cursor >= self._layout.end
        self.record.end_epoch(is_whole, self._layout.steps_left(self.cursor))
        self.epoch, self._cursor, self._is_ended = self.epoch + 1, self._layout.next_epoch(self.cursor), False
        self._restart()

    # The current batch -----------------------------------------------------------------------------------

    def commit(self, global_batch: GlobalBatch) -> None:
        """Move the cursor behind the samples of `global_batch`, whose step is decided.

        Args:
            global_batch: The next global batch.

        Raises:
            DataError: It is not the next one: stale, out of order, or committed already. Nothing is changed.
        """
        start, stop = global_batch_range(self._layout, self.cursor)
        if (global_batch.epoch, global_batch.start, global_batch.stop) != (self.epoch, start, stop):
            raise DataError(
                f"cannot commit samples [{global_batch.start}, {global_batch.stop}) of epoch {global_batch.epoch}: "
                f"next are [{start}, {stop}) of epoch {self.epoch}; commit each global batch once, in order"
            )
        self._cursor = stop
        self._is_pending = False
        self.record.decide(self.epoch)
        if self.balance is not None and self.balance.decided(self._layout, global_batch):
            self._index_stream.turn()

    def meet(self, notes: Sequence[Sequence[int]], rank: int) -> None:
        """Divide the next batches by the speeds that the workers have told each other; set_world() has to follow.

        Args:
            notes: The result of Balance.note() of each rank, by rank.
            rank: Rank of this worker.

        Raises:
            ConfigError: Only some workers balance.
        """
        if self.balance is not None:
            self.balance.begin(self._layout, notes, rank)

    # State that survives ---------------------------------------------------------------------------------

    def shortfall(self) -> Shortfall | None:
        """Return the part that epochs(), or a framework's trainer, has promised and that was not trained; None:
        nothing is left."""
        record, layout = self.record, self._layout
        if record.total is None:
            return record.shortfall()
        steps_left, epochs_left = record.cut_steps, record.cut_epochs
        if self.epoch < record.total:
            steps_left += layout.steps_left(self.cursor, record.total - self.epoch - 1)
            epochs_left += record.total - self.epoch - (self.cursor >= layout.end)
        if not epochs_left:
            return None
        return Shortfall(record.total, epochs_left, layout.steps_left(0, record.total - 1), steps_left)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training: a few numbers, equal on every worker, for any number of workers."""
        state = {**self._identity, "epoch": self.epoch, "cursor": self.cursor}
        if self._layout.max_local_batch is not None:
            state["max_local_batch"] = self._layout.max_local_batch
        if self._layout.shards:
            state["shards"] = self._layout.shards
        if self._is_ended and self.cursor < self._layout.end:  # else the cursor shows it
            state["ended"] = 1
        return {**state, **self.record.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position.

        Args:
            state: A result of state_dict().

        Raises:
            DataError: The state has another data set size, order, tail or global batch size: its cursor would not mean
                the same samples. Nothing is changed.
        """
        self._refuse_another(state)
        shards = shards_to_continue_with(
            self._layout.shards, int(state.get("shards", 0)), is_default=self._has_default_shards
        )
        epoch, cursor = state.get("epoch", -1), state.get("cursor", -1)
        if epoch < 0 or not 0 <= cursor < self._layout.cursors_end:
            raise DataError(f"invalid position: epoch {epoch}, cursor {cursor} of {self._layout.size} samples")
        self.epoch, self._cursor, self._is_ended = epoch, cursor, bool(state.get("ended"))
        self.record.load_state_dict(state)
        if self._layout.max_local_batch is not None and "max_local_batch" in state:  # every rank has to split alike
            self._layout = dataclasses.replace(self._layout, max_local_batch=state["max_local_batch"])
        self._layout = dataclasses.replace(self._layout, shards=shards)
        self._restart()

    @cached_property
    def _identity(self) -> dict[str, int | str]:
        layout = self._layout
        identity: dict[str, int | str] = {
            "version": FORMAT_VERSION,
            "seed": self.seed,
            "order": self.order.identity,
            "size": layout.size,
            "global_batch_size": layout.global_batch_size,
        }
        return identity if layout.tail == "short" else {**identity, "tail": layout.tail}

    def draw_audits(self, round: int) -> None:
        """Draw the audits of strict mode by another round (AuditRule) from the current global batch on."""
        rule = self._layout.audit
        if rule is not None:
            self._layout = dataclasses.replace(self._layout, audit=msgspec.structs.replace(rule, round=round))
            self._restart()

    def warm_up(self) -> None:
        """Start the loader processes and wait until each has fetched a sample, which is not trained. A worker does so
        before others wait for it. Nothing where the first loop over the batches starts others."""
        if not self._options["persistent_workers"]:
            return
        self._index_stream.try_out()
        try:
            for _ in range(self._options["num_workers"]):
                self._prefetch.take()
        except Exception:  # e.g. a collate_fn that cannot handle one sample; other errors will show in training
            logger.debug("the loader processes could not be started in advance", exc_info=True)
            self.close()

    def start_rehearsal(self, rank: int, size: int, is_at_tail: bool) -> int:
        """Hand out the local batch of rank `rank` of `size` from now on, at the start of an epoch or at its last global
        batch. It must not be trained. Returns the number of samples of its first batch; 0: it has none of its own."""
        layout = self._layout
        self._cursor = max(0, layout.global_batches() - 1) * layout.global_batch_size if is_at_tail else 0
        self._rank, self._world, self._is_ended = rank, size, False
        self._restart()
        first, *_ = batches(make_global_batch(layout, self.epoch, self.cursor, rank, size), layout.min_local_batch)
        return first.samples

    def close(self) -> None:
        """End the loader processes. Iterating again starts new ones. Idempotent."""
        self._prefetch.close()
        self._restart()

    def _restart(self) -> None:
        """Fetch again from the cursor, for the current world; the current batch will be handed out again."""
        self.batch, self.indices, self._is_pending = None, [], False
        self._index_stream.restart(self._layout, self.epoch, self.cursor, self._rank, self._world)
