"""Horovod's names for the reduction operators. Pure; users pass them as `op`."""

from __future__ import annotations

from farandole.collectives.reduction import Reduction

Average = Reduction.AVERAGE
Sum = Reduction.SUM
Adasum = Reduction.ADASUM
Min = Reduction.MIN
Max = Reduction.MAX
Product = Reduction.PRODUCT
