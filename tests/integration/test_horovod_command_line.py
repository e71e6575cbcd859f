"""horovodrun as its users type it, with real workers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.jobs import farandole_run, horovodrun

SHOW = "import os; print(*(f'{name}={value}' for name, value in os.environ.items() if name.startswith('HOROVOD_')))"


def variables_of(line: str) -> dict[str, str]:
    """What a worker printed with SHOW, without the worker's name in front."""
    return dict(word.split("=", 1) for word in line.split()[1:])


def test_workers_are_told_their_places_and_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("params: {fusion_threshold_mb: 4, cache_capacity: 7}\nstall_check: {warning_time_seconds: 9}\n")
    words = ["-H", "localhost:2", "--config-file", str(file), "--cache-capacity", "8", "--log-level", "INFO"]
    done = horovodrun("-np", "2", *words, sys.executable, "-c", SHOW)
    assert done.returncode == 0, done.stderr
    places = [variables_of(line) for line in sorted(done.stdout.splitlines())]
    assert [place["HOROVOD_RANK"] for place in places] == ["0", "1"]
    for place in places:
        assert place["HOROVOD_SIZE"] == place["HOROVOD_LOCAL_SIZE"] == "2"
        assert place["HOROVOD_FUSION_THRESHOLD"] == str(4 << 20)
        assert place["HOROVOD_CACHE_CAPACITY"] == "8"
        assert place["HOROVOD_STALL_CHECK_TIME_SECONDS"] == "9"
        assert place["HOROVOD_LOG_LEVEL"] == "INFO"
        assert place["HOROVOD_ELASTIC"] == "0"


def test_scripts_find_horovod_under_horovodrun_and_only_with_our_option_elsewhere() -> None:
    code = "import importlib.util; print(importlib.util.find_spec('horovod') is not None)"
    for done, found in (
        (horovodrun("-np", "1", sys.executable, "-c", code, fresh=True), "True"),
        (farandole_run("-np", "1", "--horovod", sys.executable, "-c", code, fresh=True), "True"),
        (farandole_run("-np", "1", sys.executable, "-c", code, fresh=True), "False"),
    ):
        assert done.stdout.split()[-1] == found, done.stderr


def test_what_has_no_effect_is_said_once_and_the_job_runs() -> None:
    done = horovodrun("-np", "2", "--gloo", "--cycle-time-ms", "3", "--mpi", "-q", "sh", "-c", "true")
    assert done.returncode == 0
    notes = [line for line in done.stderr.splitlines() if "no effect" in line]
    assert [note.split()[1] for note in notes] == ["--mpi", "--cycle-time-ms"]


def test_a_job_with_a_discovery_script_is_elastic(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost\n")
    script.chmod(0o755)
    words = ["--host-discovery-script", str(script), "--slots-per-host", "2", "--max-np", "2"]
    done = horovodrun("-np", "2", *words, sys.executable, "-c", SHOW)
    assert done.returncode == 0, done.stderr
    assert [variables_of(line)["HOROVOD_ELASTIC"] for line in done.stdout.splitlines()] == ["1", "1"]


@pytest.mark.parametrize(("slots", "is_homogeneous"), [("2,127.0.0.1:1", False), ("1,127.0.0.1:2", False), ("3", True)])
def test_workers_know_whether_all_hosts_have_equally_many(tmp_path: Path, slots: str, is_homogeneous: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text("import horovod.torch as hvd; hvd.init(); print(hvd.mpi_ops.is_homogeneous())")
    done = horovodrun("-np", "3", "-H", f"localhost:{slots}", sys.executable, str(script))
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == [str(is_homogeneous)] * 3


def test_other_machines_are_refused_with_their_names() -> None:
    done = horovodrun("-np", "2", "-H", "no-such-host.invalid:2", "sh", "-c", "true")
    assert done.returncode == 2
    assert "no-such-host.invalid" in done.stderr


@pytest.mark.parametrize("flag", ["--version", "-v"])
def test_the_version_is_told(flag: str) -> None:
    done = horovodrun(flag, fresh=True)
    assert done.returncode == 0
    assert done.stdout.startswith("farandole ")


def test_without_a_number_of_workers_it_says_how_to_give_one() -> None:
    done = horovodrun("-H", "localhost:2", "sh")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "horovodrun: the number of workers is missing: give -np, for example -np 2",
        "Try 'horovodrun --help'.",
    ]
