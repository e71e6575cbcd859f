"""Module parameters between two boundaries: detection of changes by user code, and their restoration.

An optimizer changes parameters only when a step is decided, so an aborted step leaves them alone. User code may change
them at any time: a momentum encoder in the loop body, weights that are swapped for an evaluation. Copying all of them
at each boundary would cost as much as a part of the optimizer step. So their versions, which autograd counts, are
compared, and only tensors with a known change before the step are copied at each boundary; the change is found in the
rehearsal (worker/bodies_without_effect.py), which compares bytes, or later. Tensors that no optimizer owns (an average
of weights), and tensors that change only after the step, are copied when a step is aborted, before user code continues.
At the end of an epoch all tensors are copied once, because an evaluation may write them through `.data`, which does not
increase the version. For the same reason a few elements are checked in every other step, in turns: when one has changed
before the step, all bytes of the next step are compared.
"""

from __future__ import annotations

import logging
from collections.abc import Container, ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.nn.modules.batchnorm import _NormBase

from farandole.training.collectives.connection_pair import bytes_of, memory_at
from farandole.training.collectives.transport import Transport

logger = logging.getLogger("farandole")


class WatchedTensors:
    """The tensors of the last track() call, by name."""

    def __init__(self) -> None:
        self._live: dict[str, torch.Tensor] = {}
        self._untrained: list[tuple[int, torch.Tensor]] = []  # with their places: no optimizer changes them
        self._versions: list[int] = []
        self._changing: set[str] = set()
        self._changing_late: set[str] = set()
        self._changing_names: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self._copies: dict[str, torch.Tensor] = {}
        self._sampled = SampledElements()
        self._is_suspicious = False  # a change without a new version: the next step is inspected
        self._is_inspected = False
        self._copied: list[str] = []  # tensors whose copy is that of the last capture()
        self.trusted: set[str] = set()  # since the last capture()
        self._is_learning = False
        self._after_step: tuple[list[int], dict[str, torch.Tensor]] | None = None  # versions, and copies if it learns

    def track(self, tensors: Mapping[str, torch.Tensor], owned: Container[str] = ()) -> None:
        """Watch these tensors from now on; `owned` are the names of optimizers' tensors. A capture() has to follow."""
        self._live = dict(tensors)
        self._untrained = [
            (place, each)
            for place, (name, each) in enumerate(self.items())
            if not (name in owned and each.requires_grad) and is_plain_tensor(each)
        ]
        not_owned = {name: each for name, each in self.items() if name not in owned}
        self.add_changing_late(not_owned)
        self._sampled = SampledElements(not_owned, self._live)
        self._copies = {name: copy for name, copy in self._copies.items() if name in tensors}
        self._after_step = None

    def items(self) -> ItemsView[str, torch.Tensor]:
        """Return the tensors, live, with their names."""
        return self._live.items()

    @property
    def changing(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the tensors that are copied at each boundary, and of the tensors that are copied when a step is
        aborted."""
        if self._changing_names is None:  # it is needed in each step
            self._changing_names = tuple(sorted(self._changing)), tuple(sorted(self._changing_late))
        return self._changing_names

    def add_changing(self, names: Iterable[str]) -> None:
        """Copy these tensors at each boundary from now on."""
        new = set(names) - self._changing
        if not new:
            return
        self._changing |= new
        self._changing_names = None
        size = sum(each.nbytes for name, each in self.items() if name in new)
        logger.info(
            "%d tensor%s (%s) of the state, %.1f MB, change in the loop body before optimizer.step(), or without a "
            "step: they are copied in each step, to be restored",
            len(new),
            "" if len(new) == 1 else "s",
            min(new) + (", …" if len(new) > 1 else ""),
            size / 1e6,
        )

    def add_changing_late(self, names: Iterable[str]) -> None:
        """Copy these tensors when a step is aborted, from now on."""
        self._changing_late.update(names)
        self._changing_names = None

    def changed(self, since: Sequence[int] | None = None) -> list[str]:
        """Return the names of the tensors that were written since the last capture(), or since mark()."""
        versions = self._versions if since is None else since
        return [name for name, now, version in zip(self._live, self.mark(), versions, strict=True) if now != version]

    def inspect(self) -> None:
        """Find out by their bytes which tensors the loop body behind the next capture() changes, before its step and
        after it: no rehearsal has shown it."""
        self._is_suspicious = self._is_learning = True

    def applied(self) -> None:
        """Note that a step is applied: what changes before the next capture() changes after the step."""
        copies = {name: each.detach().clone() for name, each in self.items()} if self._is_learning else {}
        self._after_step, self._is_learning = (self.mark(), copies), False

    def _learn_late(self) -> None:
        if self._after_step is None:
            return
        (versions, copies), self._after_step = self._after_step, None
        late = set(self.changed(versions)) | {
            name for name, each in self.items() if name in copies and not are_equal(each, copies[name])
        }
        if not late <= self._changing_late:
            self.add_changing_late(late)

    def capture(self, is_whole: bool = False) -> None:
        """Remember the tensors as they are now; with `is_whole` the bytes of all of them."""
        self._learn_late()
        self._versions = self.mark()
        self.trusted.clear()
        self._sampled.take()
        self._is_inspected, self._is_suspicious = self._is_suspicious, False
        is_whole |= self._is_inspected
        if not (is_whole or self._changing or self._copied):
            return
        wanted = {name: each for name, each in self.items() if is_whole or name in self._changing}
        self._copies = {name: self._room(name, each) for name, each in wanted.items()}
        self._copied = list(wanted)
        if wanted:
            with torch.no_grad():
                torch._foreach_copy_(list(self._copies.values()), [each.detach() for each in wanted.values()])

    def look(self) -> None:
        """Record the tensors that have changed since the last capture(): a step is about to be applied."""
        if self.mark() != self._versions:
            self.add_changing(self.changed())
        if self._is_inspected:
            self._is_inspected = False
            self.add_changing(name for name, each in self.items() if not are_equal(each, self._copies[name]))
        elif any(name not in self._changing for name in self._sampled.changed()):
            self._is_suspicious = True

    def save(self) -> None:
        """Copy the tensors that the rest of an aborted step may change, unless they have changed already."""
        gone = {*self.changed(), *self._copied}
        live = {name: each for name, each in self.items() if name in self._changing_late and name not in gone}
        for name, each in live.items():
            self._copies[name] = self._room(name, each)
            self._copies[name].copy_(each.detach())
        self._copied += live

    def mark(self) -> list[int]:
        """Return the current versions, for adopt(). `tensor.data = ...`, which autograd does not count, gives a tensor
        another memory: that of tensors that no optimizer changes is part of their version."""
        versions = [each._version for each in self._live.values()]
        for place, each in self._untrained:
            versions[place] += each.data_ptr()
        return versions

    def adopt(self, mark: Sequence[int]) -> None:
        """Treat all changes since mark() as made before the last capture()."""
        now = self.mark()
        for place, (name, each) in enumerate(self.items()):
            if now[place] != mark[place]:
                self._versions[place] = now[place]
                if name in self._copies:
                    self._copies[name].copy_(each.detach())

    def trust(self, tensors: Sequence[torch.Tensor]) -> None:
        """Treat these tensors as unchanged since the last capture(), whatever their versions are."""
        keys, now = set(map(id, tensors)), self.mark()
        for place, (name, each) in enumerate(self.items()):
            if id(each) in keys:
                self._versions[place] = now[place]
                self.trusted.add(name)

    def put_back(self) -> list[str]:
        """Return every tensor to its value at the last capture(). Returns the names of the tensors that cannot be
        restored, because they have changed and were not copied."""
        if not self._copied and self.mark() == self._versions:
            return []  # as usual
        copied = set(self._copied)
        lost = [name for name in self.changed() if name not in copied]
        with torch.no_grad():
            for name in self._copied:
                self._live[name].detach().copy_(self._copies[name])
        self._versions = self.mark()
        return lost

    def put_back_run(self) -> list[str]:
        """Return every tensor to its value at the last capture(), after a run of the loop body that another one
        follows. Returns the names of the tensors that cannot be restored, also of those without a new version whose
        change is seen by chance."""
        copied = set(self._copied)
        lost = [*self.put_back(), *(name for name in self._sampled.changed() if name not in copied)]
        return list(dict.fromkeys(lost))

    def _room(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._copies.get(name)
        if kept is not None and (kept.shape, kept.dtype, kept.device) == (tensor.shape, tensor.dtype, tensor.device):
            return kept
        return torch.empty_like(tensor, requires_grad=False)


class SampledElements:
    """Elements of a few CPU tensors at a time, in turns: of two tensors of each group."""

    def __init__(self, *groups: Mapping[str, torch.Tensor]) -> None:
        self._groups = [
            [(name, each.detach()) for name, each in group.items() if _can_be_sampled(each)] for group in groups
        ]
        self._turn = 0
        self._taken: list[tuple[str, torch.Tensor, int, bytes]] = []  # name, tensor, byte offset, bytes

    def take(self) -> None:
        """Remember some elements as they are now, in every other call."""
        self._turn += 1
        self._taken = []
        if self._turn % 2:
            return
        for group in self._groups:
            for number in range(min(2, len(group))):
                name, tensor = group[(self._turn + number) % len(group)]
                place = self._turn * 7919 % tensor.numel() * tensor.element_size()
                self._taken.append((name, tensor, place, _element(tensor, place)))

    def changed(self) -> Iterator[str]:
        """Yield the names of the tensors of which an element has changed."""
        return (name for name, each, place, was in self._taken if _element(each, place) != was)


def _element(tensor: torch.Tensor, place: int) -> bytes:
    return bytes(memory_at(tensor, place, place + tensor.element_size()))


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape have the same bytes; on a device, the same values."""
    if one.device.type != "cpu":
        return torch.equal(one, other)
    return torch.equal(bytes_of(one), bytes_of(other))


def is_plain_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a dense tensor of torch's own classes, on any device that has memory."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta"


def _can_be_sampled(tensor: torch.Tensor) -> bool:
    return is_plain_tensor(tensor) and tensor.is_cpu and tensor.is_contiguous() and tensor.numel() > 0


# Buffers --------------------------------------------------------------------------------------------------------------


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return dict(module.named_buffers()), several times as fast: most modules have no buffers and need no name.

    The private dicts are those that Module.named_buffers() reads (torch 2.13, torch/nn/modules/module.py).
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    _collect(module, "", found, seen)
    return found


def _collect(module: torch.nn.Module, prefix: str, found: dict[str, torch.Tensor], seen: set[int]) -> None:
    """Collect buffers in the order of named_buffers(): a module's own, then those of its children. Shared ones once."""
    if module._buffers:
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                found[prefix + name] = buffer
    for name, child in module._modules.items():
        if child is not None:
            _collect(child, f"{prefix}{name}.", found, seen)


def modules_with_extra_state(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the submodules, `module` included, whose class defines get_extra_state()."""
    plain = torch.nn.Module.get_extra_state
    return {name: each for name, each in module.named_modules() if type(each).get_extra_state is not plain}


def load_extra_state(module: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Load the result of get_extra_state() of submodules, by their names."""
    for name, value in saved.items():
        module.get_submodule(name).set_extra_state(value)


# Running statistics of BatchNorm layers -------------------------------------------------------------------------------
#
# Each worker computes them from its own samples; they are made equal at epoch ends.


def layers_with_statistics(modules: Iterable[torch.nn.Module]) -> list[_NormBase]:
    """Return the layers that keep a running mean and variance, each once, in the order of modules()."""
    found = {id(each): each for module in modules for each in module.modules()}
    return [each for each in found.values() if isinstance(each, _NormBase) and each.running_mean is not None]


def make_statistics_equal(layers: list[_NormBase], transport: Transport) -> None:
    """Give every worker the mean of all running means, and the variance of all samples together. The variance is the
    mean of the variances plus the variance of the means; every worker counts alike. Computed in float64, with the same
    bits on all ranks. All ranks call it. Raises the errors of transports, with nothing changed."""
    if not layers or transport.size == 1:
        return
    means = torch.cat([_flat(each.running_mean) for each in layers])
    variances = torch.cat([_flat(each.running_var) for each in layers])
    sums = torch.cat([means, variances + means.square()])
    transport.all_reduce(sums)
    mean, square = (sums / transport.size).chunk(2)
    start = 0
    for each in layers:
        assert each.running_mean is not None
        assert each.running_var is not None
        end = start + each.running_mean.numel()
        each.running_mean.copy_(mean[start:end])
        each.running_var.copy_((square[start:end] - mean[start:end].square()).clamp_(min=0))
        start = end


def _flat(statistics: torch.Tensor | None) -> torch.Tensor:
    assert statistics is not None
    return statistics.detach().reshape(-1).to("cpu", torch.float64)
