"""A whole job over streams: real processes, a real kill."""

from __future__ import annotations

from pathlib import Path

from farandole.testing.proof import Proof
from farandole.testing.running_job import RunningJob
from tests.jobs import SCRIPTS

SAMPLES = 500


def test_a_kill_in_the_middle_of_an_epoch_loses_and_repeats_no_sample_of_a_stream(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    script = SCRIPTS / "stream_job.py"
    with RunningJob(["-np", "3"], script, ["--killed", str(killed)], tmp_path, tmp_path / "output") as running:
        assert running.wait(60) == 0, (tmp_path / "output").read_text()
    assert killed.exists()
    proof = Proof(tmp_path)
    epochs = proof.epochs(SAMPLES)
    assert epochs.is_exact, epochs
    assert epochs.complete == 3
    assert len(proof.generations()) > 1
