"""The state under the step rule: with a loader of Farandole no commits are needed. TorchState creates it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from farandole.base.membership import Progress
from farandole.errors import ConfigError
from farandole.training.collectives import world
from farandole.training.state import step
from farandole.training.state.batch import Batch
from farandole.training.state.deep_copy import refuse_circles, refuse_learnable
from farandole.training.state.elastic_state import ElasticState
from farandole.training.state.module_values import ModuleValues
from farandole.training.state.optimizer_state import refuse_optimizer
from farandole.training.state.packed_metadata import (
    MetadataSnapshot,
    is_same,
    load_stateful,
    load_value,
    pack_metadata,
    refuse_other_model,
)
from farandole.training.state.packing import Packed, unpack
from farandole.training.state.session import SESSION
from farandole.training.state.state_digest import StateDigest
from farandole.training.state.state_kinds import Kinds, Loader, hash_of, named_tensors, without_parallel
from farandole.training.state.step_participants import Observer
from farandole.training.state.undivided_data import refuse_undivided
from farandole.training.state.watched_tensors import (
    WatchedTensors,
    buffers_of,
    layers_with_statistics,
    load_extra_state,
)

if TYPE_CHECKING:
    from farandole.training.state.shard_statistics import ShardStatistics

logger = logging.getLogger("farandole")


_GIVEN = ("model", "optimizer")


class StepState(ElasticState, Observer):
    """Model, optimizer, loader and all other values that change with a step. TorchState(loader=...) returns it.

    `state.step` is the number of decided steps. The *tensors* of a state are parameters and optimizer tensors; metadata
    is the rest.

    Further optimizers may be among the keywords (a GAN). A step is decided when the last of them has stepped, or when
    the loop body ends in which only some have. A fault before that undoes the steps of these, from a copy made for this
    purpose.

    See the example of `DataLoader`.

    Args:
        model: The model to train.
        optimizer: A DistributedOptimizer.
        loader: A loader of Farandole.
        after_step: Functions called without arguments when a step is decided, inside the atomic step: in the step() of
            the optimizer (of the last one of several), or at the next batch where not all of them step.
        rehearse: Hand out the second batch of a job twice. The first time its step is aborted on purpose, to find out
            which values the loop body changes before optimizer.step(), and whether they can be restored. A worker that
            joins also runs the elastic function with a few batches without effect before the others wait for it, so
            that everything that is compiled at its first run is compiled by then.
        on_divergence: The reaction to workers with different states. "mend": workers that differ copy the state of the
            majority (of the lowest rank where there is none). "fail": the job ends.
        hash_every: In strict mode, the state is hashed each time that so many steps are decided, besides the end of
            each epoch; 0: not. None: as `farandole run --hash-every` says.
        **tracked: Values that become attributes: objects with state_dict()/load_state_dict() (schedulers, a GradScaler,
            further modules) and picklable values. On a regroup they come from the source rank. When a step is repeated
            they are restored to their values before it, wherever in the loop body they were changed. Tensors, lists,
            dictionaries and sets are restored in place.

    Raises:
        ConfigError: A value cannot be pickled.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loader: Loader | None = None,
        after_step: Iterable[Callable[[], object]] = (),
        rehearse: bool = True,
        on_divergence: Literal["mend", "fail"] = "mend",
        hash_every: int | None = None,
        **tracked: Any,
    ) -> None:
        refuse_undivided(loader)
        if hash_every is not None and hash_every < 0:
            raise ConfigError(f"TorchState: hash_every is a number of steps, 0 or more, got {hash_every}")
        if on_divergence not in ("mend", "fail"):
            raise ConfigError(f'TorchState: on_divergence must be "mend" or "fail", got {on_divergence!r}')
        if "commit_follows_step" in tracked:
            raise ConfigError("TorchState(loader=...) needs no commits: leave commit_follows_step out")
        self._kinds: Kinds | None = None
        super().__init__()
        # Any: otherwise type checkers would require a check for None at each use.
        self.model: Any = model
        self.optimizer: Any = optimizer
        self.loader: Any = loader
        self.step = 0
        self.run_id = 1
        self.boundary_number = 0
        self.is_holder = False
        self.on_divergence = on_divergence
        self.hash_every = hash_every
        # A step is applied whole, from the same gradients, or not at all: workers at the same step have the same state.
        self.digests = StateDigest(lambda: named_tensors(self._sorted, self.__dict__, self.is_strict))
        self.after_step = list(after_step)
        self.rehearse, self.has_rehearsed = rehearse, not rehearse
        self.on_step: Callable[[], None] | None = None  # in a rehearsal: inspects the state when a step is called
        self._snapshot = MetadataSnapshot()
        self._module_values: ModuleValues | None = None
        self.watched = WatchedTensors()  # parameters, as user code may have changed them since the last capture()
        self._is_tracking = False  # the watched tensors are those of the current values
        self._scalers: list[tuple[torch.amp.GradScaler, dict[str, Any]]] = []
        self._statistics: ShardStatistics | None = None  # in strict mode
        self.shards: Any = None  # where the model is divided among workers
        self._buffers: list[tuple[torch.Tensor, int]] = []  # with their versions at the last capture()
        refuse_learnable(tracked)
        refuse_circles(tracked)
        self._names = list(tracked)
        for name, value in tracked.items():
            if hasattr(self, name) and name != "log":  # a value of that name is older than the method, and replaces it
                raise ConfigError(f"TorchState: the name {name!r} is reserved; give the value another name")
            setattr(self, name, value)
        for optimizer in self.optimizers():
            refuse_optimizer(optimizer)
        step.on_decided(self._on_decided, self)
        self.track_optimizers()

    def track_optimizers(self) -> None:
        """Determine again which optimizers of the state decide steps. A plain optimizer steps unseen: it is part of the
        state, and does not decide."""
        step.track(each for each in self._sorted.optimizers.values() if hasattr(each, "abandon_step"))

    # Methods that Horovod's scripts call -----------------------------------------------------------------

    def commit(self) -> None:
        """Do nothing: the state is always at the last decided step, and the loader notices planned changes."""

    def check_host_updates(self) -> None:
        """Do nothing, as in commit()."""

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Do nothing, as in commit()."""

    def save(self) -> None:
        """Call capture(). The loader does so at each boundary."""
        self.capture()

    def restore(self) -> None:
        """Call put_back(), which restores the metadata only. Parameters are never rolled back."""
        self.put_back()

    def sync(self) -> None:
        """Raise ConfigError: the run loop synchronizes a state with a loader.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError("a TorchState with a loader is synchronized by elastic.run; do not call sync()")

    def modules(self) -> list[torch.nn.Module]:
        """Return the modules that the state was given."""
        return list(self._sorted.modules.values())

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that the state was given."""
        return list(self._sorted.optimizers.values())

    # Progress --------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        epoch, cursor = (self.loader.epoch, self.loader.cursor) if self.loader is not None else (0, 0)
        return Progress(self.run_id, self.step, epoch, cursor, self.boundary_number)

    def _how_far(self) -> Progress:
        return self.progress

    def _on_decided(self, batch: Batch | None) -> None:
        """Complete the atomic step, inside optimizer.step(). The gradients are applied: the step counts even when a
        callback raises."""
        try:
            facts = step.facts()
            if not facts.is_left_out:
                if self._statistics is not None and batch is not None:
                    self._statistics.install(batch)
                for callback in self.after_step:
                    callback()
        finally:
            if self.loader is not None and batch is not None:
                SESSION.recorder.apply(batch)
                if facts.trains_nothing or facts.trains_in_part:
                    self.loader.note_untrained(is_all=facts.trains_nothing)
                self.loader.commit(batch.global_batch)
            self.step += 1

    # Metadata -----------------------------------------------------------------------------------------

    def capture(self, is_whole: bool = False) -> None:
        """Remember the metadata as it is now; called at each boundary. Also remember the parameters that user code may
        change until the next boundary; with `is_whole`, before the code after an epoch's batches, the bytes of all of
        them."""
        self._snapshot.take(self._metadata())
        if is_whole or not self._is_tracking:
            self._track()
        self.watched.capture(is_whole)
        kinds = self._sorted
        if self.is_strict:
            self._buffers = [
                (each, each._version) for module in kinds.modules.values() for each in buffers_of(module).values()
            ]
        self._scalers = [(each, each.state_dict()) for each in kinds.scalers]

    def put_back(self) -> None:
        """Return to the last capture(), before a step is repeated: restore the metadata, and parameters that user code
        has changed. Parameters that only optimizers change are those of the last decided step already."""
        packed = self._snapshot.read()
        if packed.skeleton:
            self.load_metadata(unpack(packed))
            lost = self.watched.put_back()
            if lost:
                self.is_holder = False
                logger.error(
                    "state.%s was changed in the loop body before optimizer.step(), for the first time in this job, "
                    "and a worker was lost in the same step: it cannot be restored, and is copied from a worker "
                    "that has not changed it, if there is one. Change it after optimizer.step(), or in after_step",
                    ", state.".join(lost),
                )

    def begin_micro_batch(self) -> None:
        """Restore the GradScalers before another micro-batch of the same step: they count steps, not runs of the loop
        body. In strict mode a run without a step leaves nothing behind, in modules and optimizers and schedulers, since
        their number depends on that of the workers.

        Raises ConfigError for a tensor that cannot be restored: it changes for the first time in this job.
        """
        for scaler, saved in self._scalers:
            load_stateful(scaler, saved)
        if self.is_strict:
            batch = step.batch()
            if batch is not None and not step.is_aborted():
                self._statistics_by_shard().end_body(batch)
            self._take_back_run()

    def _take_back_run(self) -> None:
        """Take back what the last run of the loop body has changed. Plain values of the state, and objects of types
        that are not known here, stay: they may add up something over the shards, such as a metric."""
        # BatchNorm writes its statistics without a new version (torch 2.13, native_functions.yaml, native_batch_norm).
        changed = [each for each, version in self._buffers if each._version != version]
        self._snapshot.put_back([*changed, *self._statistics_by_shard().values])
        kinds, kept = self._sorted, self._snapshot.fresh()
        if kept is None:
            return  # a warm-up, before the first capture()
        for each in kinds.states:
            if not all(is_same(groups, kept["groups"][name]) for name, groups in each.options().items()):
                each.load_options(kept["groups"])
        for name, value in kinds.stateful.items():
            if isinstance(value, LRScheduler) and not is_same(value.state_dict(), kept["stateful"][name]):
                load_stateful(value, kept["stateful"][name])
        for name in kinds.extra:
            load_extra_state(kinds.modules[name], kept["extra"].get(name, {}))
        self._flags.load(kept["flags"])
        if lost := self.watched.put_back_run():
            raise ConfigError(_lost_in_run(lost))

    def before_change(self) -> tuple[dict[str, Any], list[int]]:
        """Return the values before a function is called whose changes put_back() is to keep."""
        return self.copy_of_metadata(), self.watched.mark()

    def keep_change(self, before: dict[str, Any], mark: Sequence[int]) -> None:
        """Remember the new values of everything that has changed since before_change(): put_back() keeps them."""
        kept: dict[str, Any] = unpack(self._snapshot.read())
        after = self.copy_of_metadata()
        for part in ("buffers", "extra", "groups", "stateful", "values"):
            for name, value in after[part].items():
                if not is_same(before[part].get(name), value):
                    kept[part][name] = value
        kept["boundary"], kept["flags"] = self.boundary_number, after["flags"]
        if self.loader is not None:
            kept["loader"] = self.loader.state_dict()  # it contains the number of calls
        self._snapshot.take(kept)
        self.watched.adopt(mark)

    def copy_of_metadata(self) -> dict[str, Any]:
        """Return a copy of the current metadata that shares nothing with it."""
        packed = pack_metadata(self._metadata())
        copy: dict[str, Any] = unpack(Packed(packed.skeleton, [each.detach().clone() for each in packed.tensors]))
        return copy

    @property
    def is_strict(self) -> bool:
        """True when the model must not depend on the number of workers by a single bit."""
        return getattr(self.loader, "shards", 0) > 0

    def hash(self) -> str:
        """Return a SHA-256 of parameters, buffers and the optimizers' state, as 64 hexadecimal digits. It does not
        depend on a DistributedDataParallel around the model."""
        modules = {name: without_parallel(each) for name, each in self._sorted.modules.items()}
        kinds = Kinds(None, None, {**modules, **self._sorted.optimizers})
        return hash_of(named_tensors(kinds, {}, has_all_buffers=True))

    def pass_ended(self, batch: Batch) -> None:
        self._statistics_by_shard().record(batch)

    def combine_shards(self, batch: Batch) -> None:
        self._statistics_by_shard().combine(batch, world.current().transport)

    def digest_of_statistics(self, shard: int) -> int:
        return self._statistics_by_shard().digest_of(shard)

    def name_of(self, item: torch.Tensor | torch.nn.Module) -> str:
        return self._sorted.name_of(item)

    def _statistics_by_shard(self) -> ShardStatistics:
        if self._statistics is None or self._kinds is None:
            from farandole.training.state.shard_statistics import ShardStatistics  # loaded only in strict mode

            self._sort()
            self._statistics = ShardStatistics(layers_with_statistics(self.modules()))
        return self._statistics

    def before_applying(self) -> None:
        if self.on_step is not None:
            self.on_step()
        else:
            self.watched.look()

    def keeps_scaler(self) -> bool:
        return bool(self._sorted.scalers)

    def aborted(self) -> None:
        self.watched.save()

    def trust(self, parameters: Sequence[torch.Tensor]) -> None:
        self.watched.trust(parameters)

    def captured(self) -> Packed:
        """Return the metadata of the last capture(); the caller must not change it."""
        return self._snapshot.read()

    def load_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Load the metadata, captured here or on another worker."""
        for name, module in self._sorted.modules.items():
            for key, buffer in buffers_of(module).items():
                buffer.detach().copy_(metadata["buffers"][name][key])
            load_extra_state(module, metadata["extra"].get(name, {}))
        for each in self._sorted.states:
            each.remove_groups(metadata["groups"])
            each.load_options(metadata["groups"])
        if "flags" in metadata:  # a checkpoint of an earlier release has none
            self._flags.load(metadata["flags"])
        for name, saved in metadata["stateful"].items():
            load_stateful(getattr(self, name), saved)
        for name, value in metadata["values"].items():
            setattr(self, name, load_value(getattr(self, name), value))
        self.run_id, self.step, self.boundary_number = metadata["run_id"], metadata["step"], metadata["boundary"]
        self.has_rehearsed = metadata["has_rehearsed"]
        changing, changing_late = metadata["changing"]
        self.watched.add_changing(changing)
        self.watched.add_changing_late(changing_late)
        if self.loader is not None:
            self.loader.load_state_dict(metadata["loader"])
        if self.is_strict and metadata.get("arithmetic", "") not in ("", _arithmetic()):
            from farandole.training.state.numerics import warn_of_other_arithmetic  # loaded only in strict mode

            warn_of_other_arithmetic(self.step)

    def _metadata(self) -> dict[str, Any]:
        kinds = self._sorted
        return {
            "run_id": self.run_id,
            "step": self.step,
            "boundary": self.boundary_number,  # the key in checkpoints
            "has_rehearsed": self.has_rehearsed,
            "changing": self.watched.changing,
            "loader": self.loader.state_dict() if self.loader is not None else None,
            "buffers": {name: buffers_of(module) for name, module in kinds.modules.items()},
            "extra": {
                name: {key: each.get_extra_state() for key, each in modules.items()}
                for name, modules in kinds.extra.items()
            },
            "groups": {name: groups for each in kinds.states for name, groups in each.options().items()},
            "flags": self._flags.changed(),
            "stateful": {name: value.state_dict() for name, value in kinds.stateful.items()},
            "values": {name: getattr(self, name) for name in kinds.values},
            **({"arithmetic": _arithmetic()} if self.is_strict else {}),
        }

    @property
    def _flags(self) -> ModuleValues:
        if self._module_values is None:
            self._module_values = ModuleValues(self._sorted.modules)
        return self._module_values

    def restore_module_values(self) -> None:
        """Return the values of modules to those of the last capture(): code that runs once for each worker, before its
        first batch, may have set others, as `model.train()` does."""
        kept = self._snapshot.fresh()
        if kept is not None:
            self._flags.load(kept["flags"])

    def _track(self) -> None:
        self._flags.search()
        groups = self._sorted.parameters().items()
        named = {f"{name}.{key}".lstrip("."): each for name, group in groups for key, each in group.items()}
        ids = {id(parameter) for each in self._sort().states for parameter in each.parameters}
        self.watched.track(named, {name for name, each in named.items() if id(each) in ids})
        self._is_tracking = True

    # Tensors -----------------------------------------------------------------------------------------

    def live_tensors(self) -> dict[str, Any]:
        """Return parameters by module and name, and the optimizers' state (optimizer_state.py); live, not copied."""
        kinds = self._sort()
        entries = {name: entry for each in kinds.states for name, entry in each.entries().items()}
        members = {each.name: each.members(kinds.names_of_parameters()) for each in kinds.states}
        return {"parameters": kinds.parameters(), "optimizer": entries, "members": members}

    def load_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Load parameters and optimizer tensors from another worker. Raises ConfigError, with nothing changed, when its
        model has other parameters."""
        named = {name: each for each, name in self._sorted.names_of_parameters().items()}
        for each in self._sort().states:
            each.add_groups(tensors.get("members", {}).get(each.name, []), named)
        ours = self._sorted.parameters()
        refuse_other_model(ours, tensors["parameters"])
        with torch.no_grad():
            for name, parameters in ours.items():
                for key, parameter in parameters.items():
                    parameter.copy_(tensors["parameters"][name][key])
        for each in self._sort().states:
            each.load(tensors["optimizer"])

    # Classification of the values ------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in _GIVEN or name in self.__dict__.get("_names", ()):
            object.__setattr__(self, "_kinds", None)
            object.__setattr__(self, "_module_values", None)
            object.__setattr__(self, "_is_tracking", False)

    @property
    def _sorted(self) -> Kinds:
        """The values by their kinds, kept until one of them is replaced: they are needed in each step."""
        return self._kinds or self._sort()

    def _sort(self) -> Kinds:
        """Classify the values anew: an optimizer may have been replaced inside another one."""
        others = {name: getattr(self, name) for name in self._names}
        self._kinds = Kinds(self.model, self.optimizer, others)
        return self._kinds


def _arithmetic() -> str:
    """Return what tells this process's arithmetic from that of another kind of processor."""
    from farandole.training.state.numerics import own_arithmetic  # loaded only in strict mode

    return own_arithmetic().digest


def _lost_in_run(names: Sequence[str]) -> str:
    further = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"strict mode: state.{names[0]}{further} changed in a run of the loop body whose optimizer.step() made "
        f"no step, since further shards of the global batch follow. It cannot be restored, since the rehearsal "
        f"(TorchState(rehearse=True)), which is in the job's second step, has not seen it change. It would "
        f"change as often as a worker has shards, which depends on the number of workers. Change it "
        f"in TorchState(after_step=[...]), or where optimizer.step() returns True"
    )
