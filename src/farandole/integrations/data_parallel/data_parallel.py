"""DataParallel: one process, several threads or devices, one optimizer. Scripts wrap their module in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo

from farandole.errors import ConfigError
from farandole.integrations.data_parallel.dividing import Scalars, divide, merge_outputs
from farandole.integrations.data_parallel.placement import (
    Device,
    compute_in_threads,
    compute_on_devices,
    moved,
    place,
    refuse_elsewhere,
)
from farandole.integrations.data_parallel.replicas import refuse_in_replicas
from farandole.integrations.data_parallel.thread_pool import ThreadPool

_OF_STATE = (
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""The attributes that decide how a module is saved and loaded: the same objects for both."""


class DataParallel(torch.nn.Module):
    """A module whose forward and backward passes run on the parts of a batch at the same time.

    Inputs may be nested in any way. Tensors are divided along `dim`, in parts that differ by one sample at most;
    tensors of size 1 there, and values that are not tensors, are passed to each replica unchanged. Output tensors are
    concatenated; other outputs must be equal in all replicas.

    Gradients are those of the module: summed over the replicas before they reach a parameter, whose hooks fire once in
    each pass. Losses that couple the samples of a batch, and BatchNorm, see a replica's part. Buffers are those of the
    first replica; attributes that forward() sets are lost. On the CPU random numbers of torch are derived from the
    state of its default generator (replicas.py), those of Python and numpy depend on the order of the
    threads. Hooks of modules run in each replica.

    Parameters, buffers, state_dict() and attributes are the module's, by the module's names: a state saved with or
    without DataParallel, also torch's, can be loaded with or without.

    An exception in a replica is raised unchanged, when all have ended.

    Args:
        module: On the CPU, or on the first device; it stays the master copy, which the optimizer updates.
        device_ids: CUDA devices; all of this machine, if the module is on one.
        output_device: The device of the outputs; the first device by default.
        dim: The dimension of the samples in input and output tensors.
        threads: The number of replicas on the CPU; by default the number of threads that torch uses within one
            operation, which are divided among them.
        scalars: The treatment of tensors without dimensions, such as losses: their "mean", weighted by each replica's
            samples, so that it is that of the whole batch; their "sum"; or "each", a vector with one for each replica.
            A mean of integers is refused, unless they are equal.
        min_local_batch: The fewest samples of a replica: 2 for BatchNorm. A batch with fewer than twice as many is
            computed whole.

    Raises:
        ConfigError: From the constructor: parameters are on several devices or have no shape, or arguments do not fit
            the module. From forward(): inputs have different numbers of samples, outputs do not fit together, the
            module is compiled, scripted or a SyncBatchNorm, or a tensor with gradients is neither parameter nor input.

    Examples:
        >>> parallel = fd.DataParallel(model, threads=2)  # on two devices: DataParallel(model.cuda(), [0, 1])
        >>> parallel(torch.randn(4, 8)).shape
        torch.Size([4, 3])
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        threads: int | None = None,
        scalars: Scalars = "mean",
        min_local_batch: int = 1,
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"DataParallel wraps a torch.nn.Module, got {type(module).__name__}")
        if scalars not in ("mean", "sum", "each"):
            raise ConfigError(f'DataParallel: scalars must be "mean", "sum" or "each", got {scalars!r}')
        if isinstance(min_local_batch, bool) or not isinstance(min_local_batch, int) or min_local_batch < 1:
            raise ConfigError(f"DataParallel: min_local_batch must be 1 or more, got {min_local_batch!r}")
        for each in module.modules():
            refuse_in_replicas(each)
        # Not as a child: the names of parameters and buffers are the module's, not "module.weight".
        self.__dict__["module"] = module
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        for shared in _OF_STATE:
            setattr(self, shared, getattr(module, shared))
        self.training = module.training
        self.dim, self.scalars, self.min_local_batch = dim, scalars, min_local_batch
        self._placement = place(module, threads, device_ids, output_device)
        self._pool = ThreadPool(self._placement.replicas)

    # The whole may be compiled. Unlike torch.compiler.disable(), this private decorator loads the compiler only when it
    # is first called (torch 2.13, torch/_compile.py).
    @_disable_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        placement = self._placement
        parts = divide(args, kwargs, self.dim, placement.replicas, self.min_local_batch)
        refuse_elsewhere(self.module, placement.home)
        if len(parts) == 1:
            if placement.devices:
                args, kwargs = moved(args, placement.home), moved(kwargs, placement.home)
            outputs = [self.module(*args, **kwargs)]
        elif placement.devices:
            outputs = compute_on_devices(self.module, parts, placement, self._pool)
        else:
            outputs = compute_in_threads(self.module, parts, self._pool)
        return merge_outputs(outputs, [part.samples for part in parts], self.dim, self.scalars)

    # Attributes of the module ----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is None:  # while it is being unpickled
            return super().__getattr__(name)
        return getattr(module, name)

    def train(self, mode: bool = True) -> DataParallel:
        self.module.train(mode)
        self.training = mode
        return self

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> DataParallel:
        self.module.apply(fn)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state, without a prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the module's state.

        Names that all begin with "module.", as torch.nn.DataParallel and DistributedDataParallel save them, are
        accepted, too.
        """
        if state_dict and "module" not in self._modules and all(name.startswith("module.") for name in state_dict):
            state_dict = {name.removeprefix("module."): value for name, value in state_dict.items()}
        return self.module.load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.module._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> DataParallel:
        self.module._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        where = ", ".join(map(str, self._placement.devices)) or f"threads={self._placement.threads}"
        return f"{type(self.module).__name__}, {where}"
