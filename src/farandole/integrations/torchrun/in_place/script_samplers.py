"""The samplers of a script's DataLoader: the batches of an epoch that they list for each worker of the job's start.

Each worker lists the batches of all of them: of copies of the samplers, which are told another rank. A plain
DistributedSampler is computed instead. Whether a sampler says the same on all workers shows when they compare the lists
(training.py).
"""

from __future__ import annotations

import copy
import operator
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from farandole.errors import ConfigError
from farandole.training.data.augmentation import DrawWatch
from farandole.training.data.fetching import size_of
from farandole.training.data.listed_batches import ListedBatches, of_lists, refuse_foreign

NUMBERED = "_farandole_numbered"
"""Attribute of a sampler: the script has called its set_epoch()."""

AsRank: TypeAlias = Callable[[int], AbstractContextManager[None]]
"""Returns a context in which this process has another rank, in a world of the size of the start."""

_MOST_OBJECTS = 16
_MOST_ROUNDS = 16
_RANK = re.compile(
    r"_?(global_|dp_|data_parallel_)?(rank|rank_id|process_index|replica_id|replica|shard_id|shard_index)"
)
_DATA = frozenset({"dataset", "data_source", "data"})
_COPIED = (list, dict, set, np.ndarray, torch.Tensor, torch.Generator, random.Random, np.random.RandomState)
_COPIED_TOO = (np.random.Generator,)


class SameForAll(ConfigError):
    """The samplers give all workers the same samples, as far as it shows."""


# What a DataLoader has ------------------------------------------------------------------------------------------------


def samplers_of(theirs: DataLoader[Any]) -> list[Any]:
    """Return the samplers of a DataLoader, outermost first: its batch sampler, and those inside it."""
    outermost = theirs.batch_sampler if theirs.batch_sampler is not None else theirs.sampler
    found = [outermost]
    for each in found:
        inner = [value for value in getattr(each, "__dict__", {}).values() if _is_sampler(value)]
        found += [value for value in inner if not any(value is other for other in found)]
        if len(found) > _MOST_OBJECTS:
            break
    return found[:_MOST_OBJECTS]


def _is_sampler(value: Any) -> bool:
    if isinstance(value, Sampler):
        return True
    kind = type(value)
    is_own = not kind.__module__.startswith(("builtins", "torch", "numpy", "collections", "farandole."))
    return is_own and hasattr(kind, "__iter__") and hasattr(value, "__dict__") and not isinstance(value, Dataset)


def may_be_divided(theirs: DataLoader[Any]) -> bool:
    """Return whether the samplers may divide the samples among workers: they are not all of torch's other ones."""
    return any(
        isinstance(each, DistributedSampler) or not type(each).__module__.startswith(("torch.", "farandole."))
        for each in samplers_of(theirs)
    )


def shuffles(theirs: DataLoader[Any]) -> bool:
    """Return whether the samples come in random order, as far as the samplers say it."""
    said = [getattr(each, "shuffle", None) for each in samplers_of(theirs)]
    return any(said) or all(each is None for each in said)


def names_of(theirs: DataLoader[Any]) -> str:
    """Return the names of the samplers, for people: outermost first, without torch's BatchSampler."""
    kinds = [type(each).__name__ for each in samplers_of(theirs) if type(each) is not BatchSampler]
    return " of ".join(kinds) or BatchSampler.__name__


def numbered_sampler(theirs: DataLoader[Any]) -> Any:
    """Return the sampler that has the number of the epoch; None: no one has."""
    own = [each for each in samplers_of(theirs) if type(getattr(each, "epoch", None)) is int]
    return next((each for each in own if hasattr(each, "set_epoch")), own[0] if own else None)


def plain_sampler(theirs: DataLoader[Any]) -> DistributedSampler[Any] | None:
    """Return the DistributedSampler of a DataLoader that has batches of torch's BatchSampler of its samples."""
    batches = theirs.batch_sampler
    if type(batches) is not BatchSampler or not isinstance(batches.sampler, DistributedSampler):
        return None
    return batches.sampler if type(batches.sampler).__iter__ is DistributedSampler.__iter__ else None


def refuse_undivided(theirs: DataLoader[Any]) -> None:
    """Raise ConfigError, with the reason, for a DataLoader whose samples no sampler divides among workers."""
    if isinstance(theirs.dataset, IterableDataset):
        raise ConfigError(
            f"its DataLoader has {type(theirs.dataset).__name__}, an IterableDataset, whose samples cannot be read by "
            f"index"
        )
    if not may_be_divided(theirs):
        name = type(samplers_of(theirs)[-1]).__name__
        raise ConfigError(
            f"its DataLoader has a {name}, and no DistributedSampler, which would tell how the samples are divided"
        )
    if theirs.batch_sampler is None:
        raise ConfigError("its DataLoader has batch_size=None, so that its data set makes the batches")


# The batches of an epoch ----------------------------------------------------------------------------------------------


