"""Parameters of tests that combine two lists, each combination a job of many seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def each_once(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Return all combinations of two lists of the same length.

    Those of one place in both lists run in every suite, so that each value does once. The others are marked
    `chaos_long`.
    """
    return [
        pytest.param(a, b, marks=() if row == column else pytest.mark.chaos_long)
        for row, a in enumerate(first)
        for column, b in enumerate(second)
    ]
