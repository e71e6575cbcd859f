"""ElasticSampler: Horovod's way to divide a data set among workers that come and go, for any torch DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from farandole.collectives import world
from farandole.data import intervals
from farandole.data.intervals import Intervals
from farandole.data.permutation import FORMAT_VERSION, Permutation
from farandole.data.remainder import Order, Remainder
from farandole.errors import DataError


class SizedDataset(Protocol):
    """A data set with a length, which must not change."""

    def __len__(self) -> int: ...


class ElasticSampler(Sampler[int]):
    """Deals an epoch's samples to the ranks in turn, and deals what is left anew when the ranks have changed.

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

    What is recorded shows at once in processed_num; what is handed out changes with reset(), set_epoch() and
    load_state_dict() only, so that iterating again gives the same samples. A sync of the state resets, on all
    workers. All of this takes constant time and memory, whatever the size of the data set, except where samples
    were recorded one by one, by record_indices().

    When the number of ranks does not divide that of the samples which are left, some of these are handed out twice
    at the end of the epoch: fewer than there are ranks. (elastic.DataLoader hands out each sample once.)

    Raises NotInitialized before init(), DataError for a seed or epoch below 0.
    """

    def __init__(self, dataset: SizedDataset, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.rank, self.num_replicas = 0, 1
        self._size = len(dataset)
        self._before: Intervals = ()  # positions that were trained when the rest was divided
        self._counted = 0  # how many of the divided ones are trained by now, on all ranks
        self._recorded: set[int] = set()  # positions that this rank has recorded since, besides
        self._is_by_index = False  # whether samples of this epoch were recorded one by one
        self._start_epoch(0)
        self.reset()

    # Which samples --------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        return iter(self._remainder)

    def __len__(self) -> int:
        """Samples of this rank, and of each other one, as of the last reset."""
        return self._remainder.share

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
        """Begin this epoch: nothing of it has been trained."""
        self._start_epoch(epoch)
        self.reset()

    def reset(self) -> None:
        """Divide what has not been trained among the ranks that there are now."""
        placement = world.current().placement
        self._before = self._behind()
        self._counted, self._recorded = 0, set()
        self.rank, self.num_replicas = placement.rank, placement.size
        left = intervals.gaps(self._before, self._size)
        self._remainder = Remainder(left, self._order, self.rank, self.num_replicas)

    # What was trained -----------------------------------------------------------------------------------------

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Each rank has trained its next batch_size samples, or what was left of them: short last batches count
        as what they are. To be called on all ranks; batch_idx is Horovod's and does not matter."""
        self._counted = min(self._counted + batch_size * self.num_replicas, self._remainder.count)

    def record_indices(self, indices: Iterable[int]) -> None:
        """This rank has trained these samples. A sync unites what the ranks have recorded so."""
        positions = self._positions(indices)
        self._is_by_index = True
        self._recorded.update(positions[~intervals.contains(self._before, positions)].tolist())

    @property
    def processed_num(self) -> int:
        """Samples trained in this epoch by all ranks together, as far as this rank knows; never more than there
        are. Setting it is for the next reset()."""
        if self._counted and self._recorded:
            return intervals.measure(self._behind())
        return intervals.measure(self._before) + self._counted + len(self._recorded)

    @processed_num.setter
    def processed_num(self, count: int) -> None:
        self._forget()
        self._before = intervals.prefix(self._checked_count(count))

    @property
    def processed_indices(self) -> set[int]:
        """The samples behind processed_num. Builds the whole set."""
        return set(self._order(intervals.positions_of(self._behind())).tolist())

    # Saved state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """epoch and processed_num; after record_indices() processed_indices instead of the latter. Beside them
        what their meaning hangs on."""
        state: dict[str, Any] = {"epoch": self.epoch}
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
        self._check_identity(state_dict)
        epoch, recorded = state_dict["epoch"], state_dict.get("processed_indices")
        order = self._order_of(epoch)
        if recorded is None:
            before = intervals.prefix(self._checked_count(state_dict["processed_num"]))
        else:
            before = intervals.of_positions(self._positions(recorded, epoch))
        self.epoch, self._order = epoch, order
        self._forget()
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
        if sets:
            order = self._order_of(newest)
            merged["processed_indices"] = set().union(order(np.arange(counted)).tolist(), *sets)
        else:
            merged["processed_num"] = counted
        return merged | self._identity()

    # Inside -------------------------------------------------------------------------------------------------------

    def _start_epoch(self, epoch: int) -> None:
        self._order = self._order_of(epoch)
        self.epoch = epoch
        self._forget()

    def _forget(self) -> None:
        self._before, self._counted, self._recorded, self._is_by_index = (), 0, set(), False

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

    def _positions(self, indices: Iterable[int], epoch: int | None = None) -> NDArray[np.int64]:
        """Where these samples stand in the order of an epoch, this one unless given."""
        samples = np.fromiter(map(index, indices), dtype=np.int64)
        if samples.size and not 0 <= samples.min() <= samples.max() < self._size:
            raise DataError(f"expected samples in [0, {self._size}), got {samples.min()}..{samples.max()}")
        if not self.shuffle or not samples.size:
            return samples
        return Permutation(self._size, self.seed, self.epoch if epoch is None else epoch).inverse(samples)

    def _checked_count(self, count: int) -> int:
        if not 0 <= count <= self._size:
            raise DataError(f"processed_num must be in 0..{self._size}, the size of the data set, got {count}")
        return count

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
