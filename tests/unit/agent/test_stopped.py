"""A worker that stays stopped is found; one that was stopped for a moment is not."""

from __future__ import annotations

from farandole.job.agent.process import StoppedWatch


def test_a_worker_stopped_at_every_look_is_named_once_the_limit_is_reached() -> None:
    watch = StoppedWatch(limit_s=1.0)
    assert watch.look({"w1": True, "w2": False}, 10.0) == []
    assert watch.look({"w1": True, "w2": False}, 10.9) == []
    assert watch.look({"w1": True, "w2": True}, 11.0) == ["w1"]


def test_a_worker_that_went_on_in_between_starts_anew() -> None:
    watch = StoppedWatch(limit_s=1.0)
    watch.look({"w1": True}, 10.0)
    watch.look({"w1": False}, 10.5)
    assert watch.look({"w1": True}, 11.0) == []
    assert watch.look({"w1": True}, 12.0) == ["w1"]


def test_a_worker_that_is_gone_is_forgotten() -> None:
    watch = StoppedWatch(limit_s=1.0)
    watch.look({"w1": True}, 10.0)
    watch.look({}, 10.5)
    assert watch.look({"w1": True}, 11.0) == []
