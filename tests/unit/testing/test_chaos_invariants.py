"""What the invariants of chaos runs find, on records made up by hand: each of them can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from farandole.testing.proof import Proof
from tests.chaos import invariants
from tests.chaos.case import case_of
from tests.chaos.disturbed_job import Outcome
from tests.chaos.report import soaks, summary
from tests.chaos.run import as_line
from tests.scripts.chaos_job import BATCH, EPOCHS, SAMPLES, SEED, STEPS
from tests.support.pure_order import global_batches

END = {"scheduler_last_epoch": STEPS, "seen": STEPS, "result": float(STEPS), "weights": [1.0], "parameters": "a"}


def write(folder: Path, records: list[dict[str, Any]]) -> Proof:
    by_worker: dict[int, list[str]] = {}
    for record in records:
        full = {"pid": 1, "host": "here", "generation": 1, "rank": 0, "size": 1, **record}
        by_worker.setdefault(full["pid"], []).append(json.dumps(full) + "\n")
    for pid, lines in by_worker.items():
        (folder / f"worker-{pid}-here.jsonl").write_text("".join(lines))
    return Proof(folder)


def good_records() -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for step, samples in global_batches(SAMPLES, BATCH, SEED, EPOCHS).items():
        records += [{"before": step, "epoch": samples[0][0], "ids": [i for _, i in samples]}, {"after": step}]
    return [*records, {"end": STEPS, **END}]


def test_a_good_job_violates_nothing(tmp_path: Path) -> None:
    proof = write(tmp_path, good_records())
    assert [*invariants.training(proof, [1.0]), *invariants.counters(proof, 0)] == []


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        (20, {"ids": [0, 0, 1]}, "samples lost"),
        (-1, {"parameters": "b", "weights": [1.1]}, "weights that are off by 0.1"),
        (-1, {"seen": STEPS - 1}, f"'seen': {STEPS - 1}"),
    ],
)
def test_what_was_trained_wrongly_is_found(place: int, change: dict[str, Any], said: str, tmp_path: Path) -> None:
    records = good_records()
    records[place] |= change
    assert said in " ".join(invariants.training(write(tmp_path, records), [1.0]))


def test_the_right_samples_in_the_wrong_step_are_found(tmp_path: Path) -> None:
    records = good_records()
    records[10]["ids"], records[12]["ids"] = records[12]["ids"], records[10]["ids"]
    found = list(invariants.training(write(tmp_path, records), [1.0]))
    assert found == ["steps that did not train the samples of an undisturbed job: [5, 6]"]


def test_workers_that_end_with_different_parameters_are_found(tmp_path: Path) -> None:
    records = [*good_records(), {"pid": 2, "end": STEPS, **END, "parameters": "b"}]
    found = list(invariants.training(write(tmp_path, records), [1.0]))
    assert found == ["workers ended with different parameters: ['a', 'b']"]


def test_counters_that_go_back_are_found(tmp_path: Path) -> None:
    twice = [{"before": 3, "epoch": 0, "ids": []}, {"after": 3}, {"after": 3, "generation": 2}]
    assert list(invariants.counters(write(tmp_path, twice), 1)) == ["worker ('here', 1) applied step 3 after step 3"]
    begun = [{"before": step, "epoch": 0, "ids": [], "generation": step} for step in (9, 7)]
    found = list(invariants.counters(write(tmp_path, begun), 9))
    assert found == ["worker ('here', 1) went back from step 9 to 7"]


def test_a_fault_costs_one_step_at_most(tmp_path: Path) -> None:
    tries = [{"before": 3, "epoch": 0, "ids": [0], "generation": number} for number in (1, 2, 3)] + [
        {"after": 3, "generation": 3}
    ]
    proof = write(tmp_path, tries)
    assert list(invariants.counters(proof, 1)) == ["2 steps were done again, and there were 1 faults"]
    assert list(invariants.counters(proof, 2)) == []


def test_a_wrong_verdict_is_found() -> None:
    lost = "[farandole] lost w3 (slot 0): it was killed"
    said = f"[farandole] starting w3 in slot 0\n{lost}\n"
    assert list(invariants.verdicts(said, 1)) == []
    assert list(invariants.verdicts(said, 0)) == [f"1 workers were declared lost, and 0 were ended: {[lost]}"]


def test_temporary_files_that_stay_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "_GONE_S", 0.0)
    (tmp_path / "tmp").mkdir()
    tidiness = invariants.Tidiness(tmp_path / "nowhere", tmp_path / "tmp")
    assert list(tidiness.left()) == []
    (tmp_path / "tmp" / "farandole-x").touch()
    assert list(tidiness.left()) == ["temporary files were left: ['farandole-x']"]


def test_results_are_added_up() -> None:
    case = case_of(7)
    good, bad = Outcome(deaths=2, seconds=30), Outcome(violations=["too bad"], seconds=30)
    good.happened["kill"] = 2
    lines = [as_line(case, good), as_line(case, bad), as_line(case_of(7, 3), good)]
    said = summary(json.loads(json.dumps(lines)))
    assert said.startswith("3 jobs of 2 seeds in 2 minutes; 4 faults, 4 workers ended, 1 jobs with violations\n")
    assert "| kill | 4 |" in said
    assert said.endswith(f"seed 7: {case.plan}\n- too bad")


def test_soak_runs_with_the_same_flags_are_added_up() -> None:
    soak = {"every_s": 3.0, "flags": ["--spares=1"], "minutes": 5.0, "kills": 97, "ratio": 1.027}
    soak |= {"longest_stall_s": 0.125, "violations": []}
    other = {**soak, "minutes": 10.0, "kills": 190, "ratio": 0.912, "longest_stall_s": 0.3}
    rare = {**soak, "every_s": 15.0, "flags": [], "kills": 19, "violations": ["too bad"]}
    assert soaks([soak, rare, other]).splitlines()[2:] == [
        "| 15 s |  | 1 | 5 | 19 | 103 % | 0.12 s | 1 |",
        "| 3 s | --spares=1 | 2 | 15 | 287 | 91 to 103 % | 0.30 s | 0 |",
    ]
