"""What the person who started a job is told about it."""

from __future__ import annotations

import io

import pytest

from farandole.base.config import JobConfig
from farandole.base.events.event import Event
from farandole.base.events.generation_events import GenerationStarted, Recovered, RegroupBegan
from farandole.base.events.job_events import JobEnds, JobRemarked, TrainingCutShort, WorkerMetOthers, WorkerTrainsAlone
from farandole.base.events.worker_events import StatesDiverged, UserCodeFailed, WorkerLost, WorkerSpawned
from farandole.job.launch.report import Loudness, Report

STARTED = GenerationStarted(1, ("w0", "w1", "w2"), True, 0.0)
SPAWNED = WorkerSpawned("w3", 1, "localhost", 1, 3)
REGROUP = RegroupBegan(2, "w1 was lost", ("w0", "w2"))
AGAIN = GenerationStarted(2, ("w0", "w3", "w2"), False, 0.1)
TRACEBACK = ("Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: no good")


def lost(*last_lines: str) -> WorkerLost:
    return WorkerLost("w1", 1, "was killed by SIGKILL", 2, last_lines)


def told(*events: Event, loudness: Loudness = Loudness.NORMAL, exit_code: int = 0) -> list[str]:
    stream, now_s = io.TextIOWrapper(io.BytesIO()), iter([0.0, 10.0, 22.34])
    report = Report(stream, loudness, clock=lambda: next(now_s))
    report.started(JobConfig(3, min_np=2), ["python", "my train.py"])
    for event in events:
        report.on_event(event)
    report.ended(exit_code, "This is why.")
    report.close()
    return stream.buffer.getvalue().decode().splitlines()


def test_a_job_with_one_loss_is_told_from_its_start_to_its_end() -> None:
    assert told(STARTED, lost("Killed?"), SPAWNED, REGROUP, AGAIN, JobEnds(0, "x")) == [
        "[farandole] 3 workers (at least 2) to run python 'my train.py'",
        f"[farandole] {STARTED.line()}",
        f"[farandole] {lost().line()}",
        "[farandole]     | Killed?",
        f"[farandole] {REGROUP.line()}",
        f"[farandole] {AGAIN.line()}",
        "[farandole] 2 generations, 1 worker lost, 1 joined, 12.3 s",
        "[farandole] success. This is why.",
    ]


def test_workers_that_trained_alone_are_no_success() -> None:
    alone = [WorkerTrainsAlone(worker, 2) for worker in ("w0", "w1")]
    _, first, second, _, last = told(*alone)
    assert first == f"[farandole] {alone[0].line()}"
    assert second == "[farandole] w1 trains alone, too"
    assert last == "[farandole] 2 workers trained each for itself, not together with the others. This is why."
    *_, last = told(alone[0], exit_code=3)
    assert last == (
        "[farandole] failed (exit code 3), and 1 worker trained for itself, not together with the others. This is why."
    )
    *_, last = told(*alone, WorkerMetOthers("w0"), WorkerMetOthers("w1"))
    assert last == "[farandole] success. This is why."


def test_a_job_that_did_less_than_was_promised_is_not_called_a_success() -> None:
    cut_short = TrainingCutShort(4, 3, 40, 30)
    *_, told_it, _, last = told(STARTED, cut_short, JobEnds(0, "x"))
    assert told_it == f"[farandole] {cut_short.line()}"
    assert last == "[farandole] ended by the script after 10 of 40 steps. This is why."
    assert (
        told(TrainingCutShort(4, 3, 0, 0))[-1]
        == "[farandole] ended by the script after 1 of 4 whole epochs. This is why."
    )
    assert told(TrainingCutShort())[-1] == "[farandole] ended by the script. This is why."
    assert told(STARTED, cut_short, loudness=Loudness.QUIET)[0] == f"[farandole] {cut_short.line()}"
    assert told(cut_short, exit_code=3)[-1] == "[farandole] failed (exit code 3). This is why."


def test_what_was_left_out_or_mended_is_in_the_last_line() -> None:
    remarks = [JobRemarked("skipped", "1 of 9 steps was skipped"), JobRemarked("skipped", "2 of 9 steps were skipped")]
    mended = StatesDiverged(7, "weight", 1, ("w1",), "w0", is_fatal=False)
    assert told(*remarks)[-1] == "[farandole] finished, with remarks: 2 of 9 steps were skipped. This is why."
    assert told(mended, remarks[0], mended)[-1] == (
        "[farandole] finished, with remarks: the states of workers differed 2 times, and were copied; "
        "1 of 9 steps was skipped. This is why."
    )
    assert told(TrainingCutShort(4, 3, 40, 30), mended)[-1] == (
        "[farandole] ended by the script after 10 of 40 steps, with remarks: the states of workers differed once, and "
        "were copied. This is why."
    )
    assert told(mended, exit_code=3)[-1].startswith("[farandole] failed (exit code 3), with remarks: the states of")


def test_the_last_line_of_a_failure_says_why() -> None:
    assert told(exit_code=3)[-1] == "[farandole] failed (exit code 3). This is why."


@pytest.mark.parametrize("is_planned", [True, False])
def test_quiet_tells_of_a_recovery_where_a_warning_has_told_of_the_loss(is_planned: bool) -> None:
    recovered = Recovered(2, is_planned, "x", (), (), (), 9.0, 3000.0, 2.0, 1.0, 1.0, 5.0, "w0", 2, 24)
    said = told(STARTED, recovered, loudness=Loudness.QUIET)[:-2]
    assert said == ([] if is_planned else [f"[farandole] {recovered.line()}"])


def test_quiet_keeps_warnings_and_the_end() -> None:
    assert told(STARTED, SPAWNED, REGROUP, loudness=Loudness.QUIET)[:-2] == [f"[farandole] {REGROUP.line()}"]


def test_verbose_keeps_everything() -> None:
    said = told(STARTED, SPAWNED, REGROUP, JobEnds(0, "x"), loudness=Loudness.VERBOSE)
    assert len(said) == 1 + 4 + 2


def test_of_many_last_lines_the_last_few_are_told() -> None:
    said = told(lost(*map(str, range(20)), "", "  "))
    assert said[2:-2] == [f"[farandole]     | {number}" for number in range(15, 20)]


def test_exceptions_of_workers_are_in_the_last_line_of_a_job_that_went_on_without_them() -> None:
    raised = [UserCodeFailed(worker, "ValueError: no good", "") for worker in ("w1", "w2")]
    assert told(raised[0])[-1] == "[farandole] finished, with remarks: w1 raised ValueError: no good. This is why."
    assert told(*raised)[-1] == (
        "[farandole] finished, with remarks: w1 raised ValueError: no good, and 1 other worker raised exceptions, too. "
        "This is why."
    )


def test_a_traceback_is_not_told_again() -> None:
    raised = UserCodeFailed("w1", "ValueError: no good", "\n".join(TRACEBACK))
    assert told(raised, lost(*TRACEBACK))[1:-2] == [
        "[farandole] w1 raised ValueError: no good",
        f"[farandole] {lost().line()}",
    ]
    assert told(lost(*TRACEBACK))[2:-2] == ["[farandole]     | ValueError: no good"]


def test_a_script_for_horovod_that_does_not_find_it_is_told_how_to_start_it() -> None:
    missing = "ModuleNotFoundError: No module named 'horovod'"
    assert told(lost(*TRACEBACK[:2], missing), exit_code=1)[-1].endswith("start it with farandole run --horovod")
    assert not told(lost(*TRACEBACK), exit_code=1)[-1].endswith("--horovod")
