"""The same script under torchrun's rules and in place: `python -m tests.differential.run`. Each script is run by two
processes of torch, or more, by `farandole run --in-place`, and by that again with a worker that is killed and replaced.
What the workers report at their end is compared, value by value; see tests/README.md.

Exit code 1 if a job said "success" without a remark, and its values differ."""

from __future__ import annotations

import argparse
import math
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # the forked processes need it: it takes seconds to import

from tests.differential.pieces import COARSE, PIECES, RANDOM
from tests.support import jobs

DEADLINE_S = 180.0
_OF_TORCH_S, _MOST_TRIES = 60.0, 3
Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """How a job ended: its exit code, what its workers have reported, and its output."""

    exit_code: int
    values: list[Values]
    output: str

    @property
    def last_line(self) -> str:
        return next(
            (line for line in reversed(self.output.splitlines()) if "farandole" in line or "success" in line), ""
        )

    def line_with(self, text: str) -> str:
        return next((line for line in self.output.splitlines() if text in line), "")


def by_torch(script: Path, folder: Path, world: int) -> Outcome:
    """Run the script in processes that have torchrun's environment. Now and then they wait for each other for ever, as
    where another process has got their port meanwhile: they are tried again then."""
    for _ in range(_MOST_TRIES - 1):
        outcome = _by_torch(script, folder, world)
        if outcome.exit_code != signal.SIGKILL:
            return outcome
        shutil.rmtree(folder)
    return _by_torch(script, folder, world)


def _by_torch(script: Path, folder: Path, world: int) -> Outcome:
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _be_rank(script, folder, rank, world, port)
        children.append(pid)
    codes, until_s = [], time.monotonic() + _OF_TORCH_S
    for pid in children:
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > until_s:
                os.kill(pid, 9)
            time.sleep(0.01)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    output = "".join(path.read_text() for path in sorted(folder.glob("output-*")))
    return Outcome(max(map(abs, codes)), _reported(folder), output)


def _be_rank(script: Path, folder: Path, rank: int, world: int, port: int) -> None:
    code = 1
    try:
        with (folder / f"output-{rank}").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in own.items()}, MASTER_ADDR="127.0.0.1", OUT=str(folder))
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except BaseException as error:  # noqa: BLE001 - a forked process must end here
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def in_place(script: Path, folder: Path, world: int, *, is_disturbed: bool, victim: int = 1) -> Outcome:
    folder.mkdir()
    variables = {**os.environ, "OUT": str(folder), "VICTIM": str(victim)}
    if is_disturbed:
        variables["FAULT"] = str(folder / "killed")
    command = [sys.executable, "-m", "farandole", "run", "-np", str(world), "--in-place", sys.executable, str(script)]
    with (folder / "output").open("wb") as output, jobs.start(command, output, variables) as job:
        try:
            code = job.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            job.kill()
            code = 124
        jobs.check_nothing_is_left(job)
    return Outcome(code, _reported(folder), (folder / "output").read_text())


def _reported(folder: Path) -> list[Values]:
    return [torch.load(path) for path in sorted(folder.glob("*.pt"))]


def farthest(ours: Values, theirs: Values) -> float:
    """Return the largest difference of a value, relative to 1 or to the value; infinity for other names or shapes."""
    if ours.keys() != theirs.keys() or any(ours[name].shape != theirs[name].shape for name in ours):
        return math.inf
    found = [
        float(((ours[name].double() - theirs[name].double()).abs() / theirs[name].double().abs().clamp(min=1)).max())
        for name in ours
        if ours[name].numel()
    ]
    return max((math.inf if math.isnan(each) else each for each in found), default=0.0)


def verdict(name: str, wanted: Outcome, found: Outcome, *, is_disturbed: bool) -> str:
    """Return a word or two, of which the first is `right`, `static`, `refused`, `remarked`, `failed` or `WRONG`."""
    static = found.line_with("not elastic in place")
    if found.exit_code != 0:
        reason = static or found.line_with("Error") or found.last_line
        return f"{'refused' if static else 'failed'} ({found.exit_code}): {reason[:220]}"
    limit = 2e-2 if name in COARSE else 1e-4 if is_disturbed else 1e-6
    difference = max((farthest(each, wanted.values[0]) for each in found.values), default=math.inf)
    is_one_model = all(farthest(each, found.values[0]) == 0.0 for each in found.values)
    if difference <= limit and is_one_model:
        return f"static: {static[:220]}" if static else f"right ({difference:.1g})"
    remarked = found.line_with("with remarks") or found.line_with("ended by the script")
    if remarked:
        return f"remarked ({difference:.1g}): {remarked[:220]}"
    if is_disturbed and name in RANDOM and is_one_model:
        return f"right: other random numbers ({difference:.1g})"
    return f"WRONG ({difference:.1g}{'' if is_one_model else ', workers differ'}): {found.last_line[:220]}"


def compare(name: str, folder: Path, world: int) -> tuple[str, str]:
    """Return the verdicts of the undisturbed job and of the disturbed one."""
    script = folder / f"{name}.py"
    script.write_text(PIECES[name].script())
    wanted = by_torch(script, folder / "torch", world)
    if wanted.exit_code != 0 or len(wanted.values) != world:
        return f"not compared: it fails by itself ({wanted.exit_code}): {wanted.output[-500:]}", ""
    quiet = in_place(script, folder / "quiet", world, is_disturbed=False)
    lossy = in_place(script, folder / "lossy", world, is_disturbed=True)
    return (
        verdict(name, wanted, quiet, is_disturbed=False),
        verdict(name, wanted, lossy, is_disturbed=True),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--keep", type=Path, help="keep scripts and outputs in this folder")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--at", default="0:2", help="epoch and batch of the fault")
    parser.add_argument("--after", default="", help="only the names behind this one")
    options = parser.parse_args()
    names = [name for name in PIECES if options.only in name]
    if options.after:
        names = names[names.index(options.after) + 1 :]
    if options.list:
        print("\n".join(names))
        return
    os.environ["FAULT_AT"] = options.at
    root = options.keep or Path(tempfile.mkdtemp(prefix="farandole-differential-"))
    wrong = 0
    for name in names:
        folder = root / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        quiet, lossy = compare(name, folder, options.workers)
        wrong += quiet.startswith("WRONG") + lossy.startswith("WRONG")
        print(f"{name:34} {quiet}\n{'':34} {lossy}", flush=True)
    if options.keep is None:
        shutil.rmtree(root)
    print(f"{len(names)} scripts, {wrong} jobs that said success with other values")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
