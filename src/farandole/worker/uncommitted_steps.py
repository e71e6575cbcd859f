"""The cost of a rollback to the last commit, for the report of a recovery. Kept by commit_loop.py."""

from __future__ import annotations

from farandole.state.object_state import State
from farandole.state.torch_state import TorchState


class UncommittedSteps:
    """Counts the steps of the state's first optimizer since the last commit: 0 for a state that has none."""

    def __init__(self, state: State) -> None:
        optimizers = state._optimizers() if isinstance(state, TorchState) else []
        self._hooks = [each.register_step_post_hook(self._stepped) for each in optimizers[:1]]
        self._count = self._undone = 0

    def committed(self) -> None:
        """Reset the count: the steps done so far are kept."""
        self._count = 0

    def undone(self) -> None:
        """Note that the state went back to the last commit."""
        self._undone, self._count = self._undone + self._count, 0

    def take_undone(self) -> int:
        """Return the steps undone since the last call."""
        undone, self._undone = self._undone, 0
        return undone

    def close(self) -> None:
        """Remove the hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()

    def _stepped(self, *_: object) -> None:
        self._count += 1
