"""What optimizers see of a run loop, in tests of an optimizer alone (training/state/session.py)."""

from __future__ import annotations

from farandole.training.state.session import RunLoop


class RepeatingRunLoop(RunLoop):
    """A run loop whose loader repeats an aborted batch."""

    def can_repeat(self) -> bool:
        return True
