"""What the workers' records prove, and what they catch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from farandole.testing.proof import Proof


def write(folder: Path, pid: int, *records: dict[str, Any]) -> None:
    lines = [json.dumps(record | {"pid": pid}) + "\n" for record in records]
    (folder / f"worker-{pid}.jsonl").write_text("".join(lines))


def before(step: int, generation: int, ids: list[int], epoch: int = 0) -> dict[str, Any]:
    return {"before": step, "generation": generation, "ids": ids, "epoch": epoch}


def after(step: int, generation: int) -> dict[str, Any]:
    return {"after": step, "generation": generation}


def test_the_samples_of_a_step_are_those_of_the_attempt_that_stands(tmp_path: Path) -> None:
    """Worker 2 applies step 0 and dies before worker 1 has; worker 1 does it again, alone."""
    write(tmp_path, 2, before(0, 1, [5, 3]), after(0, 1))
    write(tmp_path, 1, before(0, 1, [1]), before(0, 2, [3, 1]), before(0, 2, [5]), after(0, 2), before(1, 2, [0]))
    proof = Proof(tmp_path)
    assert proof.samples_by_step() == {0: [(0, 1), (0, 3), (0, 5)]}
    assert proof.redone() == 1


def test_a_rehearsal_between_two_generations_is_no_attempt_at_a_step(tmp_path: Path) -> None:
    write(tmp_path, 1, before(0, 1, [1]), after(0, 1), before(1, 2, []), before(1, 3, [0], epoch=1), after(1, 3))
    assert Proof(tmp_path).redone() == 0


def test_a_sample_that_two_workers_train_in_one_step_is_there_twice(tmp_path: Path) -> None:
    write(tmp_path, 1, before(0, 1, [4], epoch=2), after(0, 1))
    write(tmp_path, 2, before(0, 1, [4], epoch=2), after(0, 1))
    assert Proof(tmp_path).samples_by_step() == {0: [(2, 4), (2, 4)]}


def test_what_a_lost_job_had_trained_behind_the_end_of_the_one_that_went_on_does_not_stand(tmp_path: Path) -> None:
    """Worker 1 is lost in the second epoch with its job; worker 2 goes on in the first one, and ends with that."""
    first = [before(0, 1, [0, 1]), after(0, 1), before(1, 1, [2, 3]), after(1, 1), before(2, 1, [3, 0], epoch=1)]
    write(tmp_path, 1, *first, after(2, 1))
    assert Proof(tmp_path).epochs(4).lost == {1: [1, 2]}
    write(tmp_path, 2, before(1, 2, [2, 3]), after(1, 2), {"end": 2, "generation": 2})
    proof = Proof(tmp_path)
    assert proof.epochs(4).is_exact
    assert proof.epochs(4).complete == 1
    assert proof.steps() == 2
