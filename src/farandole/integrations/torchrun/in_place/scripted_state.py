"""The state of a script that is elastic in place."""

from __future__ import annotations

from collections.abc import Iterator

from farandole.integrations.torchrun.in_place.script_loader import ScriptLoader
from farandole.integrations.torchrun.in_place.script_objects import Objects
from farandole.integrations.torchrun.in_place.script_search import hooks_of, roots_of_script
from farandole.integrations.torchrun.in_place.script_state import ScriptState
from farandole.training.state.batch import Batch
from farandole.training.state.step_state import StepState


class ScriptedState(StepState):
    """A StepState beside the values that only the script knows."""

    script: ScriptState | None = None

    def capture(self, is_whole: bool = False) -> None:
        if not self.step:
            self.watched.inspect()
        super().capture(is_whole)

    def _on_decided(self, batch: Batch | None) -> None:
        super()._on_decided(batch)
        self.watched.applied()

    def before_applying(self) -> None:
        super().before_applying()
        if self.script is not None:
            self.script.look()

    def aborted(self) -> None:
        super().aborted()
        if self.script is not None:
            self.script.save()


def state_of(objects: Objects, loader: ScriptLoader) -> ScriptedState:
    """Return the state with the objects of a script. Raises ConfigError for those that cannot be made elastic."""
    return ScriptedState(
        **{"model": None, "optimizer": None, **objects.modules, **objects.optimizers, **objects.others},
        loader=loader,  # type: ignore[arg-type]  # as TorchState(loader=...) of each DataLoader
        rehearse=False,
    )


def script_of(objects: Objects, state: ScriptedState) -> ScriptState:
    """Return the values that only the script knows: all that are not in the state."""
    return ScriptState(
        lambda: [*_parts_of(state), *objects.optimizers.values(), *objects.others.values()],
        lambda: [*roots_of_script(), *hooks_of(state.modules(), objects.optimizers.values())],
    )


def _parts_of(state: StepState) -> Iterator[object]:
    """Yield the parameters and buffers of a state."""
    for module in state.modules():
        yield from module.parameters()
        yield from module.buffers()
