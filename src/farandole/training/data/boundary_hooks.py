"""The hooks that a loader calls at each boundary.

The elastic run loop implements them; without one, they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from farandole.errors import ConfigError
from farandole.training.state.batch import Batch


class LoaderHooks(Protocol):
    """The calls of a loader at its boundaries, where workers may regroup: before each batch, and at the end of an
    epoch."""

    def reach_boundary(self) -> None:
        """Handle that a batch is about to be handed out. May regroup, and call set_world() and load_state_dict()."""
        ...

    def rehearses(self) -> bool:
        """Return whether the next batch is a rehearsal's: it has no effect, and comes again."""
        ...

    def part_on_trial(self) -> tuple[int, int] | None:
        """Return the part of the first rank's samples of the global batch that a rehearsal is to have, and the number
        of parts; None: its batch is the worker's own."""
        ...

    def begin_shard(self, batch: Batch) -> None:
        """Handle that a batch of strict mode is handed out: seed its random numbers."""
        ...

    def leave_batches(self) -> bool:
        """Handle the end of the epoch's batches, before the code after them. False: there was a regroup instead, and
        the loader's epoch and cursor are those on which the workers agreed."""
        ...

    def reach_epoch_end(self) -> bool:
        """Handle this worker's end of an epoch. True: all workers have ended it, and the epoch's number advances.
        False: there was a regroup instead, and the loader's epoch and cursor are those on which the workers agreed."""
        ...

    def begin_epoch(self) -> None:
        """Handle that the epoch's number has advanced."""
        ...

    def once(self, epoch: int, call: int, function: Callable[[], object]) -> None:
        """Call the function, the `call`-th one of this epoch, when all workers have arrived at it."""
        ...


class NoLoaderHooks:
    """The hooks of a worker without an elastic run loop."""

    def reach_boundary(self) -> None:
        pass

    def rehearses(self) -> bool:
        return False

    def part_on_trial(self) -> tuple[int, int] | None:
        return None

    def begin_shard(self, batch: Batch) -> None:
        pass

    def leave_batches(self) -> bool:
        return True

    def reach_epoch_end(self) -> bool:
        return True

    def begin_epoch(self) -> None:
        pass

    def once(self, epoch: int, call: int, function: Callable[[], object]) -> None:
        function()


def refuse_sync_batch_norm(modules: Iterable[torch.nn.Module]) -> None:
    """Raise ConfigError for layers of which each forward pass waits for the other workers: these may run the loop body
    for a global batch another number of times (`ElasticLoader.has_own_bodies`)."""
    for module in modules:
        if any(type(each).__name__ == "SyncBatchNorm" for each in module.modules()):
            raise ConfigError(
                "balance with several loop bodies for a global batch, and SyncBatchNorm: workers would run its forward "
                "pass a different number of times, and wait for each other; leave balance, or max_local_batch and "
                "micro_batch_size, out, or use BatchNorm"
            )
