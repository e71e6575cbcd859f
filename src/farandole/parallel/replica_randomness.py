"""Make random numbers in concurrent replicas a function of the generator's earlier state, whichever thread is first.

Under `elastic.run` that state is derived from (seed, step, rank), and so is each replica's dropout. The CPU has one
default generator for all threads. A function that draws from it waits for its turn, and the generator is seeded for it
with (the number drawn for the batch, replica, number of the draw).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from farandole.errors import ConfigError
from farandole.mixing import mixed


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
                self._base = int(torch.empty((), dtype=torch.int64).random_())
                self._after = generator.get_state()
            generator.manual_seed(mixed(mixed(mixed(self._base) + replica) + number) >> 1)
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
                "backward(), it would draw other numbers; leave out checkpoint() or the random layer, or use threads=1"
            )
        frame = frame.f_back  # type: ignore[assignment]


# Functions that draw ----------------------------------------------------------------------------------------------


def _always(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


def _in_training(place: int, default: bool) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
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
    """Return whether a recurrent layer draws.

    Its only float argument is the dropout between layers, followed by the training flag.
    """
    for place, arg in enumerate(args):
        if isinstance(arg, float):
            return arg > 0 and bool(args[place + 1])
    return False


def _names(text: str) -> list[str]:
    return text.split()


_DRAWS: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], bool]] = {
    **dict.fromkeys(
        _names(
            "rand rand_like randn randn_like randint randint_like randperm normal normal_ uniform_ random_ bernoulli "
            "bernoulli_ multinomial poisson binomial exponential_ geometric_ cauchy_ log_normal_ gumbel_softmax "
            "fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d "
            "fractional_max_pool3d_with_indices"
        ),
        _always,
    ),
    **dict.fromkeys(
        _names(
            "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout "
            "feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ native_dropout"
        ),
        _in_training(2, True),
    ),
    **dict.fromkeys(["rrelu", "rrelu_"], _in_training(3, False)),
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": _multi_head_attention,
    **dict.fromkeys(["lstm", "gru", "rnn_tanh", "rnn_relu"], _recurrent),
}
"""For each function of torch, by name: tells whether a call of it draws from the default generator."""
