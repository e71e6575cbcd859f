"""Output and failures of `farandole torchrun` are shown as torchrun shows them."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

from farandole.base.env import TorchrunSettings
from farandole.base.events.worker_events import WorkerFailed, WorkerSpawned
from farandole.integrations.torchrun.torchrun_options import parse_torchrun
from farandole.integrations.torchrun.torchrun_output import FailureReport, Places, TorchrunOutput, run_folder


def spawned(worker: str, rank: int, attempt: int = 0) -> WorkerSpawned:
    return WorkerSpawned(worker, rank, "localhost", 0, 3, rank, rank, attempt)


def shown(folder: Path, *arguments: str, prefix: str | None = None) -> str:
    """What the console shows of two workers, each of which writes a line to either stream in each of two attempts."""
    settings = TorchrunSettings({}, line_prefix=prefix)
    options = parse_torchrun(["--nproc-per-node", "2", "--log-dir", str(folder), *arguments, __file__], settings)
    console = io.TextIOWrapper(io.BytesIO(), write_through=True)

    async def main() -> None:
        places = Places()
        output = TorchrunOutput(options, run_folder(options), places, None, console, console)
        for attempt in (0, 1):
            for rank in (0, 1):
                worker = f"w{2 * attempt + rank}"
                places.on_event(spawned(worker, rank, attempt))
                output.line(worker, "stdout", f"out {rank} {attempt}".encode())
                output.line(worker, "stderr", f"err {rank} {attempt}".encode())
                output.closed(worker)
        output.close()

    asyncio.run(main())
    return console.buffer.getvalue().decode()  # type: ignore[attr-defined, no-any-return]


def files(folder: Path) -> dict[str, str]:
    [run] = folder.iterdir()
    assert run.name.startswith("none_")
    return {str(path.relative_to(run)): path.read_text() for path in run.rglob("*.log")}


def test_lines_have_no_prefix_and_go_to_no_file(tmp_path: Path) -> None:
    assert shown(tmp_path).splitlines()[:3] == ["out 0 0", "err 0 0", "out 1 0"]
    assert files(tmp_path) == {}


def test_redirected_streams_go_to_the_files_of_their_attempt_only(tmp_path: Path) -> None:
    assert shown(tmp_path, "-r", "0:3,1:2").splitlines() == ["out 1 0", "out 1 1"]
    assert files(tmp_path) == {
        "attempt_0/0/stdout.log": "out 0 0\n",
        "attempt_0/0/stderr.log": "err 0 0\n",
        "attempt_0/1/stderr.log": "err 1 0\n",
        "attempt_1/0/stdout.log": "out 0 1\n",
        "attempt_1/0/stderr.log": "err 0 1\n",
        "attempt_1/1/stderr.log": "err 1 1\n",
    }


def test_teed_streams_go_to_the_files_and_with_a_prefix_to_the_console(tmp_path: Path) -> None:
    assert shown(tmp_path, "-t", "1", "--role", "train").splitlines()[:2] == ["[train0]:out 0 0", "err 0 0"]
    assert set(files(tmp_path)) == {f"attempt_{attempt}/{rank}/stdout.log" for attempt in (0, 1) for rank in (0, 1)}


def test_the_template_of_the_prefix_is_torchrun_s(tmp_path: Path) -> None:
    lines = shown(tmp_path, "-t", "1", prefix="<${role_name}:$rank/${local_rank}:${other}> ")
    assert lines.splitlines()[0] == "<default:0/0:${other}> out 0 0"


def test_only_the_ranks_of_the_filter_are_shown_and_the_files_have_all(tmp_path: Path) -> None:
    assert shown(tmp_path, "-t", "1", "--local-ranks-filter", "1").splitlines() == [
        "[default1]:out 1 0",
        "err 1 0",
        "[default1]:out 1 1",
        "err 1 1",
    ]
    assert len(files(tmp_path)) == 4


def failed(rank: int, attempt: int = 0, **fields: object) -> WorkerFailed:
    known = {"pid": 100 + rank, "exit_code": 1, **fields}
    return WorkerFailed(f"w{rank}", "node1", rank, rank, attempt, **known)  # type: ignore[arg-type]


def test_the_root_cause_is_the_earliest_failure() -> None:
    report = FailureReport()
    report.on_event(failed(0, time_s=1700000002, message="RuntimeError: connection reset", traceback="Traceback A\nx"))
    report.on_event(failed(1, time_s=1700000001, message="ValueError: bad batch", traceback="Traceback B\ny"))
    text = report.text("train.py")
    others, root = text.split("Root Cause (first observed failure):")
    assert "train.py FAILED" in others
    assert "Traceback A\n  x" in others
    assert "[1]:" in root
    assert "rank      : 1 (local_rank: 1)" in root
    assert "Traceback B\n  y" in root


def test_a_signal_and_an_exit_without_an_error_file_are_described_as_by_torchrun() -> None:
    report = FailureReport()
    report.on_event(failed(0, exit_code=-9))
    report.on_event(failed(1, exit_code=3))
    text = report.text("train.py")
    assert "exitcode  : -9 (pid: 100) (SIGKILL)" in text
    assert "Signal 9 (SIGKILL) received by PID 100" in text
    assert "To enable traceback see: https://pytorch.org" in text
    assert text.index("SIGKILL") > text.index("Root Cause")


def test_only_the_last_attempt_counts() -> None:
    report = FailureReport()
    report.on_event(failed(0, exit_code=5))
    report.on_event(spawned("w2", 0, attempt=1))
    assert report.text("train.py") == ""
    report.on_event(failed(1, attempt=1, exit_code=6))
    assert "exitcode  : 5" not in report.text("train.py")
    assert "<NO_OTHER_FAILURES>" in report.text("train.py")


def test_a_host_that_was_lost_is_named() -> None:
    report = FailureReport()
    report.on_event(failed(0, exit_code=None))
    assert "its host was lost" in report.text("train.py")
