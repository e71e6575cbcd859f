"""How a job is, for people and programs."""

from __future__ import annotations

import msgspec

from farandole.base.membership import WorkerTelemetry
from farandole.base.wire.control import HostStatus, PastEvent, Status
from farandole.job.coordinator.control_requests import FOR_EVER, JobSummary, status_of, summary_of
from farandole.job.launch.control_commands import format_status
from tests.support.told_job import ToldJob


def status(told: ToldJob) -> Status:
    return status_of(told.job, told.now_s)


def states(told: ToldJob) -> dict[str, str]:
    now = status(told)
    return {each.worker: each.state for each in (*now.members, *now.newcomers)}


def test_the_state_follows_the_job_from_its_start_to_its_end() -> None:
    told = ToldJob(2)
    seen = [status(told).state]
    seen.append(status(told.training()).state)
    seen.append(status(told.exited("w1")).state)
    seen.append(status(told.ready(2, "w0").synced("w0")).state)
    seen.append(status(told.finished("w0")).state)
    seen.append(status(told.exited("w0", 0)).state)
    assert seen == ["starting", "training", "regrouping", "training", "finishing", "ending"]


def test_before_an_elastic_function_the_workers_are_in_their_setup() -> None:
    assert status(ToldJob(2).hello("w0", "w1")).state == "setup"


def test_members_come_by_rank_and_newcomers_with_what_they_do() -> None:
    told = ToldJob(3, slots=4, max_np=4, restarts=2).training().exited("w1").ready(2, "w0", "w2")
    now = status(told)
    assert [(each.worker, each.rank, each.slot, each.pid) for each in now.members] == [("w0", 0, 0, 1), ("w2", 1, 2, 1)]
    assert [(each.worker, each.rank, each.restarts_left) for each in now.newcomers] == [("w3", None, 1)]
    assert (now.generation, now.wanted, now.regroups, now.min_np, now.max_np) == (2, 3, 1, 1, 4)
    assert states(told) == {"w0": "trains", "w2": "trains", "w3": "starts"}
    told.hello("w3").elastic("w3")
    assert (states(told)["w3"], status(told).change) == ("waits", 3)


def test_a_worker_that_leaves_fails_or_has_finished_says_so() -> None:
    told = ToldJob(4).training().raised("w1", "ValueError: x", exits=False).finished("w3")
    told.feed_hosts(**{"host-a": 3})
    assert states(told) == {"w0": "trains", "w1": "fails", "w2": "trains", "w3": "leaves"}
    told = ToldJob(2).training().finished("w1")
    assert states(told) == {"w0": "trains", "w1": "has finished"}


def test_hosts_say_what_runs_there_and_what_is_against_them() -> None:
    config = {"on_failure": "host", "cooldown_range_s": (10.0, 40.0), "min_np": 1}
    told = ToldJob(2, slots=0, **config).offer(a=1, b=1, c=1).training().exited("w1")
    a, b, c = status(told).hosts
    assert a == HostStatus("a", slots=1, workers=1, is_connected=True)
    assert (b.failures, 20.0 <= b.out_for_s <= 40.0) == (1, True)
    assert (c.workers, c.failures) == (1, 0)
    told = ToldJob(2, slots=0, on_failure="host").offer(a=1, b=1).training().exited("w1")
    assert status(told).hosts[1].out_for_s == FOR_EVER


def test_spares_and_slots_that_sit_out_are_shown() -> None:
    told = ToldJob(2, slots=4, spares=2).training()
    told.hello("w2").elastic("w2").exited("w3", 1).exited("w4", 1)
    now = status(told)
    assert (now.spares, [each.worker for each in now.newcomers]) == (2, ["w2"])
    (backoffs,) = now.backoffs
    assert (backoffs.host, backoffs.slot, backoffs.failures) == ("host-a", 3, 2)
    assert backoffs.for_s > 0
    text = "\n".join(format_status(now))
    assert "1 of 2 spares wait" in text
    assert "slot 3 on host-a is in backoff for" in text


def test_a_status_goes_through_json_and_has_words_for_all_of_it() -> None:
    told = ToldJob(2, slots=3).training()
    now = msgspec.structs.replace(status(told), step=7, events=(PastEvent(7200.0, "generation 1 starts"),))
    assert msgspec.json.decode(msgspec.json.encode(now), type=Status) == now
    text = "\n".join(format_status(now))
    for words in ("job job: training, generation 1, step 7", "2 of 2 workers", "host-a", "w1", "2 h ago"):
        assert words in text, words


def test_steps_are_those_that_agents_see() -> None:
    now = status_of(ToldJob(2).training().job, 0.0, {"w0": 7, "w1": 8, "gone": 99})
    assert [worker.step for worker in now.members] == [7, 8]
    assert now.step == 8


def test_measurements_are_shown_where_there_are_some() -> None:
    job = ToldJob(2).training().job
    assert "step time" not in "\n".join(format_status(status_of(job, 0.0)))
    measured = WorkerTelemetry(0.02, 0.005, epoch=3, trained=500, samples=2000, resident_bytes=321_000_000, cores=0.9)
    text = "\n".join(format_status(status_of(job, 0.0, {}, {"w0": measured})))
    for words in ("epoch 3 (500 of 2,000 samples, 25%)", "20.0 ms", "25%", "321 MB", "0.90"):
        assert words in text, words


def test_slots_that_are_missing_are_shown() -> None:
    text = "\n".join(format_status(status(ToldJob(3, slots=2))))
    assert "waiting for 1 more slot (2 of 3 are available)" in text
    assert "more slot" not in "\n".join(format_status(status(ToldJob(2, slots=2))))


def test_the_summary_is_that_of_the_member_that_is_furthest() -> None:
    told = ToldJob(3)
    first = summary_of(told.job)
    assert (first.state, first.step, first.members, first.wanted) == ("starting", None, 3, 3)
    told.training().exited("w2")
    steps = {"w0": 7, "w1": 8, "w2": 99}
    measured = (WorkerTelemetry(epoch=epoch, trained=30, samples=100) for epoch in (1, 2, 9))
    telemetry = dict(zip(("w0", "w1", "w2"), measured, strict=True))
    assert summary_of(told.job, steps, telemetry) == JobSummary("regrouping", 8, 2, 30, 100, 2, 3)
