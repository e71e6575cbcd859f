"""The commands that ask a job which runs: all are in the help and in the reference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from farandole import registry
from farandole.job.launch.cli import _has_lost_reader, main
from farandole.job.launch.control_parser import COMMANDS as CONTROL, control_parser

REFERENCE = (Path(__file__).parents[3] / "docs" / "reference.md").read_text()


@pytest.mark.parametrize("command", CONTROL)
def test_every_command_and_option_is_in_the_reference(command: str) -> None:
    assert f"`farandole {command}" in REFERENCE
    for action in control_parser(command)._actions:
        flags = [flag for flag in action.option_strings if flag not in ("-h", "--help")]
        assert all(f"`{flag}" in REFERENCE for flag in flags), flags


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    text = capsys.readouterr().out
    assert "farandole COMMAND --help" in text
    assert all(f"\n  {command} " in text for command in ("run", *CONTROL, *registry.COMMANDS))


@pytest.mark.parametrize("words", [["scale"], ["scale", "many"], ["drain"], ["status", "x"], ["scale", "2", "--x"]])
def test_words_that_make_no_sense_are_usage_errors(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"farandole {words[0]}" in capsys.readouterr().err


def test_only_a_pipe_that_nobody_reads_any_more_has_lost_its_reader() -> None:
    reading, writing = os.pipe()
    assert not _has_lost_reader(writing)
    os.close(reading)
    assert _has_lost_reader(writing)
    os.close(writing)
