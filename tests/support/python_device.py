"""A device in the memory of the process, whose tensors torch does not take for those of the CPU: for the paths that
tensors of CUDA devices take, on machines without one. Importing it registers the device, as `elsewhere`. Its tensors
cannot be viewed in another dtype, and have no strides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("elsewhere")
DEVICE = torch.device("elsewhere", 0)


class TensorElsewhere(torch.Tensor):
    """A tensor whose numbers are in `inner`, a tensor of the CPU."""

    inner: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # its copies on the CPU are plain tensors


def _outside(inner: torch.Tensor) -> torch.Tensor:
    made = torch._C._acc.create_empty_tensor(inner.shape, inner.dtype)  # type: ignore[attr-defined]
    made.__class__ = TensorElsewhere
    made.inner = inner
    return made  # type: ignore[no-any-return]


def _inside(tensor: Any) -> Any:
    return tensor.inner if isinstance(tensor, TensorElsewhere) else tensor


def _empty(size: Sequence[int], *_: object, dtype: torch.dtype | None = None, **__: object) -> torch.Tensor:
    return _outside(torch.empty(size, dtype=dtype))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _inside(target).copy_(_inside(source))
    return target


def _elsewhere(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run any other operator on the tensors within."""
    given = [each for each in args if isinstance(each, TensorElsewhere)] + list(kwargs.values())
    args, kwargs = tree_map_only(torch.Tensor, _inside, (args, kwargs))
    result = op(*args, **kwargs)
    same = {id(_inside(each)): each for each in given if isinstance(each, TensorElsewhere)}
    return tree_map_only(torch.Tensor, lambda each: same.get(id(each)) if id(each) in same else _outside(each), result)


_library = torch.library.Library("_", "IMPL")
_library.fallback(_elsewhere, "PrivateUse1")
for _name, _function in (("empty.memory_format", _empty), ("empty_strided", _empty), ("_copy_from", _copy_from)):
    torch.library.impl(f"aten::{_name}", "privateuseone")(_function)
# Torch has kernels of these for all devices, which would make tensors without numbers.
for _name in ("detach", "alias", "t", "transpose.int", "slice.Tensor", "select.int", "split_with_sizes"):
    _packet, _, _overload = _name.partition(".")
    _op = getattr(getattr(torch.ops.aten, _packet), _overload or "default")
    torch.library.impl(f"aten::{_name}", "privateuseone")(partial(_elsewhere, _op))
