"""A command that changes a job of another user asks first."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from farandole.job.launch import control_client
from farandole.job.launch.cli import main
from farandole.job.launch.control_client import NoConsent, require_consent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of another user: this process takes itself for the next one."""
    path = tmp_path / "job"
    path.write_text("{}")
    here = os.getuid()
    monkeypatch.setattr(control_client.os, "getuid", lambda: here + 54321)
    return path


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> Terminal:
    shown = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(text))
    monkeypatch.setattr("sys.stderr", shown)
    return shown


def test_a_job_of_ones_own_needs_no_consent(tmp_path: Path) -> None:
    path = tmp_path / "job"
    path.touch()
    for mine in (path, None, tmp_path / "missing"):
        require_consent(mine, "scale it to 2 workers")


def test_without_a_terminal_the_advice_is_yes(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(NoConsent, match=r"is the file of a job of .*, and you are user \d+: to scale it .*, add --yes"):
        require_consent(job_file, "scale it to 2 workers")


def test_on_a_terminal_the_user_is_asked(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = answer(monkeypatch, "y\n")
    require_consent(job_file, "scale it to 2 workers")
    assert "Scale it to 2 workers? [y/N]" in shown.getvalue()
    for text in ("", "\n", "no\n"):
        answer(monkeypatch, text)
        with pytest.raises(NoConsent, match="nothing was changed"):
            require_consent(job_file, "scale it to 2 workers")


def test_scale_asks_and_with_yes_it_does_not(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "2", "--job-file", str(job_file)]) == 1
    assert "add --yes" in capsys.readouterr().err
    assert main(["scale", "2", "--yes", "--job-file", str(job_file)]) == 2
    assert "can be read by others" in capsys.readouterr().err
