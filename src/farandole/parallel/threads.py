"""Run replicas in threads of the CPU: their forward passes at the same time, and their backward passes, too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from farandole.parallel.autograd_bridge import Graph, bridge, traced
from farandole.parallel.dividing import Part
from farandole.parallel.nesting import changed
from farandole.parallel.replica_randomness import Draws, ReplicaRandomness
from farandole.parallel.replicas import replicas
from farandole.parallel.thread_pool import ThreadPool


def compute_in_threads(module: torch.nn.Module, parts: Sequence[Part], pool: ThreadPool) -> list[Any]:
    """Return the outputs of the replicas. Gradients flow to the module's parameters and the parts' tensors."""
    copies, masters, leaves = replicas(module, len(parts))
    inputs = [_Inputs(part) for part in parts]
    draws = Draws()
    try:
        computed = pool.run(
            [
                partial(_compute, copy, each, masters, own, draws, place)
                for place, (copy, each, own) in enumerate(zip(copies, inputs, leaves, strict=True))
            ]
        )
    finally:
        draws.close()
    bridged = bridge(pool, [graph for _, graph in computed])
    return [_replaced(output, graph.outs, new) for (output, graph), new in zip(computed, bridged, strict=True)]


class _Inputs:
    """A part of the batch, with leaves in place of the tensors that need gradients."""

    def __init__(self, part: Part) -> None:
        self.masters: list[torch.Tensor] = []
        self.leaves: list[torch.Tensor] = []
        self.args, self.kwargs = part.args, part.kwargs
        if torch.is_grad_enabled():
            self.args, self.kwargs = changed(part.args, self._leaf), changed(part.kwargs, self._leaf)

    def _leaf(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        self.masters.append(value)
        self.leaves.append(value.detach().requires_grad_())
        return self.leaves[-1].clone()  # only a non-leaf may be changed in place, e.g. by ReLU(inplace=True)


def _compute(
    replica: torch.nn.Module,
    inputs: _Inputs,
    masters: list[torch.Tensor],
    leaves: list[torch.Tensor],
    draws: Draws,
    place: int,
) -> tuple[Any, Graph]:
    """Compute one replica, in its thread."""
    with ReplicaRandomness(draws, place):
        output = replica(*inputs.args, **inputs.kwargs)
    return output, traced(masters + inputs.masters, leaves + inputs.leaves, _outs(output))


def _outs(output: Any) -> list[torch.Tensor]:
    """Return the tensors that need gradients, each once."""
    found: dict[int, torch.Tensor] = {}

    def look(leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            found[id(leaf)] = leaf

    changed(output, look)
    return list(found.values())


def _replaced(output: Any, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> Any:
    new_of = {id(before): after for before, after in zip(old, new, strict=True)}
    return changed(output, lambda leaf: new_of.get(id(leaf), leaf))
