"""The groups of the backend "farandole": their creation, and their change with each generation.

autoload.py, which makes the backend known to torch, imports this file when a script requests it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn
from urllib.parse import urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import Store, _DistributedBackendOptions
from torch.distributed.distributed_c10d import _world
from torch.distributed.rendezvous import _query_to_dict

from farandole.base.env import read_fixed_env, read_torchrun_rank_and_size, read_worker_env
from farandole.errors import ConfigError
from farandole.integrations.torchrun.process_group.autoload import BACKEND
from farandole.integrations.torchrun.process_group.c10d_group import FarandoleGroup
from farandole.integrations.torchrun.process_group.reconfigurable import NamedMembers, WorldsByHandles, meet_at
from farandole.integrations.torchrun.process_group.works import JOB, LAST_FAILURE, Everybody, Some
from farandole.training.collectives import world
from farandole.training.collectives.torch_versions import (
    clear_planner_cache,
    clear_sharding_cache,
    have_no_flight_recorder,
    have_shutdown_called,
)
from farandole.training.worker import context

_made: dict[tuple[int, ...], int] = {}  # subgroups of this generation, by their ranks: the number of earlier ones

have_shutdown_called()
have_no_flight_recorder(BACKEND)


def open_default_group() -> None:
    """Open the default group for init(default_group=True), as init_process_group("farandole") does; once.

    Raises ConfigError when another backend's group is the default one.
    """
    if dist.is_initialized():
        if not isinstance(dist.group.WORLD, FarandoleGroup):
            raise ConfigError(
                f"the default group of torch.distributed already has the backend {dist.get_backend()}: call "
                f'torch.distributed.destroy_process_group() first, or do not request the backend "farandole"'
            )
        return
    hook = sys.excepthook
    dist.init_process_group(BACKEND)
    # c10d's hook puts a rank in front of each line of a traceback, and the rank may change. The parent of the workers
    # labels their lines, and prints lines that all of them share once.
    sys.excepthook = hook


def meet(url: str) -> Iterator[Any]:
    """Do what a rendezvous of torch does for a group with our backend, from the parameters of init_process_group.

    A rank and a size that the script has copied from RANK and WORLD_SIZE are those with which the worker was started:
    the current ones take their place.
    """
    context.init()
    here = world.current().placement
    copied_rank, copied_size = read_torchrun_rank_and_size() or (here.rank, here.size)
    parameters = _query_to_dict(urlparse(url).query)
    rank, size = int(parameters.get("rank", here.rank)), int(parameters.get("world_size", here.size))
    yield _no_store, here.rank if rank == copied_rank else rank, here.size if size == copied_size else size


def create(opts: _DistributedBackendOptions, options: object) -> FarandoleGroup:
    """Create a group. c10d calls it for each."""
    _follow_generations()
    if opts.global_ranks_in_group:
        return _subgroup(list(opts.global_ranks_in_group), opts.timeout)
    if getattr(opts, "enable_reconfigure", False):  # since torch 2.14
        _made.clear()
        worlds = WorldsByHandles(opts.group_rank, opts.group_size, opts.timeout, _follow_handles)
        return FarandoleGroup(NamedMembers(worlds, may_change=True))
    if _is_outside_of_a_job(opts.group_size):
        _made.clear()
        worlds = meet_at(opts.store, opts.group_rank, opts.group_size, opts.timeout)
        return FarandoleGroup(NamedMembers(worlds, may_change=False))
    context.init()
    here = world.current().placement
    if (opts.group_rank, opts.group_size) != (here.rank, here.size):
        raise ConfigError(
            f"init_process_group(rank={opts.group_rank}, world_size={opts.group_size}): this is rank {here.rank} of "
            f"{here.size}, which may change; leave rank, world_size, RANK and WORLD_SIZE out"
        )
    _open_p2p(world.current())
    return FarandoleGroup(Everybody())


def meets_at_torchs_store(url: str) -> bool:
    """Return whether torch's own rendezvous has to find the ranks of this call of init_process_group()."""
    return _is_outside_of_a_job(int(_query_to_dict(urlparse(url).query).get("world_size", 1)))


def _is_outside_of_a_job(size: int) -> bool:
    """Return whether the script itself has started these `size` processes, and says where they meet.

    It does so with arguments of init_process_group(), or sets some of the variables that torch's env:// needs; a
    launcher sets more of them. A process that called fd.init() by itself is a world of one, and its forked children
    inherit that: it says nothing about the group.
    """
    if read_worker_env() is not None or (world.is_entered() and world.current().placement.size > 1):
        return False
    try:
        return read_fixed_env() is None and size > 1
    except ConfigError:
        return True


