"""The state under the step rule: with a loader of Farandole nothing has to be committed. TorchState makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from farandole.errors import ConfigError
from farandole.membership import Progress
from farandole.state import recording, step
from farandole.state.buffers import buffers_of
from farandole.state.named_tensors import named_tensors
from farandole.state.object_state import State
from farandole.state.packing import Packed, unpack
from farandole.state.parts import is_stateful, load_optimizer_entry, load_stateful, refuse_other_model
from farandole.state.small_snapshot import SmallSnapshot
from farandole.state.state_digest import StateDigest
from farandole.state.ticket import Batch, Ticket
from farandole.state.torch_state import TorchState, broadcast_value, current_rank


@runtime_checkable
class Loader(Protocol):
    """What the state needs of a loader: where it is, and to move it with a decided step."""

    epoch: int
    cursor: int
    seed: int
    boundary: Any  # the run loop puts itself here (data/boundary.py)

    def commit(self, ticket: Ticket) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def set_world(self, rank: int, size: int) -> None: ...
    def limit_local_batch(self, world: int) -> None: ...
    def warm_up(self) -> None: ...


@dataclass(frozen=True)
class _Kinds:
    """The values that a state was given, by name. values: the names of those that are nothing of the others."""

    modules: dict[str, torch.nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    stateful: dict[str, Any]
    values: list[str]


_GIVEN = ("model", "optimizer")


class StepState(TorchState):
    """Model, optimizer, loader and whatever else moves with a step: what TorchState(loader=...) returns.

    TorchState(model=..., optimizer=..., loader=..., after_step=[scheduler.step], scheduler=scheduler, best=0.0)

    model, optimizer, loader  the things to train with; `optimizer` a DistributedOptimizer
    further optimizers  among the keywords (a GAN): a step is decided when the last of them has stepped, or when the
                        loop body ends in which only some have; a fault before that takes back those that have, from
                        a copy that is made for it
    after_step  called without arguments when a step is decided, inside the atomic step: in the step() of the
                optimizer, the last one of several, or at the next batch where not all of them step
    **tracked   every keyword becomes an attribute: objects with state_dict()/load_state_dict() (schedulers, a
                GradScaler, further modules) and picklable values. On a regroup they come from the source rank;
                when a step is done again they are put back to where they were before it.
    on_divergence  what happens when workers are found to have different states: "mend", those that differ copy the
                state of the majority (of the lowest rank where there is none); "fail", the job ends

    `state.step` is the number of decided steps. Raises ConfigError for values that cannot be pickled.

    Large state is parameters and optimizer tensors, small state all the rest (design: words).
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        loader: Loader | None = None,
        after_step: Iterable[Callable[[], object]] = (),
        on_divergence: Literal["mend", "fail"] = "mend",
        **tracked: Any,
    ) -> None:
        if on_divergence not in ("mend", "fail"):
            raise ConfigError(f'TorchState: on_divergence must be "mend" or "fail", got {on_divergence!r}')
        if "commit_follows_step" in tracked:
            raise ConfigError("TorchState(loader=...) needs no commits: leave commit_follows_step out")
        self._kinds: _Kinds | None = None
        State.__init__(self, bcast_object=broadcast_value, get_rank=current_rank)
        # Any: a script should not have to ask at each use whether it has given them.
        self.model: Any = model
        self.optimizer: Any = optimizer
        self.loader: Any = loader
        self.step = 0
        self.lineage = 1
        self.boundary = 0
        self.once = (0, 0)  # an epoch, and how many calls of Epoch.once() are done in it
        self.is_holder = False
        self.on_divergence = on_divergence
        # A step is applied whole, from the same gradients, or not at all: workers at the same step have the same state.
        self.digests = StateDigest(lambda: named_tensors(self._kinds or self._sort(), self.__dict__))
        self.after_step = list(after_step)
        self._names = list(tracked)
        for name, value in tracked.items():
            if hasattr(self, name):
                raise ConfigError(f"TorchState: {name!r} is taken; give the value another name")
            setattr(self, name, value)
        self._snapshot = SmallSnapshot()
        step.on_decided(self._on_decided)
        self.track_optimizers()

    def track_optimizers(self) -> None:
        """Find out which of its optimizers decide steps, as they are now. A plain one steps unseen: it is part of the
        state, and does not decide."""
        step.track(each for each in self._optimizers_by_name().values() if hasattr(each, "abandon_step"))

    # What Horovod's scripts call -------------------------------------------------------------------------

    def commit(self) -> None:
        """Nothing to do: the state is always at the last decided step, and the loader notices planned changes."""

    def check_host_updates(self) -> None:
        """Nothing to do, as in commit()."""

    def save(self) -> None:
        """capture(). The loader does it at each boundary."""
        self.capture()

    def restore(self) -> None:
        """put_back(): the small state only. Parameters are never rolled back."""
        self.put_back()

    def sync(self) -> None:
        """Not possible: the run loop synchronizes a state with a loader. Raises ConfigError."""
        raise ConfigError("a TorchState with a loader is synchronized by elastic.run; do not call sync()")

    def modules(self) -> list[torch.nn.Module]:
        """Those that it was given."""
        return list(self._modules().values())

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that it was given."""
        return list(self._optimizers_by_name().values())

    # Progress --------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        epoch, cursor = (self.loader.epoch, self.loader.cursor) if self.loader is not None else (0, 0)
        return Progress(self.lineage, self.step, epoch, cursor, self.boundary)

    def _how_far(self) -> Progress:
        return self.progress

    def _on_decided(self, batch: Batch | None) -> None:
        """The rest of the atomic step; runs inside optimizer.step()."""
        for callback in self.after_step:
            callback()
        if self.loader is not None and batch is not None:
            recording.apply(batch)
            self.loader.commit(batch.ticket)
        self.step += 1

    # Small state -----------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Remember the small state as it is now: at each boundary."""
        self._snapshot.take(self._small())

    def put_back(self) -> None:
        """Return the small state to the last capture(), before a step is done again."""
        packed = self._snapshot.read()
        if packed.skeleton:
            self.load_small(unpack(packed))

    def captured(self) -> Packed:
        """What capture() remembered; the caller must not change it."""
        return self._snapshot.read()

    def load_small(self, small: Mapping[str, Any]) -> None:
        """Take over a small state, captured here or on another worker."""
        for name, module in self._modules().items():
            for key, buffer in buffers_of(module).items():
                buffer.detach().copy_(small["buffers"][name][key])
        for name, optimizer in self._optimizers_by_name().items():
            for group, saved in zip(optimizer.param_groups, small["groups"][name], strict=True):
                group.update(saved)
        for name, saved in small["stateful"].items():
            load_stateful(getattr(self, name), saved)
        for name, value in small["values"].items():
            setattr(self, name, value)
        self.lineage, self.step, self.boundary = small["lineage"], small["step"], small["boundary"]
        self.once = small["once"]
        if self.loader is not None:
            self.loader.load_state_dict(small["loader"])

    def _small(self) -> dict[str, Any]:
        kinds = self._kinds or self._sort()
        return {
            "lineage": self.lineage,
            "step": self.step,
            "boundary": self.boundary,
            "once": self.once,
            "loader": self.loader.state_dict() if self.loader is not None else None,
            "buffers": {name: buffers_of(module) for name, module in kinds.modules.items()},
            "groups": {name: list(map(_options, each.param_groups)) for name, each in kinds.optimizers.items()},
            "stateful": {name: value.state_dict() for name, value in kinds.stateful.items()},
            "values": {name: getattr(self, name) for name in kinds.values},
        }

    # Large state -----------------------------------------------------------------------------------------

    def large(self) -> dict[str, Any]:
        """Parameters by module and name, and the optimizers' state by name and parameter index, as
        "optimizer.0"; live, not copied."""
        state = {
            key: dict(optimizer.state[parameter])
            for key, optimizer, parameter in self._optimized()
            if parameter in optimizer.state
        }
        return {"parameters": self._parameters(), "optimizer": state}

    def load_large(self, large: Mapping[str, Any]) -> None:
        """Take over parameters and optimizer tensors that came from another worker. Raises ConfigError, with
        nothing changed, when its model has other parameters than ours."""
        ours = self._parameters()
        refuse_other_model(ours, large["parameters"])
        with torch.no_grad():
            for name, parameters in ours.items():
                for key, parameter in parameters.items():
                    parameter.copy_(large["parameters"][name][key])
            for key, optimizer, parameter in self._optimized():
                load_optimizer_entry(optimizer, parameter, large["optimizer"].get(key))

    def _parameters(self) -> dict[str, dict[str, torch.Tensor]]:
        """By module and name; those that the optimizer moves and no module has, by their place in it."""
        named: dict[str, dict[str, torch.Tensor]] = {
            name: dict(module.named_parameters()) for name, module in self._modules().items()
        }
        known = {id(parameter) for group in named.values() for parameter in group.values()}
        loose = {key: parameter for key, _, parameter in self._optimized() if id(parameter) not in known}
        return {**named, "": loose}

    def _optimized(self) -> list[tuple[str, torch.optim.Optimizer, torch.Tensor]]:
        """A name for each parameter of an optimizer, alike on all ranks; the optimizer; the parameter."""
        return [
            (f"{name}.{index}", optimizer, parameter)
            for name, optimizer in self._optimizers_by_name().items()
            for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
        ]

    # What is what ----------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in _GIVEN or name in self.__dict__.get("_names", ()):
            object.__setattr__(self, "_kinds", None)

    def _sort(self) -> _Kinds:
        """Kept until one of the values is exchanged: it is asked for in each step."""
        named = {
            "model": self.model,
            "optimizer": self.optimizer,
            **{name: getattr(self, name) for name in self._names},
        }
        modules = {name: value for name, value in named.items() if isinstance(value, torch.nn.Module)}
        optimizers = {name: value for name, value in named.items() if isinstance(value, torch.optim.Optimizer)}
        others = [name for name in self._names if name not in modules and name not in optimizers]
        stateful = {name: named[name] for name in others if is_stateful(named[name])}
        self._kinds = _Kinds(modules, optimizers, stateful, [name for name in others if name not in stateful])
        return self._kinds

    def _optimizers_by_name(self) -> dict[str, torch.optim.Optimizer]:
        return (self._kinds or self._sort()).optimizers

    def _modules(self) -> dict[str, torch.nn.Module]:
        return (self._kinds or self._sort()).modules


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    options = dict(group)
    del options["params"]
    return options
