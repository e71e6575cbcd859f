"""The whole state of an optimizer: all values that must be equal on all workers, wherever its class keeps them.

torch keeps state in `state[parameter]` and options in `param_groups`. Other optimizers have more: an optimizer inside
(Lookahead, SAM), `state` under keys of their own, lists of tensors (Shampoo, SOAP), attributes. This module finds all
of it from the optimizer alone, and gives it names that are equal on all ranks. Objects that belong to the process, such
as functions and hooks, stay in place. StepState, commits and Undo take the state of optimizers from here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from farandole.errors import ConfigError
from farandole.training.state.sent_optimizer_state import ID, PARAMETER, STAYS, STRIDED, EntryConverter, Made

Entries = dict[str, dict[Any, Any]]
"""Optimizer state by name. "optimizer.0" belongs to the first parameter, "optimizer.base.0" to that of an optimizer in
`self.base`; "optimizer.attributes", "optimizer.state" and "optimizer.groups" hold state that belongs to no parameter.
"""

GroupOptions = dict[str, list[dict[str, Any]]]
"""Options of each parameter group, which may change at any time, by name of the optimizer."""


class OptimizerState:
    """The state of an optimizer and of the optimizers inside it; all names begin with `name`. Make a new one when
    either may be another object."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self.name = name
        self.optimizers = with_inner(name, optimizer)

    # Metadata ------------------------------------------------------------------------------------

    def options(self) -> GroupOptions:
        """Return the options of the parameter groups. Called in each step."""
        return {name: list(map(_options_of, groups)) for name, groups in self._groups().items()}

    def load_options(self, options: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Load the result of options(). A tensor in it, such as a learning rate, stays the same object."""
        for name, groups in self._groups().items():
            for group, saved in zip(groups, options[name], strict=True):
                for key in _options_of(group).keys() - saved.keys():
                    del group[key]
                for key, value in saved.items():
                    live = group.get(key)
                    if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor) and live.shape == value.shape:
                        live.detach().copy_(value)
                    else:
                        group[key] = value

    # Groups that are added in the course of the training -----------------------------------------------------

    def members(self, names: Mapping[torch.Tensor, str]) -> list[list[str]]:
        """Return the names of the parameters in each group; an empty name for one that has none in `names`."""
        groups = self.optimizers[self.name].param_groups
        return [[names.get(each, "") for each in group["params"]] for group in groups]

    def add_groups(self, members: Sequence[Sequence[str]], named: Mapping[str, torch.Tensor]) -> None:
        """Add the groups that this optimizer lacks, whose options come with load_options(): `members` are the members()
        of another worker, `named` the parameters by name. Raises ConfigError where the order of the parameters is
        another one there, or one of them is in no module."""
        optimizer = self.optimizers[self.name]
        names = {each: name for name, each in named.items()}
        for number, (ours, theirs) in enumerate(zip(self.members(names), members, strict=False)):
            if ours != list(theirs):
                place = next((n for n, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), -1)
                what = f"{theirs[place]!r} there and {ours[place]!r} here" if place >= 0 else "of another number"
                raise ConfigError(
                    f"group {number} of the {type(optimizer).__name__} {self.name!r} has other parameters than on "
                    f"another worker: parameter {place} is {what}; give them to the optimizer in one order on all "
                    f"workers (a set has none), and add() none to a group"
                )
        for theirs in members[len(optimizer.param_groups) :]:
            missing = [name for name in theirs if name not in named]
            if missing:
                raise ConfigError(
                    f"other workers have added a group to the {type(optimizer).__name__} {self.name!r} whose "
                    f"parameters are in no module of this worker's state: give the module to TorchState"
                )
            optimizer.add_param_group({"params": [named[name] for name in theirs]})

    def remove_groups(self, options: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Remove groups that were added since the result of options()."""
        optimizer = self.optimizers[self.name]
        count = len(options[self.name])
        if len(optimizer.param_groups) > count:
            for group in optimizer.param_groups[count:]:
                for each in group["params"]:
                    optimizer.state.pop(each, None)
            del optimizer.param_groups[count:]
            if hasattr(optimizer, "groups_changed"):
                optimizer.groups_changed()

    # Tensors ------------------------------------------------------------------------------------

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Parameters that any of the optimizers changes, each once."""
        found = (each for one in self.optimizers.values() for group in one.param_groups for each in group["params"])
        return list({id(each): each for each in found}.values())

    def entries(self) -> Entries:
        """Return everything but options(). The tensors are the live ones."""
        parameters = self.parameters
        take, found = EntryConverter(parameters, self._containers()), dict[str, Any]()
        for name, optimizer in self._with_state():
            own = _own_entries(optimizer, parameters)
            found.update({f"{name}.{place}": take(optimizer.state[parameters[place]]) for place in own})
            keyed = {parameters[place] for place in own} | {each for each in parameters if is_shard(each)}
            found[f"{name}.state"] = take({key: each for key, each in optimizer.state.items() if key not in keyed})
        for name, optimizer in self.optimizers.items():
            attributes = {key: take(each) for key, each in vars(optimizer).items() if not _is_ours(optimizer, key)}
            found[f"{name}.attributes"] = {key: each for key, each in attributes.items() if each is not STAYS}
        for name, groups in self._groups().items():
            tensors = [{key: each for key, each in group.items() if _is_trained(key, each)} for group in groups]
            found[f"{name}.groups"] = {number: take(each) for number, each in enumerate(tensors) if each}
        return {name: entry for name, entry in found.items() if entry or not name.endswith((".state", ".groups"))}

    def load(self, entries: Mapping[str, Mapping[Any, Any]]) -> None:
        """Load the result of entries(), from another worker or an earlier time, into existing tensors where there are
        such. Raises ConfigError if an object that cannot be sent, such as a function, is missing here."""
        before, parameters = self.entries(), self.parameters
        put = _Putter(parameters)
        with torch.no_grad():
            for name, optimizer in self._with_state():
                self._load_state(name, optimizer, entries, put)
            for name, optimizer in self.optimizers.items():
                saved = entries.get(f"{name}.attributes")
                if saved is None:  # a checkpoint of a release that kept no attributes
                    continue
                for key in before[f"{name}.attributes"].keys() - saved.keys():
                    del vars(optimizer)[key]
                self._load_items(vars(optimizer), saved, name, put)
            for name, groups in self._groups().items():
                saved_groups = entries.get(f"{name}.groups", {})
                for number, group in enumerate(groups):
                    saved = saved_groups.get(number, {})
                    for key in before.get(f"{name}.groups", {}).get(number, {}).keys() - saved.keys():
                        del group[key]
                    self._load_items(group, saved, f"{name}.groups.{number}", put)

    def _load_items(self, live: dict[str, Any], saved: Mapping[str, Any], path: str, put: _Putter) -> None:
        for key, value in saved.items():
            live[key] = put(live.get(key, _MISSING), value, f"{path}.{key}")

    def _load_state(
        self, name: str, optimizer: torch.optim.Optimizer, entries: Mapping[str, Mapping[Any, Any]], put: _Putter
    ) -> None:
        parameters, state = put.parameters, optimizer.state
        for place in _own_entries(optimizer, parameters):
            if f"{name}.{place}" not in entries:
                del state[parameters[place]]
        keyed = {each for each in parameters if is_shard(each)}  # not among the entries: each worker has its own part
        for place, parameter in enumerate(parameters):
            entry = entries.get(f"{name}.{place}")
            if entry is not None:
                keyed.add(parameter)
                put.begin_entry(parameter, optimizer)
                state[parameter] = put(state.get(parameter, _MISSING), entry, f"{name}.{place}")
        put.begin_entry(parameters[0])
        saved = {put.key(key): value for key, value in entries.get(f"{name}.state", {}).items()}
        for key in [key for key in state if key not in saved and key not in keyed]:
            del state[key]
        for key, value in saved.items():
            state[key] = put(state.get(key, _MISSING), value, f"{name}.state[{key!r}]")

    def _with_state(self) -> Iterator[tuple[str, torch.optim.Optimizer]]:
        """Yield the optimizers, without those that share the `state` of an earlier one."""
        seen = set[int]()
        for name, optimizer in self.optimizers.items():
            if id(optimizer.state) not in seen:
                seen.add(id(optimizer.state))
                yield name, optimizer

    def _groups(self) -> dict[str, list[dict[str, Any]]]:
        """Return the parameter groups of each optimizer, without groups that an earlier optimizer has, too."""
        if len(self.optimizers) == 1:
            return {self.name: self.optimizers[self.name].param_groups}
        seen, found = set[int](), {}
        for name, optimizer in self.optimizers.items():
            groups = [group for group in optimizer.param_groups if id(group) not in seen]
            seen.update(map(id, groups))
            if groups:
                found[name] = groups
        return found

    def _containers(self) -> list[Any]:
        """Return the containers that are traversed in any case, and may also be found in attributes."""
        every = self.optimizers.values()
        return [each for one in every for each in (one.state, one.param_groups, *one.param_groups)]


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's class is one of torch's, whose state_dict() is complete."""
    return type(optimizer).__module__.startswith("torch.optim.")


def load_state_dict_in_place(
    optimizer: torch.optim.Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]
) -> None:
    """Call `load`, the optimizer's load_state_dict(), so that the groups and `state` stay the same objects: an
    optimizer around or inside this one, or a scheduler, would not see the new ones that torch creates."""
    groups, state = optimizer.param_groups, optimizer.state
    load(state_dict)
    if optimizer.param_groups is not groups:
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        optimizer.param_groups = groups
    if optimizer.state is not state:
        loaded_state = dict(optimizer.state)
        state.clear()
        state.update(loaded_state)
        optimizer.state = state


