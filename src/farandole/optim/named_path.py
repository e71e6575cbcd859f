"""From gradient to step without a loader of ours: named reductions, as Horovod's scripts expect them.

When the last parameter has had its backward passes, all gradients are reduced, still inside backward(). Where some
got none on this rank (their part of the model was not used, or comes in another backward pass), nothing is reduced
before step() or synchronize(): waiting for them in backward() could be for ever. A rank that has all of them waits in
backward() for such ranks, so these must not wait for it elsewhere, in a collective between backward() and step().
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
    """names  of all parameters of the optimizer, in its order"""

    def __init__(self, names: dict[torch.Tensor, str], options: Options, passes: Passes) -> None:
        self._options = options
        self._passes = passes
        self._sparse_dims: dict[int, int] = {}
        self._pass_id: int | None = None
        self.was_synchronized = False
        self.name(names)

    def name(self, names: dict[torch.Tensor, str]) -> None:
        """These are the parameters now."""
        groups = _groups(list(names), self._options.groups)
        self._named = [Named(parameter, name, groups.get(id(parameter))) for parameter, name in names.items()]

    # In backward() ---------------------------------------------------------------------------------------

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Runs inside backward(), once for each parameter that got a gradient."""
        if not self._is_active():
            return
        self._passes.count(id(parameter))
        pass_id = torch._C._current_graph_task_id()
        if pass_id != self._pass_id:  # a backward pass within a backward pass (checkpointing) has an end of its own
            self._pass_id = pass_id
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        """Runs at the end of backward(), on the thread that called it."""
        self._pass_id = None
        participants = self._participants()
        if not self._passes.are_due(id(each.parameter) for each in participants):
            return
        reduction = self._begin(participants)
        # Queued behind the ends of other optimizers' passes: they submit first, then all wait.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._finish(reduction))

    # In step() and synchronize() -------------------------------------------------------------------------

    def reduce_rest(self) -> bool:
        """Reduce what is not reduced yet, with zeros where there is no gradient; whether there was anything.

        Raises HorovodInternalError when a collective failed; then nothing of this step is left."""
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
        """Nothing has happened since the last step."""
        self._passes.forget()
        self.was_synchronized = False

    def _is_active(self) -> bool:
        return bool(self._options.process_set.included()) and counts_passes()

    def _participants(self) -> list[Named]:
        return [each for each in self._named if self._takes_part(each.parameter)]

    def _takes_part(self, parameter: torch.Tensor) -> bool:
        """Frozen ones do not; one that was frozen after its backward pass does."""
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
        """Gradients may be half reduced: none of them may be taken for one, or be added to."""
        self.forget()
        for each in self._named:
            each.parameter.grad = None


def _groups(parameters: list[torch.Tensor], asked: int | Sequence[Sequence[torch.Tensor]] | None) -> dict[int, int]:
    """By id of the parameter: the number of its group; parameters that are in none are missing."""
    if not asked:
        return {}
    if isinstance(asked, int):
        count = min(asked, len(parameters))
        return {id(parameter): place * count // len(parameters) for place, parameter in enumerate(parameters)}
    return {id(parameter): number for number, group in enumerate(asked) for parameter in group}
