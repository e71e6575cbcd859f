"""Differences between versions of torch that affect process groups; the only module that checks for them.

The facts are from the sources of 2.6.0, 2.9.1, 2.13.0 and 2.15.0. Where the first version that changed is not known,
the older way is used up to 2.9: it works there, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work, distributed_c10d
from torch.futures import Future

FORGETS_WORKS = torch.__version__ < "2.9"
"""True where C++ keeps only its own part of a Work that is a Python object, once Python has released it: it would wait
for that for ever. torch 2.9 has PyWorkHolder for that (torch/csrc/distributed/c10d/PyProcessGroup.hpp)."""


def ended_work(tensors: Sequence[torch.Tensor]) -> Work:
    """Return a Work of C++ that has ended, with `tensors` as its result."""
    future: Future[list[torch.Tensor]] = Future()
    future.set_result(list(tensors))
    work: Work = torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]
    return work


@functools.cache  # asked in each generation
def can_reconfigure() -> bool:
    """Return whether the members of a process group can be exchanged: since torch 2.14 (pytorch#186298).

    Whether a backend does it, its groups say themselves (`supports_reconfigure`).
    """
    return hasattr(distributed_c10d, "_supports_reconfigure")


def have_shutdown_called() -> None:
    """Have destroy_process_group() call `shutdown()` of each group, as torch 2.9 does. To be called once.

    _shutdown_backend() of torch 2.6 (distributed_c10d.py), which this replaces, knows NCCL's groups only.
    """
    shut_down: Any = getattr(distributed_c10d, "_shutdown_backend", None)
    if shut_down is None:
        return

    def shut_down_all(group: ProcessGroup) -> None:
        shut_down(group)
        if not type(group).__module__.startswith("torch."):
            group.shutdown()

    distributed_c10d._shutdown_backend = shut_down_all  # type: ignore[attr-defined]


def have_no_flight_recorder(backend: str) -> None:
    """Have c10d attach no FlightRecorderHook to groups of `backend`.

    torch 2.15 attaches one to each group whose backend does not record by itself (distributed_c10d.py,
    _maybe_attach_flight_recorder). That fails for a group that is a Python object and has devices: C++ looks for a
    backend behind it, and there is none.
    """
    recorded: set[str] | None = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recorded is not None:
        recorded.add(backend)


def clear_sharding_cache() -> None:
    """Clear DTensor's cache of sharding decisions, in the calling thread.

    torch 2.6 to 2.9 have one cache (LocalLRUCache in torch/distributed/tensor/_sharding_prop.py), and no function that
    clears it.
    """
    from torch.distributed.tensor import DTensor, debug

    if hasattr(debug, "_clear_sharding_prop_cache"):
        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    else:
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()


def clear_planner_cache() -> None:
    """Clear DTensor's cache of redistributions of shards. torch 2.6 to 2.9 do not have one."""
    from torch.distributed.tensor import _redistribute

    if hasattr(_redistribute, "clear_redistribute_planner_cache"):
        _redistribute.clear_redistribute_planner_cache()
