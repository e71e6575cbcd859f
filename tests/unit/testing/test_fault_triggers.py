"""When a fault is triggered, and how fast the job goes towards it."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.testing.faults import parse
from farandole.testing.faults.bringing import Pace, Triggers
from farandole.testing.faults.fault_plan import FaultPhase, Trigger

SAID: dict[FaultPhase, str] = {
    "start": "[farandole] starting w3 in slot 0 on localhost",
    "join": "[farandole] generation 4 is planned: w3 join",
    "regroup": "[farandole] regrouping for generation 5 with w1: w3 was killed",
    "sync": "[farandole] generation 5 starts after 8 ms with 1 worker: w1",
}


def trigger(text: str) -> Trigger:
    return parse(f"at step 0: kill any; {text}: kill any").faults[1].trigger


@pytest.fixture
def output(tmp_path: Path) -> Path:
    path = tmp_path / "output"
    path.write_text("[farandole] generation 1 starts with 3 workers: w0, w1, w2\n")
    return path


@pytest.mark.parametrize("phase", SAID)
def test_a_phase_has_come_once_the_job_says_so_after_the_fault_before(phase: FaultPhase, output: Path) -> None:
    triggers = Triggers(output, 150)
    with output.open("a") as file:
        file.write(SAID[phase] + "\n")
    assert triggers.has_come(trigger(f"during {phase}"), {})
    triggers.begin()
    assert not triggers.has_come(trigger(f"during {phase}"), {})
    with output.open("a") as file:
        file.write("".join(line + "\n" for each, line in SAID.items() if each != phase))
    assert not triggers.has_come(trigger(f"during {phase}"), {})
    with output.open("a") as file:
        file.write(SAID[phase] + "\n")
    assert triggers.has_come(trigger(f"during {phase}"), {})


def test_a_step_has_come_once_any_worker_has_begun_it(output: Path) -> None:
    triggers = Triggers(output, 150)
    assert not triggers.has_come(trigger("at step 7"), {})
    assert not triggers.has_come(trigger("at step 7"), {0: {"after": 6}, 1: {"before": 6}})
    assert triggers.has_come(trigger("at step 7"), {0: {"after": 6}, 1: {"before": 7}})
    assert not triggers.has_come(trigger("at last step of epoch 1"), {0: {"before": 298}})
    assert triggers.has_come(trigger("at last step of epoch 1"), {0: {"before": 299}})


def test_a_time_is_counted_from_the_fault_before(output: Path) -> None:
    triggers = Triggers(output, 150)
    triggers.begin()
    assert triggers.has_come(trigger("after 0 s"), {})
    assert not triggers.has_come(trigger("after 60 s"), {})


def test_the_job_goes_fast_unless_a_step_or_its_end_must_not_come_yet(tmp_path: Path) -> None:
    pace = Pace(tmp_path / "pace", fast_ms=2, steps=450)

    def said() -> float:
        return float((tmp_path / "pace").read_text())

    assert said() == 2
    pace.towards(100, 20, can_happen=True)
    assert said() == 2
    pace.towards(100, 99, can_happen=True)
    assert said() == 10, "long enough for it to happen in this step"
    pace.towards(100, 20, can_happen=False)
    further = said()
    pace.towards(100, 98, can_happen=False)
    assert 2 < further < said()
    pace.towards(None, 300, can_happen=True)
    assert said() == 2
    pace.towards(None, 446, can_happen=True)
    assert said() > 1000, "the end waits for faults"
    pace.full_speed()
    assert said() == 2
