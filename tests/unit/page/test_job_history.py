"""A page's history of a job: from statuses and events to what is shown."""

from __future__ import annotations

import msgspec
import pytest

from farandole.base.events.event import Event
from farandole.base.events.generation_events import ChangePlanned, GenerationStarted, Recovered, RegroupBegan
from farandole.base.events.job_events import CheckpointFailed, CheckpointSaved
from farandole.base.events.worker_events import WorkerLost
from farandole.base.membership import WorkerTelemetry
from farandole.base.wire.control import EventRecord, HostStatus, Status, WorkerSummary
from farandole.job.launch.job_history import POINTS_KEPT, Curves, JobHistory, epoch_of, means_of_values


def status(step: int | None = 7, telemetry: WorkerTelemetry | None = None, workers: int = 2) -> Status:
    members = tuple(
        WorkerSummary(f"w{rank}", rank, "here", rank, 100 + rank, "trains", 3, step, telemetry)
        for rank in range(workers)
    )
    hosts = (HostStatus("here", 4, workers, is_connected=True),)
    return Status("job", "training", 1, 0, step, workers, 0, 1, None, members, (), hosts, (), 0)


class Telling:
    """A history that is told events, with numbers and times of their own."""

    def __init__(self) -> None:
        self.history, self.number = JobHistory(), 0

    def tell(self, event: Event) -> dict[str, object]:
        self.number += 1
        record = EventRecord(1, self.number, 0.0, event.level, event.line(), event.fields())
        return self.history.on_event(
            msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=EventRecord), self.number
        )


def recovered(number: int, is_planned: bool = False) -> Recovered:
    times = {"ready_ms": 5.0, "connected_ms": 6.0, "synced_ms": 7.0, "first_step_ms": 12.0, "silent_ms": 0.0}
    return Recovered(
        number, is_planned, "w1 is dying", ("w1, killed",), ("its exit",), (), 30.0, **times, slowest="w2",
        steps_redone=1, samples_redone=12,
    )  # fmt: skip


def test_a_kill_and_a_join_become_generations_with_phases() -> None:
    telling = Telling()
    telling.tell(GenerationStarted(1, ("w0", "w1", "w2"), True, 0.0))
    telling.tell(WorkerLost("w1", 1, "was killed", 2))
    telling.tell(RegroupBegan(2, "w1 is dying", ("w0", "w2")))
    telling.tell(GenerationStarted(2, ("w0", "w2"), False, 0.02))
    told = telling.tell(recovered(2))
    assert told["totals"] == {"lost": 1, "joined": 0, "steps_redone": 1, "samples_redone": 12}
    telling.tell(ChangePlanned(3, "w3 joins"))
    told = telling.tell(GenerationStarted(3, ("w0", "w2", "w3"), False, 0.03))
    first, second, third = telling.history.generations
    assert (first.lost, first.joined, first.is_planned) == ((), (), True)
    assert (second.lost, second.is_planned, second.total_ms, second.slowest) == (("w1",), False, 30.0, "w2")
    assert second.phases_ms == {"silent": 0.0, "ready": 5.0, "connected": 6.0, "synced": 7.0, "first_step": 12.0}
    assert (third.joined, third.is_planned, third.reason, third.phases_ms) == (("w3",), True, "w3 joins", {})
    assert told["generation"] == third.as_dict()
    assert telling.history.newest == (1, 7)


def test_a_page_that_is_opened_late_knows_what_is_left() -> None:
    telling = Telling()
    assert telling.tell(recovered(9)).get("generation") is None
    assert telling.history.as_dict(0.0)["generations"] == []


def test_checkpoints_are_listed_with_their_failures() -> None:
    telling = Telling()
    telling.tell(CheckpointSaved("w0", 10, "step-10", 0.5))
    telling.tell(CheckpointFailed("w0", 20, "No space left on device"))
    saved, failed = telling.history.checkpoints
    assert (saved["is_saved"], saved["step"], saved["took_s"]) == (True, 10, 0.5)
    assert (failed["is_saved"], failed["reason"]) == (False, "No space left on device")


def test_the_rate_is_that_of_the_last_seconds_and_begins_anew_at_a_checkpoint() -> None:
    history = JobHistory()
    rates = [
        history.on_status(status(step), at)["point"]["rate"] for at, step in ((0.0, 0), (1.0, 10), (2.0, 20), (9.0, 90))
    ]
    assert rates == [None, 10.0, 10.0, 10.0]
    assert history.on_status(status(40), 10.0)["point"]["rate"] is None
    assert history.on_status(status(45), 11.0)["point"]["rate"] == 5.0


def test_values_are_means_over_the_members_that_log_them_and_only_finite_numbers_are_shown() -> None:
    given = status(telemetry=WorkerTelemetry(values={"loss": 2.0, "bad": float("nan")}))
    one, two = given.members
    other = msgspec.structs.replace(two, telemetry=WorkerTelemetry(values={"loss": 4.0}))
    silent = msgspec.structs.replace(two, telemetry=None)
    assert means_of_values(msgspec.structs.replace(given, members=(one, other, silent))) == {"loss": 3.0}


def test_the_epoch_is_that_of_the_most_advanced_member() -> None:
    given = status(telemetry=WorkerTelemetry(epoch=1, trained=590, samples=600))
    ahead = msgspec.structs.replace(given.members[1], telemetry=WorkerTelemetry(epoch=2, trained=10, samples=600))
    assert epoch_of(msgspec.structs.replace(given, members=(given.members[0], ahead))) == (2, 10, 600)
    assert epoch_of(status()) == (0, 0, 0)


def test_everything_is_json() -> None:
    telling = Telling()
    telling.tell(GenerationStarted(1, ("w0",), True, 0.0))
    measured = WorkerTelemetry(
        step_s=0.02, waiting_s=0.005, resident_bytes=1 << 28, cores=0.5, values={"loss": 1.0}, share=0.25
    )
    telling.history.on_status(status(telemetry=measured), 5.0)
    picture = msgspec.json.decode(msgspec.json.encode(telling.history.as_dict(5.0)))
    assert picture["status"]["workers"][1] == ["w1", 1, "here", 1, 101, "trains", 7, 3, 20.0, 5.0, 1 << 28, 0.5, 0.25]
    assert picture["curves"]["columns"]["value:loss"] == [1.0]
    assert picture["events"][0]["name"] == "GenerationStarted"


@pytest.mark.parametrize("points", [10, POINTS_KEPT, 10 * POINTS_KEPT])
def test_curves_show_the_whole_job_with_a_limited_number_of_points(points: int) -> None:
    curves = Curves()
    for number in range(points):
        curves.add(float(number), {"a": float(number)} if number < points // 2 else {"a": float(number), "b": 1.0})
    assert len(curves.at) <= POINTS_KEPT
    assert curves.at[0] == 0.0
    assert curves.at[-1] >= points * 0.9 - 1
    assert curves.columns["a"] == curves.at
    assert curves.columns["b"][0] is None
    assert curves.columns["b"][-1] == 1.0
