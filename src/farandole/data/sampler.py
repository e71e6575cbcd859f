"""ElasticSampler: Horovod's way to divide a data set among workers that come and go, for any torch DataLoader."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from operator import index
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from farandole.collectives import world
from farandole.data import intervals
from farandole.data.calling_loader import dataset_of_caller
from farandole.data.intervals import Intervals
from farandole.data.permutation import FORMAT_VERSION, Permutation
from farandole.data.remainder import Order, Remainder
from farandole.data.sampler_parts import parts_by_epoch
from farandole.errors import DataError
from farandole.state import recording


class SizedDataset(Protocol):
    """A data set with a length, which must not change."""

    def __len__(self) -> int: ...


class ElasticSampler(Sampler[int]):
    """Divides an epoch's samples to the ranks in turn, and divides the rest again when the ranks have changed.

        sampler = ElasticSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
        state = TorchState(model, optimizer, sampler=sampler)
        ...
        for batch_idx, batch in enumerate(loader):
            ...                                     # one optimizer step
            sampler.record_batch(batch_idx, 32)
        sampler.set_epoch(epoch + 1)                # at the end of an epoch, not at its start

    dataset  its length is read once
    shuffle  a new order each epoch; without it always 0, 1, 2, ...
    seed     of that order, 0 or more; the same on all ranks
    pad      what becomes of samples at the end of an epoch that the number of ranks does not divide
        True     the first of what is left are handed out again, fewer than there are ranks
        "carry"  they begin the next epoch, so that nothing is repeated and nothing lost. Fewer than there are ranks;
                 those of the last epoch stay untrained. Needs record_batch()

    What is recorded shows at once in processed_num; what is handed out changes with reset(), set_epoch() and
    load_state_dict() only, so that iterating again gives the same samples. A sync of the state resets, on all
    workers. All of this takes constant time and memory, whatever the size of the data set, except where samples
    were recorded one by one, by record_indices().

    In torchdata's StatefulDataLoader, too; but keep the state of the sampler, not of that loader, which would go on at
    what was recorded when it fetched ahead, and repeat samples.

    Raises NotInitialized before init(), DataError for a seed or epoch below 0, or another pad.
    """

    def __init__(
        self, dataset: SizedDataset, shuffle: bool = True, seed: int = 0, *, pad: bool | Literal["carry"] = True
    ) -> None:
        if pad is not True and pad != "carry":
            raise DataError(
                f'pad must be True or "carry", got {pad!r}: without either, some ranks would make a step more than '
                f"others, or samples would be lost"
            )
        self.dataset, self.shuffle, self.seed, self.pad = dataset, shuffle, seed, pad
        self.rank, self.num_replicas = 0, 1
        self._size = len(dataset)
        self._carried: Intervals = ()  # positions of earlier epochs that begin this one: -1 is the last of the last
        self._before: Intervals = ()  # positions that were trained when the rest was divided
        self._counted = 0  # how many of the divided ones are trained by now, on all ranks
        self._place = 0  # where record_batch() is in this rank's local batch
        self._is_iterated_anew = False  # since the last time that something was recorded
        self._news: list[int] = []  # positions recorded here one by one, that no other rank has heard of
        self._in_this_loop: set[int] = set()  # of the recorded ones, those of the loop over the loader that is on
        self._recorded: set[int] = set()  # positions that this rank has recorded since, besides
        self._is_by_index = False  # whether samples of this epoch were recorded one by one
        self._begin(0)
        self.reset()

    # Which samples --------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """The first next() raises DataError where the data set has another length than when the sampler was made, or
        where a DataLoader of another data set iterates."""
        self._is_iterated_anew = True
        return self._checked(iter(self._remainder))

    def __len__(self) -> int:
        """Samples of this rank, and of each other one, as of the last reset."""
        return self._remainder.per_rank

    @property
    def samples(self) -> int:
        """Samples of the data set, as many as it had when the sampler was made."""
        return self._size

    @property
    def num_samples(self) -> int:
        """The same as len()."""
        return len(self)

    @property
    def total_size(self) -> int:
        """Samples of all ranks together as of the last reset, those that are handed out twice counted twice."""
        return len(self) * self.num_replicas

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """This rank's samples in its batch number batch_idx since the last reset."""
        return self._remainder.samples(batch_idx * batch_size, (batch_idx + 1) * batch_size)

    @property
    def remaining_indices(self) -> list[int]:
        """All ranks' samples that were left at the last reset, in order. Builds the whole list."""
        indices: list[int] = self._order(intervals.positions_of(self._remainder.left)).tolist()
        return indices

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch: nothing of it has been trained. With pad="carry" it begins with what the epoch before
        could not divide, if anything of that one was trained; not when the epochs go back."""
        if epoch != self.epoch and recording.hears_samplers():
            trained = sum(max(0, stop - max(0, start)) for start, stop in self._behind())
            recording.left(self, self.epoch, None if self._is_by_index else self._size - trained)
        carried = self._carried if epoch == self.epoch else ()
        if epoch > self.epoch and (self.processed_num or not self._remainder.per_rank):
            carried = intervals.shift(self._remainder.carried, (self.epoch - epoch) * self._size)
        self._begin(epoch, carried)
        self.reset()

    def reset(self) -> None:
        """Divide what has not been trained among the ranks that there are now."""
        placement = world.current().placement
        self._before = self._behind()
        self._counted, self._place, self._recorded = 0, 0, set()
        self.rank, self.num_replicas = placement.rank, placement.size
        left = intervals.difference(self._all, self._before)
        self._remainder = Remainder(left, self._order, self.rank, self.num_replicas, self.pad == "carry")

    # What was trained -----------------------------------------------------------------------------------------

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Each rank has trained its next batch_size samples, or what was left of them: short last batches count
        as what they are. To be called on all ranks.

        batch_idx  which batch of the loop over the loader this is, from 0. It matters after `break` only: a loop
                   that begins anew without reset() or set_epoch() gets the samples of the first one again. They
                   count once, with a warning.
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
        if recording.hears_samplers() and start < self._place:
            positions, everyone, repeats = self._remainder.trained(start, self._place)
            recording.trained(self, parts_by_epoch(self._order, self._size, self.epoch, positions, everyone, repeats))

    def record_indices(self, indices: Iterable[int]) -> None:
        """This rank has trained these samples; to say it twice in one loop over the loader changes nothing. Each
        commit, and each sync, unites what the ranks have recorded so: processed_num does not know of others before.

        Raises DataError with pad="carry": a sample that was carried is in the epoch twice, and its number does not say
        which of the two was trained.
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
        if recording.hears_samplers() and positions.size:
            parts = parts_by_epoch(self._order, self._size, self.epoch, once, None, positions[is_repeat])
            recording.trained(self, parts)

    @property
    def has_news(self) -> bool:
        """Whether record_indices() was called in this epoch: then the ranks have to tell each other at a commit."""
        return self._is_by_index

    def tell_news(self) -> list[int]:
        """Positions that this rank has recorded by record_indices() since the last call."""
        news, self._news = self._news, []
        return news

    def hear_news(self, positions: Iterable[int]) -> None:
        """What tell_news() has returned on another rank. Changes nothing that is handed out before a reset."""
        self._recorded.update(positions)

    @property
    def processed_num(self) -> int:
        """Samples trained in this epoch by all ranks together, as far as this rank knows; never more than there
        are, those that were carried into it among them. Setting it is for the next reset()."""
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
        """The samples behind processed_num. Builds the whole set."""
        return set(self._order(intervals.positions_of(self._behind())).tolist())

    # Saved state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """epoch and processed_num; after record_indices() processed_indices instead of the latter. Beside them
        what their meaning hangs on."""
        state: dict[str, Any] = {"epoch": self.epoch}
        if self._carried:
            state["carried"] = [list(interval) for interval in self._carried]
        if self._is_by_index:
            state["processed_indices"] = self.processed_indices
        else:
            state["processed_num"] = self.processed_num
        return state | self._identity()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state says, with the ranks there are now. Takes {"epoch", "processed_num"} and
        {"epoch", "processed_indices"} as Horovod's samplers saved them, too.

        Raises DataError for the state of another data set, seed or order, or a place that does not exist; the
        sampler is as it was then.
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
        """What several ranks' states say together; changes nothing. Those of the newest epoch count: the highest
        number of them, or, where samples were recorded one by one, all that any of them names."""
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

    # Inside -------------------------------------------------------------------------------------------------------

    def _begin(self, epoch: int, carried: Intervals = ()) -> None:
        order = self._order_of(epoch)
        self._order = self._with_earlier(order, epoch) if carried else order
        self.epoch, self._carried = epoch, carried
        self._forget()

    @property
    def _all(self) -> Intervals:
        """The positions of the epoch; with what was carried into it."""
        return intervals.union(self._carried, intervals.prefix(self._size))

    def _forget(self) -> None:
        self._before, self._counted, self._place, self._recorded, self._is_by_index = (), 0, 0, set(), False
        self._in_this_loop.clear()
        self._news.clear()

    def _behind(self) -> Intervals:
        """All positions that were trained in this epoch."""
        sets = [self._before]
        if self._counted:
            sets.append(self._remainder.behind(self._counted))
        if self._recorded:
            sets.append(intervals.of_positions(np.fromiter(self._recorded, dtype=np.int64)))
        return intervals.union(*sets) if len(sets) > 1 else self._before

    def _order_of(self, epoch: int) -> Order:
        # Built without shuffle too: it checks the epoch. An empty data set has no order, and nothing to look up.
        permutation = Permutation(max(1, self._size), self.seed, epoch)
        return permutation if self.shuffle else _sequential

    def _with_earlier(self, order: Order, epoch: int) -> Order:
        """The order of an epoch that also knows positions below 0, which are in the epochs before it."""

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
        """The first `count` positions of the epoch, with what was carried into it."""
        carried = self._carried if carried is None else carried
        most = self._size + intervals.measure(carried)
        if not 0 <= count <= most:
            raise DataError(f"processed_num must be in 0..{most}, the size of the epoch, got {count}")
        return intervals.first(intervals.union(carried, intervals.prefix(self._size)), count)

    def _positions(self, indices: Iterable[int], epoch: int | None = None) -> NDArray[np.int64]:
        """Where these samples stand in the order of an epoch, this one unless given."""
        samples = np.fromiter(map(index, indices), dtype=np.int64)
        if samples.size and not 0 <= samples.min() <= samples.max() < self._size:
            raise DataError(f"expected samples in [0, {self._size}), got {samples.min()}..{samples.max()}")
        if not self.shuffle or not samples.size:
            return samples
        return Permutation(self._size, self.seed, self.epoch if epoch is None else epoch).inverse(samples)

    def _checked(self, samples: Iterator[int]) -> Iterator[int]:
        # In next(), not in iter(): a DataLoader is not ready for errors while it is being constructed.
        self._check_length(self.dataset, "its data set")
        reads = dataset_of_caller()
        if isinstance(reads, Sized) and reads is not self.dataset:
            self._check_length(reads, "the data set of the DataLoader that iterates it")
        yield from samples

    def _check_length(self, dataset: Sized, whose: str) -> None:
        if len(dataset) != self._size:
            raise DataError(
                f"ElasticSampler was made for {self._size} samples, but {whose} has {len(dataset)}: samples would be "
                f"left out, or asked for that do not exist. Make sampler and DataLoader of the same data set, and both "
                f"anew when its size has changed (for a part of it: torch.utils.data.Subset)"
            )

    def _identity(self) -> dict[str, int]:
        return {
            "version": FORMAT_VERSION,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "size": self._size,
        }

    def _check_identity(self, state: Mapping[str, Any]) -> None:
        for name, ours in self._identity().items():
            if state.get(name, ours) != ours:
                raise DataError(
                    f"the saved sampler has {name}={state[name]}, this one {ours}: the samples that were trained are "
                    f"others here; go on with the values it was saved with, or begin the epoch anew with set_epoch()"
                )


def _sequential(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    return positions


def _warn_of_repeats() -> None:
    warnings.warn(
        "ElasticSampler: samples of this epoch are recorded a second time. After `break` a new loop over the loader "
        "begins where the last one did: call sampler.reset() to go on with what is left, or sampler.set_epoch() to "
        "leave it out",
        stacklevel=3,
    )
