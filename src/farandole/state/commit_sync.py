"""A TorchState under the commit rule, as sync.py wants it: everybody copies from the rank with the newest commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from farandole.membership import Progress
from farandole.state.handlers import (
    BUILT_IN,
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StatefulHandler,
    StateHandler,
)
from farandole.state.packing import Packed
from farandole.state.parts import load_optimizer_entry, pack_small, refuse_other_model
from farandole.state.torch_state import TorchState


def can_be_staged(state: TorchState) -> bool:
    """Whether nobody has a sync of his own, or records that have to be united: the same answer on every rank."""
    return type(state).sync is TorchState.sync and all(
        type(each) in BUILT_IN and not (isinstance(each, SamplerStateHandler) and each.has_sets())
        for each in state._handlers.values()
    )


class CommittedState:
    """The live values of a TorchState, taken apart for a sync, and put together again.

    Large state is what an optimizer can move: parameters and the optimizers' tensors. Small state is the rest.
    """

    def __init__(self, state: TorchState) -> None:
        self.state = state
        self._captured = Packed(b"", [])
        self.is_holder = False

    @property
    def progress(self) -> Progress:
        """The number of the last commit counts, not what happened since: that is undone, or the same everywhere."""
        return Progress(step=self.state._commits)

    def settle(self) -> None:
        """After a sync: what is live is the commit now, and samplers divide what is left among the new world."""
        for handler in self._of(SamplerStateHandler).values():
            handler.value.load_state_dict(handler.value.state_dict())
        self.state._remember()

    # Small state -----------------------------------------------------------------------------------------

    def capture(self) -> None:
        self._captured = pack_small(self._small())

    def captured(self) -> Packed:
        return self._captured

    def load_small(self, small: Mapping[str, Any]) -> None:
        state = self.state
        for name, handler in self._of(ModelStateHandler).items():
            handler.value.load_state_dict(small["buffers"][name], strict=False)
        for name, handler in self._of(OptimizerStateHandler).items():
            for group, options in zip(handler.value.param_groups, small["groups"][name], strict=True):
                group.update(options)
        for name, handler in (self._of(SamplerStateHandler) | self._of(StatefulHandler)).items():
            handler.value.load_state_dict(small["stateful"][name])
        for name, value in small["values"].items():
            setattr(state, name, value)
        state._commits = small["commits"]

    def _small(self) -> dict[str, Any]:
        stateful = self._of(SamplerStateHandler) | self._of(StatefulHandler)
        return {
            "commits": self.state._commits,
            "buffers": {name: _others(handler.value) for name, handler in self._of(ModelStateHandler).items()},
            "groups": {name: _options(handler.value) for name, handler in self._of(OptimizerStateHandler).items()},
            "stateful": {name: handler.value.state_dict() for name, handler in stateful.items()},
            "values": self.state._values(),
        }

    # Large state -----------------------------------------------------------------------------------------

    def large(self) -> dict[str, Any]:
        optimizers = {
            key: dict(optimizer.state[parameter])
            for key, optimizer, parameter in self._optimized()
            if parameter in optimizer.state
        }
        return {"parameters": self._parameters(), "optimizer": optimizers}

    def load_large(self, large: Mapping[str, Any]) -> None:
        ours = self._parameters()
        refuse_other_model(ours, large["parameters"])
        self.state._copies.finish()
        with torch.no_grad():
            for name, parameters in ours.items():
                for key, parameter in parameters.items():
                    parameter.copy_(large["parameters"][name][key])
            for key, optimizer, parameter in self._optimized():
                load_optimizer_entry(optimizer, parameter, large["optimizer"].get(key))

    def _parameters(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: _parameters(handler.value) for name, handler in self._of(ModelStateHandler).items()}

    def _optimized(self) -> Iterator[tuple[str, torch.optim.Optimizer, torch.Tensor]]:
        for name, handler in self._of(OptimizerStateHandler).items():
            parameters = (p for group in handler.value.param_groups for p in group["params"])
            for place, parameter in enumerate(parameters):
                yield f"{name}.{place}", handler.value, parameter

    def _of(self, kind: type[StateHandler]) -> dict[str, StateHandler]:
        return {name: each for name, each in self.state._handlers.items() if isinstance(each, kind)}


def _parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters())


def _others(module: torch.nn.Module) -> dict[str, Any]:
    """Of the state_dict() all but the parameters: buffers, and what modules add to it."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {key: value for key, value in module.state_dict().items() if key not in parameters}


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
