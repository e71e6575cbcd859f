"""fd.elastic.DataLoader: every sample exactly once per epoch, however many workers share them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from farandole.data.boundary import Boundary, SoloBoundary
from farandole.data.dealer import Dealer, Dealt, Order
from farandole.data.partition import Layout, global_batch
from farandole.data.permutation import FORMAT_VERSION, Permutation
from farandole.data.prefetch import Prefetch
from farandole.errors import DataError, StepError
from farandole.state import recording, step
from farandole.state.ticket import Batch, Ticket

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext


class MapDataset(Protocol):
    """A data set with a length whose samples can be asked for in any order."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class DataLoader:
    """Hands out each global batch's samples, divided among the workers there are.

        for epoch in loader.epochs(10):         # continues where the state is, also in the middle of an epoch
            for x, y in loader:
                ...                             # one optimizer step

    global_batch_size  samples of one optimizer step, over all workers; fixed, so that the learning rate can
                       stay as it is when workers join or leave
    seed, shuffle      the order of the samples: a new one each epoch; without shuffle always 0, 1, 2, ...
    max_local_batch    most samples of one loop body; larger shares come as several micro-batches, and only
                       the last of them makes the optimizer step. In an elastic function the share at the
                       start of the job unless given
    min_share          fewest samples of one loop body where that is possible; 2 for models with BatchNorm

    The other arguments are those of torch's DataLoader. Its loader workers are started once and live on when
    the world changes.

    A worker that gets no sample of a global batch is handed a *ghost*: real samples, whose gradient does not
    count, so that the loop body runs equally often everywhere.

    epoch, cursor  where training is. They move with decided steps only, through commit(); fetching ahead and
                   handing out changes nothing that is saved.
    batch          the batch that is out; None before the first and after the last one
    indices        the samples of the data set in it, in order; none for a ghost

    Raises DataError, with the values, for an empty or iterable-style data set and for sizes that cannot work.
    """

    def __init__(
        self,
        dataset: MapDataset,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        max_local_batch: int | None = None,
        min_share: int = 1,
    ) -> None:
        self._layout = Layout(_size_of(dataset), global_batch_size, max_local_batch, min_share)
        self.dataset, self.seed, self.shuffle = dataset, seed, shuffle
        self.epoch = 0
        self.cursor = 0
        self.boundary: Boundary = SoloBoundary()
        self.batch: Batch | None = None
        self.indices: list[int] = []
        self._is_pending = False  # a batch is out whose ticket is not committed
        self._rank, self._world = 0, 1
        order = _shuffled(self._layout.size, seed) if shuffle else _sequential
        self._dealer = Dealer(self._layout, order)
        inner: TorchDataLoader[Any] = TorchDataLoader(
            dataset,  # type: ignore[arg-type]  # torch wants its own class, and uses these two methods
            batch_sampler=self._dealer,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=torch.Generator(),
        )
        self._prefetch = Prefetch(inner, self._dealer)

    # Iterating -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Global batches of one epoch: how often the loop body makes a step."""
        return self._layout.global_batches

    def epochs(self, total: int) -> Iterator[int]:
        """Numbers of the epochs from the current one to `total` - 1, counted from the start of the job.

        The number advances when every worker has come back for the next one. After a regroup in the tail of
        an epoch (an evaluation) its number comes again, with as many batches as are left, often none. `break`
        in the loop over batches ends the epoch for good; all workers must take it at the same step.
        """
        while self.epoch < total:
            yield self.epoch
            if self.boundary.reach_epoch_end():
                self._advance()

    def __iter__(self) -> Iterator[Any]:
        """From the cursor to the end of the epoch. A batch that is out without a decided step comes again."""
        if self._is_pending:
            self._deal()
            if step.state() != "aborted":  # the run loop has to see that
                step.close()
        return self

    def __next__(self) -> Any:
        """The next batch, collated. Raises StepError when the loop body made no step for the one before, and
        what the data set raised; epoch and cursor are as they were then."""
        self.boundary.reach()
        goes_on = self._settle()
        if not goes_on and self.cursor == self._layout.size:
            self._put_away()
            raise StopIteration
        dealt, data = self._take()
        self.batch = dealt.batch
        self.indices = [] if dealt.batch.is_ghost else dealt.indices
        self._is_pending = True
        step.open(dealt.batch)
        recording.delivered(dealt.batch, self.indices)
        return data

    def _settle(self) -> bool:
        """Find out what became of the batch that is out. True: another micro-batch of its ticket follows."""
        if self.batch is None or not self._is_pending:
            return False
        phase = step.state()
        if phase == "open" and not self.batch.is_last:
            return True
        if phase not in ("none", "aborted"):
            raise StepError(_advice(self.batch.ticket, phase))
        self._deal()
        return False

    def _take(self) -> tuple[Dealt, Any]:
        try:
            return self._prefetch.take()
        except BaseException as error:
            self.close()  # what is on its way no longer matches what was asked for
            if isinstance(error, StopIteration):  # would look like the end of the epoch
                raise DataError("the data set raised StopIteration for a sample below its length") from error
            raise

    def _advance(self) -> None:
        is_whole = self.cursor == self._layout.size
        self.epoch, self.cursor = self.epoch + 1, 0
        if not is_whole:
            self._deal()
        self._put_away()

    def _put_away(self) -> None:
        self.batch, self.indices, self._is_pending = None, [], False
        step.close()

    # The batch that is out -------------------------------------------------------------------------------

    @property
    def ticket(self) -> Ticket | None:
        """The ticket of the batch that is out."""
        return self.batch.ticket if self.batch is not None else None

    def commit(self, ticket: Ticket) -> None:
        """The step of `ticket` is decided: the cursor moves behind its samples. Raises DataError, with
        nothing changed, for any other than the next ticket: stale, out of order, or committed already."""
        start, stop = global_batch(self.cursor, self._layout.size, self._layout.global_batch_size)
        if (ticket.epoch, ticket.start, ticket.stop) != (self.epoch, start, stop):
            raise DataError(
                f"cannot commit samples [{ticket.start}, {ticket.stop}) of epoch {ticket.epoch}: next are "
                f"[{start}, {stop}) of epoch {self.epoch}; commit each ticket once, in order"
            )
        self.cursor = stop
        self._is_pending = False

    # What survives ---------------------------------------------------------------------------------------

    def set_world(self, rank: int, size: int) -> None:
        """This worker is rank `rank` of `size` from the next batch on. What was fetched ahead is dropped."""
        if not 0 <= rank < size:
            raise DataError(f"rank must be in 0..{size - 1}, got {rank}")
        self._rank, self._world = rank, size
        self._deal()

    def limit_local_batch(self, world: int) -> None:
        """Unless max_local_batch was given: no worker computes more samples at once than its share is in a world
        of this size, the first one. Else the death of one worker could become out-of-memory deaths of the others.
        """
        if self._layout.max_local_batch is None:
            largest = -(-self._layout.global_batch_size // world)
            self._split_above(max(largest, 2 * self._layout.min_share - 1))

    def state_dict(self) -> dict[str, int]:
        """Where training is: a few integers, the same on every worker, for any number of workers."""
        limit = self._layout.max_local_batch or 0
        return {**self._identity(), "epoch": self.epoch, "cursor": self.cursor, "max_local_batch": limit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there. Raises DataError, with nothing changed, when the state is of another data set
        size, order or global batch size: its cursor would not mean the same samples."""
        for name, ours in self._identity().items():
            if state.get(name) != ours:
                raise DataError(
                    f"the saved loader has {name}={state.get(name)}, this one {ours}; go on with the values "
                    f"it was saved with, or without loading it"
                )
        epoch, cursor = state.get("epoch", -1), state.get("cursor", -1)
        if epoch < 0 or not 0 <= cursor <= self._layout.size:
            raise DataError(f"no such place: epoch {epoch}, cursor {cursor} of {self._layout.size} samples")
        self.epoch, self.cursor = epoch, cursor
        self._split_above(state.get("max_local_batch", 0))

    def _identity(self) -> dict[str, int]:
        """What a cursor's meaning hangs on."""
        return {
            "version": FORMAT_VERSION,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "size": self._layout.size,
            "global_batch_size": self._layout.global_batch_size,
        }

    def _split_above(self, samples: int) -> None:
        """Every rank has to split alike; 0 keeps what is."""
        if samples:
            self._layout = dataclasses.replace(self._layout, max_local_batch=samples)
        self._deal()

    def close(self) -> None:
        """End the loader workers. Iterating again starts new ones. Idempotent."""
        self._prefetch.close()
        self._deal()

    def _deal(self) -> None:
        """Fetch anew from the cursor, for the world as it is now; what is out will be handed out again."""
        self.batch, self.indices, self._is_pending = None, [], False
        self._dealer.restart(self._layout, self.epoch, self.cursor, self._rank, self._world)


def _size_of(dataset: MapDataset) -> int:
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{type(dataset).__name__} is an IterableDataset: its samples cannot be asked for by index, "
            f"so they cannot be divided anew when workers change; give one with __len__ and __getitem__"
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(f"{type(dataset).__name__} needs __len__ and __getitem__ to be divided among workers")
    return len(dataset)


def _shuffled(size: int, seed: int) -> Order:
    def order(epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return Permutation(size, seed, epoch)(positions)

    return order


def _sequential(_epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return positions


def _advice(ticket: Ticket, phase: str) -> str:
    what = f"samples [{ticket.start}, {ticket.stop}) of epoch {ticket.epoch}"
    if phase == "decided":
        return (
            f"the step for {what} was made, but the loader was not told: give it to TorchState(loader=...), "
            f"or call loader.commit(loader.ticket) after the step"
        )
    missing = "optimizer.step()" if phase == "reduced" else "backward() and optimizer.step()"
    return (
        f"the next batch was asked for without {missing} for {what}: every run of the loop body has to make "
        f"the step of a DistributedOptimizer; instead of `continue` for a bad batch, multiply its loss by 0"
    )
