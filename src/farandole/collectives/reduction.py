"""The reduction operators of collectives, numbered as in Horovod. Pure."""

from __future__ import annotations

import enum


class Reduction(enum.IntEnum):
    """The `op` of a reducing collective. Transports know SUM, MIN, MAX and PRODUCT; the others are composed of them."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
