"""The side of the loaders towards torch: batches from its loader processes, and small tensors by value."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from multiprocessing.synchronize import Event
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data._utils import signal_handling

logger = logging.getLogger("farandole")

torch_signals: Any = signal_handling
"""torch's watch over loader processes, which has no public interface (torch 2.13)."""

_LOSSES_TO_PREPARE_ONE = 2
_MOST_LOSSES = 3
_LOOKS, _LOOK_S = 100, 0.05  # together as long as torch waits for its loader processes to end
"""Losses of loader processes before the same batch, after which it is given up: they die of its samples."""


class OnWay(Protocol):
    """A requested batch; `restart_id` numbers the restart that it belongs to."""

    @property
    def restart_id(self) -> int: ...


OnWayT = TypeVar("OnWayT", bound=OnWay)


class RequestStream(Protocol[OnWayT]):
    """A stream of the batches to fetch next (index_stream.py, stream_reader.py). An iteration begins with those on the
    way."""

    on_way: deque[OnWayT]
    is_through: bool

    @property
    def restart_id(self) -> int: ...


def torch_loader(dataset: Any, arguments: Mapping[str, Any], **sampling: Any) -> TorchDataLoader[Any]:
    """Return the loader for a Prefetch, with these arguments of torch's. It draws no number of the training, and its
    processes live until the Prefetch ends them."""
    ours = {
        "worker_init_fn": SmallByValue(arguments["worker_init_fn"]),
        "persistent_workers": arguments["num_workers"] > 0,
        "generator": torch.Generator(),
    }
    return TorchDataLoader(dataset, **{**arguments, **sampling, **ours})


class Prefetch(Generic[OnWayT]):
    """Takes batches out of a torch DataLoader whose sampler is `requests`, or out of another iterable of batches.

    Its loader processes are started by take(), and end with renew() and close(), or when this object is freed: the
    iterator holds no reference to it. When one of them dies, new ones deliver the batches on the way.

    Args:
        loader: The result of torch_loader(), or another iterable.
        requests: The batches to fetch.
        keeps_processes: renew() has no effect.
        seed: Returns the seed from which torch derives those of new loader processes.
    """

    def __init__(
        self,
        loader: TorchDataLoader[Any] | Iterable[Any],
        requests: RequestStream[OnWayT],
        keeps_processes: bool,
        seed: Callable[[], int] = torch.initial_seed,
    ) -> None:
        self._seed = seed
        self._loader, self._requests, self._keeps_processes = loader, requests, keeps_processes
        self._iterator: Iterator[Any] | None = None
        self._pids: tuple[int, ...] = ()
        self._losses = 0  # of loader processes since the last batch
        self._ahead = getattr(loader, "prefetch_factor", None)  # batches that each loader process prepares

    def take(self) -> tuple[OnWayT, Any]:
        """Return the next batch since the last restart, collated; batches of earlier restarts are dropped. Raises the
        errors of the data set; then, as after any other error here, close() is needed before the next call."""
        requests = self._requests
        while True:
            try:
                data = self._watched() if self._pids else self._next()
            except Exception as error:
                if not self._has_lost_process():
                    raise
                self._count_loss(error)
                continue
            self._losses = 0
            requested = requests.on_way.popleft()
            if requested.restart_id == requests.restart_id:
                return requested, data

    def renew(self) -> None:
        """End the loader processes: what follows is fetched by new ones, which have the data set as it is then."""
        if not self._keeps_processes:
            self._end_processes()

    def close(self) -> None:
        """End the loader processes and drop the batches being fetched. Idempotent."""
        self._end_processes()
        self._requests.on_way.clear()

    def _next(self) -> Any:
        requests = self._requests
        is_through = requests.is_through and not self._is_on_way()
        if self._iterator is None or is_through:
            requests.on_way = deque(each for each in requests.on_way if each.restart_id == requests.restart_id)
            self._iterator = self._start()
        return next(self._iterator)

    def _is_on_way(self) -> bool:
        """Return whether a batch since the last restart is on the way."""
        on_way = self._requests.on_way
        return bool(on_way) and on_way[-1].restart_id == self._requests.restart_id

    def _start(self) -> Iterator[Any]:
        loader = self._loader
        if not isinstance(loader, TorchDataLoader):
            return iter(loader)
        # As in torch, the loader processes' seeds depend on the main process's seed; but no number is taken from its
        # generator: a repeated step would see other ones. Without a generator of the loader, torch takes its base seed
        # from the default one (torch 2.13, torch/utils/data/dataloader.py, _BaseDataLoaderIter.__init__).
        if loader.generator is not None:
            loader.generator.manual_seed(self._seed())
        # A process that dies of the samples of one batch takes batches with it that it has prepared before: they come
        # when it prepares no others.
        loader.prefetch_factor = 1 if self._losses >= _LOSSES_TO_PREPARE_ONE else self._ahead
        iterator: Any = iter(loader)
        if getattr(iterator, "_worker_pids_set", False):
            # torch's handler of SIGCHLD would raise in the main thread, wherever that is, when one of them dies.
            torch_signals._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
            self._pids = tuple(process.pid for process in iterator._workers)
            iterator._workers_done_event = _DoneEvent(iterator._workers_done_event, iterator._workers)
        return iterator  # type: ignore[no-any-return]

    def _end_processes(self) -> None:
        # Private, but torch has no public way: without it they would live as long as the traceback of an error
        # (torch 2.13, torch/utils/data/dataloader.py, _MultiProcessingDataLoaderIter._shutdown_workers).
        iterator: Any = self._iterator
        if self._pids:
            if self._has_lost_process():
                iterator._workers_done_event.theirs = None
                _kill(iterator._workers)
            iterator._shutdown_workers()
        if isinstance(self._loader, TorchDataLoader):
            self._loader._iterator = None
        self._iterator, self._pids = None, ()

    # Lost loader processes -------------------------------------------------------------------------------

    def _watched(self) -> Any:
        """Return the next batch, or raise as soon as a loader process dies: torch itself would look for it every five
        seconds, and never while half of a message has arrived."""
        if threading.current_thread() is not threading.main_thread():  # where torch's handler would not raise
            return self._next()
        try:
            torch_signals._set_worker_pids(id(self), self._pids)
            torch_signals._error_if_any_worker_fails()
            if self._has_lost_process():  # and other code of this process has waited for it: torch does not see it
                raise RuntimeError("a loader process has exited unexpectedly")
            return self._next()
        finally:
            self._unwatch()

    def _unwatch(self) -> None:
        while True:
            try:
                torch_signals._remove_worker_pids(id(self))
            except ValueError:  # they are not watched
                return
            except RuntimeError:  # torch's handler was called just before, for another lost process
                continue
            return

    def _has_lost_process(self) -> bool:
        return bool(self._pids) and any(map(_has_ended, getattr(self._iterator, "_workers", ())))

    def _count_loss(self, error: Exception) -> None:
        """Prepare that new loader processes fetch the batches on the way. Raises the error when that does not help."""
        self._losses += 1
        self._unwatch()
        self._end_processes()
        if self._losses == _MOST_LOSSES:
            self._losses = 0
            error.add_note(f"{_MOST_LOSSES} times in a row before the same batch: its samples may be the cause")
            raise error
        logger.warning("a loader process is lost, and new ones are started: %s", error)


