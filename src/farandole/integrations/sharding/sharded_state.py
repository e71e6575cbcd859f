"""ShardedState: the state, under the commit rule, of a model that is divided among workers by FSDP2."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from farandole.errors import ConfigError, HostsUpdatedInterrupt, ShardLost
from farandole.integrations.horovod.named.objects import broadcast_object
from farandole.integrations.horovod.object_state import State
from farandole.integrations.sharding import pieces
from farandole.integrations.sharding.pieces import Piece
from farandole.integrations.sharding.shard_plan import Held, ShardPlan, awaited, choose, missing, shards_within_hosts
from farandole.training.collectives import world
from farandole.training.collectives.transport import Transport
from farandole.training.state import packing
from farandole.training.state.deep_copy import deep_copy

logger = logging.getLogger("farandole")

Build = Callable[[DeviceMesh], tuple[torch.nn.Module, torch.optim.Optimizer]]


class _RankState(msgspec.Struct, array_like=True):
    """The data of each rank that all ranks exchange before they agree on the state."""

    local_rank: int
    local_size: int
    held: list[Held]


@dataclass(frozen=True)
class _Commit:
    held: Held
    piece: Piece
    values: dict[str, Any]


class ShardedState(State):
    """The state of a model that is divided among workers. Each worker keeps the commits of its own shard.

    When the world has changed, mesh, model and optimizer are created again, and every shard comes from the lowest rank
    that holds it.

    Each worker has one copy of its shard of parameters and optimizer state in memory between commits, and two while it
    commits. After an interrupt or a fault, training returns to the newest complete commit. In the elastic function
    ShardLost is raised, alike on all ranks, when a shard has no holder and there is no checkpoint.

    Args:
        build: Receives a DeviceMesh with the dimensions "replicate" and "shard", and returns the sharded model and its
            optimizer. At the start of the job training begins with its result, which must be equal on all ranks.
        shards: The most shards. Ranks of one shard group are on one host, so there are fewer where workers of a host
            are left over, and 1 where each worker has to hold the whole model. Alternatively a function that receives
            the number of workers of each host, and returns a number that divides their sum.
        checkpoint: A folder that all hosts can access; save_checkpoint() writes there, by DCP. The newest checkpoint is
            loaded when a shard has no holder any more, and when a job begins.
        **values: Plain Python values, as with ObjectState; those of rank 0 at the start. For a checkpoint, objects of
            classes that the script has declared with torch.serialization.add_safe_globals(), too.

    Attributes:
        model: The model of the current world; None before the elastic function begins. Read it again after each
            interrupt or fault.
        optimizer: Its optimizer.

    Raises:
        ConfigError: `shards` is below 1.

    Examples:
        ```python
        from torch.distributed.fsdp import fully_shard

        from farandole.sharding import ShardedState


        def build(mesh):  # called again for each world
            torch.manual_seed(0)
            model = Net()
            fully_shard(model, mesh=mesh)
            return model, torch.optim.AdamW(model.parameters())


        fd.init(default_group=True)
        state = ShardedState(build, shards=2, batch=0)


        @fd.elastic.run
        def train(state):
            while state.batch < 3:
                model, optimizer = state.model, state.optimizer  # those of this world
                optimizer.zero_grad()
                F.cross_entropy(model(torch.randn(4, 8)), torch.zeros(4).long()).backward()
                optimizer.step()
                state.batch += 1
                state.commit()


        train(state)
        ```
    """

    def __init__(
        self,
        build: Build,
        shards: int | Callable[[Sequence[int]], int],
        checkpoint: str | os.PathLike[str] | None = None,
        **values: Any,
    ) -> None:
        super().__init__(bcast_object=broadcast_object, get_rank=lambda: world.current().placement.rank)
        if not callable(shards) and shards < 1:
            raise ConfigError(f"shards must be 1 or more, got {shards}")
        self._build, self._shards = build, shards
        self._checkpoint = Path(checkpoint) if checkpoint is not None else None
        self._names = list(values)
        self._commits: list[_Commit] = []
        self._number, self._place = 0, (0, 1)  # of the newest commit; number of this rank's shard, and of shards
        self.__dict__.update(values)

    # Methods for scripts --------------------------------------------------------------------------------------

    @property
    def replicas(self) -> int:
        """Number of workers that hold each shard."""
        return world.current().placement.size // self._place[1]

    @property
    def shards(self) -> int:
        """Number of shards into which the model is divided, at most those that were requested."""
        return self._place[1]

    def save(self) -> None:
        """Copy this worker's shard. The earlier commit stays until all ranks have the new one."""
        self._number += 1
        self._keep()

    def restore(self) -> None:
        """Do nothing: sync() follows, and finds the commit from which all ranks can continue."""

    def check_host_updates(self) -> None:
        """Check for host updates as State does. When it returns or raises HostsUpdatedInterrupt, all ranks have the
        newest commit."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            del self._commits[:-1]
            raise
        del self._commits[:-1]

    def save_checkpoint(self) -> None:
        """Write the current state to the folder `checkpoint`. A collective, called by all ranks at the same place.

        The two newest checkpoints stay. An interrupted one does not count.

        Raises:
            ConfigError: No folder was given, or a value has a class that torch.load(weights_only=True) would not load.
        """
        if self._checkpoint is None:
            raise ConfigError("save_checkpoint() needs a folder: ShardedState(..., checkpoint=folder)")
        from farandole.integrations.sharding import pieces  # the import takes most of a second

        pieces.write_stored(self._checkpoint, self._number, self.model, self.optimizer, self._values())

    # Methods for the run loop ---------------------------------------------------------------------------------

    def reset(self) -> None:
        """Release model and optimizer, which are bound to ended groups: their memory is needed for the next ones."""
        self.model: Any = None
        self.optimizer: Any = None

    def sync(self) -> None:
        """Agree on the newest complete commit, and load it on all ranks, divided for the current world."""
        here = world.current()
        transport, placement = here.transport, here.placement
        mine = _RankState(placement.local_rank, placement.local_size, [each.held for each in self._commits])
        ranks = [
            msgspec.msgpack.decode(each, type=_RankState) for each in transport.all_gather(msgspec.msgpack.encode(mine))
        ]
        held = [each_rank.held for each_rank in ranks]
        self._make([each_rank.local_size for each_rank in ranks if each_rank.local_rank == 0])
        plan = choose(held)
        if plan is not None:
            self._take_over(plan, awaited(plan, held, self._shards_by_rank(), self.shards), transport)
        elif not self._take_from_disk(held):
            self._begin(transport)
        self._keep()
        transport.barrier()  # before it a rank may fail, and the next world then needs the earlier commits
        del self._commits[:-1]

    # Private --------------------------------------------------------------------------------------------------

    def _make(self, hosts: list[int]) -> None:
        """Create mesh, model and optimizer of this world."""
        self.reset()
        size, rank = world.current().placement.size, world.current().placement.rank
        shards = self._shards(hosts) if callable(self._shards) else shards_within_hosts(hosts, self._shards)
        if shards < 1 or size % shards:
            raise ConfigError(
                f"shards={self._shards} returned {shards} for hosts with {hosts} workers: it must divide {size}"
            )
        mesh = init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("replicate", "shard"))
        self._place = rank % shards, shards
        self.model, self.optimizer = self._build(mesh)

    def _shards_by_rank(self) -> list[int]:
        return [rank % self.shards for rank in range(world.current().placement.size)]

    def _begin(self, transport: Transport) -> None:
        """Begin the job: all ranks have created a state, and the lowest rank's version of each shard counts."""
        self._keep()
        self._take_over(ShardPlan(self._number, tuple(range(self.shards))), set(range(self.shards)), transport)

    def _take_over(self, plan: ShardPlan, travelling: set[int], transport: Transport) -> None:
        """Load a commit from its sources into the live model and the live values."""
        # A newer one cannot become complete any more, and its number will be used again.
        self._commits = [each for each in self._commits if each.held.number <= plan.number]
        mine = {
            each.held.index: each
            for each in self._commits
            if (each.held.number, each.held.count) == (plan.number, plan.count)
        }
        source = plan.sources[0]
        own = (mine[0].piece.whole, mine[0].values) if transport.rank == source else None
        whole, values = _broadcast(own, source, transport)
        pieces.put_whole(self.model, self.optimizer, whole)
        shards = {index: each.piece.shards for index, each in mine.items()}
        pieces.put_shards(self.model, self.optimizer, shards, plan, travelling, self._place, transport)
        self._number = plan.number
        self.__dict__.update(deep_copy(values, "state"))

    def _take_from_disk(self, held: list[list[Held]]) -> bool:
        """Load the newest checkpoint. Returns False if there is none and nothing is lost. Raises ShardLost."""
        newest = None
        if self._checkpoint is not None:
            from farandole.integrations.sharding import pieces

            newest = pieces.newest_stored(self._checkpoint)
        lost = _what_is_lost(held) if any(held) else ""
        if newest is None:
            if lost:
                raise ShardLost(f"{lost} {_advice(self._checkpoint)}")
            return False
        if lost:
            logger.warning("%s All workers return to the checkpoint %s", lost, newest)
        self._number, values = pieces.read_stored(newest, self.model, self.optimizer)
        self.__dict__.update(values)
        return True

    def _keep(self) -> None:
        piece = pieces.take(self.model, self.optimizer)
        self._commits.append(_Commit(Held(self._number, *self._place), piece, deep_copy(self._values(), "state")))

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}


def _broadcast(value: Any, source: int, transport: Transport) -> Any:
    """Return rank `source`'s value; tensors in it are sent as raw memory."""
    packed = packing.pack(value) if transport.rank == source else None
    skeleton = transport.all_gather(packed.skeleton if packed is not None else b"")[source]
    tensors = packed.tensors if packed is not None else packing.make_room(skeleton)
    packing.broadcast_all(transport, tensors, packing.total_bytes(tensors), source)
    return value if packed is not None else packing.unpack(packing.Packed(skeleton, tensors))


def _what_is_lost(held: list[list[Held]]) -> str:
    number, indices, count = missing(held)
    which = f"shard {indices[0]}" if len(indices) == 1 else f"shards {', '.join(map(str, indices))}"
    return (
        f"{which} of {count}: parameters and optimizer state of commit {number} were lost with the last worker that "
        f"held them."
    )


def _advice(checkpoint: Path | None) -> str:
    there = (
        "Give ShardedState a checkpoint folder, and call save_checkpoint() periodically"
        if checkpoint is None
        else f"There is no checkpoint in {checkpoint} yet: call save_checkpoint() earlier"
    )
    return f"{there}; or use more workers than shards, so that each shard has another holder."
