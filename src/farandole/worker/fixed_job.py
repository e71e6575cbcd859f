"""A worker in a job of fixed size (torchrun, mpirun, srun): no coordinator, one generation. context.py uses it."""

from __future__ import annotations

from collections.abc import Callable

from farandole.collectives import world
from farandole.collectives.listener import DataListener
from farandole.collectives.named.settings import NamedSettings
from farandole.env import FixedEnv
from farandole.messages import Start
from farandole.worker.fixed_size import Rendezvous
from farandole.worker.world_builder import WorldBuilder


class FixedJob:
    """The worker's connection from the first init() to the end of the process. All ranks call init() and shutdown()
    equally often."""

    def __init__(self, env: FixedEnv, settings: Callable[[], NamedSettings], timeout_s: float) -> None:
        self._env, self._timeout_s = env, timeout_s
        self._listener = DataListener()
        self._builder = WorldBuilder(self._listener, f"rank{env.rank}", str(env.cross_rank), settings)
        self._start: Start | None = None
        self._session = 0

    def meet(self) -> None:
        """Find the other ranks through the launcher's rendezvous and enter their world. Raises what Rendezvous
        and WorldBuilder raise."""
        self._start = Rendezvous(self._env, self._timeout_s).meet(self._listener.address)
        self.meet_again()

    def meet_again(self) -> None:
        """Enter the world, also after leave(). Raises PeerLost when a rank does not arrive in time."""
        if self._start is None:
            self.meet()
            return
        self._session += 1
        world.enter(self._builder.build(self._start, self._session, self._timeout_s).world)

    def leave(self) -> None:
        """Close the connections to the other ranks, for shutdown()."""
        if world.is_entered():
            here = world.current()
            world.enter(None)
            if here.named is not None:
                here.named.close()
            here.transport.close()
            if here.p2p is not None:
                here.p2p.close()

    def close(self) -> None:
        self.leave()
        self._listener.close()