def listed(theirs: DataLoader[Any], workers: int, as_rank: AsRank) -> ListedBatches:
    """Return the batches of all workers of the start in the epoch that begins now. The samplers stay as they are.

    Args:
        theirs: A DataLoader of the script.
        workers: The number of workers at the start.
        as_rank: Gives this process another rank.

    Raises:
        ConfigError: The batches cannot be listed.
    """
    refuse_undivided(theirs)
    samples = size_of(theirs.dataset)  # type: ignore[arg-type]
    plain = plain_sampler(theirs)
    if plain is not None:
        return _of_distributed(theirs.batch_sampler, plain, workers, samples)
    name = f"its sampler {names_of(theirs)}"
    watch = DrawWatch()
    try:
        by_rank = [_of_rank(theirs, rank, samples, as_rank) for rank in range(workers)]
        again = _of_rank(theirs, 0, samples, as_rank)
    except ConfigError as error:
        raise ConfigError(f"{name} {error}") from error
    finally:
        has_drawn = watch.undo()
    if has_drawn:
        raise ConfigError(
            f"{name} draws from the random numbers of its process, which differ between workers: it needs a generator "
            f"of its own, seeded with the number of the epoch"
        )
    if again != by_rank[0]:
        raise ConfigError(f"{name} lists other batches each time it is asked")
    if workers > 1 and all(each == by_rank[0] for each in by_rank):
        raise SameForAll(f"{name} gives all workers the same samples, or does not keep its rank in an attribute")
    try:
        return of_lists(by_rank, samples)
    except ConfigError as error:
        raise ConfigError(f"{name} {error}") from error


def advance(theirs: DataLoader[Any]) -> None:
    """Let the samplers list the epoch once, as torch's iterator does: they may count."""
    if plain_sampler(theirs) is None:
        for _ in theirs.batch_sampler:  # type: ignore[union-attr]
            pass


def _of_distributed(batches: Any, sampler: DistributedSampler[Any], workers: int, samples: int) -> ListedBatches:
    """Return what DistributedSampler.__iter__ of torch 2.13 (torch/utils/data/distributed.py) gives each rank."""
    count = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.shuffle:
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + sampler.epoch)
        order = torch.randperm(count, generator=generator, device="cpu").numpy()
    else:
        order = np.arange(count)
    placed = copy.copy(sampler)
    place(placed, sampler.rank, sampler.num_replicas)
    if placed.num_samples != sampler.num_samples:
        raise ConfigError(f"its DistributedSampler was made when its data set had another length than {count}")
    of_each = count // workers if sampler.drop_last else -(-count // workers)
    size = batches.batch_size
    left = of_each % size
    sizes = [size] * (of_each // size) + ([left] if left and not batches.drop_last else [])
    if not sizes:
        raise ConfigError(f"its data set of {samples} samples does not fill one batch of all workers")
    by_rank = np.resize(order, of_each * workers).reshape(of_each, workers).T[:, : sum(sizes)]
    try:
        refuse_foreign(by_rank, samples)
    except ConfigError as error:
        raise ConfigError(f"its sampler {type(sampler).__name__} {error}") from error
    return ListedBatches(np.ascontiguousarray(by_rank), np.array(sizes, dtype=np.int64))


def _of_rank(theirs: DataLoader[Any], rank: int, samples: int, as_rank: AsRank) -> list[list[int]]:
    """Return the batches that a copy of the samplers lists as this rank."""
    most = _MOST_ROUNDS * max(samples, 1)
    batches: list[list[int]] = []
    with as_rank(rank):
        for batch in _copied(theirs, rank):
            try:
                batches.append([operator.index(each) for each in batch])
            except TypeError as error:
                raise ConfigError("has batches of other things than numbers of samples") from error
            most -= max(len(batches[-1]), 1)
            if most < 0:
                raise ConfigError(f"does not end: it lists more than {_MOST_ROUNDS} times the {samples} samples")
    return batches


def _copied(theirs: DataLoader[Any], rank: int) -> Any:
    """Return a copy of the batch sampler, and of the samplers inside it, with another rank."""
    originals = samplers_of(theirs)
    memo: dict[int, Any] = {}
    try:
        copies = [copy.copy(each) for each in originals]
        for original, each in zip(originals, copies, strict=True):
            for name, value in list(getattr(original, "__dict__", {}).items()):
                changed = _changed(name, value, rank, theirs, originals, copies, memo)
                if changed is not value:
                    each.__dict__[name] = changed
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"cannot be copied ({type(error).__name__}: {error})") from error
    return copies[0]


def _changed(
    name: str,
    value: Any,
    rank: int,
    theirs: DataLoader[Any],
    originals: list[Any],
    copies: list[Any],
    memo: dict[int, Any],
) -> Any:
    """Return the value of an attribute in the copy of its sampler."""
    if _RANK.fullmatch(name) and type(value) is int:
        return rank
    place = next((place for place, each in enumerate(originals) if each is value), None)
    if place is not None:
        return copies[place]
    if isinstance(value, Iterator):
        raise ConfigError(f"keeps an iterator ({name}), which cannot be copied")
    if value is theirs.dataset or name in _DATA or not isinstance(value, _COPIED + _COPIED_TOO):
        return value
    return copy.deepcopy(value, memo)


# The share of the current world ---------------------------------------------------------------------------------------


def place(sampler: DistributedSampler[Any], rank: int, workers: int) -> None:
    """Give a DistributedSampler the current rank and size: it keeps those of its construction (torch 2.13,
    torch/utils/data/distributed.py, DistributedSampler.__init__)."""
    samples = len(sampler.dataset)  # type: ignore[arg-type]
    sampler.rank, sampler.num_replicas = rank, workers
    is_cut = sampler.drop_last and samples % workers
    sampler.num_samples = samples // workers if is_cut else -(-samples // workers)
    sampler.total_size = sampler.num_samples * workers
