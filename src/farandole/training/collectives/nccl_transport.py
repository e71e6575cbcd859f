"""CUDA tensors through NCCL: the groups that device_transport.py connects, and the check whether a process can use
NCCL.

The order of events (a step is decided only after the host has seen that its reduction has ended well):

- All work of a group is queued in a stream of its own, behind the earlier work of the caller's current stream.
  Should NCCL hang, no stream of the script waits for it.
- NCCL works on a private copy. The host queries an event behind its operation; meanwhile it checks the ring. Only
  after all ranks have their result, it is copied into the caller's tensor, and waited for.
- So a thread that aborts need not wait for NCCL, whose abort may take long: NCCL never touches the caller's tensor.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from farandole.base.env import prepare_for_nccl
from farandole.training.collectives.kept_group import (
    KeptGroup,
    Offer,
    ReconfigurableGroup,
    agreed_members,
    make_reconfigurable,
)
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.torch_group import NO_LIMIT_S, OPS, Construction, ExchangedStore
from farandole.training.collectives.transport import Reduction

logger = logging.getLogger("farandole")

_CONNECT_TIMEOUT_S = 60.0


class NcclGroups:
    """The DeviceGroups (device_transport.py) of CUDA devices.

    Args:
        kept: Holds the group from one generation to the next, where torch can exchange its members. None: it is made
            anew. It is taken at once, since the generation before is closed before the first tensor of this one.
    """

    name = "NCCL"

    def __init__(self, kept: KeptGroup | None = None) -> None:
        self._kept = kept
        self._lasting = None if kept is None else kept.take()
        if kept is not None:
            kept.is_used_by(self)

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def identity(self, device: torch.device) -> str:
        return str(torch.cuda.get_device_properties(device).uuid)

    def connect(self, ring: RingTransport, device: torch.device) -> NcclGroup | str:
        wrong = prepare_for_nccl()
        lasting = None if wrong else self._own_lasting_group(ring)
        offer = Offer() if lasting is None else lasting.offer()
        packed = ring.all_gather(msgspec.msgpack.encode(offer))
        members = agreed_members([msgspec.msgpack.decode(each, type=Offer) for each in packed])
        self._lasting = None  # not before: if a rank is lost until here, the next generation has it

        def make(store: ExchangedStore) -> NcclGroup:
            if wrong:
                raise RuntimeError(wrong)
            if lasting is None or members is None:
                return NcclGroup(new_group(store, ring.rank, ring.size), store, device)
            group = NcclGroup(lasting.group, store, device, lasting)
            try:
                with torch.cuda.device(device):
                    lasting.reconfigure(store, members, _CONNECT_TIMEOUT_S)
            except BaseException:
                group.release()
                raise
            return group

        made = Construction(ring, make, NcclGroup.connect, NcclGroup.release, _CONNECT_TIMEOUT_S, "nccl").finish()
        if isinstance(made, NcclGroup) and self._kept is not None:
            self._kept.is_used_by(made)
        return made

    def hand_over(self) -> ReconfigurableGroup | None:
        """Return the group of the generation before, if no tensor of this one has needed it."""
        lasting, self._lasting = self._lasting, None
        return lasting

    def _own_lasting_group(self, ring: RingTransport) -> ReconfigurableGroup | None:
        """Return this rank's group that lives through the generations; None if there is none."""
        if self._kept is not None and self._lasting is None:
            self._lasting = make_reconfigurable(lambda store: new_reconfigurable_group(store, ring.rank, ring.size))
        return self._lasting


# One process group, a TorchGroup (torch_group.py) ---------------------------------------------------------------------

_ABORT_S = 30.0
_HAND_OVER_S = 1.0
_stuck: list[tuple[Any, ...]] = []
"""Groups whose abort has not ended, with the memory that they may still use."""


