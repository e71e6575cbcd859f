"""The user's communication hook of a DistributedDataParallel. It reduces as before, between Farandole's weights and
step header.

What it keeps from step to step begins anew in each generation, on all workers: one that has joined has none of it. The
state of PowerSGD is known, and goes on instead:

- What an aborted step has changed is undone, as the parameters are.
- Matrices, counters and random numbers are equal on all workers. One that has joined gets them from the first worker
  that has made the most steps.
- The errors belong to each worker: what its compression has left out so far. A survivor keeps them, a worker that has
  joined has none, and those of a lost worker are lost. The hook divides by the number of workers; so errors are
  multiplied by the new one over the former one, and count as much as they would have.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from farandole.errors import ConfigError
from farandole.integrations.torchrun.process_group.c10d_group import FarandoleGroup
from farandole.integrations.torchrun.process_group.works import failure, plain_collectives
from farandole.training.collectives import world
from farandole.training.collectives.transport import NOTHING, Transport
from farandole.training.optim.buckets import Bucket
from farandole.training.optim.compression import BF16Compressor, Compressor, FP16Compressor
from farandole.training.state import step as current_step
from farandole.training.state.batch import GlobalBatch

Hook = Callable[[Any, Any], Future[torch.Tensor]]
_COMPRESSORS: dict[Hook, Compressor] = {
    default_hooks.fp16_compress_hook: FP16Compressor,
    default_hooks.bf16_compress_hook: BF16Compressor,
}


class CommHook:
    """A communication hook. By the contract of such hooks it returns the mean over all ranks."""

    def __init__(self, state: Any, hook: Hook) -> None:
        self._state, self._hook = state, hook
        self._beginning = _copied(state)
        is_of_power_sgd = all(hasattr(state, name) for name in _OF_POWER_SGD)
        self._carried = CarriedState(state, self._begin_anew) if is_of_power_sgd else None
        self._world: world.World | None = None  # in which the state has begun anew

    @property
    def compression(self) -> Compressor | None:
        """The compressor that does the same, if there is one."""
        is_of_all = self._state is None or isinstance(self._state, FarandoleGroup)
        return _COMPRESSORS.get(self._hook) if is_of_all else None

    def begin(self, step: GlobalBatch | None, device: torch.device) -> None:
        """Note that the first bucket of a pass follows, for a step, or without one. All ranks call it. Raises the
        errors of transports."""
        here = world.current()
        if step is not None and self._carried is not None:
            self._carried.begin(step, device)
        elif here is not self._world:
            self._begin_anew()
        self._world = here

    def _begin_anew(self) -> None:
        _load(self._state, copy.deepcopy(self._beginning))

    def end(self) -> None:
        """Note that the results of all buckets of a pass have arrived."""
        if self._carried is not None:
            self._carried.is_whole = True

    def undo(self) -> None:
        """Undo what the current step has changed in a state that is carried over."""
        if self._carried is not None:
            self._carried.undo()

    def reduce(self, bucket: HookBucket) -> torch.Tensor:
        """Return the mean. Raises RecoverableError when a worker was lost, even if another error arrives here."""
        try:
            with plain_collectives():
                return self._hook(self._state, bucket).wait()
        except Exception as error:
            lost = failure()
            if lost is None:
                raise
            raise lost from error


class HookBucket:
    """A bucket as a hook sees it, with the methods of torch's GradBucket."""

    def __init__(self, bucket: Bucket, index: int, is_last: bool) -> None:
        self._flat, self._parameters = bucket.flat, bucket.parameters
        self._index, self._is_last = index, is_last

    def index(self) -> int:
        return self._index

    def buffer(self) -> torch.Tensor:
        return self._flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self._flat = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Return the parts of the buffer, in the shapes of the parameters."""
        parts = torch.split(self._flat, [each.numel() for each in self._parameters])
        return [part.view(each.shape) for part, each in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        return list(self._parameters)

    def is_last(self) -> bool:
        return self._is_last


class HookedReduce:
    """The reduction of buckets by a hook; see Reduce in training/optim/bucketed_gradients.py.

    place, paths  of the several paths of a module whose buckets the hook gets; they have numbers of their own
    """

    may_overlap = False

    def __init__(self, hook: CommHook, place: int = 0, paths: int = 1) -> None:
        self._hook, self._place, self._paths = hook, place, paths

    def forget(self) -> None:
        """Do nothing: the hook has the same buckets in each generation."""

    def all_reduce(self, transport: Transport, buckets: Sequence[Bucket], place: int, trailer: bytes) -> list[bytes]:
        batch = current_step.batch()
        buckets[place].flat.mul_(transport.size)  # the hook takes the mean
        self.reduce(buckets, place, None if batch is None else batch.global_batch)
        return transport.all_reduce(NOTHING, trailer) if trailer else []

    def reduce(self, buckets: Sequence[Bucket], place: int, step: GlobalBatch | None) -> None:
        """Overwrite a bucket with the mean over all ranks."""
        flat = buckets[place].flat
        if place == 0:
            self._hook.begin(step, flat.device)
        is_last = place == len(buckets) - 1 and self._place == self._paths - 1
        mean = self._hook.reduce(HookBucket(buckets[place], place * self._paths + self._place, is_last))
        if mean.data_ptr() != flat.data_ptr():
            flat.copy_(mean.view(-1))
        if is_last:
            self._hook.end()


def registered_hook(ddp: DistributedDataParallel) -> CommHook | None:
    """Return the hook that the module has so far. Raises ConfigError for a hook that only C++ knows."""
    if ddp._comm_hooks:
        hook, state = ddp._comm_hooks[-1]
        return CommHook(state, hook)
    # Private, but built-in hooks (_register_builtin_comm_hook in torch/nn/parallel/distributed.py of torch 2.13) are
    # recorded there only.
    logging_data = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    built_in = str(logging_data.get("comm_hook", ""))
    if built_in.endswith("FP16_COMPRESS"):
        return CommHook(None, default_hooks.fp16_compress_hook)
    if built_in and not built_in.endswith("ALLREDUCE"):
        raise ConfigError(
            f"DistributedDataParallel has the built-in hook {built_in}, which is not supported; leave it out"
        )
    return None


def _copied(state: Any) -> dict[str, Any]:
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


def _load(state: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(state, name, value)


# The state of PowerSGD ------------------------------------------------------------------------------------------------
#
# torch 2.13, torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py. Errors are new tensors in each step, by the
# number of the bucket; the matrices are overwritten.

_ERRORS = "error_dict"
_OF_POWER_SGD = (_ERRORS, "p_memory_dict", "q_memory_dict", "rng", "iter")
_STANDING = struct.Struct("<QQ")  # steps, bytes of what is equal on all ranks

Errors = dict[int, torch.Tensor]


class CarriedState:
    """The state of PowerSGD, from step to step and from generation to generation.

    begin_anew  sets it to its beginning
    """

    def __init__(self, state: Any, begin_anew: Callable[[], None]) -> None:
        self._state, self._begin_anew = state, begin_anew
        self._steps = 0  # those that are decided
        self._step: GlobalBatch | None = None
        self._before: dict[str, Any] = {}  # the state before it
        self._undone: Errors | None = None  # of a step that is aborted here: another worker may have applied it
        self._size = 0  # workers in it
        self._agreed_in: world.World | None = None
        self.is_whole = False  # the hook has reduced all buckets of the step

    def begin(self, step: GlobalBatch, device: torch.device) -> None:
        """Begin a pass. Raises the errors of transports."""
        if step is self._step:
            return  # a further pass of this step
        if self._step is not None and self.is_whole:  # it was not undone, so it is decided
            self._steps += 1
        self._step, here = None, world.current()
        if self._agreed_in is not here:
            self._agree(here, device)
            self._agreed_in, self._size = here, here.transport.size
        self._before = {**self._equal(), _ERRORS: dict(self._state.error_dict)}
        self._step, self._undone, self.is_whole = step, None, False

    def undo(self) -> None:
        """Restore the state before the step, which is aborted."""
        if self._step is not None:
            self._undone = self._state.error_dict if self.is_whole else None
            _load(self._state, self._before)
            self._step, self._before = None, {}

    def _equal(self) -> dict[str, Any]:
        """Return copies of what is equal on all ranks, by name."""
        errors, self._state.error_dict = self._state.error_dict, {}  # as large as the model, and not to be copied
        try:
            return {name: value for name, value in _copied(self._state).items() if name != _ERRORS}
        finally:
            self._state.error_dict = errors

    def _agree(self, here: world.World, device: torch.device) -> None:
        """Give all ranks the state of the most steps, if there is any."""
        packed = pickle.dumps(_moved(self._equal(), torch.device("cpu"))) if self._steps else b""
        own = _STANDING.pack(self._steps, len(packed))
        standings = [_STANDING.unpack(each) for each in here.transport.all_gather(own)]
        most, nbytes = max(standings)
        if most == 0:
            self._begin_anew()
            return
        if any(steps != most for steps, _ in standings):
            source = standings.index((most, nbytes))
            sent = torch.frombuffer(bytearray(packed if source == here.transport.rank else nbytes), dtype=torch.uint8)
            here.transport.broadcast(sent, source)
            if self._steps != most:
                is_next = self._steps + 1 == most and self._undone is not None
                _load(self._state, _moved(pickle.loads(sent.numpy().tobytes()), device))
                self._state.error_dict = self._undone if is_next and self._undone is not None else {}
        if self._size not in (0, here.transport.size):
            scale = here.transport.size / self._size
            self._state.error_dict = {place: error * scale for place, error in self._state.error_dict.items()}
        self._steps = most


def _moved(values: Any, device: torch.device) -> Any:
    if isinstance(values, torch.Tensor):
        return values.to(device)
    return {name: _moved(value, device) for name, value in values.items()} if isinstance(values, dict) else values
