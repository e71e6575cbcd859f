"""What a loader asks at each boundary. The elastic run loop answers; without one, nobody has to be asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class LoaderHooks(Protocol):
    """Where workers may regroup: between two batches, and between two epochs."""

    def reach(self) -> None:
        """A batch is about to be handed out. May regroup, and call set_world() and load_state_dict()."""
        ...

    def rehearses(self) -> bool:
        """Whether the batch that is handed out next is a rehearsal's: nothing comes of it, and it comes again."""
        ...

    def leave_batches(self) -> bool:
        """The batches of the epoch are through, and the code behind them follows. False: there was a regroup instead,
        and the loader's epoch and cursor are what the workers agreed on."""
        ...

    def reach_epoch_end(self) -> bool:
        """This worker is through with an epoch. True: so are all, and the epoch's number advances. False:
        there was a regroup instead, and the loader's epoch and cursor are what the workers agreed on."""
        ...

    def begin_epoch(self) -> None:
        """The epoch's number has advanced."""
        ...

    def once(self, epoch: int, call: int, function: Callable[[], object]) -> None:
        """Call the function, the `call`-th one of this epoch, when all workers have come to it."""
        ...


class NoLoaderHooks:
    """The boundary of a worker without an elastic run loop."""

    def reach(self) -> None:
        pass

    def rehearses(self) -> bool:
        return False

    def leave_batches(self) -> bool:
        return True

    def reach_epoch_end(self) -> bool:
        return True

    def begin_epoch(self) -> None:
        pass

    def once(self, epoch: int, call: int, function: Callable[[], object]) -> None:
        function()
