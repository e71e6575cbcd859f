"""The process's view of the current generation, for rank(), the optimizer and the run loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from farandole.base.events.job_events import JobRemarked
from farandole.base.membership import GenerationId, Placement
from farandole.errors import GenerationEnded, NotInitialized, StepError
from farandole.training.collectives.transport import Transport

if TYPE_CHECKING:
    from farandole.training.collectives.agreement import CallHandler
    from farandole.training.collectives.extension import Extension
    from farandole.training.collectives.point_to_point import PointToPoint

logger = logging.getLogger("farandole")


def log_remark(topic: str, text: str) -> None:
    """Log what the last line of a job has under a launcher of Farandole."""
    logger.warning(JobRemarked(topic, text).line())


@dataclass(frozen=True)
class World:
    """A generation, seen from this worker.

    Attributes:
        transport: For the main thread: gradients, agreements, state. All ranks make the same calls in the same order.
        extensions: The operations of integrations, on connections of their own, by name.
        p2p: Messages from one rank to another; for the main thread, too.
        is_homogeneous: Every host has the same number of workers.
        on_remark: Takes the topic and the text of a remark; see remark().
        told_size: Returns, from the number of workers, the one that a script is told; None: that one.
    """

    id: GenerationId
    placement: Placement
    transport: Transport
    extensions: Mapping[str, Extension] = field(default_factory=dict)
    is_homogeneous: bool = True
    p2p: PointToPoint | None = None
    on_remark: Callable[[str, str], None] = log_remark
    told_size: Callable[[int], int] | None = None

    def end_extensions(self, reason: str) -> None:
        """End the operations of all extensions: afterwards none touches a tensor."""
        for each in self.extensions.values():
            each.abort(reason)
            each.wait_until_quiet()

    def close_extensions(self) -> None:
        """Close their connections in an orderly way: others may still need this rank in an operation."""
        for each in self.extensions.values():
            each.close()

    def close(self) -> None:
        """Close all connections."""
        self.close_extensions()
        self.transport.close()
        if self.p2p is not None:
            self.p2p.close()


@dataclass
class View:
    """This process's view of its job, for the functions below."""

    world: World | None = None  # the current one; None before init() and after shutdown()
    without_world: str = "Farandole has not been initialized; call farandole.init() first"
    refusal: str | None = None  # why collectives are refused; None: they are not
    interruption: str | None = None  # why they raise GenerationEnded; None: they do not
    call_handler: CallHandler | None = None  # carries out fd.mean and fd.any in an elastic function
    is_forked_child: bool = False  # this process was forked by one that had a world
    on_enter: list[Callable[[World | None], None]] = field(default_factory=list)


view = View()


def enter(world: World | None) -> None:
    """Make `world` the current one; None after shutdown()."""
    view.world = world
    for callback in view.on_enter:
        callback(world)


def on_enter(callback: Callable[[World | None], None]) -> None:
    """Call `callback(world)` from now on whenever a world has become the current one."""
    view.on_enter.append(callback)


def current() -> World:
    """The current world. Raises NotInitialized before init() and after shutdown()."""
    here = view.world
    if here is None:
        raise NotInitialized(view.without_world)
    return here


def remark(topic: str, text: str) -> None:
    """Add a remark to the last line of the job, as its rank 0. A later one of the same topic replaces it; under another
    launcher, it is a line of the log."""
    here = current()
    if here.placement.rank == 0:
        here.on_remark(topic, text)


def word_missing_init(message: str) -> None:
    """Set the message of NotInitialized: programs written for Horovod compare it with Horovod's."""
    view.without_world = message


@contextmanager
def placed_as(rank: int, size: int) -> Iterator[None]:
    """Present a world of one as this rank of `size`. Its collectives stay local."""
    here = current()
    view.world = replace(here, placement=msgspec.structs.replace(here.placement, rank=rank, size=size))
    try:
        yield
    finally:
        view.world = here


def is_entered() -> bool:
    """Return whether there is a current world."""
    return view.world is not None


def refuse_collectives(why: str | None) -> None:
    """Refuse collectives from now on: no call may start, or wait for, an operation that another rank can fail.

    None permits them again, but never in a forked child.
    """
    if not (view.is_forked_child and why is None):
        view.refusal = why


def interrupt_collectives(why: str | None) -> None:
    """Make every collective raise GenerationEnded from now on, because other ranks do not take part in it.

    None permits them again. fd.mean and fd.any have their own handling (agreement.py).
    """
    view.interruption = why


def are_refused() -> bool:
    return view.refusal is not None


def raise_if_refused(op: str) -> None:
    """Raise StepError where collectives are refused, and GenerationEnded where they are interrupted."""
    if view.refusal is not None:
        raise StepError(f"{op} {view.refusal}")
    if view.interruption is not None:
        raise GenerationEnded(op, current().id.number, view.interruption)


def is_forked_child() -> bool:
    """Return whether this process was forked by one that had a world. Then it must leave alone what belongs to the
    worker: its connections, its files, the threads that it lacks."""
    return view.is_forked_child


def _refuse_in_child() -> None:
    """Refuse collectives in a forked child: it inherits its parent's rank, but must not act as that rank."""
    if view.world is not None:
        view.is_forked_child = True
        refuse_collectives(
            f"in process {os.getpid()}, which was forked by a worker and is not a worker itself: train in the worker, "
            f"or start the child process with multiprocessing's spawn method"
        )


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_refuse_in_child)
