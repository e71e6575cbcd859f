"""Sentences for people."""

from __future__ import annotations

import pytest

from farandole.job.coordinator.sentences import format_exit, listed


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL (signal 9)"),
        (-11, "was killed by SIGSEGV (signal 11)"),
        (-99, "was killed by signal 99"),
    ],
)
def test_exit_codes_are_said_in_words(exit_code: int, words: str) -> None:
    assert format_exit(exit_code) == words


@pytest.mark.parametrize(("names", "words"), [("", "none"), ("a", "a"), ("ab", "a and b"), ("abc", "a, b and c")])
def test_names_are_listed_as_a_person_would(names: str, words: str) -> None:
    assert listed(names) == words
