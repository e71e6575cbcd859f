"""Replicas of a module in the memory of the CPU: new module objects, the same parameters, random numbers of their own.

data_parallel.py uses the replicas for one forward pass.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from farandole.errors import ConfigError

# Private: torch calls it in torch/nn/parallel/replicate.py of torch 2.13, and classes override it, as RNNBase does.
_TORCHS_OWN = torch.nn.Module._replicate_for_data_parallel


def replicas(
    module: torch.nn.Module, count: int
) -> tuple[list[torch.nn.Module], list[torch.Tensor], list[list[torch.Tensor]]]:
    """Return `count` replicas, the masters, and for each replica its leaves.

    The masters are the parameters that need gradients; the leaves replace them and share their memory. Without grad
    mode there are no masters. The first replica has the module's own buffers, so that changes by forward() persist; the
    others have copies. Attributes that forward() sets are lost with the replica.
    """
    modules = list(module.modules())
    for each in modules:
        refuse_in_replicas(each)
    masters = _masters(modules) if torch.is_grad_enabled() else []
    made, leaves = [], []
    for place in range(count):
        own = [master.detach().requires_grad_() for master in masters]
        replaced: dict[int, torch.Tensor] = {id(master): leaf for master, leaf in zip(masters, own, strict=True)}
        made.append(_replica(modules, replaced, keeps_buffers=place == 0))
        leaves.append(own)
    return made, masters, leaves


def refuse_in_replicas(module: torch.nn.Module) -> None:
    """Raise ConfigError for a module that cannot run in several replicas."""
    reason = _reason_against(type(module))  # type: ignore[arg-type]
    if reason is not None:
        raise ConfigError(f"{type(module).__name__} in a DataParallel: {reason}")
    # Private marks of torch.compile(): torch 2.13, torch/_dynamo/eval_frame.py, and Module.compile().
    if "_torchdynamo_orig_callable" in module.__dict__ or module._compiled_call_impl is not None:
        raise ConfigError(
            f"a compiled module ({type(module).__name__}) in a DataParallel: it runs with the parameters with which it "
            "was compiled, not with those of a replica; leave out torch.compile()"
        )


@cache
def _reason_against(kind: type) -> str | None:
    if issubclass(kind, torch.jit.ScriptModule):
        return "a scripted module cannot be replicated in threads; leave out torch.jit"
    names = {base.__name__ for base in kind.__mro__}
    if "SyncBatchNorm" in names:
        return (
            "replicas would call its collective several times and in any order; use BatchNorm, whose statistics are "
            "those of each replica's part of the batch"
        )
    if names & {"DistributedDataParallel", "DataParallel"}:
        return "wrap in the opposite order, DistributedDataParallel around DataParallel, each of them once"
    return None


def _masters(modules: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the masters; shared parameters once."""
    found: dict[int, torch.Tensor] = {}
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.requires_grad:
                found[id(tensor)] = tensor
    return list(found.values())


def _replica(modules: list[torch.nn.Module], replaced: dict[int, torch.Tensor], keeps_buffers: bool) -> torch.nn.Module:
    copies: dict[int, Any] = {id(module): _shallow(module) for module in modules}
    buffers: dict[int, torch.Tensor] = {}

    def copied(buffer: torch.Tensor) -> torch.Tensor:
        return buffers.setdefault(id(buffer), replaced.get(id(buffer), buffer.detach().clone()))

    for module in modules:
        new = copies[id(module)]
        # Not by setattr(), with which torch looks for parameters and children (torch 2.13, torch/nn/modules/module.py,
        # Module.__setattr__): it took most of the time.
        new.__dict__.update(
            _parameters=_mapped(module._parameters, lambda parameter: replaced.get(id(parameter), parameter)),
            # The dict itself: assignments in forward() persist, too.
            _buffers=module._buffers if keeps_buffers else _mapped(module._buffers, copied),
            _modules=_mapped(module._modules, lambda child: copies[id(child)]),
        )
    root: torch.nn.Module = copies[id(modules[0])]
    return root


def _mapped(entries: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: None if entry is None else change(entry) for name, entry in entries.items()}


