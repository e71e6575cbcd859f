"""The scripts of the tutorial: the pages show the differences between them, which are small, and all of them run."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, farandole_run
from tests.support.pages import blocks_of_pages

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "examples" / "tutorial"
MOST_CHANGES = 8
MIGRATIONS = [("plain", "elastic", "docs/tutorial.md"), ("ddp", "ddp_elastic", "docs/moving-from-ddp.md")]


def code_of(name: str) -> list[str]:
    """The lines of a script below its docstring."""
    return (TUTORIAL / f"{name}.py").read_text().split("\n")[2:]


def difference(before: str, after: str) -> list[str]:
    lines = difflib.unified_diff(code_of(before), code_of(after), n=2, lineterm="")
    return [line.rstrip() for line in lines if not line.startswith(("---", "+++", "@@"))]


def changes(lines: list[str]) -> int:
    """The number of changed lines: a line in the place of another one counts once, blank lines do not count."""
    runs = re.findall(r"[+-]+", "".join(line[:1] or " " for line in lines if len(line) != 1))
    return sum(max(run.count("+"), run.count("-")) for run in runs)


@pytest.mark.parametrize(("before", "after", "page"), MIGRATIONS)
def test_a_page_shows_the_difference_which_is_at_most_eight_lines(before: str, after: str, page: str) -> None:
    shown = [block.code for block in blocks_of_pages() if block.place.startswith(page) and block.language == "diff"]
    assert [each.strip("\n") for each in shown] == ["\n".join(difference(before, after)).strip("\n")]
    assert 0 < changes(difference(before, after)) <= MOST_CHANGES


def test_a_line_in_the_place_of_another_one_is_one_change() -> None:
    assert changes(["-a", "+b", " c", "+d", "+", "+e", " f", "-g"]) == 4


def test_the_tutorial_shows_the_plain_loop_which_is_run_as_its_block() -> None:
    shown = [each.code for each in blocks_of_pages() if each.place.startswith("docs/tutorial.md")]
    assert shown[0].strip() == "\n".join(code_of("plain")).strip()


def test_a_script_of_ddp_runs_with_two_workers() -> None:
    done = farandole_run("-np", "2", sys.executable, str(TUTORIAL / "ddp.py"))
    assert done.returncode == 0, done.stderr
    assert "epoch 9: loss 0." in done.stdout


@pytest.mark.parametrize("name", ["elastic", "ddp_elastic"])
def test_an_elastic_loop_goes_on_without_a_killed_worker_and_with_a_new_one(tmp_path: Path, name: str) -> None:
    wrapper = [str(SCRIPTS / "kill_in_script.py"), str(tmp_path / "mark"), "100"]
    done = farandole_run("-np", "2", sys.executable, *wrapper, str(TUTORIAL / f"{name}.py"))
    assert done.returncode == 0, done.stderr
    assert "killed by SIGKILL" in done.stderr
    assert "success. 2 workers finished the training." in done.stderr
    assert "epoch 9: loss 0." in done.stdout
