"""Each command that shows something also does so as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farandole.job.launch.cli import main
from farandole.job.launch.completion_command import all_commands

WITHOUT = {
    "run": "it shows what a job prints; --events FILE has the events as JSON, `farandole status --json` the rest",
    "torchrun": "as run",
    "horovodrun": "as run",
    "agent": "as run",
    "page": "it serves a page, whose data browsers get as JSON; --print-token prints one word",
    "demo": "it is for people",
    "completion": "it prints a script",
}
"""Commands without --json, with the reason."""


def has_json(name: str) -> bool:
    return "--json" in all_commands()[name]._option_string_actions


@pytest.mark.parametrize("name", all_commands())
def test_every_command_has_json_or_a_reason_to_have_none(name: str) -> None:
    assert has_json(name) == (name not in WITHOUT)


def test_the_reasons_are_those_of_commands_that_there_are() -> None:
    assert WITHOUT.keys() <= all_commands().keys()


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> object:
    capsys.readouterr()
    assert main(words) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_certificates_tell_what_was_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cryptography")
    folder = tmp_path / "tls"
    made = printed(capsys, "certificates", str(folder), "--json")
    assert isinstance(made, dict)
    assert (made["folder"], made["has_new_authority"]) == (str(folder), True)
    again = printed(capsys, "certificates", str(folder), "--json")
    assert isinstance(again, dict)
    assert not again["has_new_authority"]


def test_manifests_are_one_list_that_kubectl_reads(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("kubernetes", "manifest", "--image", "i", "-np", "2", "--json", "python", "train.py")
    told = printed(capsys, *words)
    assert isinstance(told, dict)
    assert (told["apiVersion"], told["kind"]) == ("v1", "List")
    assert {"Secret", "Job", "Service"} <= {each["kind"] for each in told["items"]}


def test_errors_stay_text_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no job runs there
    for words in (["scale", "2"], ["drain", "a"], ["undrain", "a"], ["top"], ["events"], ["stacks", "0"]):
        assert main([*words, "--json"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"farandole {words[0]}: no job of this user runs here")
