"""Groups whose members are named by handles and not by a coordinator.

They are for processes outside of a job, and for scripts that reconfigure a group by themselves (torch's
init_process_group(enable_reconfigure=True), since torch 2.14).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import Store

from farandole.base.env import read_worker_env
from farandole.base.machine import now_s
from farandole.base.wire.encryption import load_certificates
from farandole.errors import ConfigError, NotInitialized
from farandole.integrations.torchrun.process_group.works import Everybody
from farandole.training.collectives.world import World
from farandole.training.collectives.world_by_handles import HandleListener

_FIRST = 1  # the number of the only world of members that met at a store


class WorldsByHandles:
    """The worlds of a group whose members are named by handles, one after the other.

    Args:
        rank: The rank before the first world.
        size: The size before the first world.
        timeout: The time limit of an operation that has no other one.
        on_enter: Called with each new world.
    """

    def __init__(
        self, rank: int, size: int, timeout: timedelta, on_enter: Callable[[World], None] = lambda _: None
    ) -> None:
        self._on_enter = on_enter
        env = read_worker_env()
        if env is None:
            self._listener = HandleListener()
        else:
            self._listener = HandleListener(*env.data_hosts, tls=load_certificates(env.tls))
        self._placed, self.timeout = (rank, size), timeout
        self.in_operation = threading.Lock()
        self._world: World | None = None
        self._limits = TimeLimits()
        self._used: set[int] = set()
        self._missing = "call torch.distributed._reconfigure() with the handles of all members first"

    @property
    def handle(self) -> str:
        """The handle of this process. It stays the same."""
        return str(self._listener.handle)

    @property
    def rank(self) -> int:
        return self._placed[0]

    @property
    def size(self) -> int:
        return self._placed[1]

    def current(self) -> World:
        return self.begin("the group")

    def begin(self, op: str) -> World:
        """Return the world. Raises NotInitialized where there is none."""
        here = self._world
        if here is None:
            raise NotInitialized(f"{op}: the members of this group are not connected: {self._missing}")
        return here

    @contextmanager
    def limit(self, op: str, timeout: timedelta | None) -> Iterator[None]:
        """Enclose an operation; it ends the world with GenerationEnded when it takes longer than `timeout`."""
        here = self._world
        if here is None:
            yield
            return
        chosen = self.timeout if timeout is None or timeout <= timedelta() else timeout
        reason = f"Timed out waiting {chosen / timedelta(milliseconds=1):g}ms for the other ranks in {op}"
        with self._limits.limit(chosen.total_seconds(), lambda: _abort(here, reason)):
            yield

    def reconfigure(self, uuid: int, handles: Collection[str], timeout: timedelta | None = None) -> None:
        """Connect to exactly the members that `handles` name, and leave the world before.

        All of them call it at once with the same arguments. An error before the connections are made leaves the world
        as it was, an error afterwards leaves the group without connections; both permit another call.

        Args:
            uuid: The same for all members; each process uses it once only.
            handles: In a list or tuple, ordered by rank; in a set, the ranks are chosen here.
            timeout: The time limit; None: that of the group.

        Raises:
            ConfigError: The uuid was used, or a handle is invalid, or this process's is missing.
            PeerLost: A member did not connect in time.
        """
        if uuid in self._used:
            raise ConfigError(f"reconfigure: uuid {uuid} was already used by this group: pass another one to each call")
        ordered = list(handles) if isinstance(handles, Sequence) else sorted(handles)
        self._listener.check(ordered)
        self._used.add(uuid)
        if self._world is not None:
            _abort(self._world, "the members of the group were replaced")
        self._leave("its last reconfigure() failed; call it again with another uuid")
        limit_s = (timeout or self.timeout).total_seconds()
        here = self._listener.connect(uuid, ordered, limit_s)
        self._placed, self._world = (here.placement.rank, here.placement.size), here
        self._on_enter(here)

    def abort(self) -> None:
        """End the operations in flight and all later ones, until the next reconfigure()."""
        if self._world is not None:
            _abort(self._world, "the group was aborted")

    def close(self) -> None:
        """Close the connections. Messages that were sent before still arrive. Idempotent."""
        self._leave("it was destroyed")
        self._listener.close()
        self._limits.close()

    def _leave(self, missing: str) -> None:
        here, self._world, self._missing = self._world, None, missing
        if here is not None:
            here.transport.close()
            if here.p2p is not None:
                here.p2p.close()


def meet_at(store: Store, rank: int, size: int, timeout: timedelta) -> WorldsByHandles:
    """Return the connected members of a group of fixed size, which exchange their handles at torch's store.

    Raises what the store raises when a member does not arrive in time, and what reconfigure() raises.
    """
    worlds = WorldsByHandles(rank, size, timeout)
    try:
        store.set(f"farandole/{rank}", worlds.handle)
        handles = [store.get(f"farandole/{each}").decode() for each in range(size)]
        worlds.reconfigure(_FIRST, handles)
    except BaseException:
        worlds.close()
        raise
    return worlds


class NamedMembers(Everybody):
    """All members that were named by their handles.

    Args:
        worlds: Their worlds.
        may_change: reconfigure() may be called.
    """

    worlds: WorldsByHandles

    def __init__(self, worlds: WorldsByHandles, may_change: bool) -> None:
        self.worlds, self.may_change = worlds, may_change

    @property
    def rank(self) -> int:
        return self.worlds.rank

    @property
    def size(self) -> int:
        return self.worlds.size

    def abort(self) -> None:
        if self.may_change:
            self.worlds.abort()
        else:
            self.close()

    def close(self) -> None:
        self.worlds.close()


def _abort(world: World, reason: str) -> None:
    world.transport.abort(reason)
    if world.p2p is not None:
        world.p2p.abort(reason)


# Time limits ----------------------------------------------------------------------------------------------------------


class TimeLimits:
    """Calls functions when blocks of code take too long. A thread, started by the first block, waits for that."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._limits: dict[object, tuple[float, Callable[[], None]]] = {}
        self._wakes_at_s = float("inf")
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @contextmanager
    def limit(self, limit_s: float, exceeded: Callable[[], None]) -> Iterator[None]:
        """Enclose a block; call `exceeded` in another thread if it is still running after `limit_s`."""
        key, due_s = object(), now_s() + limit_s
        with self._changed:
            self._limits[key] = due_s, exceeded
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="farandole-limits", daemon=True)
                self._thread.start()
            elif due_s < self._wakes_at_s:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                del self._limits[key]

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._is_closed:
                now = now_s()
                for key, (due_s, exceeded) in list(self._limits.items()):
                    if due_s <= now:
                        self._limits[key] = float("inf"), exceeded
                        exceeded()
                self._wakes_at_s = min((due_s for due_s, _ in self._limits.values()), default=float("inf"))
                is_forever = self._wakes_at_s == float("inf")
                # A wait of more than threading.TIMEOUT_MAX seconds is an OverflowError.
                self._changed.wait(None if is_forever else min(self._wakes_at_s - now, threading.TIMEOUT_MAX))
