"""A command that cannot work is refused with a reason; one that can stays as it stands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farandole.errors import ConfigError
from farandole.job.launch.command import checked, python_script


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_command_that_can_work_stays_as_it_stands() -> None:
    Path("train.py").touch()
    for command in (["sh", "-c", "x"], [sys.executable, "-u", "train.py", "nosuch.py"], [sys.executable, "-m", "x"]):
        assert checked(command) == command


def test_a_script_that_cannot_be_executed_is_given_to_this_python() -> None:
    Path("train.py").touch()
    assert checked(["train.py", "--lr", "1"]) == [sys.executable, "train.py", "--lr", "1"]


def test_a_script_that_can_be_executed_stays_as_it_stands() -> None:
    Path("train.py").touch(mode=0o755)
    assert checked(["./train.py", "1"]) == ["./train.py", "1"]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ([], "the command is missing"),
        ([sys.executable, "train.py"], "train.py: no such file"),
        ([sys.executable, "-u", "-W", "ignore", "-Xdev", "train.py"], "train.py: no such file"),
        (["train.py"], "train.py: no such file"),
        (["./train.sh"], "./train.sh: no such file"),
        (["no-such-command"], "no-such-command: no such command"),
        (["./notes.txt"], "chmod"),
        (["./folder"], "a directory"),
    ],
)
def test_a_command_that_cannot_work_is_refused(command: list[str], reason: str) -> None:
    Path("notes.txt").touch()
    Path("folder").mkdir()
    with pytest.raises(ConfigError, match=reason):
        checked(command)


@pytest.mark.parametrize(
    ("arguments", "script"),
    [
        (["a.py", "-m", "b"], "a.py"),
        (["-m", "a"], None),
        (["-um", "a"], None),
        (["-c", "a"], None),
        (["-"], None),
        ([], None),
        (["-W"], None),
        (["-Wmost", "a.py"], "a.py"),
        (["-X", "importtime", "--check-hash-based-pycs", "never", "-I", "a.py"], "a.py"),
    ],
)
def test_the_script_is_found_among_the_interpreters_options(arguments: list[str], script: str | None) -> None:
    assert python_script(arguments) == script
