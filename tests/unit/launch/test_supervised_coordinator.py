"""The launcher watches its coordinator: one that hangs is replaced, one that was suspended is not."""

from __future__ import annotations

from farandole.job.launch.supervised_coordinator import HangWatch, hang_deadline_s


class Watched:
    """A coordinator that shows life every 0.1 s unless it `hangs`, and its launcher, which looks unless `is_stopped`.
    Time passes with `passes`."""

    def __init__(self, deadline_s: float = 1.5) -> None:
        self.now_s = 100.0
        self.watch = HangWatch(deadline_s, lambda: self.now_s)
        self.watch.record()
        self.is_judged = False

    def passes(self, seconds: float, hangs: bool = False, is_stopped: bool = False) -> bool:
        """Whether it was found to hang."""
        end_s, next_look_s = self.now_s + seconds, self.now_s
        while self.now_s < end_s:
            self.now_s += 0.025
            if not hangs and not is_stopped:
                self.watch.record()
            if not is_stopped and self.now_s >= next_look_s:
                self.is_judged |= self.watch.hangs()
                next_look_s = self.now_s + self.watch.look_every_s
        return self.is_judged


def test_a_coordinator_that_shows_life_is_left_alone() -> None:
    assert not Watched().passes(60.0)


def test_one_that_hangs_is_noticed_within_the_deadline() -> None:
    watched = Watched()
    assert not watched.passes(1.2, hangs=True)
    assert watched.passes(0.4, hangs=True)


def test_the_time_in_which_the_launcher_was_stopped_itself_does_not_count() -> None:
    watched = Watched()
    watched.passes(1.0)
    assert not watched.passes(3600.0, hangs=True, is_stopped=True)  # Ctrl-Z stops both
    assert not watched.passes(1.0, hangs=True)  # it is slow to come back
    assert not watched.passes(60.0)
    assert watched.passes(2.0, hangs=True)


def test_the_deadline_is_below_the_lease_of_agents_on_other_machines() -> None:
    assert hang_deadline_s(3.0) == 1.5
    assert hang_deadline_s(30.0) == 15.0
    assert hang_deadline_s(0.5) == 1.0  # no process is judged faster
