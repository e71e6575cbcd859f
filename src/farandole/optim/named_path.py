"""The path from gradient to step without a loader of Farandole: named reductions, as Horovod's scripts expect them.

When the last parameter has had its backward passes, all gradients are reduced, still inside backward(). If some
parameters got no gradient on this rank (their part of the model was not used, or comes in another backward pass),
nothing is reduced before step() or synchronize(): backward() could wait for them forever. A rank that has all gradients
waits in backward() for such ranks, so these must not wait for it elsewhere, in a collective between backward() and
step().
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole.errors import HorovodInternalError
from farandole.optim.named_reduction import Named, NamedReduction
from farandole.optim.optimizer_mixin import counts_passes
from farandole.optim.options import Options
from farandole.optim.passes import Passes


class NamedPath:
    """Named reductions of one optimizer.

    names  names of all its parameters, in its order
    """

    def __init__(self, names: dict[torch.Tensor, str], options: Options, passes: Passes) -> None:
        self._options = options
        self._passes = passes
        self._sparse_dims: dict[int, int] = {}
        self._pass_id: int | None = None
        self.was_synchronized = False
        self.name(names)

    def name(self, names: dict[torch.Tensor, str]) -> None:
        """Set the current parameters."""
        groups = _groups(list(names), self._options.groups)
        self._named = [Named(parameter, name, groups.get(id(parameter))) for parameter, name in names.items()]

    # In backward() ---------------------------------------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Handle a gradient. Runs inside backward(), once for each parameter that got one."""
        if not self._is_active():
            return
        self._passes.count(id(parameter))
        pass_id = torch._C._current_graph_task_id()
        if pass_id != self._pass_id:  # a backward pass within a backward pass (checkpointing) has an end of its own
            self._pass_id = pass_id
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        """End the pass. Runs at the end of backward(), on the thread that called it."""
        self._pass_id = None
        participants = self._participants()
        if not self._passes.are_due(id(each.parameter) for each in participants):
            return
        reduction = self._begin(participants)
        # Queued after the ends of other optimizers' passes: they submit first, then all wait.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(reduction))

    # In step() and synchronize() -------------------------------------------------------------------------

    def reduce_rest(self) -> bool:
        """Reduce the remaining gradients, with zeros where there is no gradient. Returns whether there were any.

        Raises HorovodInternalError when a collective failed; then nothing of this step is left.
        """
        if not self._is_active():
            return False
        reduction = self._begin(self._participants())
        self._finish(reduction)
        return reduction is not None

    def synchronize(self) -> None:
        self.reduce_rest()
        self._passes.restart()
        self.was_synchronized = True

    def forget(self) -> None:
        """Reset the state for the time after a step."""
        self._passes.forget()
        self.was_synchronized = False

    def _is_active(self) -> bool:
        return bool(self._options.process_set.included()) and counts_passes()

    def _participants(self) -> list[Named]:
        return [each for each in self._named if self._takes_part(each.parameter)]

    def _takes_part(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter takes part: not a frozen one, unless it was frozen after its backward pass."""
        return parameter.requires_grad or self._passes.has_counted(id(parameter))

    def _begin(self, participants: Sequence[Named]) -> NamedReduction | None:
        keys = self._passes.unreduced(id(each.parameter) for each in participants)
        if not keys:
            return None
        reduction = NamedReduction(
            [each for each in participants if id(each.parameter) in keys], self._options, self._sparse_dims
        )
        try:
            reduction.submit()
        except HorovodInternalError:
            self._abandon()
            raise
        self._passes.reduced(keys)
        return reduction

    def _finish(self, reduction: NamedReduction | None) -> None:
        if reduction is None:
            return
        try:
            reduction.finish()
        except HorovodInternalError:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Drop all gradients. They may be partly reduced, so they must not be used or added to."""
        self.forget()
        for each in self._named:
            each.parameter.grad = None


def _groups(parameters: list[torch.Tensor], asked: int | Sequence[Sequence[torch.Tensor]] | None) -> dict[int, int]:
    """Return the group numbers by id of the parameter; parameters without a group are missing."""
    if not asked:
        return {}
    if isinstance(asked, int):
        count = min(asked, len(parameters))
        return {id(parameter): place * count // len(parameters) for place, parameter in enumerate(parameters)}
    return {id(parameter): number for number, group in enumerate(asked) for parameter in group}
