"""State and ObjectState: what a job must not lose, under the commit rule. The base of TorchState and of users' own."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from farandole.errors import HostsUpdatedInterrupt
from farandole.membership import Progress
from farandole.state import loop_hooks
from farandole.state.deep_copy import deep_copy
from farandole.state.host_updates import HostUpdateResult
from farandole.state.save_once import save_once


class State:
    """What `elastic.run` needs of a state. Derive from it and give it save(), restore() and sync().

    bcast_object  gives every rank rank 0's value
    get_rank      this worker's rank

    Rank 0 is never a worker that has just joined, so a sync() that broadcasts from rank 0 keeps what was committed.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], object]] = []

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A script knows which values it has given; they are attributes."""

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Functions to call when the world has changed, e.g. to scale the learning rate by the new size().

        They run on every worker, in order, before the state is synchronized: what they change in the state of the
        source rank is then everybody's. On a worker that joins too: its world was itself alone until then.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The world has changed. Called by `elastic.run` before sync(); calls reset() and the callbacks."""
        self._host_messages = queue.Queue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Hosts came or will go; from any thread. `timestamp`: seconds since 1970, `update_res`: HostUpdateResult."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """save(), then check_host_updates(). All ranks call it at the same place.

        After a fault, training goes on from the newest commit. Saving comes first, so ranks differ by at most one.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on all ranks alike, when workers come or go and all ranks know of it.

        In an elastic function of a job with other workers this is a small collective, which may raise
        PeerLost or GenerationEnded. Whether a script has read the messages does not matter there.
        """
        if loop_hooks.hears_of_updates():
            update = loop_hooks.agreed_update()
        else:
            update = self._agree_on_messages()
        self._raise_if_updated(update)

    def _raise_if_updated(self, update: HostUpdateResult | None) -> None:
        if update is not None:
            raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)

    def save(self) -> None:
        """Remember the state as it is now."""
        raise NotImplementedError(f"{type(self).__name__} has no save()")

    def restore(self) -> None:
        """Return to what the last save() remembered."""
        raise NotImplementedError(f"{type(self).__name__} has no restore()")

    def sync(self) -> None:
        """Make the state of all ranks equal to rank 0's. A collective."""
        raise NotImplementedError(f"{type(self).__name__} has no sync()")

    def reset(self) -> None:
        """The world has changed; what depends on rank() and size() may be made anew here."""

    def save_once(self, write: Callable[..., object], path: str | os.PathLike[str] | None = None) -> bool:
        """Have one worker write a file of the script's own: see save_once.py. True on the one that has written it."""
        return save_once(write, path, self._how_far())

    def _how_far(self) -> Progress:
        """What save_once() compares; alike on all ranks. Who counts nothing is never older than a file."""
        return Progress()

    def _agree_on_messages(self) -> HostUpdateResult | None:
        """Without a run loop that knows: rank 0's messages decide for all."""
        previous = newest = self._last_updated_timestamp
        update = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, result = self._host_messages.get()
            if timestamp > previous:
                newest = max(newest, timestamp)
                update |= HostUpdateResult(result)
        previous, newest, update = self._bcast_object((previous, newest, update))
        self._last_updated_timestamp = newest
        return HostUpdateResult(update) if newest > previous else None


class ObjectState(State):
    """A State of plain Python values: every keyword becomes an attribute.

    Values are copied deeply by each save() and again by restore(): what is changed in place is rolled back too.
    Raises ConfigError for values that cannot be copied.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        self._saved_state = deep_copy(kwargs, "state")
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        loop_hooks.committing()
        self._keep()
        loop_hooks.committed()

    def restore(self) -> None:
        for name, value in deep_copy(self._saved_state, "state").items():
            setattr(self, name, value)

    def sync(self) -> None:
        if self._saved_state:
            for name, value in self._bcast_object(self._values()).items():
                setattr(self, name, value)
            self._keep()

    def _keep(self) -> None:
        self._saved_state = deep_copy(self._values(), "state")

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}
