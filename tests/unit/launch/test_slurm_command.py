"""`farandole slurm grow` and `shrink`, with stand-ins for Slurm's commands that write down how they were called."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from farandole.base.membership import Address
from farandole.integrations.slurm.slurm_command import DONE, NOT_DONE, slurm_command
from farandole.job.launch.job_files import JobFile

TOKEN = b"0123456789abcdef" * 4


class Commands:
    """Slurm's commands in a folder, and a job file in the home folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.home = folder, folder / "home"
        for name in ("sbatch", "squeue", "scancel"):
            self.answer(name, "")
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.setenv("HOME", str(self.home))
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    def answer(self, name: str, text: str, code: int = 0) -> None:
        script = f'#!/bin/sh\necho "{name} $*" >> {self.folder}/calls\n'
        script += f"cat > {self.folder}/input\n" if name == "sbatch" else ""
        program = self.folder / name
        program.write_text(f"{script}printf '%b' '{text}'\nexit {code}\n")
        program.chmod(0o755)

    def add_job(self, job: str, mode: int = 0o600) -> Path:
        path = self.home / ".farandole" / f"slurm-{job}.job"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(JobFile("j", 1, None, Address("h", 1), TOKEN, ("python",), 0.0)))
        path.chmod(mode)
        return path

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(tmp_path, monkeypatch)


def test_grow_submits_an_array_of_jobs_that_run_an_agent(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    file = commands.add_job("7")
    commands.answer("sbatch", "12\\n")
    assert slurm_command(["grow", "4", "--", "--partition=cheap", "--gpus-per-node=8"]) == DONE
    (call,) = commands.calls
    assert "--array=1-4 --nodes=1 --job-name=farandole-7" in call
    assert call.endswith("--partition=cheap --gpus-per-node=8")
    script = (commands.folder / "input").read_text()
    assert script.startswith("#!/bin/sh\nexec ")
    assert f"-m farandole agent --slurm --job-file {file}" in script
    assert TOKEN.decode() not in call + script
    assert "Slurm job 12 adds 4 nodes to job 7" in capsys.readouterr().out


def test_inside_of_a_job_its_number_is_known(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.add_job("7")
    commands.add_job("8")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert slurm_command(["grow", "1"]) == DONE
    assert "--job-name=farandole-8" in commands.calls[0]


def test_shrink_cancels_what_has_not_begun_and_then_the_newest(commands: Commands) -> None:
    commands.add_job("7")
    commands.answer("squeue", "9_1|RUNNING|9\\n12_1|RUNNING|13\\n12_2|RUNNING|14\\n12_3|PENDING|12\\n")
    assert slurm_command(["shrink", "2", "--job", "7"]) == DONE
    assert commands.calls[1] == "scancel 12_3 12_2"


def test_fewer_than_requested_are_told(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    commands.add_job("7")
    commands.answer("squeue", "9_1|RUNNING|9\\n")
    assert slurm_command(["shrink", "2"]) == DONE
    assert "cancelled 9_1; no more were added, so 1 less than requested" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["grow", "0"], "N must be at least 1, got 0"),
        (["grow", "1"], "give the number of the Slurm job with --job; of the job files, those of 7, 8 are in"),
        (["grow", "1", "--job", "9"], "slurm-9.job does not exist: the job has not started yet, or has ended"),
        (["grow", "1", "--job", "8"], "slurm-8.job can be read by others"),
        (["shrink", "1", "--job", "7", "--", "--x"], "shrink takes no options of sbatch, got --x"),
    ],
)
def test_what_cannot_work_is_refused(
    commands: Commands, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    commands.add_job("7")
    commands.add_job("8", mode=0o644)
    assert slurm_command(arguments) == 2
    assert says in capsys.readouterr().err
    assert commands.calls == []


def test_a_refusal_of_slurm_is_shown(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    commands.add_job("7")
    (commands.folder / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    assert slurm_command(["grow", "1"]) == NOT_DONE
    assert "sbatch ended with exit code 1: sbatch: error: invalid partition" in capsys.readouterr().err


def test_without_slurms_commands_the_error_says_where_to_run_it(
    commands: Commands, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.add_job("7")
    monkeypatch.setenv("PATH", str(commands.home))
    assert slurm_command(["grow", "1"]) == 2
    assert "there is no sbatch in PATH: run this where Slurm's commands are installed" in capsys.readouterr().err


def test_shrink_without_added_nodes_says_so(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    commands.add_job("7")
    assert slurm_command(["shrink", "1"]) == NOT_DONE
    assert "no node was added to job 7" in capsys.readouterr().err


def test_programs_get_the_numbers_as_json(commands: Commands, capsys: pytest.CaptureFixture[str]) -> None:
    commands.add_job("7")
    commands.answer("sbatch", "12\\n")
    assert slurm_command(["grow", "4", "--json"]) == DONE
    told = json.loads(capsys.readouterr().out)
    assert (told["job"], told["slurm_job"], told["nodes"]) == ("7", "12", 4)
    commands.answer("squeue", "12_1|RUNNING|13\\n")
    assert slurm_command(["shrink", "2", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out) == {"job": "7", "cancelled": ["12_1"], "missing": 1}
