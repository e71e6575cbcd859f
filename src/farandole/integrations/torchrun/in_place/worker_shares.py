"""The shares that workers have of the batches of a script's DataLoaders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from farandole.errors import FarandoleError
from farandole.integrations.torchrun.in_place.script_collectives import echo_world
from farandole.integrations.torchrun.in_place.script_loader import ScriptLoader
from farandole.integrations.torchrun.in_place.script_samplers import (
    SameForAll,
    listed as listed_batches,
    place,
    plain_sampler,
)
from farandole.integrations.torchrun.in_place.torchs_loaders import torchs_iterator, with_batches
from farandole.training.collectives import world
from farandole.training.data.listed_batches import ListedBatches


class Shares:
    """Those of one worker.

    Args:
        workers: The number of workers at the start of the job.

    Attributes:
        at_start: Rank and size that the script has read at its start.
        has_begun: The training has: before, each loader has the share of the start.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.at_start = (0, 1)
        self.has_begun = False

    def list(self, theirs: TorchDataLoader[Any]) -> tuple[ListedBatches | None, str]:
        """Return the batches of the epoch that the script begins, or the reason why there are none."""
        try:
            return listed_batches(theirs, self._workers, self.as_rank), ""
        except FarandoleError as error:
            return None, str(error)

    @contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Return a context in which this process has a rank of the start."""
        here = world.current()
        world.enter(echo_world(here, rank, self._workers))
        try:
            yield
        finally:
            world.enter(here)

    def in_current_world(self, theirs: TorchDataLoader[Any]) -> TorchDataLoader[Any]:
        """Return a DataLoader with this worker's share of the batches of the script's in the current world: itself,
        where its sampler can be told."""
        if not self.has_begun:
            return theirs
        here = world.current().placement
        plain = plain_sampler(theirs)
        if plain is not None:
            place(plain, here.rank, here.size)
            return theirs
        if (here.rank, here.size) == self.at_start:
            return theirs
        try:
            listed = listed_batches(theirs, self._workers, self.as_rank)
        except SameForAll:
            return theirs
        return with_batches(theirs, listed.rest(0, here.rank, here.size))

    def rest(self, loader: ScriptLoader, position: int) -> Iterator[Any]:
        """Return torch's iterator over the rest of an epoch."""
        here = world.current().placement
        rest = with_batches(loader.theirs, loader.rest(position, here.rank, here.size))
        with loader.draws_kept():  # torch has drawn at the beginning of the epoch
            return torchs_iterator(rest)
