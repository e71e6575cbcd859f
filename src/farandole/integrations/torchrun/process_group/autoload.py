"""What each `import torch` runs where Farandole is installed: torch's entry point `torch.backends` calls `load()`.

It makes the backend "farandole" known to torch.distributed; the rest of Farandole is imported when a script requests
that backend. In a worker of `farandole run` it also prepares torch for the job's store, watches whether the worker
trains without having met the others, and with --in-place makes the script elastic. Anywhere else it does nothing more.

It imports only what torch has imported, and reads the environment itself: every program that imports torch waits for
it, and importing farandole.base.env takes longer than all that is done here.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist

BACKEND = "farandole"
SYSTEMS = ("linux",)
_DEVICES = ("cpu", "cuda")


def load() -> None:
    """Make the backend known, and prepare a worker. Idempotent. torch's entry point calls it, and the fork server calls
    it again in each worker that it has forked, whose environment differs from its own."""
    if sys.platform not in SYSTEMS:
        sys.modules.pop("farandole", None)  # so that a script's `import farandole` says why it does not work here
        return
    if not dist.is_available():
        return  # a torch that was built without torch.distributed
    make_backend_known()
    if os.environ.get("FARANDOLE_WORKER"):
        _prepare_worker()


@functools.cache
def make_backend_known() -> None:
    """Register the backend, and a rendezvous that needs no environment variables for it. Idempotent."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=list(_DEVICES))
    # register_rendezvous_handler() refuses a scheme that is registered (torch 2.13, torch/distributed/rendezvous.py).
    handlers = _rendezvous()._rendezvous_handlers
    theirs = handlers["env"]
    handlers["env"] = lambda url, **options: _meet(url, options, theirs)


def _rendezvous() -> Any:
    return sys.modules["torch.distributed.rendezvous"]  # loaded by torch.distributed, whose function has its name


def _registration() -> Any:
    """Return registration.py, which is loaded with the rest of Farandole."""
    from farandole.integrations.torchrun.process_group import registration

    return registration


def _create(options: Any, backend_options: object) -> Any:
    return _registration().create(options, backend_options)


def _meet(url: str, options: dict[str, Any], theirs: Callable[..., Iterator[Any]]) -> Iterator[Any]:
    """Replace torch's env:// rendezvous for our backend: rank and size are known, and the ranks have connected.

    Not where the script itself says who the ranks are: outside of a job, and with `enable_reconfigure` (torch 2.14).
    """
    call = _arguments_of_init()
    is_ours = _is_backend_of_all(call.get("backend")) and not call.get("enable_reconfigure")
    if is_ours and not _registration().meets_at_torchs_store(url):
        yield from _registration().meet(url)
    else:
        yield from theirs(url, **options)


def _is_backend_of_all(backend: object) -> bool:
    """Return whether the argument of init_process_group requests our backend, for all devices that it names
    ("farandole", "cuda:farandole,cpu:farandole")."""
    return isinstance(backend, str) and all(each.split(":")[-1] == BACKEND for each in backend.split(","))


