"""State and ObjectState: the values of a job under the commit rule. The base classes of TorchState and of users'
states.
"""

from __future__ import annotations

import queue
import struct
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import Any

from farandole.base.membership import Progress
from farandole.errors import HostsUpdatedInterrupt
from farandole.training.collectives.transport import Transport
from farandole.training.state.deep_copy import deep_copy, refuse_learnable
from farandole.training.state.elastic_state import ElasticState
from farandole.training.state.packed_metadata import pack_metadata
from farandole.training.state.packing import Packed
from farandole.training.state.session import SESSION, HostUpdateResult


class State(ElasticState, metaclass=ABCMeta):
    """The interface of a state that `elastic.run` needs. Derive from it and define save(), restore() and sync().

    Rank 0 is never a worker that has just joined, so a sync() that broadcasts from rank 0 keeps the committed values.

    Args:
        bcast_object: Returns rank 0's argument on every rank.
        get_rank: Returns this worker's rank.

    Examples:
        ```python
        class Counter(fd.elastic.State):
            def __init__(self):
                super().__init__(bcast_object=fd.broadcast_object, get_rank=fd.rank)
                self.count = self.saved = 0

            def save(self):
                self.saved = self.count

            def restore(self):
                self.count = self.saved

            def sync(self):
                self.count = self.saved = fd.broadcast_object(self.count)


        state = Counter()
        state.count = 3
        state.commit()
        ```
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        super().__init__()
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.Queue[tuple[float, int]] = queue.Queue()
        self._last_updated_timestamp: float = 0

    def on_reset(self) -> None:
        """Handle a change of the world: call reset() and the callbacks. `elastic.run` calls it before sync()."""
        self._host_messages = queue.Queue()
        super().on_reset()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that hosts came or will go; may be called from any thread.

        Args:
            timestamp: Seconds since 1970.
            update_res: A HostUpdateResult.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Call save(), then check_host_updates(). All ranks call it at the same place.

        After a fault, training continues from the newest commit. Saving comes first, so the commits of two ranks differ
        by at most one.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on all ranks alike, when workers come or go and all ranks know of it.

        In an elastic function of a job with other workers this is a small collective. It does not matter there whether
        a script has read the messages.

        Raises:
            HostsUpdatedInterrupt: The membership is about to change.
            PeerLost, GenerationEnded: The collective failed.
        """
        if SESSION.run_loop.receives_updates():
            update = SESSION.run_loop.agreed_update()
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
        """Return to the state of the last save()."""
        raise NotImplementedError(f"{type(self).__name__} has no restore()")

    def sync(self) -> None:
        """Make the state of all ranks equal to rank 0's. A collective."""
        raise NotImplementedError(f"{type(self).__name__} has no sync()")

    def _agree_on_messages(self) -> HostUpdateResult | None:
        """Decide by rank 0's messages for all ranks, without a run loop that answers."""
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

    Each save() makes a deep copy of the values, and so does restore(): changes in place are rolled back too.

    Args:
        bcast_object: Returns rank 0's argument on every rank: fd.broadcast_object.
        get_rank: Returns this worker's rank: fd.rank.
        **kwargs: The values.

    Raises:
        ConfigError: A value cannot be copied.

    Examples:
        >>> state = fd.elastic.ObjectState(fd.broadcast_object, fd.rank, epoch=0)
        >>> state.epoch = 5
        >>> state.restore()  # to the values of the newest commit
        >>> state.epoch
        0
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        refuse_learnable(kwargs)
        self._saved_state = deep_copy(kwargs, "state")
        for name, value in kwargs.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Copy the values deeply, as the newest commit. commit() calls it."""
        SESSION.run_loop.committing()
        self._keep()
        SESSION.run_loop.committed()

    def restore(self) -> None:
        """Set the values to copies of those of the newest commit. The elastic function calls it after a fault."""
        for name, value in deep_copy(self._saved_state, "state").items():
            setattr(self, name, value)

    def sync(self) -> None:
        """Take the values of rank 0, and commit them. A collective, with which the elastic function begins."""
        if self._saved_state:
            for name, value in self._bcast_object(self._values()).items():
                setattr(self, name, value)
            self._keep()

    def _keep(self) -> None:
        self._saved_state = deep_copy(self._values(), "state")

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._saved_state}


# An ObjectState as a checkpoint sees it: plain values, and the number of their commits --------------------------------

_COUNT = struct.Struct("<q")


def can_be_kept(state: ObjectState) -> bool:
    """Return whether the state consists of its values only: its class overrides none of save, restore and sync."""
    kind = type(state)
    return all(getattr(kind, name) is getattr(ObjectState, name) for name in ("save", "restore", "sync"))


class KeptValues:
    """The newest commit of an ObjectState, without tensors. This class counts commits, since ObjectState does not."""

    def __init__(self, state: ObjectState) -> None:
        self.state = state
        self.is_holder = False
        self._commits = 0

    @property
    def progress(self) -> Progress:
        return Progress(step=self._commits)

    def committed(self) -> None:
        self._commits += 1

    def agree(self, transport: Transport) -> None:
        """Set the same commit count on all ranks, newcomers included; their values are equal already. A collective."""
        counts = transport.all_gather(_COUNT.pack(self._commits))
        self._commits = max(_COUNT.unpack(each)[0] for each in counts)
        self.is_holder = True

    def capture(self) -> None:
        """Do nothing: a commit is a copy already."""

    def captured(self) -> Packed:
        return pack_metadata(
            {"commits": self._commits, "buffers": {}, "groups": {}, "stateful": {}, "values": self.state._saved_state}
        )

    def load_metadata(self, metadata: Mapping[str, Any]) -> None:
        self._commits = metadata["commits"]
        self.state._saved_state = deep_copy(dict(metadata["values"]), "state")
        self.state.restore()

    def live_tensors(self) -> dict[str, Any]:
        return {"parameters": {}, "optimizer": {}}

    def load_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Do nothing: the state has no tensors."""