def _subgroup(ranks: list[int], timeout: timedelta) -> FarandoleGroup:
    """Create a subgroup. Called on its members only, for each group of the same ranks in the same order."""
    everybody = dist.group.WORLD
    if not isinstance(everybody, FarandoleGroup):
        raise ConfigError(
            f'new_group(backend="farandole"): the default group has the backend {dist.get_backend()}, whose ranks '
            f'may differ; call init_process_group("farandole")'
        )
    if _do_whole_groups_follow and len(ranks) == world.current().placement.size:
        return FarandoleGroup(Everybody())
    key = tuple(ranks)
    number = _made[key] = _made.get(key, -1) + 1
    return FarandoleGroup(Some(ranks, number, everybody.members.worlds), timeout)


_do_whole_groups_follow = False


def let_whole_groups_follow() -> None:
    """Make groups of all ranks from now on groups of all workers of each generation, as the default group is. Otherwise
    they end with their generation."""
    global _do_whole_groups_follow
    _do_whole_groups_follow = True


@functools.cache
def _follow_generations() -> None:
    """Let groups of this process follow the generations."""
    world.on_enter(_follow)


def _follow(entered: world.World | None) -> None:
    """Follow a new generation: c10d's own records of the default group get its size. They are private, and nothing else
    changes them while the group exists (torch 2.13, torch/distributed/distributed_c10d.py, _World)."""
    group = dist.group.WORLD
    if isinstance(group, FarandoleGroup) and group.members.worlds is not JOB:
        return  # its members have nothing to do with the job
    _made.clear()
    if not isinstance(group, FarandoleGroup):
        return
    LAST_FAILURE.forget()
    if entered is None:
        _forget_subgroups()
    else:
        _open_p2p(entered)
        _renew(group, entered)


def _follow_handles(entered: world.World) -> None:
    """Follow a reconfiguration of the default group as _follow() does."""
    _made.clear()
    group = dist.group.WORLD
    if isinstance(group, FarandoleGroup):
        _renew(group, entered)


def _renew(group: FarandoleGroup, entered: world.World) -> None:
    _forget_subgroups()
    forget_meshes()
    for each in _world.pg_map:  # with let_whole_groups_follow() there are others
        if each is group or (isinstance(each, FarandoleGroup) and type(each.members) is Everybody):
            _world.pg_group_ranks[each] = {rank: rank for rank in range(entered.placement.size)}


def _forget_subgroups() -> None:
    """Remove the subgroups of the last generation, so that a search for a group of some ranks does not find one."""
    for group in _world.pg_map:
        if isinstance(group, FarandoleGroup) and isinstance(group.members, Some):
            group.members.forget()
    for tag, groups in _world.tags_to_pg.items():
        _world.tags_to_pg[tag] = [each for each in groups if each is dist.group.WORLD]


def _open_p2p(entered: world.World) -> None:
    if entered.p2p is not None:
        entered.p2p.open()


# The store of Farandole's groups, which is empty ----------------------------------------------------------------------
#
# c10d needs a store for each group; these groups have connected without one.


class NoStore(Store):
    """Raises an error that says so when it is used: by groups of other backends, above all."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: no operation waits here."""

    def _refuse(self, *_: object) -> NoReturn:
        raise ConfigError(
            'torch.distributed was initialized with the backend "farandole", which has no store: no group of another '
            "backend can be created with it, and ranks cannot be counted or awaited with it. Leave `backend` out of "
            "new_group(), and unset TORCH_DIST_INIT_BARRIER"
        )


_STORE_OPERATIONS = "set get add wait check compare_set delete_key num_keys append multi_get multi_set clone"

for _name in _STORE_OPERATIONS.split(" "):
    setattr(NoStore, _name, NoStore._refuse)

_no_store = NoStore()  # torch keeps only its C++ part


# Torch's caches of DTensor operations, which hold their meshes --------------------------------------------------------
#
# They are cleared in each generation: a mesh of the same ranks in the last generation counts as equal, and its groups
# are over.


def forget_meshes() -> None:
    """Clear the caches of the calling thread, the main one: torch keeps them per thread.

    Does nothing where no DTensor was ever made.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    clear_sharding_cache()
    clear_planner_cache()
