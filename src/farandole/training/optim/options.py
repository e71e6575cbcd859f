"""Arguments of DistributedOptimizer, checked at its creation, before anything is hooked or reduced; and advice about
them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farandole.base.env import read_bucket_mb
from farandole.errors import StepError
from farandole.training.collectives import world
from farandole.training.collectives.extension import SomeRanks, are_all
from farandole.training.collectives.transport import Reduction
from farandole.training.optim.bucket_size import bytes_of
from farandole.training.optim.compression import Compression, Compressor


@dataclass(frozen=True)
class Options:
    """Horovod's arguments of DistributedOptimizer, which explains them. Raises ValueError for invalid ones."""

    compression: Compressor = Compression.none
    op: Reduction = Reduction.AVERAGE
    predivide_factor: float = 1.0
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None
    sparse_as_dense: bool = False
    process_set: SomeRanks | None = None
    loss: str = "mean"
    bucket_mb: float | None = None

    def __post_init__(self) -> None:
        if self.predivide_factor != 1.0 and self.op != Reduction.AVERAGE:
            raise ValueError(
                f"gradient_predivide_factor={self.predivide_factor} splits the division of an average and works "
                f"with op=Average only, got op={Reduction(self.op).name}"
            )
        if self.loss not in ("mean", "sum"):
            raise ValueError(f'loss must be "mean" or "sum", got {self.loss!r}')
        if self.bucket_mb is not None:
            bytes_of(self.bucket_mb)
        if isinstance(self.groups, int):
            if self.groups < 0:
                raise ValueError(
                    f"groups must be a number of groups, 0 or more, or lists of parameters, got {self.groups}"
                )
        elif self.groups is not None:
            _check_groups(self.groups)

    @property
    def pinned_bytes(self) -> int | None:
        """Least size of a bucket, 0 for one bucket; None: it is chosen. Raises ConfigError for an invalid variable."""
        asked = read_bucket_mb() if self.bucket_mb is None else self.bucket_mb
        return None if asked is None else bytes_of(asked)


def refuse_for_loader(options: Options, passes_per_step: int) -> None:
    """Raise StepError for arguments that are not possible with a loader of Farandole."""
    if passes_per_step != 1:
        raise StepError(
            f"backward_passes_per_step={passes_per_step} is for scripts without a DataLoader of "
            f"Farandole, which accumulates gradients itself: DataLoader(global_batch_size=..., micro_batch_size=...)"
        )
    if (
        options.op != Reduction.AVERAGE
        or options.predivide_factor != 1.0
        or options.groups
        or not are_all(options.process_set)
    ):
        raise StepError(
            "op other than Average, gradient_predivide_factor, groups, sparse_as_dense and process_set are "
            "for scripts without a DataLoader of Farandole, which weights gradients itself: leave them out"
        )


def groups_of(groups: Any, num_groups: int) -> Any:
    """Return the groups that `groups` and Horovod's older `num_groups` request together; the older one warns."""
    if num_groups:
        warnings.warn(
            f"num_groups is Horovod's older name; write groups={num_groups}", DeprecationWarning, stacklevel=3
        )
    return num_groups if groups is None and num_groups else groups


def check_passes(passes: int) -> int:
    """Raise ValueError for an invalid number of backward passes for each step."""
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step must be at least 1, got {passes}")
    return passes


def names_of(param_groups: Sequence[dict[str, Any]], named_parameters: Iterable[Any] | None) -> dict[torch.Tensor, str]:
    """Return a name for each parameter of the optimizer, equal on all ranks: the given one, or one made of its place.

    Raises ValueError for items that are not pairs, names given twice, and parameters without a name.
    """
    places = {
        parameter: f"parameter.{number}.{place}"
        for number, group in enumerate(param_groups)
        for place, parameter in enumerate(group["params"])
    }
    if named_parameters is None:
        return places
    pairs = list(named_parameters)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                f"named_parameters contains a {type(pair).__name__}; it must contain tuples (name, parameter), as "
                f"model.named_parameters() returns them"
            )
    _refuse_duplicates([name for name, _ in pairs])
    names = {parameter: name for name, parameter in pairs}
    missing = [f"{place} of shape {tuple(p.shape)}" for p, place in places.items() if p not in names]
    if missing:
        raise ValueError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters: {', '.join(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''}; name all of them, or leave named_parameters out"
        )
    return {parameter: names[parameter] for parameter in places}


def _refuse_duplicates(names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(
            f"named_parameters has these names more than once: {', '.join(twice)}; add a prefix to the names of each "
            f"model"
        )


def _check_groups(groups: Sequence[Sequence[torch.Tensor]]) -> None:
    if not isinstance(groups, (list, tuple)):
        raise ValueError(f"groups must be a number, or a list of lists of parameters, got {type(groups).__name__}")
    seen: set[int] = set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError(f"groups must contain lists of parameters, found a {type(parameter).__name__}")
            if id(parameter) in seen:
                raise ValueError(f"groups contains a parameter of shape {tuple(parameter.shape)} twice")
            seen.add(id(parameter))


# Advice to a script about its optimizer, given once -------------------------------------------------------------------

_LARGE_MODEL = 10_000_000  # parameters: some tens of milliseconds in each step
_ADVISED = set[str]()  # the name of the class that the script was told of


def recommend_fused(optimizer: torch.optim.Optimizer) -> None:
    """Warn, once and on rank 0 only, when a large model on the CPU is stepped one parameter after the other although
    its optimizer has a faster implementation. No warning if the script has chosen (`fused=False`, `foreach=False`)."""
    if _ADVISED or world.current().placement.rank != 0:
        return
    option = next((each for each in ("fused", "foreach") if each in optimizer.defaults), None)
    groups = optimizer.param_groups
    if option is None or any(group.get(name) is not None for group in groups for name in ("fused", "foreach")):
        return
    count = sum(each.numel() for group in groups for each in group["params"] if each.device.type == "cpu")
    if count < _LARGE_MODEL:
        return
    name = type(optimizer).__name__
    _ADVISED.add(name)
    warnings.warn(
        f"{name} steps through {count / 1e6:.0f} million parameters with many small operations, which takes several "
        f"times as long as with {option}=True on the CPU: write {name}(..., {option}=True), or {option}=False to keep "
        f"the current behaviour",
        RuntimeWarning,
        stacklevel=3,
    )
