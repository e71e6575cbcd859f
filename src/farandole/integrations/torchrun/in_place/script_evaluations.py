"""The lengths of a script's DataLoaders for evaluation, which are those of the current world: with fewer workers, each
has more batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from farandole.integrations.torchrun.in_place.script_samplers import place, plain_sampler, shuffles
from farandole.training.collectives import world


class Evaluations:
    """Scripts ask for `len(loader)` before they iterate, and divide by it. So samplers are told the current world
    before the code behind the batches of an epoch runs, and a length that was asked for earlier gets a remark."""

    def __init__(self) -> None:
        self._lengths: WeakKeyDictionary[DataLoader[Any], tuple[int, int]] = WeakKeyDictionary()
        self._placed = (0, 0)  # the rank and the size that all samplers have been told

    def begin(self) -> None:
        """Note that the samplers are constructed in the current world."""
        here = world.current().placement
        self._placed = (here.rank, here.size)

    def follow(self, loaders: Iterable[DataLoader[Any]], is_of_training: Callable[[DataLoader[Any]], bool]) -> None:
        """Tell the samplers of all others than the training loader's the current rank and size, if these are others
        than before."""
        here = world.current().placement
        if (here.rank, here.size) == self._placed:
            return
        self._placed = (here.rank, here.size)
        for each in loaders:
            sampler = plain_sampler(each)
            if sampler is not None and not shuffles(each) and not is_of_training(each):
                place(sampler, here.rank, here.size)

    def look_at_part(self, loader: DataLoader[Any], rank: int, workers: int, line: str) -> None:
        """Say in the last line of the job if an evaluation begins whose samples the script has divided by itself, as
        `range(rank, n, workers)`, while its workers have changed. `rank`, `workers`: of the start."""
        here = world.current()
        own = getattr(loader.dataset, "indices", None) or getattr(loader.sampler, "indices", None)
        if workers < 2 or here.id.number < 2 or not isinstance(own, list | range) or len(own) < 2:
            return
        if own[0] == rank and all(later - each == workers for each, later in pairwise(own)):
            text = (
                f"the script has divided the samples of the DataLoader of {line} among its workers by itself: since "
                f"these have changed, it evaluates some samples never, or twice"
            )
            world.remark("evaluation", text)

    def note_length(self, loader: DataLoader[Any], length: int) -> None:
        """Note that the script has asked for len() of a DataLoader."""
        self._lengths[loader] = (length, world.current().placement.size)

    def compare(self, loader: DataLoader[Any], length: int, line: str) -> None:
        """Say in the last line of the job if an evaluation begins that has another number of batches than the script
        was told, with other workers: a mean that is computed with that number is wrong."""
        told, workers = self._lengths.get(loader, (length, 0))
        size = world.current().placement.size
        if told != length and workers != size:
            text = (
                f"with {size} workers an evaluation has {length} batches for each, and not {told} as with {workers}, "
                f"when the script asked for len() of the DataLoader of {line}: a mean that it computes with that would "
                f"be wrong"
            )
            world.remark("evaluation", text)
