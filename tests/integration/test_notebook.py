"""The notebook among the examples, executed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS

pytestmark = pytest.mark.long

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook" / "digits.ipynb"


def test_the_notebook_trains_two_workers_and_uses_their_model() -> None:
    """Its cells, one after the other, in a process of their own with a running event loop, as a kernel has one."""
    runner = str(SCRIPTS / "run_notebook.py")
    done = subprocess.run([sys.executable, runner, str(NOTEBOOK)], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    check_output_of_notebook(done.stdout)


def test_the_notebook_runs_in_a_kernel_of_jupyter() -> None:
    """The packages are those of tests/browser: `make test-page`."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=90).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    check_output_of_notebook("".join(output.get("text", "") for output in outputs))


def check_output_of_notebook(text: str) -> None:
    assert re.findall(r"\[0\] epoch (\d): loss \S+, 2 workers", text) == ["1", "2", "3", "4", "5"]
    (accuracy,) = re.findall(r"accuracy (\S+)%", text)
    assert float(accuracy) > 80


def test_the_notebook_is_stored_without_output() -> None:
    code = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
