"""What shells complete: the words of the commands, their options and the values of these, from the parsers."""

from __future__ import annotations

import argparse
import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from farandole.job.launch.cli import _main_parser
from farandole.job.launch.completion_command import SHELLS, all_commands, completion_script
from tests.support.terminal import OnTerminal

LONG_S = 30.0
# The words of a command line so far, as readline divides them, and then what the function finds.
ASK = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _farandole; printf "%s\\n" "${COMPREPLY[@]}"'


@functools.cache
def script() -> str:
    return completion_script("bash")


def found(*words: str) -> set[str]:
    """What bash offers for the last of these words."""
    command = ["bash", "--norc", "-c", f"{script()}\n{ASK}", "bash", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=True)
    assert done.stderr == ""
    return {line for line in done.stdout.splitlines() if line}


def test_every_command_is_completed() -> None:
    (action,) = (action for action in _main_parser()._actions if action.dest == "command")
    assert {name.split()[0] for name in all_commands()} == {*(action.choices or ()), "horovodrun"}
    assert found("farandole", "s") == {"status", "stacks", "scale", "slurm"}
    assert found("farandole", "to") == {"torchrun", "top"}
    assert {"run", "agent", "page", "doctor", "completion"} < found("farandole", "")
    assert found("farandole", "kubernetes", "") == {"manifest"}
    assert found("farandole", "kubernetes", "--h") == {"--help"}
    assert found("farandole", "slurm", "g") == {"grow"}


def test_options_are_those_of_the_command() -> None:
    assert found("farandole", "run", "--progr") == {"--progress"}
    assert found("farandole", "torchrun", "--nproc") == {"--nproc-per-node", "--nproc_per_node"}
    assert found("horovodrun", "--check") >= {"--check-build", "--checkpoint"}
    assert found("farandole", "stacks", "--a") == {"--all", "--address"}
    assert found("farandole", "slurm", "grow", "2", "--job") == {"--job", "--job-file"}
    assert found("farandole", "status", "--no-such") == set()


def test_values_are_offered_after_a_space_or_an_equals_sign() -> None:
    assert found("farandole", "run", "--progress", "") == {"auto", "never", "always"}
    assert found("farandole", "run", "-np", "2", "--transport", "h") == {"hierarchical"}
    assert found("farandole", "run", "--progress", "=", "ne") == {"never"}
    assert found("farandole", "run", "--progress", "=") == {"auto", "never", "always"}
    assert found("farandole", "run", "-np", "--") == set(), "any number may come here"
    assert found("farandole", "completion", "") == {"bash", "zsh", "fish"}


def test_a_value_is_not_taken_for_the_command_of_the_user() -> None:
    wanted = {"--events"}
    assert found("farandole", "run", "-H", "a", ":", "2", "--even") == wanted
    assert found("farandole", "run", "--blacklist-cooldown-range", "1", "2", "--even") == wanted
    assert found("farandole", "run", "--page", "--even") == wanted
    assert found("farandole", "run", "--page", "=", "a", ":", "1", "--even") == wanted


def test_the_options_of_the_users_command_are_its_own() -> None:
    assert "bash" in found("farandole", "run", "-np", "2", "bas")
    assert found("farandole", "run", "-np", "2", "python", "--even") == set()
    assert found("farandole", "run", "-np", "2", "--", "--even") == set()
    assert found("farandole", "torchrun", "train.py", "--progr") == set()


@pytest.mark.skipif(shutil.which("bash") is None, reason="it needs bash")
def test_the_tabulator_completes_a_command_line_in_bash(tmp_path: Path) -> None:
    file = tmp_path / "completion"
    file.write_text(script())
    (tmp_path / "my-job-file").touch()
    command = ["bash", "--norc", "--noprofile", "-i"]
    with OnTerminal(command, 200, {"TERM": "dumb", "PS1": "$ ", "INPUTRC": "/dev/null"}, tmp_path) as bash:
        bash.wait_until(lambda screen: screen.last == "$ ", LONG_S)
        bash.type(f"source {file}\n".encode())
        bash.wait_until(lambda screen: screen.rows[-2:] == [f"$ source {file}", "$ "], LONG_S)
        for typed, shown in (
            (b"farandole torc\t", "farandole torchrun "),
            (b"--standa\t", "farandole torchrun --standalone "),
            (b"--progress=ne\t", "farandole torchrun --standalone --progress=never "),
            (b"--events my-\t", "farandole torchrun --standalone --progress=never --events my-job-file "),
        ):
            bash.type(typed)
            bash.wait_until(lambda screen, shown=shown: screen.last == f"$ {shown}", LONG_S)


def test_files_and_folders_are_offered_where_a_value_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own-file").touch()
    (tmp_path / "own-folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert found("farandole", "run", "--tls", "own") == {"own-folder"}
    assert found("farandole", "run", "--job-file", "own") == {"own-file", "own-folder"}
    assert found("farandole", "ledger", "check", "own") == {"own-folder"}
    assert found("farandole", "run", "--host", "own") == set()


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_can_read_their_scripts(shell: str, tmp_path: Path) -> None:
    text = completion_script(shell)
    for name, parser in all_commands().items():
        assert all(word in text for word in name.split())
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        assert all(flag.lstrip("-") in text for action in shown for flag in action.option_strings), name
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / "script"
    file.write_text(text)
    done = subprocess.run([shell, "-n", str(file)], capture_output=True, text=True, timeout=LONG_S)
    assert (done.returncode, done.stderr) == (0, "")
