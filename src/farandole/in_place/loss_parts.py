"""How a loss depends on the number of samples it was computed from: read from the top of its graph. training.py asks.

The gradients of workers are weighted by their samples, which is right for means over samples, however the batch is
divided. A sum over samples grows with the part of a worker; a sum that is divided by something else of the samples, as
by the number of all boxes, counts as the script has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_MOST_PARTS = 64
_ALIKE = 1e-3  # relative difference of factors that are the same, also in half precision
_PASSING = frozenset(
    {"ToCopyBackward0", "CloneBackward0", "AliasBackward0", "ViewBackward0", "SqueezeBackward0", "UnsqueezeBackward0"}
)
_REDUCTION_IS_SUM = 2  # at::Reduction (torch 2.13, aten/src/ATen/core/Reduction.h)


@dataclass(frozen=True)
class Part:
    """A summand of a loss.

    name     of the node of the graph
    count    values that it adds up; 1 where it is their mean; 0: it is neither
    factors  of these
    labels   of a mean over labels: the sum of their weights, and their number; an ignored one weighs nothing
    """

    name: str
    count: int
    factors: tuple[torch.Tensor | float, ...] = ()
    labels: tuple[torch.Tensor, int] | None = None

    def weight(self) -> float:
        """Return the weight of all its values together, which may wait for the device; NaN: it is not known."""
        return self.count * math.prod(map(float, self.factors)) if self.count else math.nan

    def is_weighted(self) -> bool:
        """Return whether it is a mean over labels that do not all count alike."""
        return self.labels is not None and not math.isclose(float(self.labels[0]), self.labels[1], rel_tol=_ALIKE)


def parts_of(loss: torch.Tensor) -> list[Part]:
    """Return the summands of a loss, as far as the top of its graph shows them."""
    found: list[Part] = []
    try:
        for part in _parts(loss.grad_fn, ()):
            found.append(part)
            if len(found) == _MOST_PARTS:
                break
    except RuntimeError:  # what the graph has saved was freed: the backward pass will say so
        return []
    return found


def _parts(node: Any, factors: tuple[torch.Tensor | float, ...]) -> Iterator[Part]:
    if node is None:
        return
    name = str(node.name())
    inner = [each for each, _ in node.next_functions]
    if name in ("AddBackward0", "SubBackward0"):
        for each in inner:
            yield from _parts(each, factors)
    elif name == "NegBackward0" or name in _PASSING:
        yield from _parts(inner[0], factors)
    elif name in ("MulBackward0", "DivBackward0") and None in inner:
        left, right = inner
        factor = node._saved_other if left is not None else node._saved_self
        is_over_it = name == "DivBackward0" and left is None
        if not isinstance(factor, torch.Tensor) or factor.numel() != 1 or is_over_it:
            yield Part(name, 0)
            return
        factor = factor.detach()
        yield from _parts(left or right, (*factors, 1 / factor if name == "DivBackward0" else factor))
    elif name in ("MulBackward1", "DivBackward1") and isinstance(node._saved_other, int | float):
        factor = node._saved_other
        yield from _parts(inner[0], (*factors, 1 / factor if name == "DivBackward1" else factor))
    else:
        count = _count(name, node)
        is_mean_over_labels = name.startswith("NllLoss") and count == 1
        labels = (node._saved_total_weight, node._saved_target.numel()) if is_mean_over_labels else None
        yield Part(name, count, factors, labels)


def _count(name: str, node: Any) -> int:
    if name.startswith("MeanBackward"):
        return 1
    if name.startswith("SumBackward"):
        return math.prod(node._saved_self_sym_sizes)
    reduction = getattr(node, "_saved_reduction", None)
    if reduction is None:
        return 0
    return int(node._saved_target.numel()) if reduction == _REDUCTION_IS_SUM else 1


def grow(before: Sequence[Part], samples_before: int, now: Sequence[Part], samples: int) -> bool:
    """Return whether a summand of a loss has grown with the number of samples."""
    expected = samples / samples_before
    pairs = [(one.weight(), other.weight()) for one, other in zip(before, now, strict=True)]
    return samples != samples_before and any(
        then and math.isclose(weight / then, expected, rel_tol=_ALIKE) for then, weight in pairs
    )


def are_means(parts: Sequence[Part], before: Sequence[Part]) -> bool:
    """Return whether all summands of a loss are means whose factors have not changed, so that nothing of other workers
    is in them. `before`: those of an earlier loop body; none: there was none."""
    return all(each.count == 1 for each in parts) and all(
        math.isclose(one.weight(), other.weight(), rel_tol=_ALIKE)
        for one, other in zip(parts, before, strict=bool(before))
    )
