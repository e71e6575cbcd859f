"""What a host event does to a job, in Horovod's numbers. Pure; State hears of it, the run loop agrees on it."""

from __future__ import annotations

import enum


class HostUpdateResult(enum.IntFlag):
    """Several changes at once are or-ed together."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added
