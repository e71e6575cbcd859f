"""The time for which a process is the parent of its descendants' orphans."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

import pytest

from farandole.job.agent.process import adopting_orphans, can_adopt_orphans

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot do that")


def prctl(option: int, argument: int) -> None:
    assert ctypes.CDLL(None).prctl(option, ctypes.c_ulong(argument), *[ctypes.c_ulong(0)] * 3) == 0


def is_on() -> bool:
    value = ctypes.c_int()
    prctl(37, ctypes.addressof(value))
    return bool(value.value)


@pytest.fixture(params=[False, True], ids=["off", "on"])
def before(request: pytest.FixtureRequest) -> Iterator[bool]:
    """How it was."""
    prctl(36, int(request.param))
    yield request.param
    prctl(36, 0)


def test_it_is_as_it_was_when_the_last_one_ends(before: bool) -> None:
    assert can_adopt_orphans()
    first, second = adopting_orphans(), adopting_orphans()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_on()
    second.__exit__(None, None, None)
    assert is_on() == before
