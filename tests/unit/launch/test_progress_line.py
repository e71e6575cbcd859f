"""The text of the progress line: what it tells, and what it leaves out where there is little room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farandole.base.events.generation_events import Recovered
from farandole.job.coordinator.control_requests import JobSummary
from farandole.job.launch.progress_line import Part, ProgressLine, Rate, duration, fitted

TRAINING = JobSummary("training", step=100, epoch=3, trained=2_000, samples=10_000, members=4, wanted=4)


def recovered(total_ms: float = 312.4, is_planned: bool = False) -> Recovered:
    lost = () if is_planned else ("w1 was killed",)
    return Recovered(2, is_planned, "", lost, (), (), total_ms, 0, 1, 1, 1, 1, "w0", 0, 0)


def line_of(*summaries: JobSummary, every_s: float = 1.0, columns: int = 200) -> str:
    """The line after these summaries, one after the other."""
    line, now_s = ProgressLine(0.0), 0.0
    for summary in summaries:
        now_s += every_s
        line.on_summary(summary, now_s)
    return fitted(line.parts(now_s), columns)


def test_a_job_with_a_loader_tells_epoch_time_left_step_rate_workers_and_the_last_recovery() -> None:
    line = ProgressLine(0.0)
    line.on_summary(TRAINING, 10.0)
    assert fitted(line.parts(10.0), 200) == "[farandole] epoch 3: 20% | step 100 | 4 workers"
    line.on_summary(replace(TRAINING, step=150, trained=4_500), 12.0)
    line.on_event(recovered())
    assert fitted(line.parts(12.0), 200) == (
        "[farandole] epoch 3: 45% | 0:04 left in it | step 150 | 1,250 samples/s | 4 workers | recovered in 312 ms"
    )


def test_nothing_is_told_before_the_first_summary() -> None:
    assert fitted(ProgressLine(0.0).parts(5.0), 80) == ""


def test_a_script_without_steps_tells_for_how_long_it_has_run() -> None:
    plain = JobSummary("starting", None, 0, 0, 0, members=2, wanted=2)
    assert line_of(*[plain] * 65) == "[farandole] 1:05 | 2 workers"
    assert line_of(replace(plain, members=1, wanted=1)) == "[farandole] 0:01 | 1 worker"


def test_without_a_loader_the_rate_is_that_of_steps() -> None:
    first = JobSummary("training", 10, 0, 0, 0, members=2, wanted=3)
    assert line_of(first, replace(first, step=18)) == "[farandole] step 18 | 8.0 steps/s | 2 of 3 workers"


def test_a_stream_has_no_percentage_and_no_time_left() -> None:
    first = JobSummary("training", 10, 1, 500, 0, members=2, wanted=2)
    assert line_of(first, replace(first, trained=900)) == "[farandole] epoch 1 | step 10 | 400 samples/s | 2 workers"


@pytest.mark.parametrize("state", ["regrouping", "finishing", "ending"])
def test_a_state_in_which_nobody_trains_is_told(state: str) -> None:
    assert line_of(replace(TRAINING, state=state)).startswith(f"[farandole] {state} | epoch 3: 20%")


def test_a_planned_change_was_no_recovery_and_long_ones_are_told_in_seconds() -> None:
    line = ProgressLine(0.0)
    line.on_summary(TRAINING, 1.0)
    line.on_event(recovered(120.0, is_planned=True))
    assert line.parts(1.0)[-1].text == "changed in 120 ms"
    line.on_event(recovered(12_345.0))
    assert line.parts(1.0)[-1].text == "recovered in 12.3 s"


def test_the_rate_goes_on_over_the_end_of_epochs_also_of_short_ones() -> None:
    """200 samples a second: 150 to the end of epoch 3 and 50 of the next one; then two whole epochs at once."""
    epochs = [(3, 50), (3, 250), (4, 50), (4, 250), (6, 50)]
    summaries = [replace(TRAINING, epoch=epoch, trained=trained, samples=400) for epoch, trained in epochs]
    assert "200 samples/s" in line_of(*summaries[:4])
    assert f"{(50 + 2 * 400 + 200 + 150) / 4:,.0f} samples/s" in line_of(*summaries)


def test_a_job_that_begins_again_at_an_older_epoch_has_no_rate_at_first() -> None:
    later, earlier = replace(TRAINING, epoch=4, step=400), replace(TRAINING, epoch=2, step=200)
    assert "/s" not in line_of(later, earlier)
    assert "/s" not in line_of(replace(TRAINING, trained=5_000), TRAINING), "nor one that went back within an epoch"


def test_the_rate_of_rare_steps_is_known_and_falls_when_they_stay_away() -> None:
    rate = Rate()
    for second in range(121):
        rate.add(second, 7 * (second // 30))
    assert rate.per_s(121) == pytest.approx(7 / 30)
    assert rate.per_s(300) == pytest.approx(7 / (300 - 60 - 90), rel=0.01)


def test_only_the_last_seconds_count_for_the_rate() -> None:
    rate = Rate()
    for second in range(101):
        rate.add(second, second if second <= 50 else 50 + 100 * (second - 50))
    assert rate.per_s(100) == pytest.approx(100)


def test_narrow_terminals_lose_the_least_important_parts_first() -> None:
    line = ProgressLine(0.0)
    line.on_summary(TRAINING, 1.0)
    line.on_summary(replace(TRAINING, trained=4_000, step=200, state="regrouping"), 2.0)
    line.on_event(recovered())
    parts = line.parts(2.0)
    shown = [fitted(parts, columns) for columns in range(130, -1, -1)]
    assert all(len(text) <= columns for text, columns in zip(shown, range(130, -1, -1), strict=True))
    assert list(dict.fromkeys(shown))[:7] == [
        "[farandole] regrouping | epoch 3: 40% | 0:03 left in it | step 200 | 2,000 samples/s | 4 workers"
        " | recovered in 312 ms",
        "regrouping | epoch 3: 40% | 0:03 left in it | step 200 | 2,000 samples/s | 4 workers | recovered in 312 ms",
        "regrouping | epoch 3: 40% | 0:03 left in it | step 200 | 2,000 samples/s | 4 workers",
        "regrouping | epoch 3: 40% | step 200 | 2,000 samples/s | 4 workers",
        "regrouping | epoch 3: 40% | step 200 | 4 workers",
        "regrouping | epoch 3: 40% | step 200",
        "regrouping | epoch 3: 40%",
    ]
    assert shown[-1] == fitted(parts, -1) == ""


def test_no_parts_are_an_empty_line() -> None:
    assert fitted([], 80) == ""
    assert fitted([Part(7, "[farandole]")], 80) == "[farandole]"


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0:00"), (7.4, "0:07"), (723, "12:03"), (10_800, "3:00:00")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
