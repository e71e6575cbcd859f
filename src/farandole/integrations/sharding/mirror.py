"""The mirror of another worker's part, kept equal by replay: its owner sends the gradients of each step, and the same
optimizer takes the same step here."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from farandole.integrations.sharding.parts import Part, copied


class Mirror:
    """A mirror, of nothing at first.

    optimizer  the owner's, as far as it is equal on all workers
    kind       its class, without what Farandole has added
    places     the places of the divided parameters in its groups: (group, place in it)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kind: type[torch.optim.Optimizer],
        places: Sequence[tuple[int, int]],
    ) -> None:
        self._optimizer, self._kind, self._places = optimizer, kind, places
        self.load([])

    def load(self, parts: Sequence[Part]) -> None:
        """Mirror these parts from now on; they are not copied."""
        self._parameters = [torch.nn.Parameter(each.rows[""]) for each in parts]
        twin: Any = object.__new__(self._kind)
        twin.__dict__.update(
            {key: copied(each) for key, each in vars(self._optimizer).items() if key not in _NOT_EQUAL}
        )
        members = sorted(zip(self._places, self._parameters, strict=False), key=lambda each: each[0])
        twin.param_groups = [
            {"params": [parameter for (group, _), parameter in members if group == number]}
            for number in range(len(self._optimizer.param_groups))
        ]
        twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        twin.state = defaultdict(dict)
        for parameter, part in zip(self._parameters, parts, strict=True):
            state = {key: each for key, each in part.rows.items() if key} | part.shared
            if state:
                twin.state[parameter] = state
        self._twin = twin

    def apply(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the owner's step."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        for group, mirrored in zip(self._optimizer.param_groups, self._twin.param_groups, strict=True):
            mirrored.update({key: copied(each) for key, each in group.items() if key != "params"})
        self._kind.step(self._twin)
        for parameter in self._parameters:
            parameter.grad = None

    def parts(self) -> list[Part]:
        """Return the mirrored parts, live."""
        return [self._part(each) for each in self._parameters]

    def _part(self, parameter: torch.nn.Parameter) -> Part:
        state = self._twin.state.get(parameter, {})
        rows = {key: each for key, each in state.items() if is_alike(each, parameter)}
        return Part({"": parameter.detach(), **rows}, {key: each for key, each in state.items() if key not in rows})


def is_alike(value: object, parameter: torch.Tensor) -> bool:
    """Return whether a tensor of an optimizer's state has an element for each of its parameter."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape


_NOT_EQUAL = frozenset(
    {"param_groups", "state", "step", "_base_scales", "_is_inside", "_farandole_paths", "_farandole_reduced"}
)
