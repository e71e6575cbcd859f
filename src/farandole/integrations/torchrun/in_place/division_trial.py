"""The trial of a division, elastic in place: does the script train the same, however a batch is divided among workers?

It does where its loss is a mean over samples. A sum over them, a mean over something else (words that are not padding,
classes with weights), or a count that the script reduces over the workers, makes gradients depend on the division. No
list of losses would be complete, so all workers run the loop body without effect, before the first step with another
number of workers than at the start:

    whole    with the own part of the global batch
    first    with half of its samples, each twice
    second   with the other half, each twice: the mean of the gradients of both is that of the whole. So three times,
             with other halves, since two halves may be equally heavy by chance
    many     with one of its samples, as often as the part has samples
    few      with the same sample, as often as a part had at the start, and as many workers: the same gradient
    last     the same two for the epoch's last batch, if that is smaller: a script may leave it out by its size
    again    with the whole and other random numbers, where something differs: then these may be the reason

Every batch has a size that the script has, or is about to have, anyway. Dropout and BatchNorm are off.
docs/decisions/trials-in-place.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from farandole.training.collectives.transport import Transport
from farandole.training.data.augmentation import generators_kept
from farandole.training.state.step_state import StepState
from farandole.training.worker.loss_trial import Gradients, TrialBody
from farandole.training.worker.step_randomness import reseed

_HALVES = ("whole", *("first", "second") * 3)
_SIZES = ("many", "few")
_LAST = ("last many", "last few")

_DIFFERENT = 1e-2
"""Relative difference of gradients above which they are different ones; in half precision rounding is below that."""

_SMALL = 1e-3
"""Of the gradient of a batch: what is smaller is compared with this."""


class Sizes(NamedTuple):
    """Numbers at the start, and now.

    batch    most samples of a worker's batch at the start
    workers  at the start, and now
    last     samples of a worker's last batch of the epoch, at the start, and now; 0: it is as large as the others
    """

    batch: int
    workers: tuple[int, int]
    last: tuple[int, int] = (0, 0)


class Found(msgspec.Struct, array_like=True):
    """The result on one worker: squares of norms.

    whole, many   of gradients
    halves        of the whole's and two halves' difference, the largest of the three
    sizes, noise  of the differences of "many" and "few", "whole" and "again"
    option        of an optimizer, which differs between "many" and "few"; empty: none does
    states        digests of the script's tensors that the whole has changed, before it and after it
    """

    can_be_divided: bool = False
    whole: float = 0.0
    many: float = 0.0
    halves: float = 0.0
    sizes: float = 0.0
    noise: float = 0.0
    option: str = ""
    states: dict[str, tuple[int, int]] = {}


class DivisionTrial:
    """The trial on this worker, from before the first of its bodies to the end of the last.

    collated    returns a batch of samples of the data set
    is_collated_by_script  with a collate_fn of its own
    states      returns the digests of the script's tensors
    generation  the number of the generation in which it began

    Attributes:
        because: Why the division matters: a clause; empty: it does not, or cannot be told.
        is_open: It cannot be told, since gradients of equal samples differ.
        is_in_body: A body is under way.
    """

    def __init__(
        self,
        state: StepState,
        seed: int,
        sizes: Sizes,
        collated: Callable[[Sequence[int]], Any],
        is_collated_by_script: bool,
        states: Callable[[], dict[str, int]],
        generation: int,
    ) -> None:
        self._is_collated_by_script = is_collated_by_script
        self._state, self._seed, self._sizes, self._collated = state, seed, sizes, collated
        self._body = TrialBody(state.modules(), torch.clone)
        self._states, self._before = states, dict[str, int]()
        self.generation = generation
        self._bodies = [*_HALVES, *_SIZES, *(_LAST if all(sizes.last) else ()), "again"]
        self._data: Any = None
        self._samples: Sequence[int] = ()
        self._whole, self._rest = Gradients(), Gradients()
        self._options, self._options_of_many = dict[str, float](), dict[str, float]()
        self._found = Found()
        self.because, self.is_open, self.is_in_body = "", False, False

    def workers_seen(self) -> int:
        """Return the number of workers that the script has to see in the next body, and whose collectives are answered
        locally, as if each of them had the same samples; 0: the real ones."""
        match self._bodies[0]:
            case "few" | "last few":
                return self._sizes.workers[0]
            case "many" | "last many":
                return self._sizes.workers[1]
            case _:
                return 0

    def begin_body(self) -> None:
        """Begin the next body, before its batch is handed out."""
        self.is_in_body = True
        reseed(self._seed, int(self._bodies[0] == "again"), 0)
        if self._bodies[0] == "whole":
            self._before = self._states()
        self._body.begin()

    def look(self) -> None:
        """Look at the optimizers' options and the script's tensors: they are about to be brought back."""
        self._options = _options(self._state)
        if self._bodies[0] == "whole":
            now = self._states()
            self._found.states = {
                name: (each, now[name]) for name, each in self._before.items() if now.get(name, each) != each
            }

    def batch(self, data: Any, samples: Sequence[int]) -> Any:
        """Return the batch of this body. `data`: the own part of the global batch, which has these samples."""
        if self._bodies[0] == "whole":
            self._data, self._samples = data, samples
            return data
        rows = self._rows()
        divided = rows_of(self._data, len(self._samples), rows)
        if divided is not None and not self._is_collated_by_script:
            return divided
        with generators_kept():
            collated = self._collated([self._samples[row] for row in rows])
        # Rows are taken as they are, with the random numbers of the data set, unless the script's collate_fn gives them
        # another form in a smaller batch: it may pad them to the longest one.
        return collated if divided is None or _shapes(collated) != _shapes(divided) else divided

    def _rows(self) -> list[int]:
        rows, half = range(len(self._samples)), len(self._samples) // 2
        split = self._bodies.count("second") % 3
        mixed = sorted(rows[: 2 * half], key=(lambda row: 0, lambda row: row % 2, lambda row: row // 2 % 2)[split])
        first, second, last = mixed[:half], mixed[half:], [*rows[2 * half :]]
        match self._bodies[0]:
            case "first":
                return [*first, *first, *last]
            case "second":
                return [*second, *second, *last]
            case "many":
                return [0] * len(self._samples)
            case "few":
                return [0] * self._sizes.batch
            case "last many":
                return [0] * self._sizes.last[1]
            case "last few":
                return [0] * self._sizes.last[0]
            case _:
                return [*rows]

    def end_body(self) -> None:
        """Take the gradients of the body, which is over."""
        body, self.is_in_body = self._bodies.pop(0), False
        now = self._body.end()
        match body:
            case "whole":
                self._whole = now
                self._found.whole = _square(now)
            case "first":
                self._rest = _sum((2.0, self._whole), (-1.0, now))
            case "second":
                difference = _square(_sum((1.0, self._rest), (-1.0, now)))
                self._found.halves = max(self._found.halves, math.inf if math.isnan(difference) else difference)
            case "many" | "last many":
                self._rest = now
                self._found.many = max(self._found.many, _square(now))
                self._options_of_many = self._options
            case "few" | "last few":
                self._found.sizes = max(self._found.sizes, _square(_sum((1.0, self._rest), (-1.0, now))))
                before = self._options_of_many.items()
                differing = (name for name, each in before if _is_other(each, self._options.get(name, each)))
                self._found.option = self._found.option or next(differing, "")
            case "again":
                self._found.noise = _square(_sum((1.0, self._whole), (-1.0, now)))

    def is_over(self, transport: Transport) -> bool:
        """Return whether no further body is due, after agreement with all workers. Raises RecoverableError."""
        if self._bodies[1:] and self._bodies[0] != "first":
            return False
        if self._bodies and self._bodies[0] == "first":
            if self._found.can_be_divided:
                return False
            self._found.can_be_divided = len(self._samples) > 1
        packed = transport.all_gather(msgspec.msgpack.encode(self._found))
        by_rank = [msgspec.msgpack.decode(each, type=Found) for each in packed]
        self.because = differing_state(by_rank)
        if self.because or self._bodies[1:]:
            return bool(self.because) or not all(each.can_be_divided for each in by_rank)
        self.because = judge(by_rank)
        self.is_open = not self._bodies and any(_differs(each.noise, each.whole) for each in by_rank)
        if self.is_open:
            self.because = ""
        return not self.because or not self._bodies

    def drop(self) -> None:
        """Remove what a body needs. Idempotent."""
        self._body.end()


def differing_state(by_rank: Sequence[Found]) -> str:
    """Return why the division matters to what the script computes besides gradients, such as a mean over the batch of
    all workers; empty: it does not. Pure."""
    for name in by_rank[0].states:
        pairs = [each.states.get(name) for each in by_rank]
        if None not in pairs and len({each[0] for each in pairs if each}) == 1 and len(set(pairs)) > 1:
            return f"{name}, which all workers had alike, is another one on each of them after a step"
    return ""


def judge(by_rank: Sequence[Found]) -> str:
    """Return why the division matters; empty: it does not. Pure."""
    if option := next(filter(None, (each.option for each in by_rank)), ""):
        return f"{option} depends on how many samples a worker has"
    # The gradient of a single sample may be small, and its rounding large beside it.
    if any(_differs(each.sizes, max(each.many, _SMALL**2 * each.whole)) for each in by_rank):
        return "gradients depend on how many samples a worker has or how many workers there are, as those of a sum do"
    if any(_differs(each.halves, each.whole) for each in by_rank):
        return "the gradient of a batch is not the mean of those of its samples"
    return ""


def _sum(*weighed: tuple[float, Gradients]) -> Gradients:
    total = Gradients()
    for weight, gradients in weighed:
        for key, gradient in gradients.items():
            total[key] = total[key].add(gradient, alpha=weight) if key in total else gradient * weight
    return total


def _options(state: StepState) -> dict[str, float]:
    """Return the numbers among the options of the optimizers, such as learning rates, by name."""
    return {
        f"{type(optimizer).__name__}.param_groups[{number}][{key!r}]": float(value)
        for optimizer in state.optimizers()
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }


def _is_other(one: float, other: float) -> bool:
    return not math.isclose(one, other, rel_tol=_DIFFERENT)


def _differs(difference: float, whole: float) -> bool:
    return math.isfinite(whole) and difference > _DIFFERENT**2 * whole


def _square(gradients: Mapping[str, torch.Tensor]) -> float:
    return math.fsum(float(torch.linalg.vector_norm(each, dtype=_wide(each))) ** 2 for each in gradients.values())


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def rows_of(data: Any, samples: int, rows: Sequence[int]) -> Any:
    """Return a batch of these rows of a batch of `samples` rows; None where it is no batch of rows."""
    if isinstance(data, torch.Tensor):
        return data[torch.tensor(rows, device=data.device)] if data.dim() and data.shape[0] == samples else None
    if isinstance(data, Mapping):
        parts = {key: rows_of(each, samples, rows) for key, each in data.items()}
        return None if any(each is None for each in parts.values()) else _like(data, parts)
    if isinstance(data, (list, tuple)) and data:
        each_row = [rows_of(each, samples, rows) for each in data]
        if all(each is not None for each in each_row):
            return type(data)(*each_row) if hasattr(data, "_fields") else type(data)(each_row)
        if len(data) == samples and not hasattr(data, "_fields"):
            return type(data)(data[row] for row in rows)
    return None


def _shapes(data: Any) -> Any:
    """Return the shapes of the tensors in a batch."""
    if isinstance(data, torch.Tensor):
        return data.shape
    if isinstance(data, Mapping):
        return {key: _shapes(each) for key, each in data.items()}
    return [_shapes(each) for each in data] if isinstance(data, (list, tuple)) else None


def _like(data: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    if type(data) is dict:
        return parts
    try:
        return type(data)(parts)  # type: ignore[call-arg]  # as BatchEncoding
    except TypeError:
        return None
