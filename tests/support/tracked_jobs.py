"""Jobs whose numbers are tracked: the training of tests/scripts/tracked_job.py, undisturbed and with faults."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from farandole.elastic import MetricsReader
from tests.scripts.tracked_job import STEPS, STEPS_PER_EPOCH
from tests.support.jobs import SCRIPTS, farandole_run
from tests.support.pages import ROOT, blocks_of_pages

FAULTS = ("before the log", "behind the log", "in the last step", "leaving")
WORKERS = 3

Curves = dict[str, dict[int, float]]
"""The values of each name by step."""


def curves_of(file: Path) -> Curves:
    curves: Curves = {}
    for step, values in MetricsReader(file, from_start=True).read():
        for name, value in values.items():
            curves.setdefault(name, {})[step] = value
    return curves


def undisturbed(folder: Path) -> Curves:
    """The curves of one worker that nothing happens to."""
    folder.mkdir()
    job = farandole_run("-np", "1", sys.executable, str(SCRIPTS / "tracked_job.py"), "--file", str(folder / "m.csv"))
    assert job.returncode == 0, job.stderr
    curves = curves_of(folder / "m.csv")
    every_step, ends = list(range(1, STEPS + 1)), list(range(STEPS_PER_EPOCH, STEPS + 1, STEPS_PER_EPOCH))
    assert {name: list(curve) for name, curve in curves.items()} == {
        "loss": every_step,
        "lr": every_step,
        "epoch/weight": ends,
    }
    return curves


def check_curves(found: Curves, expected: Curves, relative: float = 1e-9) -> None:
    """Each step is there once, in order, with the value of the undisturbed run."""
    assert sorted(found) == sorted(expected)
    for name, curve in expected.items():
        assert list(found[name]) == list(curve), name
        assert list(found[name].values()) == pytest.approx(list(curve.values()), rel=relative), name


def run_recipe(module: str, folder: Path, **variables: str) -> str:
    """Run the script of docs/logging.md that imports this module, whose job loses rank 0 four times. Its output."""
    recipe = next(
        block.code
        for block in blocks_of_pages()
        if block.place.startswith("docs/logging.md") and block.not_run and module in block.code
    )
    (folder / "watch.py").write_text(recipe)
    (folder / "train.py").write_text(
        textwrap.dedent(f"""
            import runpy, sys
            sys.argv = ["tracked_job.py", "--file", "metrics.csv", "--faults", "{WORKERS}"]
            runpy.run_path({str(SCRIPTS / "tracked_job.py")!r}, run_name="__main__")
        """)
    )
    path = os.pathsep.join([str(_command(folder)), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **variables}
    command = [sys.executable, "watch.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in folder.glob("ended-*")) == [f"ended-{name}" for name in FAULTS]
    return done.stdout + done.stderr


def _command(folder: Path) -> Path:
    """A folder with this checkout's `farandole`, and this Python as `python`."""
    (folder / "bin").mkdir()
    for name, words in (("farandole", f'"{sys.executable}" -m farandole'), ("python", f'"{sys.executable}"')):
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    return folder / "bin"
