"""Process groups of torch that live through the generations, since torch can exchange their members (torch 2.14).

torch calls that to reconfigure a group: all members pass the same number and the handles of all of them
(pytorch#186298). Here the handles travel around the ring of the new generation, and so do the values by which the
members find each other. nccl_transport.py uses it; docs/decisions/cuda-tensors.md says when.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d

from farandole.training.collectives.torch_group import ExchangedStore


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """The message of one rank to the others before their groups are reconfigured.

    Attributes:
        handle: The handle of its group; empty: it has none that can be reconfigured.
        number: A random number, by which the new group is told from all others if this is rank 0.
    """

    handle: str = ""
    number: int = 0


@dataclass(frozen=True)
class Members:
    """The members of a group in one generation: its number, and their handles, by rank."""

    number: int
    handles: Sequence[str]


def agreed_members(offers: Sequence[Offer]) -> Members | None:
    """Return the members that the ranks' offers determine, the same on all ranks; None if there can be no such group.

    That is so if a rank has no group that can be reconfigured, or two have the same handle: torch refuses that.
    """
    handles = [each.handle for each in offers]
    if not all(handles) or len(set(handles)) < len(handles):
        return None
    return Members(offers[0].number, handles)


class ReconfigurableGroup:
    """A process group of torch without members at first, and the store that it keeps for life.

    Args:
        make: Returns torch's group (a Backend), given that store.

    Attributes:
        group: torch's group.
        held: Objects that the group may still use until it has new members.
    """

    def __init__(self, make: Callable[[dist.Store], Any]) -> None:  # type: ignore[name-defined]
        self._store = _StoreOfTheGeneration()
        self.group: Any = make(self._store)
        self.held: list[object] = []

    def offer(self) -> Offer:
        """Return the offer to the other ranks. The handle is valid until the next reconfigure()."""
        return Offer(str(self.group.get_reconfigure_handle()), secrets.randbits(62))

    def reconfigure(self, store: ExchangedStore, members: Members, timeout_s: float) -> None:
        """Replace the members. All of them call it at once; it blocks until they are connected.

        Args:
            store: Carries the values by which they find each other.
            members: The new members; this process is one of them.
            timeout_s: The time limit, in seconds.

        Raises:
            RuntimeError: A member did not connect in time. The group cannot be used any more.
        """
        self._store.values = store
        options: Any = distributed_c10d.ReconfigureOptions()  # type: ignore[attr-defined]
        options.uuid, options.handles = members.number, list(members.handles)
        options.timeout = timedelta(seconds=timeout_s)
        self.group.reconfigure(options).wait()
        self.held.clear()


class GroupUser(Protocol):
    """An object of one generation that uses a ReconfigurableGroup."""

    def hand_over(self) -> ReconfigurableGroup | None:
        """End the running operation, and return the group, which this object no longer uses.

        Returns None if the group was released, or its operation does not end.
        """
        ...


class KeptGroup:
    """The group of one ring of a world, which its generations use one after the other."""

    def __init__(self) -> None:
        self._user: Callable[[], GroupUser | None] = lambda: None

    def is_used_by(self, user: GroupUser) -> None:
        """Let the next generation have the group of this one. A user that is gone has taken its group with it."""
        self._user = weakref.ref(user)

    def take(self) -> ReconfigurableGroup | None:
        """Return the group of the generation before, whose operations have ended; None if there is none."""
        user, self._user = self._user(), lambda: None
        return user.hand_over() if user is not None else None


def make_reconfigurable(make: Callable[[dist.Store], Any]) -> ReconfigurableGroup | None:  # type: ignore[name-defined]
    """Return a new group; None where torch's group says that it cannot be reconfigured, or its constructor does."""
    try:
        made = ReconfigurableGroup(make)
    except (AttributeError, RuntimeError):  # no such option, or not for this backend (pytorch#186298)
        return None
    return made if made.group.supports_reconfigure else None


class _StoreOfTheGeneration(dist.Store):  # type: ignore[name-defined, misc]
    """The store that a group keeps for life. It holds the values of one generation at a time.

    Attributes:
        values: The store of the generation in which the group is being connected, or was last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: ExchangedStore | None = None

    def set(self, key: str, value: Any) -> None:
        self._present().set(key, value)

    def get(self, key: str) -> bytes:
        return self._present().get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._present().wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return self._present().check(keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._present().compare_set(key, expected, desired)

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the store has its own timeout."""

    def _present(self) -> ExchangedStore:
        if self.values is None:
            raise RuntimeError("the process group has no members yet")
        return self.values