def outline(value: Any) -> str:
    """Return a text that tells two entries apart, but for the contents of their tensors."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{key!r}: {outline(each)}' for key, each in value.items()))}}}"
    if isinstance(value, list | tuple | deque):
        return f"[{', '.join(map(outline, value))}]"
    return repr(value)


# Places in which optimizers keep state --------------------------------------------------------------------------------

_TORCH_OWN = frozenset(
    {
        "state",
        "param_groups",
        "defaults",
        "_optimizer_step_pre_hooks",
        "_optimizer_step_post_hooks",
        "_optimizer_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_load_state_dict_post_hooks",
        "_zero_grad_profile_name",
        "_warned_capturable_if_run_uncaptured",
        "_step_supports_amp_scaling",
        "step",  # set by a scheduler, which counts calls
        "_opt_called",
        "grad_scale",  # set by a GradScaler while it steps
        "found_inf",
    }
)
"""Attributes that torch sets on optimizers (torch 2.13: torch/optim/optimizer.py,
torch/optim/lr_scheduler.py and torch/amp/grad_scaler.py)."""


def with_inner(name: str, optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizer and all optimizers in its attributes, also in containers; each once."""
    found: dict[str, torch.optim.Optimizer] = {}
    seen = set[int]()

    def visit(path: str, value: Any) -> None:
        inside: dict[Any, Any]
        if isinstance(value, torch.optim.Optimizer):
            inside = {key: each for key, each in vars(value).items() if not _is_ours(value, key)}
        elif isinstance(value, dict):
            inside = {key: each for key, each in value.items() if isinstance(key, str | int)}
        elif isinstance(value, list | tuple):
            inside = dict(enumerate(value))
        else:
            return
        if id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, torch.optim.Optimizer):
                found[path] = value
            for key, each in inside.items():
                visit(f"{path}.{key}", each)

    visit(name, optimizer)
    return found


