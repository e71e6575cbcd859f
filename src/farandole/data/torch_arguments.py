"""Arguments of torch's DataLoader with another meaning here, or none: each is refused with its reason. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from farandole.errors import ConfigError

_OWN_ORDER = "which sample comes when follows from seed and order, so that it can be divided anew when workers change"

# Values that request the default behaviour.
_HARMLESS: Mapping[str, tuple[object, ...]] = {
    "batch_size": (),
    "sampler": (None,),
    "batch_sampler": (None,),
    "generator": (None,),
    "persistent_workers": (True,),
    "in_order": (True,),
    "shuffle": (False, None),
    "drop_last": (False,),
}

_REASONS: Mapping[str, str] = {
    "batch_size": "torch's batch_size counts the samples of one worker; give global_batch_size, those of all together",
    "sampler": f"{_OWN_ORDER}; give order=, or use elastic.ElasticSampler in torch's own DataLoader",
    "batch_sampler": f"{_OWN_ORDER}; give order=, or use elastic.ElasticSampler in torch's own DataLoader",
    "generator": "random numbers follow from seed, so that they are the same on every worker; give seed=",
    "persistent_workers": "loader workers live until close(), over the ends of epochs and over regroups",
    "in_order": "batches come in the order of the epoch, for the cursor counts them so",
}

_ORDER_OF_STREAMS = "samples come in the order in which the data set's streams give them"
OF_STREAMS: Mapping[str, str] = {
    **_REASONS,
    "sampler": f"{_ORDER_OF_STREAMS}; a data set with __len__ and __getitem__ can be given to elastic.DataLoader",
    "batch_sampler": f"{_ORDER_OF_STREAMS}; a data set with __len__ and __getitem__ can be given to elastic.DataLoader",
    "shuffle": f"{_ORDER_OF_STREAMS}; shuffle there, by the number that set_epoch() is called with",
    "drop_last": "the last global batch of an epoch is a shorter one, for nobody knows before that it is the last",
}
"""Reasons of StreamLoader."""


def refuse(
    given: Mapping[str, object],
    known: Iterable[str],
    num_workers: int,
    loader: str = "DataLoader",
    reasons: Mapping[str, str] = _REASONS,
) -> None:
    """Raise ConfigError for an argument of torch that cannot be supported, TypeError for an unknown one."""
    for name, value in given.items():
        if name not in reasons:
            close = difflib.get_close_matches(name, [*known, *reasons], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"{loader} has no argument {name!r}{hint}")
        is_harmless = any(value is each for each in _HARMLESS[name])
        # Without loader workers none could live on.
        if not is_harmless and not (name == "persistent_workers" and num_workers == 0):
            raise ConfigError(f"{loader}: {name}={value!r} cannot be followed: {reasons[name]}")
