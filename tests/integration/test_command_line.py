"""The command line as a person meets it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.jobs import farandole_run

HEAVY = ("torch", "numpy", "asyncio", "fsspec")


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["torchrun", "--help"]])
def test_help_comes_at_once(words: list[str]) -> None:
    """What takes the time is what is imported: a count of modules says the same on every machine."""
    command = [sys.executable, "-X", "importtime", "-m", "farandole", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "usage: farandole" in done.stdout
    imported = [line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert len(imported) < 250, imported
    assert not {"torch", "numpy", "asyncio", "fsspec"} & set(imported)


def test_help_loads_nothing_heavy_and_a_job_no_torch() -> None:
    code = (
        "import sys; from farandole.job.launch.arguments import parse_run; from farandole.job.launch import cli\n"
        "parse_run(['-np', '2', 'sh'])\n"
        "from farandole.integrations.torchrun.torchrun_command import parse_torchrun\n"
        "parse_torchrun(['--no-python', 'sh'])\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
        "import farandole.job.launch.job_runner, farandole.job.launch.report\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.splitlines() == ["[]", "False"]


def test_any_command_runs_on_every_worker_and_its_words_come_back_with_its_name() -> None:
    done = farandole_run("-np", "2", "--", "sh", "-c", "echo out $0; echo err >&2", "--help", fresh=True)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[w0] out --help", "[w1] out --help"]
    assert sorted(line for line in done.stderr.splitlines() if line.endswith("] err")) == ["[w0] err", "[w1] err"]
    assert done.stderr.splitlines()[-1].startswith("[farandole] success.")


def test_a_reader_that_leaves_early_stops_nothing() -> None:
    job = subprocess.Popen(
        [sys.executable, "-m", "farandole", "run", "-np", "1", "sh", "-c", "read x; seq 100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with job:
        assert job.stdout is not None
        assert job.stderr is not None
        job.stdout.close()
        assert job.stderr.read().splitlines()[-1].startswith("[farandole] success.")
        assert job.wait(20) == 0


def test_ctrl_c_ends_the_job_without_a_traceback_and_leaves_nobody() -> None:
    job = subprocess.Popen(
        [sys.executable, "-m", "farandole", "run", "-np", "2", "sh", "-c", "echo $$; exec sleep 60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with job:
        assert job.stdout is not None
        assert job.stderr is not None
        workers = [int(job.stdout.readline().split()[1]) for _ in range(2)]
        job.send_signal(signal.SIGINT)
        said = job.stderr.read()
        assert job.wait(20) != 0
    assert "Traceback" not in said
    assert "SIGINT" in said.splitlines()[-1]
    assert said.count("SIGINT: the workers are asked to end") == 1
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
