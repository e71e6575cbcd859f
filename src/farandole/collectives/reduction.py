"""How tensors of several ranks become one: the numbers are Horovod's. Pure."""

from __future__ import annotations

import enum


class Reduction(enum.IntEnum):
    """The `op` of a reducing collective. Transports know SUM, MIN, MAX and PRODUCT; the rest is made of them."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
