"""The user's communication hook of a DistributedDataParallel. It reduces as before, between Farandole's weights and
step header. ddp_passes.py calls it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from farandole.errors import ConfigError
from farandole.process_group.works import failure

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


class UserHook:
    """A communication hook. By the contract of such hooks it returns the mean over all ranks.

    State that it keeps from step to step (PowerSGD's errors) is reset in each generation: a worker that has joined has
    none of it, and all ranks must do the same.
    """

    def __init__(self, state: Any, hook: Hook) -> None:
        self._state, self._hook = state, hook
        self._beginning = _remember(state)

    def begin_generation(self) -> None:
        for name, value in copy.deepcopy(self._beginning).items():
            setattr(self._state, name, value)

    def start(self, bucket: GradBucket) -> Future[torch.Tensor]:
        return self._hook(self._state, bucket)

    def wait(self, future: Future[torch.Tensor]) -> torch.Tensor:
        """Wait for the result of the hook. Raises RecoverableError when a worker was lost, even if another error
        arrives here."""
        try:
            return future.wait()
        except Exception as error:
            lost = failure()
            if lost is None:
                raise
            raise lost from error


def registered_hook(ddp: DistributedDataParallel) -> UserHook | None:
    """Return the hook that the module has so far. Raises ConfigError for a hook that only C++ knows."""
    if ddp._comm_hooks:
        hook, state = ddp._comm_hooks[-1]
        return UserHook(state, hook)
    # Private, but built-in hooks (_register_builtin_comm_hook in torch/nn/parallel/distributed.py of torch 2.13) are
    # recorded there only.
    logging_data = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    built_in = str(logging_data.get("comm_hook", ""))
    if built_in.endswith("FP16_COMPRESS"):
        return UserHook(None, fp16_compress_hook)
    if built_in and not built_in.endswith("ALLREDUCE"):
        raise ConfigError(
            f"DistributedDataParallel has the built-in hook {built_in}, which is not supported; leave it out"
        )
    return None


def _remember(state: Any) -> dict[str, Any]:
    """Return deep copies of the attributes of a hook's state, by name, without process groups and objects that cannot
    be copied."""
    names = [*getattr(state, "__dict__", ())]
    for kind in type(state).__mro__:
        slots = getattr(kind, "__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    kept = {}
    for name in names:
        if hasattr(state, name) and not isinstance(getattr(state, name), ProcessGroup):
            with contextlib.suppress(TypeError, RuntimeError):
                kept[name] = copy.deepcopy(getattr(state, name))
    return kept
