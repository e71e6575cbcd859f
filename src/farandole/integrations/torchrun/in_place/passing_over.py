"""A newcomer's way through its script to where the others are: it runs code without effect, and passes over epochs."""

from __future__ import annotations

from farandole.integrations.torchrun.in_place.script_collectives import echo_world
from farandole.integrations.torchrun.in_place.script_loader import ScriptLoader
from farandole.training.collectives import world
from farandole.training.state.step_state import StepState
from farandole.training.worker import context


class PassingOver:
    """That of one worker.

    Args:
        workers: The number of workers at the start of the job.

    Attributes:
        has_to_join: This worker is a newcomer that was not admitted yet.
        offset: From the iterations of the script over its training loader to the epochs of the training.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.has_to_join = False
        self.offset = 0
        self._real: world.World | None = None  # while this worker, a member, passes over code
        self._was_found = False  # it has come to the epoch of the others

    @property
    def is_member(self) -> bool:
        """True while a member passes over code."""
        return self._real is not None

    @property
    def is_under_way(self) -> bool:
        """True while this worker runs code whose effects do not count."""
        return self.has_to_join or self._real is not None

    def begin_world(self) -> None:
        """Handle that the world is entered."""
        job = context.job()
        self.has_to_join = job is not None and job.is_newcomer()
        if self.has_to_join:
            world.enter(self._echo(world.current()))

    def is_done_already(self, loader: ScriptLoader, begun: int, steps: int) -> bool:
        """Return whether the others had completed this epoch before this worker started, so that it can be passed over
        before they wait for this worker. A script that begins in the middle, from its own checkpoint, counts its
        iterations otherwise.

        Args:
            loader: The training loader.
            begun: The number of the script's iteration over it.
            steps: The steps of all its iterations up to this one.
        """
        job = context.job()
        begins_anew = not loader.is_numbered() or loader.number() == begun
        return job is not None and begins_anew and steps <= job.link.step

    def arrives(self, loader: ScriptLoader, begun: int) -> bool:
        """Return whether this iteration of the script is the one in which the others are, or will be next."""
        if not self._was_found:
            is_here = loader.has_number() if loader.is_numbered() else begun == loader.epoch
            if not is_here:
                return False
            self.offset = loader.epoch - begun
            self._was_found = True
            return not loader.is_left
        return True

    def begin(self, state: StepState) -> None:
        """Run code without effect from now on, until stop()."""
        state.capture(is_whole=True)
        self._real = world.current()
        world.enter(self._echo(self._real))

    def begin_behind(self, state: StepState) -> None:
        """Run the code behind an epoch without effect: the others had completed it before this worker came to it. The
        next iteration is the others' next one."""
        self._was_found = True
        self.begin(state)

    def stop(self, state: StepState, loader: ScriptLoader) -> None:
        """Restore what the code without effect has changed."""
        assert self._real is not None
        real, self._real = self._real, None
        world.enter(real)
        state.put_back()
        loader.set_world(real.placement.rank, real.placement.size)

    def _echo(self, here: world.World) -> world.World:
        """Return the world of a worker whose collectives are answered locally: not rank 0, in a world of the size of
        the start."""
        size = max(2, self._workers)
        return echo_world(here, size - 1, size)