def _own_entries(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return the places of the parameters whose state is a dictionary, as in torch's own optimizers."""
    state = optimizer.state
    return [
        place
        for place, each in enumerate(parameters)
        if each in state and isinstance(state[each], dict) and not is_shard(each)
    ]


def _is_ours(optimizer: torch.optim.Optimizer, attribute: str) -> bool:
    """Return whether an attribute is set by torch or Farandole, and not by the optimizer's class."""
    return attribute in _TORCH_OWN or attribute in getattr(optimizer, "farandole_attributes", ())


_HOLDERS = frozenset({torch.Tensor, torch.nn.Parameter, list, dict, OrderedDict, deque})


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(group)
    del options["params"]
    if _HOLDERS.isdisjoint(map(type, options.values())):  # the usual case, and this runs in each step
        return options
    return {key: value for key, value in options.items() if not _is_trained(key, value)}


def _is_trained(key: str, value: Any) -> bool:
    """Return whether a value in a parameter group holds tensors that only a step changes. A tensor of one number is an
    option: a scheduler changes a learning rate at any time."""
    if type(value) not in _HOLDERS or key == "params":
        return False
    if isinstance(value, torch.Tensor):
        return value.numel() > 1
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | deque) else ()
    return any(isinstance(each, torch.Tensor) or _is_trained("", each) for each in values)


