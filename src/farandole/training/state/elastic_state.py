"""What both rules want of a state. StepState follows the step rule, those of integrations/horovod the commit rule."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

import msgspec

from farandole.base.liveness import status_reporting
from farandole.base.membership import Progress
from farandole.training.collectives import world
from farandole.training.state import step
from farandole.training.state.session import SESSION
from farandole.training.state.tracker import Tracker

logger = logging.getLogger("farandole")


class ElasticState:
    """The values that an elastic function changes, and which survive a change of the membership."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], object]] = []

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Allow any attribute: a script knows the values that it has given."""

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Add functions to call when the world has changed, e.g. to scale the learning rate by the new size().

        They run on every worker, in order, before the state is synchronized: their changes on the source rank then
        reach all workers. They also run on a worker that joins: until then its world was itself alone.

        Args:
            callbacks: Functions without arguments.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Handle a change of the world: call reset() and the callbacks. `elastic.run` calls it before sync()."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()
        for value in list(vars(self).values()):
            if isinstance(value, Tracker):
                value.regrouped()

    def reset(self) -> None:
        """Adapt to a changed world. Override it to rebuild objects that depend on rank() and size()."""

    def save_once(self, write: Callable[..., object], path: str | os.PathLike[str] | None = None) -> bool:
        """Have one worker write a file of the script, such as an exported model: one that is still in the job.

        All ranks call it at the same place; it is no collective. `if rank() == 0: torch.save(...)` is not enough in an
        elastic job: a worker that was disconnected and replaced may take itself for rank 0 long afterwards. So the
        coordinator decides, as for a checkpoint.

        With a path, a temporary file beside it replaces `path` atomically once the coordinator has agreed. `path` is
        never an incomplete file, and never comes from a worker that was disconnected or from an older state than the
        existing file. Without a path the coordinator is asked first; then `write()` may do anything that is harmless
        when repeated: after a fault the script may reach the same place a second time.

        Args:
            write: Writes the file, to the path that it is given if there is a `path`. Its errors propagate unchanged,
                and no temporary file remains.
            path: A local or mounted file.

        Returns:
            True on the worker that has written it.
        """
        if world.current().placement.rank != 0:
            return False
        if path is None:
            if not self._may_save("the argument of save_once"):
                return False
            write()
            return True
        target = Path(path).absolute()
        temporary = target.with_name(f".{secrets.token_hex(8)}.{target.name}")
        try:
            write(temporary)
            _force(temporary)
            if not self._may_save(str(target)):
                return False
            temporary.replace(target)
            return True
        finally:
            temporary.unlink(missing_ok=True)

    def _may_save(self, file: str) -> bool:
        if SESSION.may_save is None:
            return True
        progress = msgspec.structs.replace(self._how_far(), run_id=world.current().id.run_id)
        refusal = SESSION.may_save(f"save-once-{secrets.token_hex(8)}", progress, file)
        if refusal:
            logger.warning("save_once: %s was not saved: %s", file, refusal)
        return not refusal

    def log(self, **values: float | SupportsFloat) -> None:
        """Show numbers of this worker on the job's page, and in its metrics: `state.log(loss=loss, lr=0.1)`.

        A call takes some microseconds. The newest numbers are sent twice a second, and a tensor on a device is waited
        for only then. A tensor that has its graph, such as a loss, is left out where one of its name was read within
        the last 50 ms. The page shows the mean over the workers that log a name. Numbers are no part of the state.
        Those of a rehearsal, whose step does not count, are dropped. A value of the state that is named `log` replaces
        this method.

        Args:
            **values: Numbers, or tensors with one element. Each replaces the former one of its name; at most 50 names
                are shown.

        Raises:
            TypeError: A value that is read is neither a number nor a tensor with one element.
        """
        if not step.is_rehearsal():
            status_reporting.log_numbers(values)

    def _how_far(self) -> Progress:
        """Return the progress, equal on all ranks. A state without a count is never older than a file."""
        return Progress()


def _force(path: Path) -> None:
    """Flush the file to disk: the rename must not precede its contents."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
