"""Gradients on their way through named reductions: submitted all together, then waited for, then in `.grad`.

named_path.py uses it. Submitting and waiting are two steps, so that two optimizers whose gradients come from one
backward pass can both submit before either waits, whatever their order on other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farandole.collectives.named.constants import Average
from farandole.collectives.named.operations import (
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from farandole.optim.options import Options


@dataclass(frozen=True)
class Named:
    """A parameter to reduce the gradient of.

    name   what other ranks call it too
    group  those with equal numbers are reduced together; None: by itself
    """

    parameter: torch.Tensor
    name: str
    group: int | None = None


_under_way: dict[str, InFlight] = {}
"""By name of a gradient. Two optimizers may use a name twice; then one is finished before the other begins."""


class InFlight:
    """Some gradients of one optimizer. They must not be touched between submit() and finish().

    sparse_dims  by id of the parameter: how many dimensions of its sparse gradients are sparse; grows
    """

    def __init__(self, named: Sequence[Named], options: Options, sparse_dims: dict[int, int]) -> None:
        self._named = named
        self._options = options
        self._sparse_dims = sparse_dims
        self._waits: list[Callable[[], None]] = []

    def submit(self) -> None:
        """Parameters without a gradient take part with zeros. Raises what the operations raise."""
        for other in {id(each): each for each in map(_under_way.get, self._names()) if each is not None}.values():
            other.finish()
        _under_way.update(dict.fromkeys(self._names(), self))
        try:
            for each in self._units():
                self._waits.append(self._submit(each))
        except BaseException:
            self._leave()
            raise

    def finish(self) -> None:
        """Wait for all; then every `.grad` is the reduced one. Raises the first error, when nothing is in flight
        any more: some gradients are reduced then, and some are not."""
        first: Exception | None = None
        for wait in self._waits:
            try:
                wait()
            except Exception as error:  # noqa: BLE001 - raised below
                first = first or error
        self._leave()
        if first is not None:
            raise first

    def _leave(self) -> None:
        self._waits.clear()
        for name in self._names():
            if _under_way.get(name) is self:
                del _under_way[name]

    def _names(self) -> list[str]:
        return [each.name for each in self._named]

    def _units(self) -> list[list[Named]]:
        """What is submitted by one call each. Sparse gradients go alone: they are gathered."""
        units: dict[object, list[Named]] = {}
        for each in self._named:
            gradient = self._gradient(each.parameter)
            is_alone = each.group is None or (gradient.is_sparse and not self._options.sparse_as_dense)
            units.setdefault(each.name if is_alone else each.group, []).append(each)
        return list(units.values())

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            gradient = parameter.grad = self._zeros(parameter)
        if gradient.is_sparse:
            self._sparse_dims[id(parameter)] = gradient.sparse_dim()
        return gradient

    def _zeros(self, parameter: torch.Tensor) -> torch.Tensor:
        """Of the layout that the parameter's gradients had before: sparse ones are not reduced like dense ones."""
        sparse_dim = self._sparse_dims.get(id(parameter))
        if sparse_dim is None:
            return torch.zeros_like(parameter, requires_grad=False)
        nowhere = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
        nothing = parameter.detach().new_empty(0, *parameter.shape[sparse_dim:])
        return torch.sparse_coo_tensor(nowhere, nothing, parameter.shape, check_invariants=False)

    def _submit(self, unit: list[Named]) -> Callable[[], None]:
        """Start one reduction; gives what waits for it and writes `.grad`."""
        options, name = self._options, f"gradient.{unit[0].name}"
        gradients = [self._gradient(each.parameter) for each in unit]
        if gradients[0].is_sparse and not options.sparse_as_dense:
            take = sparse_allreduce_async(gradients[0], name=name, op=options.op, process_set=options.process_set)
            return lambda: setattr(unit[0].parameter, "grad", take())
        packed = [options.compression.compress(_dense(gradient)) for gradient in gradients]
        sent = [tensor.contiguous() for tensor, _ in packed]
        arguments: dict[str, Any] = {"name": name, "op": options.op, "process_set": options.process_set}
        if options.op == Average:
            arguments |= {
                "prescale_factor": 1.0 / options.predivide_factor,
                "postscale_factor": options.predivide_factor,
            }
        if unit[0].group is None:
            handle = allreduce_async_(sent[0], **arguments)
        else:
            handle = grouped_allreduce_async_(sent, **arguments)

        def finish() -> None:
            synchronize(handle)  # in place: `sent` holds the result
            for each, tensor, (_, ctx) in zip(unit, sent, packed, strict=True):
                _write(each.parameter, options.compression.decompress(tensor, ctx))

        return finish


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient.detach()


def _write(parameter: torch.Tensor, reduced: torch.Tensor) -> None:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        parameter.grad = reduced.to(gradient.dtype).to_sparse(gradient.sparse_dim())
    elif reduced.data_ptr() != gradient.data_ptr() or reduced.stride() != gradient.stride():
        gradient.detach().copy_(reduced)
