"""The trial of the loss: is the gradient of a batch the mean of those of its samples, as the loop says that it is?

Only then is a step the same for each number of workers. A sum over the samples, a mean over something else (words that
are not padding, weights of classes), or a comparison of samples with each other is something else, unless the loop says
so: `loss="sum"`, or fd.weight(n). No list of losses would be complete, so the rehearsal, whose step does not count, has
three batches instead of the workers' own: one as a whole, and both of its halves. Each is run by another worker where
there are so many; each further worker, or all of them where something differs, runs the whole again with other random
numbers, which may be the reason. docs/decisions/loop-bodies.md.

Of a model that is divided among workers each has the gradients of its shard only, which all of them have computed
together: there all workers run the same part, one part after the other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from farandole.training.collectives.transport import Transport
from farandole.training.data.elastic_loader import has_compiled
from farandole.training.state import step
from farandole.training.state.optimizer_state import is_shard
from farandole.training.state.step_state import StepState
from farandole.training.worker.warm_up import is_plain

PARTS = ((0, 1), (0, 2), (1, 2))
"""Number of a part of the batch, and the number of parts: the whole, and its halves."""

_AGAIN = len(PARTS)
_RESIZED = _AGAIN + 1
_IMPOSSIBLE = b"-"
_ELEMENTS = 8192
"""Elements of all gradients together that are compared. The comparison is linear, so that some stand for all."""

_DIFFERENT, _DIFFERENT_COARSELY = 3e-3, 3e-2
"""Relative difference above which gradients are different ones; the second with layers in half precision."""


class Taken(msgspec.Struct, array_like=True):
    """A run on one worker.

    role      place in PARTS, _AGAIN, or _RESIZED: as the first run of this worker, with another number of workers
    share     the factor with which its gradients would count in those of the whole
    values    elements of its gradients, float64
    asks      the script has asked for the number of workers
    rows      digests of its samples
    """

    role: int
    share: float
    values: bytes
    is_coarse: bool
    asks: bool = False
    rows: dict[str, int] = {}


class LossTrial:
    """The trial on this worker. All workers have as many runs, of which `runs` are over."""

    def __init__(self, state: StepState, rank: int, size: int) -> None:
        self._is_sharded = state.shards is not None
        # What is compiled would be so for layers that are off.
        self._is_possible = not has_compiled() and (is_plain(state) or self._is_sharded)
        modules = state.modules()
        count = sum(1 for module in modules for _ in module.parameters())
        self._body = TrialBody(modules, lambda gradient: _some_of(gradient, max(16, _ELEMENTS // max(count, 1))))
        self._rank, self._size, self.runs = rank, size, 0
        self._taken = dict[int, Taken]()
        self._rows = defaultdict[str, dict[int, set[int]]](lambda: defaultdict(set))  # digests by sample and rank
        self._asks, self._is_resized = False, False

    @property
    def seed(self) -> int:
        """A number for the random numbers of the next run: another one for each run, unless one is repeated."""
        if self._is_sharded:
            return 0 if self._is_resized else self.runs
        return self._rank if self._is_resized else self._rank + self._size * self.runs

    @property
    def _role(self) -> int:
        return min(self.seed, _AGAIN)

    def told_size(self, size: int) -> int:
        """Return the number of workers that the script is told."""
        self._asks = True
        return size + 1 if self._is_resized else size

    @property
    def part(self) -> tuple[int, int] | None:
        """The part of the batch that comes next on this worker: its number, and the number of parts; None: there is no
        trial here."""
        if not self._is_possible:
            return None
        return PARTS[self._role] if self._role < _AGAIN else PARTS[0]

    def begin(self) -> None:
        if self._is_possible:
            self._body.begin()

    def take(self, transport: Transport, rows: dict[str, int]) -> None:
        """Take the gradients of the run, and tell all workers. The step is not closed yet. `rows`: the digests of its
        samples. Raises RecoverableError."""
        gradients = self._body.end()
        role = _RESIZED if self._is_resized else self._role
        share = step.share()
        workers = self._size * share if self._is_sharded and share else 1  # whose equal gradients were added up
        parts = [gradients[key].reshape(-1).double().cpu() / workers for key in sorted(gradients)]
        values = torch.cat(parts).numpy().tobytes() if parts else b""
        taken = Taken(role, share, values, self._body.is_coarse, self._asks, rows)
        if self._is_sharded:
            is_needed = True
        elif role == _AGAIN:  # by another worker than the whole, if there is one: workers may have different data
            is_needed = self._size == 1 or self._rank == 1 or (self.seed == _AGAIN and self._rank > 0)
        else:
            is_needed = role < _AGAIN or self._rank == 0
        payload = msgspec.msgpack.encode(taken) if is_needed else b""
        gathered = transport.all_gather(payload if self._is_possible else _IMPOSSIBLE)
        self._is_possible = _IMPOSSIBLE not in gathered
        if not self._is_possible:
            return
        by_rank = {rank: msgspec.msgpack.decode(packed, type=Taken) for rank, packed in enumerate(gathered) if packed}
        if self._is_sharded:
            self._taken.setdefault(role, _joined([*by_rank.values()]))
        for rank, each in by_rank.items():
            self._taken.setdefault(each.role, each)
            for row, digest in each.rows.items():
                self._rows[row][rank].add(digest)
        self.runs += 1
        self._is_possible = self.runs <= len(PARTS) + 2

    def is_over(self) -> bool:
        """Return whether no further run is due. The same on all workers."""
        if not self._is_possible:
            return True
        if len(self._taken.keys() & set(range(_AGAIN))) < _AGAIN:
            return False
        found = self.judge()
        is_unclear = self.runs == 1 and bool(self.differing_sample())  # each worker may draw other numbers each time
        self._is_resized = not (found or is_unclear) and self._taken[0].asks and _RESIZED not in self._taken
        return not (self._is_resized or is_unclear) and (not found or _AGAIN in self._taken)

    def judge(self) -> str:
        """Return what the loss is, and what to do about it; empty: what it has to be, as far as can be told."""
        if not self._is_possible:
            return ""
        again = self._taken.get(_AGAIN)
        if _RESIZED in self._taken and (found := judge_size(self._taken[0], self._taken[_RESIZED], again)):
            return found
        if self._size < _AGAIN and all(self._taken[role].share == 1 for role in range(_AGAIN)):
            return ""  # a sum that may be divided by a count over all workers, which is another one in each run
        return judge([self._taken[role] for role in range(_AGAIN)], again)

    def differing_sample(self) -> str:
        """Return the index of a sample that is another one on another worker; empty: there is none, as far as is known,
        or a worker has got another one itself in another run."""
        if any(len(digests) > 1 for by_rank in self._rows.values() for digests in by_rank.values()):
            return ""
        several = (row for row, by_rank in self._rows.items() if len(set().union(*by_rank.values())) > 1)
        return next(several, "").partition(" ")[0]

    def drop(self) -> None:
        """Remove what a run needs. Idempotent."""
        self._body.end()


def _joined(shards: Sequence[Taken]) -> Taken:
    """Return a run of which each worker has taken the gradients of its shard."""
    values, is_coarse = b"".join(each.values for each in shards), any(each.is_coarse for each in shards)
    asks = any(each.asks for each in shards)
    return msgspec.structs.replace(shards[0], values=values, is_coarse=is_coarse, asks=asks)


def judge(parts: Sequence[Taken], again: Taken | None) -> str:
    """Return what the loss is, and what to do about it; empty: what it has to be, as far as can be told. Pure. `again`:
    the first of the PARTS with other random numbers."""
    whole, first, second = map(_values, parts)
    shares = [each.share for each in parts]
    tolerance = _DIFFERENT_COARSELY if any(each.is_coarse for each in parts) else _DIFFERENT
    if whole.numel() and not (first.numel() and second.numel()):
        return (
            "a part of a batch trains nothing: a loop that leaves out small batches (`continue`) leaves out other ones"
        )
    if not whole.numel() == first.numel() == second.numel() or not all(shares):
        return ""
    if not _differ(shares[0] * whole, shares[1] * first + shares[2] * second, tolerance):
        return ""
    if again is not None and _is_by_chance(whole, again, tolerance):
        return ""
    if not _differ(whole, first + second, tolerance):
        return 'it is a sum over the samples: write DistributedOptimizer(..., loss="sum"), or divide it by their number'
    if not _differ(2 * whole, first + second, tolerance):
        return "it is a mean over the samples: leave loss='sum', or fd.weight(), out"
    return (
        "if it is a mean over words, over weights, over labels of which some are ignored, call fd.weight(n) before "
        "backward(), with the number that the mean divides by"
    )


def judge_size(one: Taken, resized: Taken, again: Taken | None) -> str:
    """Return what to do about gradients that depend on the number of workers; empty: they do not, as far as can be
    told. Pure. `one`: a run; `resized`: the same with another number; `again`: the same with other random numbers."""
    values, others = _values(one), _values(resized)
    tolerance = _DIFFERENT_COARSELY if one.is_coarse else _DIFFERENT
    if values.numel() != others.numel() or not _differ(values, others, tolerance):
        return ""
    if again is not None and _is_by_chance(values, again, tolerance):
        return ""
    return "it depends on fd.size(): leave that out, and write fd.mean(n) for a sum over the workers that it divides"


def _is_by_chance(whole: torch.Tensor, again: Taken, tolerance: float) -> bool:
    repeated = _values(again)
    return repeated.numel() != whole.numel() or _differ(whole, repeated, tolerance)


def _values(taken: Taken) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(taken.values), dtype=torch.float64)
        if taken.values
        else torch.zeros(0, dtype=torch.float64, device="cpu")
    )


def _differ(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    difference = float((one - other).norm())
    return math.isfinite(difference) and difference > tolerance * float(one.norm())


def _some_of(gradient: torch.Tensor, most: int) -> torch.Tensor:
    """Return a copy of at most so many elements of a gradient, at places that follow from its shape."""
    flat = gradient.reshape(-1)
    return flat[:: max(1, -(-flat.numel() // most))].clone()


# A run of the loop body without effect, of which only the gradients are of interest -----------------------------------
#
# Layers of chance, and those that compute statistics of a batch, are off in it: their gradients are no means over
# samples by intention.

Gradients = dict[str, torch.Tensor]


class TrialBody:
    """From before the run to its end; the next run may follow. Layers of the modules are off. Of their parameters'
    gradients `part` returns what is kept, which must not be the gradient's own memory. `is_coarse`: a layer has
    computed in half precision."""

    def __init__(self, modules: Iterable[torch.nn.Module], part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._modules, self._part = list(modules), part
        self._hooks: list[Any] = []
        self._switched: set[torch.nn.Module] = set()
        self._statistics: list[tuple[torch.Tensor, torch.Tensor]] = []  # with their values
        self._gradients, self.is_coarse = Gradients(), False

    def begin(self) -> None:
        self._gradients = {}
        self._hooks += hook_gradients(self._modules, self._note)
        for module in self._modules:
            for each in module.modules():
                if _is_off(each):
                    self._hooks.append(each.register_forward_pre_hook(self._switch_off))
                if not any(True for _ in each.children()):
                    self._hooks.append(each.register_forward_hook(self._note_precision))

    def end(self) -> Gradients:
        """Switch the layers on again. Return the gradients, summed up over the backward passes of the run, by name: the
        same names on all workers. Idempotent."""
        for each in self._hooks:
            each.remove()
        self._hooks.clear()
        for module in self._switched:
            module.training = True
        self._switched.clear()
        with torch.no_grad():
            for buffer, value in self._statistics:
                buffer.copy_(value)
        self._statistics.clear()
        return self._gradients

    def _switch_off(self, module: torch.nn.Module, _: object) -> None:
        if not module.training:
            return
        self._switched.add(module)
        module.training = False
        if isinstance(module, _NormBase) and module.running_mean is not None and module.running_var is not None:
            # Statistics are each worker's own between the ends of epochs, and all are to compute the same.
            for buffer, value in ((module.running_mean, 0.0), (module.running_var, 1.0)):
                self._statistics.append((buffer, buffer.clone()))
                with torch.no_grad():
                    buffer.fill_(value)

    def _note_precision(self, _: torch.nn.Module, __: object, output: object) -> None:
        self.is_coarse |= isinstance(output, torch.Tensor) and output.is_floating_point() and output.itemsize < 4

    def _note(self, name: str, gradient: torch.Tensor) -> None:
        values, before = self._part(gradient), self._gradients.get(name)
        self._gradients[name] = values if before is None else before.add_(values)


def hook_gradients(modules: Iterable[torch.nn.Module], note: Callable[[str, torch.Tensor], None]) -> list[Any]:
    """Have `note` called with each gradient of a parameter, dense and without a graph, and with the parameter's name,
    which is the same on all workers. Returns the handles of the hooks."""

    @torch.no_grad()
    def dense(name: str, gradient: torch.Tensor) -> None:
        values = gradient.detach()
        note(name, values.to_dense() if values.layout is not torch.strided else values)

    def hook(name: str, parameter: Any) -> Any:
        if is_shard(parameter):  # FSDP2 sets its gradient
            return parameter.register_post_accumulate_grad_hook(lambda _: dense(name, parameter.grad.to_local()))
        return parameter.register_hook(partial(dense, name))

    return [
        hook(f"{name} (model {number})" if number else name, parameter)
        for number, module in enumerate(modules)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and parameter.is_leaf
    ]


def _is_off(module: torch.nn.Module) -> bool:
    """Return whether a layer is one of BatchNorm, or of chance: also DropPath of other libraries, and attention, which
    often has a dropout of its own."""
    if isinstance(module, (_DropoutNd, _NormBase, torch.nn.MultiheadAttention)):
        return True
    name, has_children = type(module).__name__.lower(), any(True for _ in module.children())
    if "attention" in name or "attn" in name:
        return any("drop" in key.lower() and isinstance(each, float) for key, each in vars(module).items())
    return ("drop" in name or "stochastic" in name) and not has_children
