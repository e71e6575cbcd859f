"""Construct a process group of torch in a thread of its own. The builders of gloo/ and nccl/ use it.

The construction blocks for as long as a peer does not answer, and cannot be interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from farandole.collectives.ring import RingTransport
from farandole.collectives.torch_groups.ring_store import ExchangedStore

T = TypeVar("T")

# A rank waits for a value that no rank has set yet: the next round must not come at once.
_PAUSE_S = 0.001


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """The message of a rank in a round: values set since the last one, whether it is done, and its problem, if any."""

    values: dict[str, bytes]
    has_ended: bool
    problem: str = ""


class Construction(Generic[T]):
    """Constructs a group; all ranks of the ring do so at once.

    Args:
        make: Returns the group, given the store by which its ranks find each other; runs in the thread.
        connect: Returns when the group can be used; runs in the thread, too. Unlike make() it has to end when `give_up`
            is called.
        give_up: Ends a group that will not be used.
    """

    def __init__(
        self,
        ring: RingTransport,
        make: Callable[[ExchangedStore], T],
        connect: Callable[[T], None],
        give_up: Callable[[T], None],
        timeout_s: float,
        name: str,
    ) -> None:
        self._ring, self.store = ring, ExchangedStore(timeout_s)
        self._make, self._connect, self._give_up = make, connect, give_up
        self._lock = threading.Lock()
        self._group: T | None = None
        self._problem = ""
        self._is_through = self._was_abandoned = False
        # Not a daemon: a process that ends must wait for it. A daemon inside of torch would crash the process.
        self._thread = threading.Thread(target=self._work, name=f"farandole-{name}")
        self._thread.start()

    def finish(self) -> T | str:
        """Return the group, once it can be used on all ranks; or, on all alike, why there is none.

        Raises PeerLost and GenerationEnded at once, even if the thread still runs.
        """
        try:
            problem = self._carry_words()
        except BaseException:
            self._abandon()
            raise
        finally:
            self.store.close()
        if problem:
            self._abandon()
            return problem
        self._thread.join()  # the thread has nothing left to do
        assert self._group is not None
        return self._group

    def _carry_words(self) -> str:
        """Exchange values in rounds around the ring, until all ranks are done, or one has a problem, which is returned.

        A round begins when any rank has a message: its neighbours see that it has begun.
        """
        while True:
            if not self.store.has_to_speak and self._ring.wait_for_peer(self.store.descriptor) is None:
                continue
            untold = self.store.take_untold()  # first, or an end between the two would never be sent
            mine = _Said(untold, self._is_through, self._problem)
            packed = self._ring.all_gather(msgspec.msgpack.encode(mine))
            said = [msgspec.msgpack.decode(each, type=_Said) for each in packed]
            self.store.bring([each.values for each in said])
            for rank, each in enumerate(said):
                if each.problem:
                    return f"rank {rank}: {each.problem}"
            if all(each.has_ended for each in said):
                return ""
            if not any(each.values for each in said):
                threading.Event().wait(_PAUSE_S)

    def _abandon(self) -> None:
        self.store.abandon()
        with self._lock:
            self._was_abandoned, group = True, self._group
        if group is not None:
            self._give_up(group)

    def _work(self) -> None:
        try:
            group = self._make(self.store)
            with self._lock:
                self._group, was_abandoned = group, self._was_abandoned
            if was_abandoned:
                self._give_up(group)
                return
            self._connect(group)
        except Exception as error:  # noqa: BLE001 - finish() returns it
            self._problem = str(error) or type(error).__name__
        finally:
            self._is_through = True  # after the problem, which is read by another thread
            self.store.end()