def _arguments_of_init() -> Mapping[str, object]:
    """Return the arguments of the call of init_process_group: the handler of a rendezvous does not receive them."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "init_process_group" and "backend" in frame.f_locals:
            return frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    return {}


# A worker of `farandole run` ------------------------------------------------------------------------------------------


@functools.cache
def _prepare_worker() -> None:
    rank, size = (os.environ.get(name, "") for name in ("HOROVOD_RANK", "HOROVOD_SIZE"))
    if store := os.environ.get("FARANDOLE_STORE", ""):
        _use_store(store, int(size) if size.isdecimal() else 0)
    if rank.isdecimal() and size.isdecimal() and int(size) > 1:
        LoneTraining.of_process = LoneTraining(int(rank), int(size))
        LoneTraining.of_process.watch()
    _keep_groups()
    if os.environ.get("FARANDOLE_IN_PLACE"):
        # By its name: the package lies above this one, and installs itself in the script of the worker.
        importlib.import_module("farandole.integrations.torchrun.in_place.torch_patches").install()


def _use_store(address: str, workers: int) -> None:
    """Change how torch opens the store of a rendezvous, in two ways.

    A group of more ranks than the job has `workers` (0: not known) is reported: its ranks would wait for the others
    without a word until their timeout.

    - TORCHELASTIC_USE_AGENT_STORE is for the launcher's own store. torch 2.6 to 2.14 follow it at any address, where
      every rank then waits for a store that nobody serves; torch 2.15 does not (torch/distributed/rendezvous.py,
      _agent_store_serves).
    - torch counts its groups from 0 again after destroy_process_group(), so the next init_process_group() would read
      the entries of the last one. It gets a part of the store of its own.
    """
    module = _rendezvous()
    theirs = getattr(module, "_create_c10d_store", None)
    if theirs is None:
        return
    earlier = 0

    def create(hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal earlier
        if world_size > 1 and LoneTraining.of_process is not None:
            LoneTraining.of_process.end()
        args = (rank, world_size, *args)
        if f"{hostname}:{port}" != address:
            variable = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            try:
                return theirs(hostname, port, *args, **kwargs)
            finally:
                if variable is not None:
                    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = variable
        if rank == 0 and 0 < workers < world_size:
            _warn_of_missing_ranks(world_size, workers)
        store = theirs(hostname, port, *args, **kwargs)
        number, earlier = earlier, earlier + 1
        return torch._C._distributed_c10d.PrefixStore(f"rendezvous{number}", store) if number else store

    module._create_c10d_store = create


def _warn_of_missing_ranks(world_size: int, workers: int) -> None:
    print(
        f"farandole: init_process_group(world_size={world_size}) in a job of {workers} "
        f"worker{'s' if workers > 1 else ''}: unless the script starts further processes itself, it waits until its "
        f"timeout for ranks that do not exist. Leave world_size out, or start {world_size} workers",
        file=sys.stderr,
        flush=True,
    )


def _keep_groups() -> None:
    """Have groups that the script destroys live until it destroys the next ones.

    A DistributedDataParallel keeps its group as well. If it is the last one to release a group of Gloo, it waits for
    the group's thread with Python's lock held, while that thread may wait for the lock to free a tensor: the script
    hangs at its end (torch 2.6 to 2.15; pytorch/pytorch#56297). Python's own reference releases the lock first
    (#154976).
    """
    module = sys.modules["torch.distributed.distributed_c10d"]
    theirs = module.destroy_process_group
    kept: list[object] = []

    @functools.wraps(theirs)
    def destroy_process_group(group: Any = None) -> None:
        kept[:] = module._world.pg_map
        theirs(group)

    module.destroy_process_group = dist.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]


def note_meeting() -> None:
    """Note that this worker has entered the world, and make the backend known where torch has not loaded this file."""
    make_backend_known()
    if LoneTraining.of_process is not None:
        LoneTraining.of_process.end()


class LoneTraining:
    """The watch whether this worker trains without having met the others.

    It looks after each step of an optimizer until the worker has met them. A step before that is reported, on stderr
    and to the agent, which is withdrawn if the worker meets the others later.
    """

    of_process: ClassVar[LoneTraining | None] = None

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._has_warned = self._is_over = False
        self._hook: Any = None

    def watch(self) -> None:
        """Begin to look after each step, of whatever optimizer."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._hook = register_optimizer_step_post_hook(self._look)

    def _look(self, *_: object) -> None:
        # torch.compile() traces hooks, and a compiled step must not change for this. The hook is not removed here:
        # torch iterates over the hooks (torch 2.13, torch/optim/optimizer.py, profile_hook_step).
        if self._is_over or torch.compiler.is_compiling():
            return
        if has_met():
            self._report_meeting()
        elif not self._has_warned:
            self._has_warned = True
            _report(has_met=False)
            print(self._warning(), file=sys.stderr, flush=True)

    def end(self) -> None:
        """Report that the worker has met the others, or is about to. Idempotent. Not called within a step."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if not self._is_over:
            self._report_meeting()

    def _report_meeting(self) -> None:
        self._is_over = True
        _report(has_met=True)
        if self._has_warned:
            print(f"farandole: rank {self._rank} of {self._size} meets the others now", file=sys.stderr, flush=True)

    def _warning(self) -> str:
        return (
            f"farandole: rank {self._rank} of {self._size} has made an optimizer step and has not met the other "
            f"workers: {self._size} workers train {self._size} models, each for itself, and may overwrite each other's "
            "files. Call farandole.init(), or torch.distributed.init_process_group() as under torchrun (RANK, "
            "WORLD_SIZE and MASTER_ADDR are set), or start the script with -np 1"
        )


def has_met() -> bool:
    """Return whether this worker has entered the world, or a process group of several ranks."""
    world = sys.modules.get("farandole.training.collectives.world")
    if world is not None and world.is_entered():
        return True
    return dist.is_initialized() and dist.get_world_size() > 1


def _report(has_met: bool) -> None:
    """Report this to the agent, through the worker's status page."""
    if page := os.environ.get("FARANDOLE_PAGE"):
        from farandole.base.liveness.status_reporting import report_meeting

        report_meeting(page, has_met)
