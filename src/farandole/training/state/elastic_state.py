"""ElasticState: what both rules want of a state. StepState follows the step rule, State and TorchState of
integrations/horovod the commit rule.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsFloat

from farandole.base.liveness import status_reporting
from farandole.base.membership import Progress
from farandole.training.state import step
from farandole.training.state.save_once import save_once
from farandole.training.state.tracker import Tracker


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
        """Have one worker write a file of the script; see save_once.py.

        Args:
            write: Writes the file, to the path that it is given if there is a `path`.
            path: A local or mounted file.

        Returns:
            True on the worker that has written it.
        """
        return save_once(write, path, self._how_far())

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
        """Return the progress that save_once() compares, equal on all ranks. A state without a count is never older
        than a file."""
        return Progress()
