"""Arguments of torch's DataLoader with another meaning here, or none: each is refused with its reason; and two names
for one thing, of which one is to be given."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from farandole.errors import ConfigError
from farandole.training.data.partition import Tail
from farandole.training.data.sample_order import Order, Sequential, Shuffled

_OWN_ORDER = "seed and order determine the order of samples, so that they can be divided again when workers change"

# Values that request the default behaviour.
_HARMLESS: Mapping[str, tuple[object, ...]] = {
    "batch_size": (),
    "sampler": (None,),
    "batch_sampler": (None,),
    "generator": (None,),
    "in_order": (True,),
    "shuffle": (False, None),
    "drop_last": (False,),
}

_REASONS: Mapping[str, str] = {
    "batch_size": "in torch it counts the samples of one worker; give global_batch_size, which counts those of all",
    "sampler": f"{_OWN_ORDER}; give order=, or use elastic.ElasticSampler in torch's own DataLoader",
    "batch_sampler": f"{_OWN_ORDER}; give order=, or use elastic.ElasticSampler in torch's own DataLoader",
    "generator": "random numbers are derived from seed, so that they are the same on every worker; give seed=",
    "in_order": "batches are returned in the order of the epoch, since the cursor counts them in that order",
}

_ORDER_OF_STREAMS = "samples have the order in which the streams of the data set yield them"
STREAM_ARGUMENTS: Mapping[str, str] = {
    **_REASONS,
    "sampler": f"{_ORDER_OF_STREAMS}; a data set with __len__ and __getitem__ can be given to elastic.DataLoader",
    "batch_sampler": f"{_ORDER_OF_STREAMS}; a data set with __len__ and __getitem__ can be given to elastic.DataLoader",
    "shuffle": f"{_ORDER_OF_STREAMS}; shuffle in the data set, by the number that is passed to set_epoch()",
    "drop_last": "the last global batch of an epoch is shorter: the length of a stream is not known in advance",
}
"""Reasons of StreamLoader."""


def refuse_torch_arguments(
    given: Mapping[str, object],
    known: Iterable[str],
    loader: str = "DataLoader",
    reasons: Mapping[str, str] = _REASONS,
) -> None:
    """Raise ConfigError for an argument of torch that cannot be supported, TypeError for an unknown one."""
    for name, value in given.items():
        if name not in reasons:
            close = difflib.get_close_matches(name, [*known, *reasons], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"{loader} has no argument {name!r}{hint}")
        if not any(value is each for each in _HARMLESS[name]):
            raise ConfigError(f"{loader}: {name}={value!r} is not supported: {reasons[name]}")


def order_of(order: Order | None, shuffle: bool) -> Order:
    """Return the order of the samples. Raises ConfigError where both arguments say one."""
    if order is None:
        return Shuffled() if shuffle else Sequential()
    if not shuffle:
        raise ConfigError(f"DataLoader: shuffle=False and order={order.identity} contradict each other; give one")
    return order


def tail_of(tail: Tail | None, drop_last: bool) -> Tail:
    """Return the use of the last samples of an epoch. Raises ConfigError where both arguments say one."""
    if drop_last and tail not in (None, "drop"):
        raise ConfigError(f"DataLoader: drop_last=True and tail={tail!r} contradict each other; give one")
    return "drop" if drop_last else tail or "short"
