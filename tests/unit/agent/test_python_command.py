"""Which commands a fork server can do, and what it has to do for them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from farandole.job.agent.fork_server import PythonCommand, python_command
from farandole.job.agent.spawner import forkable


@pytest.mark.parametrize(
    ("command", "options", "target"),
    [
        ("python train.py", "", "train.py"),
        ("python3.11 train.py -m --epochs 3", "", "train.py -m --epochs 3"),
        ("/usr/bin/python -O -u train.py", "-O -u", "train.py"),
        ("python -W error -X dev -Wonce -Xutf8 ./train.py a", "-W error -X dev -Wonce -Xutf8", "./train.py a"),
        ("python --check-hash-based-pycs never t.py", "--check-hash-based-pycs never", "t.py"),
        ("python -m package.train -c", "", "-m package.train -c"),
        ("python -um train", "-u", "-m train"),
        ("python -bW error -m train", "-bW error", "-m train"),
    ],
)
def test_scripts_and_modules_are_taken_apart(command: str, options: str, target: str) -> None:
    words = command.split()
    assert python_command(words) == PythonCommand(words[0], tuple(options.split()), tuple(target.split()))


@pytest.mark.parametrize(
    "command",
    [
        "",
        "train.py",
        "bash train.sh",
        "pythonic train.py",
        "python",
        "python -",
        "python -c print()",
        "python -uc print()",
        "python -i train.py",
        "python -x train.py",
        "python -m",
        "python --version",
        "python -W error",
        "python train.zip",
        "python folder",
        "python -X importtime train.py",
        "python -Ximporttime train.py",
        "torchrun train.py",
    ],
)
def test_everything_else_is_left_alone(command: str) -> None:
    assert python_command(command.split()) is None


def test_another_interpreter_than_our_own_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    assert forkable([sys.executable, "train.py"]) is not None
    assert forkable([str(other), "train.py"]) is None
    assert forkable([str(tmp_path / "python3"), "train.py"]) is None
    assert os.access(other, os.X_OK)