class _DoneEvent:
    """torch's event for the end of its loader processes, as the main process sees it. A killed process may have had the
    lock of `theirs`, for which torch would wait for ever, also where it only looks at it."""

    def __init__(self, theirs: Event, processes: Sequence[BaseProcess]) -> None:
        self.theirs: Event | None = theirs
        self._processes, self._is_set = processes, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if self.theirs is None:
            return
        setting = threading.Thread(target=self.theirs.set, daemon=True)
        setting.start()
        for _ in range(_LOOKS):
            setting.join(_LOOK_S)
            if not setting.is_alive() or any(map(_has_ended, self._processes)):  # the one with the lock
                break
        if setting.is_alive():
            _kill(self._processes)


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        if not _has_ended(process):
            process.kill()


def _has_ended(process: BaseProcess) -> bool:
    """Return whether a process has ended. Not is_alive(): that is true for ever of a process that other code has waited
    for, as os.wait() does."""
    return bool(connection.wait([process.sentinel], timeout=0))


# Transfer of small tensors from the loader processes, in the message itself -------------------------------------------
#
# torch sends a tensor's shared memory instead, a file descriptor that the receiver fetches over a separate
# connection: half a millisecond for each tensor, and more when the processors are busy. That is right for large
# tensors.

# Limited so that the batches that two loader processes prepare ahead fit into the pipe (64 KiB). A loader process that
# is killed while it waits for space leaves half a message there, which torch notices in the main thread only.
_LARGEST_BYTES = 16 * 1024


class SmallByValue:
    """A worker_init_fn that sends small tensors by value. Two tensors of a batch that share memory no longer do so
    afterwards."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker: int) -> None:
        ForkingPickler.register(torch.Tensor, reduce_by_value)
        if self._then is not None:
            self._then(worker)


def reduce_by_value(tensor: torch.Tensor) -> Any:
    """Return the reduction of a tensor for pickle: by value when it is small and numpy has its type, else as torch
    does."""
    is_dense = tensor.layout is torch.strided and tensor.is_cpu
    # With other strides, such as channels last, numpy would keep the values only.
    if is_dense and tensor.nbytes <= _LARGEST_BYTES and tensor.is_contiguous():
        try:
            return torch.from_numpy, (tensor.numpy(),)
        except (TypeError, RuntimeError):  # bfloat16, quantized, with a gradient
            pass
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]
