"""The number of an epoch, as DataLoader.epochs() hands it out."""

from __future__ import annotations

from collections.abc import Callable

from farandole.data.boundary import Boundary


class Epoch(int):
    """An int. After a regroup in the tail of an epoch (an evaluation) the same number is handed out again, so that
    code of the tail runs at least once; what is given to once() is not repeated."""

    _boundary: Boundary
    _calls: int

    @classmethod
    def at(cls, number: int, boundary: Boundary) -> Epoch:
        """The number, with the boundary that counts what was done once."""
        epoch = cls(number)
        epoch._boundary, epoch._calls = boundary, 0
        return epoch

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # kept in a state, it is a number

    def once(self, function: Callable[[], object]) -> bool:
        """Call `function()`, on every worker, once in this epoch: whatever happens, the tracked values of the state
        hold what it did exactly once. All workers call it at the same place; the order of several counts. Whether
        it ran here.

        It begins when all workers have come. When a worker is lost before any other was through, the others do it
        again; when one was through, its state becomes everybody's, and nobody does. What `function` does outside of
        the state (prints a line, writes a file) is then missing on the workers that it did not run on.

        Raises PeerLost or GenerationEnded, which elastic.run handles, when a worker is lost meanwhile;
        CollectiveMismatch when workers are at different places.
        """
        call, self._calls = self._calls, self._calls + 1
        return self._boundary.once(int(self), call, function)