# From received values to the live state -------------------------------------------------------------------------------


_MISSING = object()


class _Putter:
    """Puts the output of an EntryConverter into live values, in place where possible."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = parameters
        self.begin_entry(parameters[0])

    def begin_entry(self, parameter: torch.Tensor, owner: torch.optim.Optimizer | None = None) -> None:
        """Begin the entry of a parameter in the optimizer `owner`; None: what belongs to no parameter."""
        self._parameter, self._owner = parameter, owner

    def __call__(self, live: Any, saved: Any, path: str, key: Any = None) -> Any:
        """Return the new value in place of `live`: often `live` itself, changed."""
        if isinstance(saved, torch.Tensor):
            return self._tensor(live, saved, key)
        if isinstance(saved, Made):
            owner = live if type(live) is saved.kind else object.__new__(saved.kind)
            self._mapping(vars(owner), saved.attributes, path)
            return owner
        if isinstance(saved, tuple):
            return self._tuple(live, saved, path)
        if isinstance(saved, Mapping):
            made: MutableMapping[Any, Any] = live if isinstance(live, MutableMapping) else OrderedDict()
            self._mapping(made, saved, path)
            return dict(made) if made is not live and type(saved) is dict else made
        if isinstance(saved, list | deque):
            return self._sequence(live, saved, path)
        if isinstance(saved, set | frozenset):
            return type(saved)(map(self.key, saved))
        return saved

    def key(self, saved: Any) -> Any:
        """Return the parameter, or its id(), that a marker stands for; any other value as it is."""
        if type(saved) is not tuple:
            return saved
        kind = _kind(saved)
        if kind is None:
            return tuple(map(self.key, saved))
        return self.parameters[saved[1]] if kind == PARAMETER else id(self.parameters[saved[1]])

    def _placed(self, tensor: torch.Tensor, key: Any) -> torch.Tensor:
        """Move a tensor of another worker, which is in host memory, to the parameter's device, as torch's
        load_state_dict() does. A step counter stays on the CPU unless a kernel reads it."""
        is_counter = key == "step" if self._owner is not None else tensor.dim() == 0
        groups = self._owner.param_groups if is_counter and self._owner is not None else []
        group = next((each for each in groups if any(p is self._parameter for p in each["params"])), {})
        is_read_by_kernel = group.get("capturable") or group.get("fused")
        return tensor if is_counter and not is_read_by_kernel else tensor.to(self._parameter.device)

    def _tensor(self, live: Any, saved: torch.Tensor, key: Any) -> Any:
        if isinstance(live, torch.Generator):
            live.set_state(saved.contiguous())
            return live
        if not isinstance(live, torch.Tensor):
            return self._placed(saved, key)
        if live.shape != saved.shape or live.dtype != saved.dtype:
            return saved.to(live.device)
        live.detach().copy_(saved)
        return live

    def _tuple(self, live: Any, saved: tuple[Any, ...], path: str) -> Any:
        kind = _kind(saved)
        if kind == STAYS[0]:
            if live is _MISSING:
                raise ConfigError(
                    f"{path} is a function, or another object that cannot be sent to other workers, and is missing "
                    f"on this worker: create it in the optimizer's __init__()"
                )
            return live
        if kind == STRIDED:
            tensor, strides = saved[1]
            if not isinstance(live, torch.Tensor) or live.stride() != tuple(strides):
                tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="cpu").copy_(tensor)
                return self._tensor(_MISSING, tensor, None)
            return self._tensor(live, tensor, None)
        if kind is not None:
            return self.key(saved)
        lives = live if isinstance(live, tuple) and len(live) == len(saved) else [_MISSING] * len(saved)
        items = [self(one, each, f"{path}.{n}") for n, (one, each) in enumerate(zip(lives, saved, strict=True))]
        return tuple(items) if type(saved) is tuple else type(saved)(*items)

    def _mapping(self, live: MutableMapping[Any, Any], saved: Mapping[Any, Any], path: str) -> None:
        """Load the items in the order of `saved`, so that digests agree."""
        made = {}
        for name, value in saved.items():
            key = self.key(name)
            made[key] = self(live.get(key, _MISSING), value, f"{path}.{name}", key)
        live.clear()
        live.update(made)

    def _sequence(self, live: Any, saved: list[Any] | deque[Any], path: str) -> Any:
        lives = [*(live if isinstance(live, list | deque) else ()), *[_MISSING] * len(saved)]
        items = [self(lives[n], each, f"{path}.{n}") for n, each in enumerate(saved)]
        made: Any = deque(items, saved.maxlen) if isinstance(saved, deque) else items
        if type(live) is not type(made) or getattr(live, "maxlen", None) != getattr(made, "maxlen", None):
            return made
        live.clear()
        live.extend(items)
        return live


def _kind(saved: tuple[Any, ...]) -> str | None:
    """Return the marker at the start of a tuple; None for a tuple of the optimizer's own."""
    return saved[0] if len(saved) == 2 and type(saved[0]) is str and saved[0] in _KINDS else None


