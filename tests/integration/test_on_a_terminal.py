"""Jobs on a real terminal: the progress line is below their output, damages none of it, and is gone in the end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from farandole.testing.running_job import FARANDOLE_RUN
from tests.support.jobs import ELASTIC_JOB, SCRIPTS, processes_with
from tests.support.terminal import OnTerminal, Screen

pytestmark = pytest.mark.long

LONG_S = 90.0
WIDE = 400  # no row is continued in the next one
NOISY = str(SCRIPTS / "noisy_worker.py")
TRAINS = re.compile(r"epoch \d+: \d+% \| .*step [\d,]+ \| [\d,.]+ samples/s \| 2 workers")
NARROW = re.compile(r"epoch \d+: \d+%( \| step [\d,]+)?")
NOISE = re.compile(r"\[[01w\d]+\] (line \d+ of rank [01]|100%\|##########|\d+%\|#*|red \d+|still red|the last line)?")


def no_line_is_left(screen: Screen) -> bool:
    return not any(" workers" in row and "samples/s" in row for row in screen.rows) and screen.last == ""


@pytest.mark.timeout(240)
def test_a_job_tells_its_progress_over_a_recovery_and_in_a_narrow_terminal(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    words = ["-np", "2", sys.executable, str(ELASTIC_JOB), "--epochs", "1000000", "--item-ms", "2"]
    words += ["--stop", str(tmp_path / "stop"), "--records", str(records)]
    with OnTerminal([*FARANDOLE_RUN, *words], columns=WIDE) as job:
        job.wait_until(lambda screen: TRAINS.search(screen.last) is not None, LONG_S)
        victim = next(records.glob("worker-*.jsonl")).name.split("-")[1]
        os.kill(int(victim), signal.SIGKILL)
        job.wait_until(lambda screen: "| recovered in " in screen.last, LONG_S)
        wide = job.screen.rows[:-1]
        job.resize(30)
        job.wait_until(lambda screen: NARROW.fullmatch(screen.last) is not None, LONG_S)
        job.resize(WIDE)
        narrow_rows = len(job.screen.rows)  # in which a message may have been continued
        job.wait_until(lambda screen: TRAINS.search(screen.last) is not None, LONG_S)
        (tmp_path / "stop").touch()
        assert job.wait(LONG_S) == 0, job.screen.rows
        assert no_line_is_left(job.screen), job.screen.rows
        wide += job.screen.rows[narrow_rows:-1]
        assert [row for row in wide if not row.startswith("[")] == []
        assert job.screen.rows[-2].endswith("2 workers finished the training.")


FUNCTION_JOB = """
import sys, time
from pathlib import Path
import farandole as fd

def work(stop):
    while not Path(stop).exists():
        print("a line of the function", flush=True)
        time.sleep(0.1)
    return "the result"

print(fd.run(work, (sys.argv[1],), num_proc=2, progress="auto"))
"""


def test_a_program_that_runs_a_function_may_show_the_line_of_its_job(tmp_path: Path) -> None:
    program, stop = tmp_path / "program.py", tmp_path / "stop"
    program.write_text(FUNCTION_JOB)
    with OnTerminal([sys.executable, str(program), str(stop)], columns=WIDE) as job:
        job.wait_until(lambda screen: re.search(r"0:0\d \| 2 workers", screen.last) is not None, LONG_S)
        stop.touch()
        assert job.wait(LONG_S) == 0, job.screen.rows
        assert {re.sub(r"^\[w?\d\] ", "", row) for row in job.screen.rows[:-2]} == {"a line of the function"}
        assert job.screen.rows[-2:] == ["['the result', 'the result']", ""]


@pytest.mark.parametrize("how", ["ends", "Ctrl-C", "fails"])
def test_the_output_of_noisy_workers_is_undamaged_and_the_terminal_clean_at_any_end(tmp_path: Path, how: str) -> None:
    stop = tmp_path / "stop"
    command = [*FARANDOLE_RUN, "-np", "2", sys.executable, NOISY, str(stop)]
    with OnTerminal(command, columns=WIDE) as job:
        job.wait_until(lambda screen: "] 0:02 | 2 workers" in screen.last, LONG_S)
        if how == "ends":
            stop.touch()
        elif how == "Ctrl-C":
            job.type(b"\x03")
        else:
            stop.write_text("3")
        code = job.wait(LONG_S)
        assert code == {"ends": 0, "Ctrl-C": 130, "fails": 3}[how]
        rows = job.screen.rows
        assert rows[-1] == ""
        damaged = [row for row in rows[:-1] if not NOISE.fullmatch(row) and not row.startswith("[farandole] ")]
        assert [row for row in damaged if row != "^C"] == []
        for rank in "01":
            numbers = [int(found[1]) for row in rows if (found := re.search(rf"line (\d+) of rank {rank}$", row))]
            assert numbers == list(range(len(numbers)))
            assert len(numbers) > 10
        assert all("31" in colours for row, colours in zip(rows, job.screen.colours, strict=True) if "] red" in row)
    assert processes_with(str(stop)) == []


def test_without_a_terminal_there_is_nothing_new_unless_it_is_asked_for(tmp_path: Path) -> None:
    command = [*FARANDOLE_RUN, "-np", "1", "--progress"]
    script = ["sh", "-c", "echo told; sleep 1.5"]
    told = [
        subprocess.run([*command, choice, *script], capture_output=True, timeout=LONG_S)
        for choice in ("auto", "always")
    ]
    assert all(each.returncode == 0 and each.stdout == b"[w0] told\n" for each in told), told
    assert b"\x1b" not in told[0].stderr
    assert b"\x1b[K" in told[1].stderr
    assert b"1 worker" in told[1].stderr
