"""When is an operation warned of, and when given up."""

from __future__ import annotations

import pytest

from farandole.integrations.horovod.named.negotiation import Stall
from farandole.integrations.horovod.named.pending import StallReport, StallWatch
from farandole.integrations.horovod.named.stages import Key, Kind

NOTHING = StallReport()


def waiting(name: str = "x", number: int = 1, missing: tuple[int, ...] = (2,)) -> Stall:
    return Stall(Key(0, Kind.ALLREDUCE, name), (0, 1), missing, number)


def test_a_warning_comes_after_a_while_and_again_after_the_same_while() -> None:
    watch = StallWatch(warning_s=60)
    warned = [now_s for now_s in range(0, 200, 5) if watch.check(now_s, [waiting()]).warnings]
    assert warned == [60, 120, 180]


def test_a_warning_names_the_operation_and_who_is_missing() -> None:
    watch = StallWatch(warning_s=60)
    watch.check(0, [waiting()])
    (warning,) = watch.check(61, [waiting()]).warnings
    assert "stalled for 61 s: allreduce 'x': ranks 0 and 1 submitted it, still missing: rank 2" in warning


def test_operations_that_wait_for_the_same_ranks_share_a_warning() -> None:
    watch = StallWatch(warning_s=60)
    many = [waiting(f"x{number}", number) for number in range(9)] + [waiting("y", 10, missing=(3,))]
    watch.check(0, many)
    first, second = watch.check(60, many).warnings
    assert "'x0'" in first
    assert "'x4' and 4 more: " in first
    assert "'y'" in second
    assert "missing: rank 3" in second


def test_the_next_operation_of_a_name_is_another_one() -> None:
    watch = StallWatch(warning_s=60)
    for now_s in range(0, 300, 30):
        assert watch.check(now_s, [waiting(number=now_s)]) == NOTHING


def test_what_has_come_in_between_is_forgotten() -> None:
    watch = StallWatch(warning_s=60)
    watch.check(0, [waiting()])
    watch.check(30, [])
    assert watch.check(65, [waiting()]) == NOTHING


def test_what_waits_too_long_expires_without_a_last_warning() -> None:
    watch = StallWatch(warning_s=2, abort_s=5)
    watch.check(0, [waiting()])
    assert watch.check(2, [waiting()]).warnings
    assert watch.check(6, [waiting()]) == StallReport((), (waiting().key,))


def test_abort_alone_and_never_at_all() -> None:
    watch = StallWatch(warning_s=0, abort_s=5)
    watch.check(0, [waiting()])
    assert watch.check(1000, [waiting()]) == StallReport((), (waiting().key,))
    off = StallWatch(warning_s=0)
    assert not off.is_on
    assert off.check(0, [waiting()]) == off.check(1000, [waiting()]) == NOTHING


def test_negative_times_are_refused() -> None:
    with pytest.raises(ValueError, match="warning_s=-1"):
        StallWatch(warning_s=-1)