_KINDS = frozenset({PARAMETER, ID, STRIDED, STAYS[0]})


# Optimizers that cannot train with a loader of Farandole: they are refused when a state is created with them ----------

_WHY_REFUSED = {
    torch.optim.LBFGS: (
        "evaluates its closure as often as the loss on this worker's local batch requires, so that workers would run "
        "different numbers of reductions"
    ),
    torch.optim.SparseAdam: (
        "needs sparse gradients, and those of the global batch are dense; use torch.optim.Adam for them"
    ),
}


def is_shard(tensor: object) -> bool:
    """Return whether each worker has a part of a tensor."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)  # importing it takes half a second


def refuse_shards(parameters: Iterable[torch.Tensor]) -> None:
    """Raise ConfigError for a parameter of which each worker has a part of its own: states and gradients of those are
    other ones on each worker."""
    for each in parameters:
        if is_shard(each):
            raise ConfigError(
                f"a parameter of shape {tuple(each.shape)} is divided among the workers, as by fully_shard(), and has "
                f"other values on each: give model and optimizer to TorchState(model=..., optimizer=..., loader=...) "
                f"with a loader of Farandole, and do not wrap the optimizer (docs/sharded-models.md)"
            )


def refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError for an optimizer that cannot train with a loader of Farandole, or that contains one."""
    for each in with_inner("optimizer", optimizer).values():
        if each is not optimizer and hasattr(each, "abandon_step"):
            raise ConfigError(
                f"the {type(optimizer).__name__} of the TorchState contains a DistributedOptimizer, and would step "
                f"even when the step is skipped: wrap the outermost optimizer in DistributedOptimizer(...)"
            )
        for kind, why in _WHY_REFUSED.items():
            if isinstance(each, kind):
                raise ConfigError(
                    f"torch.optim.{kind.__name__} {why}. Use another optimizer, or train without a DataLoader of "
                    f"Farandole, under the commit rule"
                )
