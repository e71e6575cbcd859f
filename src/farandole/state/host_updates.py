"""The effect of host events on a job, in Horovod's numbers. Pure. State receives the events; the run loop agrees on
them."""

from __future__ import annotations

import enum


class HostUpdateResult(enum.IntFlag):
    """The effect of host changes. Several changes at once are combined with bitwise or."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added
