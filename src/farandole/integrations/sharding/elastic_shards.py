"""The shards of a state: of a model that FSDP2 has divided and its optimizer each worker has a part, and the mirror of
another worker's part.

After a change of the membership all parts are cut anew for the new number of workers. Each worker gets what it lacks
from the owner of a former part, or from its mirror. The objects of the script stay: the parameters, the optimizer and
its state hold other rows.

A step is taken when all workers have said that they hold the gradients of their own part and of the one that they
mirror. So a worker that could not hear that all have said so can take the step all the same, if another one has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import torch

from farandole.errors import ConfigError, ShardLost, StepError
from farandole.integrations.sharding.division import Held, Plan, choose, lost, mirrors, rows_of
from farandole.integrations.sharding.mirror import Mirror, is_alike
from farandole.integrations.sharding.parts import Part, copied, cut, digest, fill, joined, room_for
from farandole.integrations.sharding.redivision import Former, redivided, to_mirror
from farandole.integrations.sharding.shard_path import Gathering, Gradients, Ready, Reducing, ShardPath
from farandole.integrations.sharding.sharded_modules import ShardedModules, divided_like, exchange, is_divided, local
from farandole.training.collectives import world
from farandole.training.collectives.transport import Transport
from farandole.training.collectives.transport_choice import host_transport
from farandole.training.optim import step_agreement
from farandole.training.optim.optimizer_mixin import OwnMethods
from farandole.training.optim.stepping import make_stepping

_COMPARED_FIRST, _COMPARED_EVERY = 3, 100  # steps after a regroup

_Told = tuple[tuple[int, int], list[Held]]


class ElasticShards:
    """The divided model among the modules of a state, and the optimizer of its parameters. Raises ConfigError for what
    cannot follow the membership."""

    def __init__(self, modules: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self._modules = ShardedModules(modules)
        self._parameters = list(self._modules.parameters)
        self.keys = frozenset(map(id, self._parameters))
        self._optimizer, self._kind = optimizer, type(optimizer)
        self._mirror = Mirror(optimizer, self._kind, self._places())
        here = world.current()
        # As fully_shard() has divided the model: that counts only while no worker has agreed on a division.
        self._held = Held(here.id.number, here.placement.size, here.placement.rank, -1, -1)
        self._before: tuple[Held, Former] | None = None  # of the last complete division, until all have the next one
        self.mirrored_by: list[int] = []  # by rank, the rank that has its mirror
        self._steps = 0  # since the last regroup
        self._versions: list[tuple[int, int]] = []  # of the parameters, after the last step
        self.plan_digest = step_agreement.digest(self._modules.parameters)
        self.path = ShardPath(self)
        self._modules.communicate_by(Gathering(self.path), Reducing(self.path))
        for each in self._parameters:
            if each.requires_grad:  # a worker alone reduces nothing
                each.register_post_accumulate_grad_hook(self._note_gradient)  # type: ignore[no-untyped-call]
        make_stepping(optimizer, [self])
        hook = optimizer.register_step_post_hook(lambda *_: self._note_versions())
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(hook.id, last=False)  # before those that change parameters

    def prove(self) -> None:
        """Divide everything as it is divided, in the way in which it is after a change of the membership. Whatever
        another torch raises is raised now, and not when a worker is lost."""
        self._install(
            [Part({key: each.clone() for key, each in part.rows.items()}, part.shared) for part in self._own()]
        )

    def own(self, keys: Collection[int]) -> ShardPath:
        """Return the path of the gradients of the optimizer's parameters."""
        return self.path

    def _places(self) -> list[tuple[int, int]]:
        groups = enumerate(self._optimizer.param_groups)
        found = {id(each): (number, place) for number, group in groups for place, each in enumerate(group["params"])}
        missing = [
            name for each, name in self._modules.parameters.items() if each.requires_grad and id(each) not in found
        ]
        others = found.keys() - self.keys
        if missing or others:
            what = (
                f"{missing[0]} is not among its parameters" if missing else f"{len(others)} of its parameters are whole"
            )
            raise ConfigError(
                f"the optimizer of a model that fully_shard() has divided has to have all parameters of it, and no "
                f"other ones: {what}. Call fully_shard() for the root of the model, too, and give "
                f"model.parameters() to the optimizer"
            )
        return [found.get(id(each), (-1, -1)) for each in self._parameters]

    # Own part --------------------------------------------------------------------------------------------

    def _own(self) -> list[Part]:
        return [self._part(each) for each in self._parameters]

    def _part(self, parameter: torch.Tensor) -> Part:
        state = self._optimizer.state.get(parameter, {})
        divided = {key: each for key, each in state.items() if is_divided(each)}
        for key, each in divided.items():
            if not is_alike(each, parameter):
                raise ConfigError(
                    f"{self._kind.__name__} keeps {key!r} of shape {tuple(each.shape)} for a parameter of shape "
                    f"{tuple(parameter.shape)}: what is not divided as the parameter is cannot follow the membership"
                )
        rows = {"": local(parameter.detach()), **{key: local(each) for key, each in divided.items()}}
        return Part(rows, {key: each for key, each in state.items() if key not in divided})

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        self.path.open_pass(parameter)

    def gradients(self) -> Gradients:
        """Return the gradients of the own part, live."""
        return [None if each.grad is None else local(each.grad) for each in self._parameters]

    def refuse_left(self, arrived: torch.Tensor | None) -> None:
        """Raise StepError where gradients of an earlier batch are left, but for one that has just arrived: a step that
        is repeated could not add to them once."""
        for each, name in self._modules.parameters.items():
            if each is not arrived and each.grad is not None and bool(local(each.grad).any()):
                raise StepError(
                    f"the gradient of {name} is that of an earlier batch: fully_shard() has divided the model, and "
                    f"each batch needs optimizer.zero_grad(). Make global_batch_size larger instead of accumulating "
                    f"gradients of several batches"
                )

    def drop_gradients(self) -> None:
        for each in self._parameters:
            each.grad = None

    # Steps -----------------------------------------------------------------------------------------------

    def exchange(self, own: Gradients) -> Gradients:
        """Give the gradients to the worker that mirrors them. Returns those of the part that is mirrored here."""
        given = [
            torch.zeros_like(local(parameter)) if each is None else each
            for parameter, each in zip(self._parameters, own, strict=True)
        ]
        like = [part.rows[""] for part in self._mirror.parts()]
        room = room_for(like)
        to_mirror(joined(given), room, self.mirrored_by, host_transport(world.current().transport))
        # All workers have gradients of the same parameters; the optimizer passes over the others.
        return [None if each is None else mirrored for each, mirrored in zip(own, cut(room, like), strict=True)]

    def digests(self) -> tuple[int, int]:
        """Return the digests of the own part and of the mirrored one; zeros in most steps."""
        if self._steps >= _COMPARED_FIRST and self._steps % _COMPARED_EVERY:
            return 0, 0
        return digest(self._own()), digest(self._mirror.parts())

    def _note_versions(self) -> None:
        self._versions = list(map(_versions_of, self._parameters))

    def refuse_changed(self) -> None:
        """Raise ConfigError for a parameter that has changed since the last step: its mirror has not."""
        for (parameter, name), version in zip(self._modules.parameters.items(), self._versions, strict=True):
            if _versions_of(parameter) != version:
                raise ConfigError(
                    f"{name} was changed outside of optimizer.step(): fully_shard() has divided the model, and the "
                    f"mirror of this part on another worker does not have the change. Change parameters before the "
                    f"call of the elastic function, or in the step() of an optimizer of your own"
                )

    def refuse_optimizer(self, rank: int) -> None:
        """Raise ConfigError, since the mirror of a rank differs from its part."""
        raise ConfigError(
            f"{self._kind.__name__} takes another step for a part of the model alone than for the same part among the "
            f"others: after {self._steps} steps the mirror of rank {rank} differs from its part. An optimizer of a "
            f"model that is divided among workers has to compute each element from its own gradient, as SGD and Adam do"
        )

    def stepped(self, ready: Ready | None) -> None:
        """Note that the optimizer takes the step, and take that of the mirror. None: there is none."""
        if ready is not None:
            self._mirror.apply(ready.mirrored)
        self._held = self._held._replace(version=self._held.version + 1)
        self._before, self._steps = None, self._steps + 1

    def options(self) -> list[dict[str, Any]]:
        """Return a copy of the options of the optimizer's groups."""
        groups = self._optimizer.param_groups
        return [{key: copied(each) for key, each in group.items() if key != "params"} for group in groups]

    def _complete(self, ready: Ready) -> None:
        """Take the step that another worker has taken, with the options of that step: those of now may be later."""
        assert isinstance(self._optimizer, OwnMethods)
        for parameter, gradient in zip(self._parameters, ready.own, strict=True):
            parameter.grad = None if gradient is None else divided_like(parameter, gradient)
        groups = self._optimizer.param_groups
        later = [dict(group) for group in groups]
        for group, options in zip(groups, ready.options, strict=True):
            group.update(options)
        self._optimizer._apply()
        self.stepped(ready)
        for group, options in zip(groups, later, strict=True):
            group.update(options)
        self.drop_gradients()

    # Another world ---------------------------------------------------------------------------------------

    def follow(self, transport: Transport) -> None:
        """Divide everything anew among the workers of this world, which all call it. Raises the errors of transports,
        with nothing changed, and ShardLost, alike on all."""
        ready = self.path.take_decided()
        if ready is not None:  # before anything is exchanged: the state has this step already, and has to keep it
            self._complete(ready)
        transport = host_transport(transport)
        here, size, rank = world.current(), transport.size, transport.rank
        generation, place = here.id.number, (here.placement.local_rank, here.placement.cross_rank)
        mine = msgspec.msgpack.encode((place, [each for each, _ in self._divisions()]))
        told = [msgspec.msgpack.decode(each, type=_Told) for each in transport.all_gather(mine)]
        held = [divisions for _, divisions in told]
        plan = choose(held)
        if plan is None:
            raise ShardLost(_what_is_lost(*lost(held)))
        if plan.generation != generation:  # otherwise all have been divided in this world
            self._divide(plan, held, transport)
        self._held, self._steps = Held(generation, size, rank, -1, max(plan.version, 0)), 0
        self.mirrored_by = mirrors([place for place, _ in told])
        self.path.begin_world()
        self._load_mirror(transport)
        self._note_versions()

    def _compare(self, former: Former, plan: Plan, held: Sequence[Sequence[Held]], transport: Transport) -> None:
        """Raise ConfigError, alike on all workers, if a part differs from its mirror, where both are there."""
        own, mirrored = (digest(parts) for parts in former)
        packed = transport.all_gather(msgspec.msgpack.encode((own, mirrored)))
        digests = [msgspec.msgpack.decode(each, type=tuple[int, int]) for each in packed]
        planned = (plan.generation, plan.version)
        of = [
            (rank, each)
            for rank, worker in enumerate(held)
            for each in worker
            if (each.generation, each.version) == planned
        ]
        owners = {each.shard: rank for rank, each in of}
        for rank, each in of:
            owner = owners.get(each.mirrored)
            if owner is not None and digests[owner][0] != digests[rank][1]:
                self.refuse_optimizer(owner)

    def _divide(self, plan: Plan, held: Sequence[Sequence[Held]], transport: Transport) -> None:
        row_counts, planned = [each.shape[0] for each in self._parameters], (plan.generation, plan.version)
        kept = next((each for each in self._divisions() if (each[0].generation, each[0].version) == planned), None)
        former = kept[1] if kept is not None else Former()
        self._compare(former, plan, held, transport)
        parts = redivided(row_counts, former, plan, held, transport)
        transport.barrier()  # before it a worker may be lost, and the next world needs the former parts
        self._install(parts)
        self._before = kept  # needed again where a worker is lost before all have the new parts, and mirrors

    def _divisions(self) -> list[tuple[Held, Former]]:
        """Return the divisions of which this worker holds shards, live."""
        now = (self._held, Former(self._own(), self._mirror.parts()))
        return [now] if self._before is None else [now, self._before]

    @torch.no_grad()
    def _install(self, parts: Sequence[Part]) -> None:
        self._modules.end_pass()
        self._modules.divide([part.rows[""] for part in parts])
        state = self._optimizer.state
        for parameter, part in zip(self._parameters, parts, strict=True):
            found = {key: divided_like(parameter, rows) for key, rows in part.rows.items() if key} | part.shared
            if found:
                _replace(state[parameter], found)
            else:
                state.pop(parameter, None)

    def _load_mirror(self, transport: Transport) -> None:
        """Give a copy of the own part to the worker that mirrors it, and hold that which is mirrored here."""
        size, of = transport.size, self.mirrored_by.index(transport.rank)
        if size == 1:
            self._mirror.load([])
            return
        own = self._own()
        room = [
            part.with_room(len(rows_of(each.shape[0], size, of)))
            for each, part in zip(self._parameters, own, strict=True)
        ]
        flat = [each for part in room for each in part.rows.values()]
        arrived = room_for(flat)
        to_mirror(joined(each for part in own for each in part.rows.values()), arrived, self.mirrored_by, transport)
        fill(flat, arrived)
        self._mirror.load(room)
        self._held = self._held._replace(mirrored=of)


def _versions_of(parameter: torch.Tensor) -> tuple[int, int]:
    return parameter._version, local(parameter)._version


def _replace(state: dict[str, Any], found: dict[str, Any]) -> None:
    """Let the state of an optimizer for a parameter have these values, in the tensors that it has."""
    for key in state.keys() - found.keys():
        del state[key]
    for key, value in found.items():
        live = state.get(key)
        if is_divided(live) and is_divided(value):
            exchange(live, value)
        elif isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor) and live.shape == value.shape:
            live.copy_(value)
        else:
            state[key] = value


def _what_is_lost(missing: Sequence[int], count: int) -> str:
    which = f"shard {missing[0]}" if len(missing) == 1 else f"shards {', '.join(map(str, missing))}"
    return (
        f"{which} of {count}: parameters and optimizer state were lost with the worker that had them and the one that "
        f"had their mirror. Start the job again, from what the script has saved. Where several hosts have as many "
        f"workers, a mirror is on another host; replicas survive more (docs/hybrid-sharding.md)"
    )
