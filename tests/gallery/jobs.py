"""Jobs of the gallery: what their workers ask for meanwhile is done, and one that takes too long says where it is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from farandole.job.launch.job_files import running
from tests.support.launching import ROOT, Launched, launch

_POLL_S = 0.003
_STACKS_S = 0.5  # until the workers have written where they are
_END_S = 3.0


@dataclass(frozen=True)
class Ended:
    """code     exit code of the launcher; negative: the signal that killed it
    seconds  from its start to its end
    late     it was ended because it took longer than it might
    left     processes that it left behind
    """

    code: int
    seconds: float
    late: bool
    left: list[str]


def run(arguments: Sequence[str], folder: Path, environment: Mapping[str, str], deadline_s: float) -> Ended:
    """`farandole ARGUMENTS` with this environment added to ours; what it prints is appended to `folder`/output."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **environment}
    variables["PYTHONDONTWRITEBYTECODE"] = "1"
    began, is_late = time.monotonic(), False
    helpers: dict[Path, Launched] = {}
    with (folder / "output").open("ab") as output:
        with launch(arguments, output, output, variables, folder) as launcher:
            while launcher.poll() is None:
                for request in folder.glob("ask-*"):
                    job = next(each.job for each in running() if each.pid == launcher.pid)
                    words = ["scale", request.read_text(), "--job", job]
                    request.unlink()
                    answer = request.with_name(request.name.replace("ask", "answer"))
                    helpers[answer] = launch(words, output, output, variables, folder)
                for answer, helper in helpers.items():
                    if helper.poll() is not None and not answer.exists():
                        answer.write_text(str(helper.returncode))
                if time.monotonic() - began > deadline_s and not is_late:
                    is_late = True
                    _show_stacks(launcher.pid, folder)
                    _end(launcher)
                time.sleep(_POLL_S)
            seconds = time.monotonic() - began
            left = launcher.left()
        for helper in helpers.values():
            helper.left()
    return Ended(launcher.wait(), round(seconds, 2), is_late, left)


def _show_stacks(launcher: int, folder: Path) -> None:
    for pid in (launcher, *(int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*"))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    time.sleep(_STACKS_S)


def _end(launcher: Launched) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        launcher.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(_END_S)
