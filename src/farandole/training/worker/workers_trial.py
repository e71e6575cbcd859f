"""The trial of the workers: a loop body that all of them run with the same samples and random numbers, and without
effect.

A newcomer receives the TorchState, and in place what only the script knows, as far as it can be found. The trial before
it trains shows whether something is missing: then the newcomer's gradients, or the options of its optimizers, are
others. In place it is not admitted then; an elastic function says so. docs/decisions/trials-in-place.md.

Later trials of an elastic function show whether its workers have become different: a loop may keep centers, or a memory
of features, which each worker has of its own samples.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from farandole.training.state.step_state import StepState
from farandole.training.state.tensor_digest import digest_of
from farandole.training.worker.loss_trial import hook_gradients

_ROUNDING = 1e-3
"""Relative difference of gradients up to which it may be of rounding: on a GPU, or on hosts of different processors."""


class GradientNote(msgspec.Struct, frozen=True, array_like=True):
    """What is compared of the gradients of one parameter, of all backward passes of the loop body.

    digest      of their bytes
    magnitude   sum of the absolute values
    sums        sums of the values, with alternating signs of two periods
    """

    digest: int
    magnitude: float
    sums: tuple[float, float]


class Tried(msgspec.Struct, frozen=True):
    """The result of a trial on one worker.

    is_newcomer  it is on trial
    exact        gradients are comparable bit by bit with those of workers of the same name; empty: with none
    gradients    by the name of the parameter
    options      by the name of the optimizer, its group and the option
    other_place  where its script stands that is not where those of the others do: a clause; empty: nowhere
    samples      digest of those that it had; 0: not known
    draws        the loop has random numbers from a generator of its own
    """

    is_newcomer: bool
    exact: str
    gradients: dict[str, GradientNote]
    options: dict[str, str]
    other_place: str = ""
    samples: int = 0
    draws: bool = False


@dataclass(frozen=True)
class Verdict:
    """What all workers have found in a trial.

    refused     ranks of the newcomers that do not train as the others do
    difference  the first thing that is another one on them: a clause
    is_open     the trial shows nothing: the other workers differ among themselves
    """

    refused: tuple[int, ...] = ()
    difference: str = ""
    is_open: bool = False


def judge(by_rank: Sequence[Tried]) -> Verdict:
    """Compare the results of a trial. Pure."""
    others = [each for each in by_rank if not each.is_newcomer]
    if not others:
        return Verdict(is_open=True)
    found = {rank: _difference(others[0], each) for rank, each in enumerate(by_rank)}
    if open_in := next((found[rank] for rank, each in enumerate(by_rank) if not each.is_newcomer and found[rank]), ""):
        return Verdict(difference=open_in, is_open=True)
    refused = tuple(rank for rank, difference in found.items() if difference)
    if not refused:
        return Verdict()
    is_elsewhere = bool(by_rank[refused[0]].other_place)
    return Verdict(refused, found[refused[0]] if is_elsewhere else f"with equal samples, {found[refused[0]]}")


def judge_twice(first: Sequence[Tried], again: Sequence[Tried]) -> Verdict:
    """Return the verdict of two trials that should be alike: the first one's, if those who are no newcomers have done
    the same twice. Pure."""
    pairs = zip(first, again, strict=True)
    changed = next((found for one, two in pairs if not one.is_newcomer and (found := _difference(one, two))), "")
    return Verdict(difference=changed, is_open=True) if changed else judge(first)


def own_values(first: Sequence[Tried], again: Sequence[Tried]) -> str:
    """Return what differs between workers that have done the same twice: a clause; empty: nothing, or they have other
    samples, or random numbers of their own. Pure."""
    is_chance = any(each.draws for each in first) or len({each.samples for each in first}) > 1
    if is_chance or any(_difference(one, two) for one, two in zip(first, again, strict=True)):
        return ""
    return next((found for each in first if (found := _difference(first[0], each))), "")


def _difference(one: Tried, other: Tried) -> str:
    if other.other_place:
        return f"{other.other_place}, as from a checkpoint that it has loaded without sampler.set_epoch()"
    for name in sorted({*one.options, *other.options}):
        if one.options.get(name) != other.options.get(name):
            return f"{name} is {other.options.get(name, 'absent')} instead of {one.options.get(name, 'absent')}"
    is_exact = bool(one.exact) and one.exact == other.exact
    for name in sorted({*one.gradients, *other.gradients}):
        mine, theirs = one.gradients.get(name), other.gradients.get(name)
        if mine is None or theirs is None:
            return f"{name} has {'no' if theirs is None else 'a'} gradient"
        if mine.digest != theirs.digest and (is_exact or not _is_rounding(mine, theirs)):
            return f"the gradient of {name} is another one"
    return ""


def _is_rounding(one: GradientNote, other: GradientNote) -> bool:
    allowed = _ROUNDING * max(one.magnitude, other.magnitude)
    pairs = [(one.magnitude, other.magnitude), *zip(one.sums, other.sums, strict=True)]
    return all(abs(mine - theirs) <= allowed for mine, theirs in pairs) or not math.isfinite(allowed)


class Trial:
    """The trial on this worker, from before the loop body to its end."""

    def __init__(self, state: StepState) -> None:
        self._state = state
        self._notes: dict[str, list[GradientNote]] = {}
        self._options: dict[str, str] = {}
        self._is_on_cpu = True
        self._hooks = hook_gradients(state.modules(), self._note)

    def _note(self, name: str, values: torch.Tensor) -> None:
        self._is_on_cpu &= values.device.type == "cpu"
        flat = values.reshape(-1).to(torch.complex128 if values.is_complex() else torch.float64)
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        total, odd, third = float(flat.sum()), float(flat[1::2].sum()), float(flat[1::3].sum())
        magnitude = float(flat.abs().sum())
        sums = (total - 2 * odd, total - 2 * third)
        self._notes.setdefault(name, []).append(GradientNote(digest_of([values]), magnitude, sums))

    def look(self) -> None:
        """Note the options of the optimizers: the loop body has called step()."""
        for optimizer in self._state.optimizers():
            for number, group in enumerate(optimizer.param_groups):
                of = f"{type(optimizer).__name__}.param_groups[{number}]"
                options = {key: _text(value) for key, value in group.items() if key != "params"}
                self._options |= {f"{of}[{key!r}]": text for key, text in options.items()}

    def end(self, is_newcomer: bool, other_place: str = "") -> Tried:
        """Return the result, the arguments as in Tried. No further gradient is noted."""
        for each in self._hooks:
            each.remove()
        exact = platform.node() if self._is_on_cpu else ""
        gradients = {name: _united(notes) for name, notes in self._notes.items()}
        return Tried(is_newcomer, exact, gradients, self._options, other_place)


def _united(notes: Sequence[GradientNote]) -> GradientNote:
    """Return the note of several gradients, in whatever order they came."""
    return GradientNote(
        sum(each.digest for each in notes) % 2**64,
        math.fsum(each.magnitude for each in notes),
        (math.fsum(each.sums[0] for each in notes), math.fsum(each.sums[1] for each in notes)),
    )


def _text(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)
