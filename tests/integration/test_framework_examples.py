"""The examples with trainers of others: a worker is killed, the other goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farandole.testing.running_job import FARANDOLE_RUN
from farandole.training.ledger.check import check
from farandole.training.ledger.proving import Folder
from tests.support.jobs import processes_with

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"


def worker_in(ledger: Path, script: Path) -> int:
    """A worker of the job, as soon as two have trained a few steps."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        files = list(ledger.glob("w*.jsonl"))
        if len(files) == 2 and all(file.stat().st_size > 1000 for file in files):
            for pid in processes_with(str(ledger)):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if words[1:2] == [str(script).encode()]:
                    return pid
        time.sleep(0.002)
    raise TimeoutError("no two workers train")


@pytest.mark.parametrize(("framework", "epochs", "steps"), [("lightning", 5, 300), ("transformers", 1, 30)])
def test_an_example_survives_a_kill(tmp_path: Path, framework: str, epochs: int, steps: int) -> None:
    pytest.importorskip(framework)
    script, ledger = EXAMPLES / framework / "train.py", tmp_path / "ledger"
    words = [*FARANDOLE_RUN, "-np", "2", "--restarts", "0", "--sample-ledger", str(ledger), sys.executable, str(script)]
    with (
        (tmp_path / "output").open("wb") as output,
        subprocess.Popen([*words, "--epochs", str(epochs)], stdout=output, stderr=output, cwd=tmp_path) as job,
    ):
        try:
            os.kill(worker_in(ledger, script), signal.SIGKILL)
            assert job.wait(60) == 0, (tmp_path / "output").read_text()
        finally:
            if job.poll() is None:
                job.send_signal(signal.SIGINT)
                job.wait(20)
    said = (tmp_path / "output").read_text()
    assert "killed by SIGKILL" in said
    assert set(re.findall(r"worker \d: (\d+) steps", said)) == {str(steps)}
    found = check(Folder(ledger))
    assert found.is_exact
    assert found.whole_epochs() == epochs
