"""An agent's measurements of its workers."""

from __future__ import annotations

import os
import sys

import pytest

from farandole.base.liveness import logged_numbers, status_reporting
from farandole.base.liveness.logged_numbers import LoggedNumbers
from farandole.base.liveness.status_reporting import OwnStatusPage, StatusPage
from farandole.base.membership import Phase, WorkerTelemetry
from farandole.job.agent.worker_telemetry import USAGE_EVERY_S, TelemetryMeter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages for workers are made with Linux's memfd")


class Clock:
    """The worker's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 1_000_000_000
        for module in (status_reporting, logged_numbers):
            monkeypatch.setattr(module, "now_ns", lambda: self.ns)

    def pass_ms(self, milliseconds: float) -> None:
        self.ns += int(milliseconds * 1e6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def measure(meter: TelemetryMeter, page: StatusPage, now_s: float = 0.0) -> WorkerTelemetry:
    return meter.measure({"w0": page}, {}, now_s)["w0"]


def train(own: OwnStatusPage, clock: Clock, steps: range, generation: int = 1) -> None:
    """Steps of 20 ms, in 5 of which it waits."""
    for step in steps:
        own.set_phase(Phase.WAITING)
        clock.pass_ms(5)
        own.set_phase(Phase.USER)
        clock.pass_ms(15)
        own.set_step(generation, step, 3, 12 * step, 600)


def test_a_step_has_its_duration_and_the_waiting_in_it(clock: Clock) -> None:
    page, meter = StatusPage(), TelemetryMeter()
    own = OwnStatusPage(page.path)
    train(own, clock, range(1, 5))
    assert measure(meter, page).step_s == 0.0
    train(own, clock, range(5, 15))
    seen = measure(meter, page)
    assert (seen.step_s, seen.waiting_s) == (pytest.approx(0.02), pytest.approx(0.005))
    assert (seen.epoch, seen.trained, seen.samples) == (3, 168, 600)
    assert measure(meter, page) == seen  # no step has ended since


def test_a_regroup_is_no_step(clock: Clock) -> None:
    page, meter = StatusPage(), TelemetryMeter()
    own = OwnStatusPage(page.path)
    train(own, clock, range(5))
    measure(meter, page)
    train(own, clock, range(5, 10))
    before = measure(meter, page)
    clock.pass_ms(5000)
    train(own, clock, range(10, 12), generation=2)
    assert measure(meter, page).step_s == before.step_s
    train(own, clock, range(12, 14), generation=2)
    assert measure(meter, page).step_s == pytest.approx(0.02)


def test_memory_and_processor_time_are_those_of_the_process() -> None:
    page, meter = StatusPage(), TelemetryMeter()
    pids = {"w0": os.getpid()}
    first = meter.measure({"w0": page}, pids, 100.0)["w0"]
    assert first.resident_bytes > 1 << 20
    assert first.cpu_s > 0
    deadline = first.cpu_s + 0.1
    while sum(os.times()[:2]) < deadline:
        sum(range(1000))
    assert meter.measure({"w0": page}, pids, 100.1)["w0"].cores == 0.0  # not asked again so soon
    assert meter.measure({"w0": page}, pids, 100.0 + USAGE_EVERY_S)["w0"].cores >= 0.04


def test_a_process_that_has_ended_is_no_error() -> None:
    page, meter = StatusPage(), TelemetryMeter()
    assert meter.measure({"w0": page}, {"w0": 1 << 30}, 100.0)["w0"].resident_bytes == 0
    assert meter.measure({}, {}, 101.0) == {}


def test_share_and_speed_reach_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    page, meter = StatusPage(), TelemetryMeter()
    assert measure(meter, page).share == 0.0
    monkeypatch.setattr(status_reporting.OWN, "page", OwnStatusPage(page.path))
    status_reporting.set_balance(0.125, 321.5)
    measured = measure(meter, page)
    assert (measured.share, measured.speed) == (0.125, 321.5)


def test_numbers_of_the_user_reach_the_agent(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    page, meter = StatusPage(), TelemetryMeter()
    monkeypatch.setattr(status_reporting.OWN, "page", OwnStatusPage(page.path))
    monkeypatch.setattr(status_reporting, "_numbers", LoggedNumbers())
    status_reporting.log_numbers({"loss": 0.5})
    assert measure(meter, page).values == {"loss": 0.5}
    clock.pass_ms(100)
    status_reporting.log_numbers({"loss": 0.4, "lr": 1})
    assert measure(meter, page).values == {"loss": 0.5}  # at most twice a second
    clock.pass_ms(500)
    status_reporting.set_step(1, 7)
    assert measure(meter, page).values == {"loss": 0.4, "lr": 1.0}
    status_reporting.log_numbers({"loss": float("inf"), "lr": 10**400})
    clock.pass_ms(500)
    status_reporting.set_step(1, 8)
    assert measure(meter, page).values == {"loss": float("inf")}


def test_too_many_numbers_are_cut_and_nonsense_on_the_page_is_not_read() -> None:
    page = StatusPage()
    own = OwnStatusPage(page.path)
    own.write_values({f"{'long name ' * 20}{number}": float(number) for number in range(50)})
    assert 1 <= len(page.values()) < 50
    before = page.values()
    own._measured[status_reporting._VALUES_VERSION] += 2
    own.memory[status_reporting._VALUES_AT : status_reporting._VALUES_AT + 10] = b"\xff" * 10
    assert page.values() == before
    own._measured[status_reporting._VALUES_VERSION] += 2
    own._measured[status_reporting._VALUES_BYTES] = 1 << 40
    assert page.values() == before