def _shallow(module: torch.nn.Module) -> torch.nn.Module:
    """Return a shallow copy of a module. Its class may define which attributes of its instances must not be shared."""
    kind = type(module)
    if kind._replicate_for_data_parallel is not _TORCHS_OWN:
        known: torch.nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        return known
    copy = kind.__new__(kind)
    copy.__dict__.update(module.__dict__, _is_replica=True)
    return copy


# Random numbers in concurrent replicas: a function of the generator's earlier state, whichever thread is first --------
#
# Under `elastic.run` that state is derived from (seed, step, rank), and so is each replica's dropout. The CPU has one
# default generator for all threads. A function that draws from it waits for its turn, and the generator is seeded for
# it with (the number drawn for the batch, replica, number of the draw).


class Draws:
    """All draws of one batch. The caller's generator advances by one number if there are any, else by none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._base: int | None = None
        self._after: torch.Tensor | None = None

    def turn(self, replica: int, number: int, draw: Callable[[], Any]) -> Any:
        generator = torch.default_generator
        with self._lock:
            if self._base is None:
                self._base = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
                self._after = generator.get_state()
            parts = struct.pack("<3Q", self._base, replica, number)
            seed = int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "little")
            generator.manual_seed(seed >> 1)
            return draw()

    def close(self) -> None:
        """Close the draws when all replicas have ended."""
        if self._after is not None:
            torch.default_generator.set_state(self._after)


class ReplicaRandomness(TorchFunctionMode):
    """A mode around the forward pass of one replica, in its thread."""

    def __init__(self, draws: Draws, replica: int) -> None:
        super().__init__()
        self._draws, self._replica, self._number = draws, replica, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        draws = _DRAWS.get(getattr(func, "__name__", ""))
        if draws is None or kwargs.get("generator") is not None or not draws(args, kwargs):
            return func(*args, **kwargs)
        _refuse_checkpoint(func.__name__)
        self._number += 1
        return self._draws.turn(self._replica, self._number, lambda: func(*args, **kwargs))


def _refuse_checkpoint(name: str) -> None:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            raise ConfigError(
                f"{name}() inside of torch.utils.checkpoint, in a replica that runs in a thread: computed again in "
                "backward(), it would yield other random numbers; leave out checkpoint() or the random layer, or use "
                "threads=1"
            )
        frame = frame.f_back  # type: ignore[assignment]


# Functions that draw --------------------------------------------------------------------------------------------------


MayDraw = Callable[[tuple[Any, ...], dict[str, Any]], bool]


def _in_training(place: int, default: bool) -> MayDraw:
    def draws(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = args[place] if len(args) > place else kwargs.get("training", kwargs.get("train", default))
        return bool(given)

    return draws


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool((args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0)


def _multi_head_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    probability = args[10] if len(args) > 10 else kwargs.get("dropout_p", 0.0)
    return probability > 0 and bool(args[13] if len(args) > 13 else kwargs.get("training", True))


def _recurrent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a recurrent layer draws: its only float is the dropout, followed by the training flag."""
    for place, arg in enumerate(args):
        if isinstance(arg, float):
            return arg > 0 and bool(args[place + 1])
    return False


_ALWAYS = (
    "rand rand_like randn randn_like randint randint_like randperm normal normal_ uniform_ random_ bernoulli "
    "bernoulli_ multinomial poisson binomial exponential_ geometric_ cauchy_ log_normal_ gumbel_softmax "
    "fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d fractional_max_pool3d_with_indices"
)
_IN_TRAINING = (
    "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ "
    "feature_alpha_dropout feature_alpha_dropout_ native_dropout"
)

_DRAWS: dict[str, MayDraw] = {
    **dict.fromkeys(_ALWAYS.split(), lambda args, kwargs: True),
    **dict.fromkeys(_IN_TRAINING.split(), _in_training(2, True)),
    **dict.fromkeys(["rrelu", "rrelu_"], _in_training(3, False)),
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": _multi_head_attention,
    **dict.fromkeys(["lstm", "gru", "rnn_tanh", "rnn_relu"], _recurrent),
}
"""For each function of torch, by name: tells whether a call of it draws from the default generator."""
