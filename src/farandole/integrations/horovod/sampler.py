"""ElasticSampler: Horovod's division of a data set among a changing number of workers, for any torch DataLoader."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from operator import index
from types import FrameType
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from farandole.errors import DataError
from farandole.training.collectives import world
from farandole.training.data import intervals
from farandole.training.data.intervals import Intervals
from farandole.training.data.permutation import FORMAT_VERSION, Permutation
from farandole.training.data.remainder import OrderFunction, Remainder, parts_by_epoch
from farandole.training.state.session import SESSION


class SizedDataset(Protocol):
    """A data set with a length, which must not change."""

    def __len__(self) -> int: ...


class ElasticSampler(Sampler[int]):
    """Divides an epoch's samples among the ranks in turn, and divides the rest again when the ranks have changed.

    Recorded samples show at once in processed_num. The samples that are handed out change with reset(), set_epoch() and
    load_state_dict() only, so that iterating again gives the same samples. A sync of the state resets, on all workers.
    All of this takes constant time and memory for any size of the data set, unless samples were recorded one by one, by
    record_indices().

    In torchdata's StatefulDataLoader, keep the state of the sampler, not of that loader: the loader would continue at
    the records of the time when it fetched ahead, and repeat samples.

    Args:
        dataset: Its length is read once.
        shuffle: A new order in each epoch; without it always 0, 1, 2, ...
        seed: Seed of that order, 0 or more; the same on all ranks.
        pad: The use of samples at the end of an epoch that the number of ranks does not divide. True: the first samples
            of the rest are repeated, fewer than there are ranks. "carry": the last samples begin the next epoch, so
            that none is repeated or lost. They are fewer than there are ranks; those of the last epoch stay untrained.
            Needs record_batch().

    Raises:
        NotInitialized: `init()` was not called.
        DataError: A seed or epoch is below 0, or `pad` has another value.

    Examples:
        ```python
        sampler = fd.elastic.ElasticSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler)
        state = fd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)


        @fd.elastic.run
        def train(state):
            while state.epoch < 2:
                for number, (x, y) in enumerate(loader):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    sampler.record_batch(number, len(x))
                    state.commit()
                state.epoch += 1
                sampler.set_epoch(state.epoch)  # at the end of an epoch, not at its start


        train(state)
        ```
    """

    def __init__(
        self, dataset: SizedDataset, shuffle: bool = True, seed: int = 0, *, pad: bool | Literal["carry"] = True
    ) -> None:
        if pad is not True and pad != "carry":
            raise DataError(
                f'pad must be True or "carry", got {pad!r}: with another value some ranks would run one step more than '
                f"others, or samples would be lost"
            )
        self.dataset, self.shuffle, self.seed, self.pad = dataset, shuffle, seed, pad
        self._size = len(dataset)
        self._is_iterated_anew = False  # since the last record
        self._begin(0)
        self.reset()

    def _begin(self, epoch: int, carried: Intervals = ()) -> None:
        order = self._order_of(epoch)
        self._order = self._with_earlier(order, epoch) if carried else order
        self.epoch = epoch
        self._carried = carried  # positions of earlier epochs that begin this one: -1 is the newest
        self._forget()

    def _forget(self) -> None:
        self._before: Intervals = ()  # positions that were trained when the rest was divided
        self._counted = 0  # number of the divided samples that are trained by now, on all ranks
        self._place = 0  # position of record_batch() in this rank's samples
        self._news: list[int] = []  # positions recorded here one by one, unknown to other ranks
        self._in_this_loop: set[int] = set()  # positions recorded in the current loop over the loader
        self._recorded: set[int] = set()  # positions that this rank has also recorded since
        self._is_by_index = False  # samples of this epoch were recorded one by one

    # Samples ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over this rank's samples.

        Its first next() raises DataError if the data set's length has changed since the sampler was made, or if a
        DataLoader of another data set iterates it.
        """
        self._is_iterated_anew = True
        return self._checked(iter(self._remainder))

    def __len__(self) -> int:
        """Return the number of samples of this rank, and of each other one, as of the last reset."""
        return self._remainder.per_rank

    @property
    def samples(self) -> int:
        """Number of samples of the data set, as it was when the sampler was made."""
        return self._size

    @property
    def num_samples(self) -> int:
        """Number of samples of this rank, equal to len()."""
        return len(self)

    @property
    def total_size(self) -> int:
        """Number of samples of all ranks together as of the last reset; samples that are handed out twice count
        twice."""
        return len(self) * self.num_replicas

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return this rank's samples in one batch since the last reset.

        Args:
            batch_idx: Number of the batch, from 0.
            batch_size: Samples of a batch of one rank.
        """
        return self._remainder.samples(batch_idx * batch_size, (batch_idx + 1) * batch_size)

    @property
    def indices(self) -> list[int]:
        """Samples of this rank as of the last reset, in the order in which they are handed out. Builds the whole
        list."""
        return self._remainder.samples()

    @property
    def remaining_indices(self) -> list[int]:
        """Samples of all ranks that were left at the last reset, in order. Builds the whole list."""
        indices: list[int] = self._order(intervals.positions_of(self._remainder.left)).tolist()
        return indices

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, of which nothing has been trained.

        With pad="carry" it begins with the samples that the previous epoch could not divide, if any sample of that
        epoch was trained; not when the epoch number decreases.

        Args:
            epoch: Number of the epoch, from 0.
        """
        if epoch != self.epoch and SESSION.sampler_recorder.is_needed:
            trained = sum(max(0, stop - max(0, start)) for start, stop in self._behind())
            SESSION.sampler_recorder.left(self, self.epoch, None if self._is_by_index else self._size - trained)
        carried = self._carried if epoch == self.epoch else ()
        if epoch > self.epoch and (self.processed_num or not self._remainder.per_rank):
            carried = intervals.shift(self._remainder.carried, (self.epoch - epoch) * self._size)
        self._begin(epoch, carried)
        self.reset()

    def reset(self) -> None:
        """Divide the samples that have not been trained among the current ranks."""
        placement = world.current().placement
        self._before = self._behind()
        self._counted, self._place, self._recorded = 0, 0, set()
        self.rank, self.num_replicas = placement.rank, placement.size
        left = intervals.difference(self._of_epoch(self._carried), self._before)
        self._remainder = Remainder(left, self._order, self.rank, self.num_replicas, self.pad == "carry")

    # Trained samples -------------------------------------------------------------------------------------------

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has trained its next samples. Short last batches count with their real size. All ranks
        call it.

        Args:
            batch_idx: Number of the batch in the loop over the loader, from 0. It matters after `break` only: a loop
                that restarts without reset() or set_epoch() gets the samples of the first one again. They count once,
                with a warning.
            batch_size: Number of samples of each rank, 0 or more.

        Raises:
            DataError: batch_size is negative.
        """
        if batch_size < 0:
            raise DataError(f"record_batch: batch_size must be 0 or more, got {batch_size}")
        start = self._place
        if self._is_iterated_anew and batch_idx * batch_size < start:
            start = batch_idx * batch_size
            _warn_of_repeats()
        self._is_iterated_anew = False
        self._place = min(start + batch_size, self._remainder.per_rank)
        self._counted = max(self._counted, min(self._place * self.num_replicas, self._remainder.assigned))
        if SESSION.sampler_recorder.is_needed and start < self._place:
            positions, everyone, repeats = self._remainder.trained(start, self._place)
            parts = parts_by_epoch(self._order, self._size, self.epoch, positions, everyone, repeats)
            SESSION.sampler_recorder.trained(self, parts)

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that this rank has trained these samples.

        A repeated call in one loop over the loader changes nothing. Each commit, and each sync, unites these records of
        all ranks: until then processed_num does not include other ranks' samples.

        Args:
            indices: Numbers of samples in the data set.

        Raises:
            DataError: With pad="carry": a carried sample is in the epoch twice, and its number does not tell the two
                apart.
        """
        if self.pad == "carry" or self._carried:
            raise DataError('record_indices() cannot be used with pad="carry"; use record_batch()')
        positions = self._positions(indices)
        self._is_by_index = True
        if self._is_iterated_anew:
            self._in_this_loop.clear()
            self._is_iterated_anew = False
        positions = positions[[position not in self._in_this_loop for position in positions.tolist()]]
        self._in_this_loop.update(positions.tolist())
        is_repeat = np.isin(positions, self._remainder.repeats())
        once = positions[~is_repeat]
        news = once[~intervals.contains(self._before, once)].tolist()
        if len(news) < len(once) or not self._recorded.isdisjoint(news):
            _warn_of_repeats()
        self._recorded.update(news, positions[is_repeat].tolist())
        self._news += news
        if SESSION.sampler_recorder.is_needed and positions.size:
            parts = parts_by_epoch(self._order, self._size, self.epoch, once, None, positions[is_repeat])
            SESSION.sampler_recorder.trained(self, parts)

    @property
    def has_news(self) -> bool:
        """True when record_indices() was called in this epoch: the ranks then have to exchange their records at a
        commit."""
        return self._is_by_index

    def take_news(self) -> list[int]:
        """Return the positions that this rank has recorded by record_indices() since the last call."""
        news, self._news = self._news, []
        return news

    def add_news(self, positions: Iterable[int]) -> None:
        """Add the result of take_news() on another rank. The samples that are handed out do not change before a reset.

        Args:
            positions: Positions in the order of the epoch.
        """
        self._recorded.update(positions)

    @property
    def processed_num(self) -> int:
        """Number of samples trained in this epoch by all ranks together, as far as this rank knows. At most the size
        of the epoch, carried samples included. A new value takes effect at the next reset()."""
        if self._counted and self._recorded:
            return intervals.measure(self._behind())
        return intervals.measure(self._before) + self._counted + len(self._recorded)

    @processed_num.setter
    def processed_num(self, count: int) -> None:
        before = self._first(count)
        self._forget()
        self._before = before

    @property
    def processed_indices(self) -> set[int]:
        """Set of the trained samples that processed_num counts. Builds the whole set."""
        return set(self._order(intervals.positions_of(self._behind())).tolist())

    # Saved state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and processed_num; after record_indices() processed_indices instead of the latter. The values on
        which their meaning depends are included."""
        state: dict[str, Any] = {"epoch": self.epoch}
        if self._carried:
            state["carried"] = [list(interval) for interval in self._carried]
        if self._is_by_index:
            state["processed_indices"] = self.processed_indices
        else:
            state["processed_num"] = self.processed_num
        return state | self._identity()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at a saved state, with the current ranks.

        Args:
            state_dict: A result of state_dict(). {"epoch", "processed_num"} and {"epoch", "processed_indices"}, as
                saved by Horovod's samplers, are accepted, too.

        Raises:
            DataError: The state has another data set, seed or order, or a position that does not exist. Nothing is
                changed.
        """
        if "epoch" not in state_dict or not state_dict.keys() & {"processed_num", "processed_indices"}:
            raise DataError(
                f"the state of a sampler has epoch, and processed_num or processed_indices; got {sorted(state_dict)}"
            )
        self._check_identity(state_dict)
        epoch, recorded = state_dict["epoch"], state_dict.get("processed_indices")
        carried = tuple((start, stop) for start, stop in state_dict.get("carried", ()))
        if recorded is None:
            before = self._first(state_dict["processed_num"], carried)
        else:
            before = intervals.of_positions(self._positions(recorded, epoch))
        self._begin(epoch, carried)
        self._before, self._is_by_index = before, recorded is not None
        self.reset()

    def merge(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the union of several ranks' states; changes nothing.

        Only states of the newest epoch count: the highest number of samples in them, or, where samples were recorded
        one by one, all samples that any of them names.

        Args:
            states: Results of state_dict().
        """
        newest = max(state["epoch"] for state in states)
        states = [state for state in states if state["epoch"] == newest]
        counted = max(state.get("processed_num", 0) for state in states)
        sets = [state["processed_indices"] for state in states if "processed_indices" in state]
        merged: dict[str, Any] = {"epoch": newest}
        if "carried" in states[0]:
            merged["carried"] = states[0]["carried"]
        if sets:
            order = self._order_of(newest)
            merged["processed_indices"] = set().union(order(np.arange(counted)).tolist(), *sets)
        else:
            merged["processed_num"] = counted
        return merged | self._identity()

    # Private ------------------------------------------------------------------------------------------------------

    def _behind(self) -> Intervals:
        """Return all positions that were trained in this epoch."""
        sets = [self._before]
        if self._counted:
            sets.append(self._remainder.behind(self._counted))
        if self._recorded:
            sets.append(intervals.of_positions(np.fromiter(self._recorded, dtype=np.int64)))
        return intervals.union(*sets) if len(sets) > 1 else self._before

    def _order_of(self, epoch: int) -> OrderFunction:
        # Built without shuffle too, since it checks the epoch. An empty data set has no order, and nothing to look up.
        permutation = Permutation(max(1, self._size), self.seed, epoch)
        return permutation if self.shuffle else _sequential

    def _with_earlier(self, order: OrderFunction, epoch: int) -> OrderFunction:
        """Return the order of an epoch, extended to positions below 0, which are in the epochs before it."""

        def look_up(positions: NDArray[np.int64]) -> NDArray[np.int64]:
            samples = np.empty_like(positions)
            back = positions // self._size
            for epochs in np.unique(back).tolist():
                chosen = back == epochs
                its_order = self._order_of(epoch + epochs) if epochs else order
                samples[chosen] = its_order(positions[chosen] - epochs * self._size)
            return samples

        return look_up

    def _first(self, count: int, carried: Intervals | None = None) -> Intervals:
        """Return the first `count` positions of the epoch, carried ones included."""
        carried = self._carried if carried is None else carried
        most = self._size + intervals.measure(carried)
        if not 0 <= count <= most:
            raise DataError(f"processed_num must be in 0..{most}, the size of the epoch, got {count}")
        return intervals.first(self._of_epoch(carried), count)

    def _of_epoch(self, carried: Intervals) -> Intervals:
        return intervals.union(carried, intervals.prefix(self._size))

    def _positions(self, indices: Iterable[int], epoch: int | None = None) -> NDArray[np.int64]:
        """Return the positions of these samples in the order of an epoch, by default the current one."""
        samples = np.fromiter(map(index, indices), dtype=np.int64)
        if samples.size and not 0 <= samples.min() <= samples.max() < self._size:
            raise DataError(f"expected samples in [0, {self._size}), got {samples.min()}..{samples.max()}")
        if not self.shuffle or not samples.size:
            return samples
        return Permutation(self._size, self.seed, self.epoch if epoch is None else epoch).inverse(samples)

    def _checked(self, samples: Iterator[int]) -> Iterator[int]:
        # In next(), not in iter(): a DataLoader cannot handle errors while it is being constructed.
        self._check_length(self.dataset, "its data set")
        reads = dataset_of_caller()
        if isinstance(reads, Sized) and reads is not self.dataset:
            self._check_length(reads, "the data set of the DataLoader that iterates it")
        yield from samples

    def _check_length(self, dataset: Sized, whose: str) -> None:
        if len(dataset) != self._size:
            raise DataError(
                f"ElasticSampler was made for {self._size} samples, but {whose} has {len(dataset)}: samples would be "
                f"left out, or samples that do not exist would be read. Create sampler and DataLoader for the same "
                f"data set, and create both again when its size has changed (for a part of it: torch.utils.data.Subset)"
            )

    def _identity(self) -> dict[str, int]:
        return {"version": FORMAT_VERSION, "seed": self.seed, "shuffle": int(self.shuffle), "size": self._size}

    def _check_identity(self, state: Mapping[str, Any]) -> None:
        for name, ours in self._identity().items():
            if state.get(name, ours) != ours:
                raise DataError(
                    f"the saved sampler has {name}={state[name]}, this one {ours}: its positions mean other "
                    f"samples here; use the values it was saved with, or restart the epoch with set_epoch()"
                )


def _sequential(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return positions


def _warn_of_repeats() -> None:
    warnings.warn(
        "ElasticSampler: samples of this epoch are recorded a second time. After `break` a new loop over the loader "
        "begins where the last one did: call sampler.reset() to continue with the samples that are left, or "
        "sampler.set_epoch() to skip them",
        stacklevel=3,
    )


# The data set that will be read at a sampler's indices: that of the DataLoader that iterates the sampler --------------

_DEPTH = 8  # the loader's iterator is 2 to 4 calls up: batch samplers may be wrapped


def dataset_of_caller() -> Any:
    """Return the data set of the DataLoader that has called, also indirectly; None when there is none.

    A DataLoader does not pass its data set to its sampler, and a sampler made for a smaller one trains a part of it
    without an error. So the callers are inspected, once for each loop over the loader: they are iterators of torch's
    private class (torch 2.13, torch/utils/data/dataloader.py, _BaseDataLoaderIter).
    """
    # Not from this frame on: its locals, once asked for, would contain itself, and such a cycle keeps the loader's
    # iterator until the garbage collector takes it apart, when its workers cannot be told to end any more: torch then
    # waits 5 s for each of them.
    for frame in islice(_callers(sys._getframe(1)), _DEPTH):
        if frame.f_code.co_varnames[:1] == ("self",):
            caller = frame.f_locals.get("self")
            if isinstance(caller, _BaseDataLoaderIter):
                return caller._dataset
    return None


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
