"""What optimizers see of a run loop, in tests of an optimizer alone (training/state/loop_hooks.py)."""

from __future__ import annotations


class RepeatingRunLoop:
    """A run loop whose loader repeats an aborted batch."""

    def can_repeat(self) -> bool:
        return True

    def steps_decided(self) -> int:
        return 0

    def prepared(self) -> int:
        return 0

    def agree(self, prepared_by_rank: list[int]) -> None:
        pass

    def digest(self) -> int:
        return 0

    def has_saved(self) -> bool:
        return False

    def compare(self, digests_by_rank: list[int], has_any_saved: bool) -> None:
        pass
