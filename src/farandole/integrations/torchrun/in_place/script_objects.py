"""The objects of a script that belong to its training: noted when they are constructed, by weak references.
torch_patches.py notes them, training.py asks for them.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from farandole.errors import ConfigError

T = TypeVar("T")

_PACKAGES = tuple(f"{Path(module.__file__ or '').parent}/" for module in (torch, sys.modules["farandole"]))
_LIGHTNING = ("lightning.pytorch.", "pytorch_lightning.")


class Noted(Generic[T]):
    """Objects that still exist, in the order of their construction, with the lines that constructed them."""

    def __init__(self) -> None:
        self._entries: list[tuple[weakref.ref[T], str]] = []

    def add(self, value: T) -> None:
        self._entries.append((weakref.ref(value), line_of_script()))

    def __iter__(self) -> Iterator[T]:
        return (value for reference, _ in self._entries if (value := reference()) is not None)

    def __len__(self) -> int:
        """Return the number of all objects that were constructed so far."""
        return len(self._entries)

    def is_younger(self, value: T, count: int) -> bool:
        """Return whether the object was constructed when there had been `count` others."""
        return any(reference() is value for reference, _ in self._entries[count:])

    def line_of(self, value: T) -> str:
        """Return the line of the script that has constructed the object; empty for an unknown one."""
        return next((line for reference, line in self._entries if reference() is value), "")


@dataclass(frozen=True)
class Objects:
    """The objects of a training, by the names that they have in its state."""

    modules: dict[str, torch.nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    others: dict[str, Any]

    def __str__(self) -> str:
        named = {**self.modules, **self.optimizers, **self.others}
        return ", ".join(f"{name} ({_kind(value)})" for name, value in named.items())


class Registry:
    """The objects that the script has constructed so far.

    obstacle  the first construct of the script that cannot follow the membership, with its line; empty: none
    """

    def __init__(self) -> None:
        self.parallel: Noted[DistributedDataParallel] = Noted()
        self.averages: Noted[torch.nn.Module] = Noted()
        self.optimizers: Noted[torch.optim.Optimizer] = Noted()
        self.others: Noted[Any] = Noted()  # schedulers and GradScalers
        self.loaders: Noted[Any] = Noted()
        self.obstacle = ""

    def note_obstacle(self, what: str) -> None:
        """Note that the script does something that cannot follow the membership."""
        self.obstacle = self.obstacle or f"{what} ({line_of_script()})"

    def objects(self) -> Objects:
        """Return the objects of the training.

        Raises:
            ConfigError: They cannot be trained elastically.
        """
        if self.obstacle:
            raise ConfigError(self.obstacle)
        parallel = list(self.parallel)
        if not parallel:
            raise ConfigError("there is no DistributedDataParallel, so nothing tells which gradients are reduced")
        reduced = {id(parameter) for each in parallel for parameter in each.parameters()}
        optimizers = []
        for each in self.optimizers:
            parameters = [parameter for group in each.param_groups for parameter in group["params"]]
            if any(parameter.requires_grad and id(parameter) not in reduced for parameter in parameters):
                raise ConfigError(
                    f"the {type(each).__name__} of {self.optimizers.line_of(each)} has parameters of no "
                    f"DistributedDataParallel: its gradients would differ between workers"
                )
            optimizers.append(each)
        if not optimizers:
            raise ConfigError("there is no optimizer of the parameters of a DistributedDataParallel")
        return Objects(
            _named("model", [*parallel, *self.averages]),
            _named("optimizer", optimizers),
            _named("value", [each for each in self.others if _belongs_to(each, optimizers)]),
        )

    def newer(self, known: Objects) -> str:
        """Return a model or an optimizer that is trained, and is none of these, with its line; empty: there is none."""
        modules, optimizers = list(known.modules.values()), list(known.optimizers.values())
        for each in self.parallel:
            if not any(each is other for other in modules) and any(p.requires_grad for p in each.parameters()):
                return f"another {_kind(each)} ({self.parallel.line_of(each)})"
        for optimizer in self.optimizers:
            if not any(optimizer is other for other in optimizers):
                return f"another optimizer, {_kind(optimizer)} ({self.optimizers.line_of(optimizer)}),"
        return ""


def _belongs_to(value: Any, optimizers: list[torch.optim.Optimizer]) -> bool:
    """Return whether a scheduler is one of these optimizers, or the object is no scheduler."""
    optimizer = getattr(value, "optimizer", None)
    return optimizer is None or any(each is optimizer for each in optimizers)


def _named(name: str, values: list[T]) -> dict[str, T]:
    return {name if not number else f"{name}_{number + 1}": each for number, each in enumerate(values)}


def _kind(value: Any) -> str:
    inner = f" of {type(value.module).__name__}" if isinstance(getattr(value, "module", None), torch.nn.Module) else ""
    return f"{type(value).__name__}{inner}"


# The script's own frames ----------------------------------------------------------------------------------------------


def line_of_script() -> str:
    """Return file and line of the innermost frame that belongs to none of torch, Lightning and Farandole."""
    frame = _frame_of_script()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "unknown line"


_RANKS = re.compile(r"rank|gpu|process_index", re.IGNORECASE)
_COUNTS = re.compile(r"world|proc|replica|worker|rank|gpu|\bws$", re.IGNORECASE)


def kept_count(workers: int) -> str:
    """Return the name of a variable, in the innermost function of the script or its caller, that has this number and is
    named like one of workers; empty: there is none."""
    return _kept(workers, _COUNTS)


def kept_rank(rank: int) -> str:
    """Return the name of a variable, as kept_count(), that has this number and is named like a rank."""
    return _kept(rank, _RANKS)


def _kept(number: int, names: re.Pattern[str]) -> str:
    frame = _frame_of_script()
    for each in (frame, frame and frame.f_back):
        if each is not None and (name := _kept_in(each, number, names)):
            return name
    return ""


def _kept_in(frame: FrameType, number: int, pattern: re.Pattern[str]) -> str:
    code = frame.f_code
    names = {*code.co_names, *code.co_varnames, *code.co_freevars}
    fitting = [name for name in names if pattern.search(name)]
    for name in sorted(names):
        value = frame.f_locals.get(name, frame.f_globals.get(name))
        if type(value) is int and value == number and name in fitting:
            return name
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict and not isinstance(value, type | ModuleType):
            for each in fitting:
                if type(attributes.get(each)) is int and attributes[each] == number:
                    return f"{name}.{each}"
    return ""


def runs_in_lightning() -> bool:
    """Return whether a loop of Lightning's Trainer is running.

    The Trainer counts its batches, and ends an epoch too early when one came again (lightning 2.6,
    _TrainingEpochLoop.done).
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and not _module_of(frame).startswith(_LIGHTNING):
        frame = frame.f_back
    return frame is not None


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _frame_of_script() -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None and (
        frame.f_code.co_filename.startswith((*_PACKAGES, "<")) or _module_of(frame).startswith(_LIGHTNING)
    ):
        frame = frame.f_back
    return frame