def new_group(store: dist.Store, rank: int, size: int) -> Any:  # type: ignore[name-defined]
    """Return torch's process group of NCCL, which is connected in its first operation."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL")  # noqa: B009 - not in every torch
    return nccl(store, rank, size, _options())


def new_reconfigurable_group(store: dist.Store, rank: int, size: int) -> Any:  # type: ignore[name-defined]
    """Return torch's process group of NCCL whose members can be exchanged; it has none yet.

    Raises RuntimeError if torch has none: it is called nccl2 (torch 2.15, pytorch#189359).
    """
    nccl: Any = getattr(distributed_c10d, "ProcessGroupNCCL2", None)
    if nccl is None:
        raise RuntimeError(f"torch {torch.__version__} has no process group of NCCL whose members can be exchanged")
    options = _options()
    options.enable_reconfigure = True
    # Without a device: with one, it would be connected here. reconfigure() takes the current one.
    return nccl(store, rank, size, options)


def _options() -> Any:
    options: Any = getattr(dist, "ProcessGroupNCCL").Options()  # noqa: B009
    options._timeout = timedelta(seconds=NO_LIMIT_S)
    # So that a rank which waits for others to connect can be aborted: a communicator that does not block, as in
    # the documentation of ncclCommInitRankConfig() and of ncclConfig_t.blocking.
    options.config.blocking = 0
    return options


class NcclGroup:
    """A process group of NCCL in one generation.

    Args:
        group: torch's group.
        store: The store through which the ranks find each other; kept, since torch may read it later.
        device: The device of all tensors.
        lasting: The same group, if the next generation may have it.
    """

    name = "NCCL"
    look_every_s = 0.0001  # there is no callback when an operation has ended

    def __init__(
        self,
        group: Any,
        store: ExchangedStore,
        device: torch.device,
        lasting: ReconfigurableGroup | None = None,
    ) -> None:
        self._group, self._lasting = group, lasting
        self._store, self._device = store, device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._lock = threading.Lock()
        self._aborting: threading.Thread | None = None

    def connect(self) -> None:
        """Return when the group can be used: the communicator is made in the first operation.

        Raises RuntimeError when it cannot be made, or after shut_down().
        """
        begun = self.all_reduce(
            self.take(torch.ones(1, dtype=torch.float32, device=self._device), torch.float32, True), Reduction.SUM
        )
        pause = threading.Event()
        while not begun.is_completed():
            if self._aborting is not None:
                raise RuntimeError("the process group was aborted before it was connected")
            pause.wait(self.look_every_s)
        begun.wait()

    def take(self, flat: torch.Tensor, dtype: torch.dtype, is_read: bool) -> torch.Tensor:
        nbytes = flat.numel() * dtype.itemsize
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if self._memory.numel() < nbytes:
                self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            copy = self._memory[:nbytes].view(dtype)
            return copy.copy_(flat) if is_read else copy

    def all_reduce(self, copy: torch.Tensor, op: Reduction, when_done: Callable[[], None] | None = None) -> _NcclWork:
        options = dist.AllreduceOptions()
        options.reduceOp = OPS[op]  # type: ignore[assignment]
        return self._begun(lambda: self._group.allreduce([copy], options))

    def broadcast(self, copy: torch.Tensor, source: int, when_done: Callable[[], None] | None = None) -> _NcclWork:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self._begun(lambda: self._group.broadcast([copy], options))

    def give(self, copy: torch.Tensor, flat: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            flat.copy_(copy)
        self._stream.synchronize()

    def shut_down(self) -> None:
        """Abort NCCL in another thread, since that may take long, or for ever."""
        with self._lock:
            if self._aborting is None and self._group is not None:
                # A daemon: should it never return, the process can still end. release() waits for it.
                self._aborting = threading.Thread(target=self._group.abort, name="farandole-nccl-abort", daemon=True)
                self._aborting.start()

    def hand_over(self) -> ReconfigurableGroup | None:
        """End the running operation, and return the group for the next generation; None if that cannot have it.

        The abort of a group whose members can be exchanged ends its operations, and nothing else (pytorch#189359).
        """
        self.shut_down()
        lasting, aborting = self._lasting, self._aborting
        if lasting is None or aborting is None:
            return None
        aborting.join(_HAND_OVER_S)
        if aborting.is_alive():
            self.release()
            return None
        with self._lock:
            self._group = self._lasting = None
        lasting.held.append(self._memory)
        return lasting

    def release(self) -> None:
        """Release the group in the background: memory that NCCL may still use is kept until its abort has ended."""
        self.shut_down()
        with self._lock:
            kept, self._group = (self._group, self._store, self._memory, self._lasting), None
            self._lasting = None
        if kept[0] is not None and self._aborting is not None:
            # Not a daemon, for the reason given in torch_group.py (Construction).
            threading.Thread(target=_release, args=(kept, self._aborting), name="farandole-nccl-release").start()

    def _begun(self, begin: Callable[[], Any]) -> _NcclWork:
        group = self._group
        with torch.cuda.stream(self._stream):
            begin().wait()  # the stream waits, behind NCCL's own one; not this thread
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _NcclWork(event, lambda: _failure(group))


class _NcclWork:
    """An operation in progress.

    Not torch's Work: querying that takes a lock which a running abort holds (torch 2.13,
    torch/csrc/distributed/c10d/NCCLUtils.cpp, NCCLComm::abort() and NCCLComm::checkForNcclError()).
    """

    def __init__(self, event: Any, failure: Callable[[], str]) -> None:
        self._event, self._failure = event, failure

    def is_completed(self) -> bool:
        return bool(self._event.query() or self._failure())

    def wait(self) -> None:
        if not self._event.query():
            raise RuntimeError(self._failure())


def _failure(group: Any) -> str:
    """Return a failure that torch's watchdog has detected since, e.g. a broken connection; empty if none."""
    if not hasattr(group, "get_error"):  # older than torch 2.13, whose torch/_C/_distributed_c10d.pyi has it
        return ""
    name = str(group.get_error().name)
    return "" if name == "SUCCESS" else f"its watchdog reports {name}"


def _release(kept: tuple[Any, ...], aborting: threading.Thread) -> None:
    """Return when the group is gone, or cannot be released."""
    aborting.join(_ABORT_S)
    if aborting.is_alive():
        logger.warning(
            "the abort of NCCL has not ended within %g s; the memory of its process group is not released", _ABORT_S
        )
        _stuck.append(kept)


# The check whether this process can use NCCL --------------------------------------------------------------------------


def own_nccl_problem() -> str:
    """Return why this process cannot use NCCL; empty if it can. Touches no device."""
    has_nccl = dist.is_available() and dist.is_nccl_available()
    return nccl_problem(torch.version.cuda is not None, has_nccl, torch.cuda.device_count())


def nccl_problem(has_cuda: bool, has_nccl: bool, devices: int) -> str:
    """Return why a process with such a torch cannot use NCCL; empty if it can."""
    if not has_cuda:
        return f"torch {torch.__version__} is a build without CUDA"
    if not has_nccl:
        return f"torch {torch.__version__} is a build without NCCL"
    if devices == 0:
        return "torch finds no CUDA device: check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return ""
