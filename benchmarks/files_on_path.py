"""Which of our files run between two moments of a real job: how much of the code one has to read to follow it.

    python -m benchmarks.files_on_path [--list]

A job of three workers with a sample ledger runs with a profiler that notes each call into our code, in the launcher,
the coordinator and the workers. One worker is killed. Printed are the numbers of files, and with --list the files, of
    kill        from kill -9 to the first step of the next generation: a survivor's and the launcher's together
    decision    in the same time: the coordinator's, whose process decides
    death       of both those that do not run, in these processes, in the time before: what is there for the death
    step        an ordinary training step
    backward    loss.backward() in one of these
    allreduce   a named all-reduce
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

STEPS, BEGUN_AT, KILLED_AT = 60, 2, 40

_PROFILER = """
import atexit, json, os, sys, threading, time
calls, seen = [], {}
def note(frame, event, argument):
    if event == "call":
        name = frame.f_code.co_filename
        place = seen.get(name)
        if place is None:
            place = name.rpartition("/farandole/")[2] if "/src/farandole/" in name else ""
            place = seen[name] = "" if place.startswith("testing/") else place  # the script's own
        if place:
            calls.append((time.monotonic_ns(), place))
def write():
    sys.setprofile(None)
    path = os.path.join(os.path.dirname(__file__), "calls-%d" % os.getpid())
    with open(path, "w") as file:
        json.dump(calls, file)
    os.rename(path, path + ".json")  # some processes are killed at the end of the job
def exit_forked(code, exit=os._exit):
    write()
    exit(code)
threading.setprofile(note)
sys.setprofile(note)
atexit.register(write)
os._exit = exit_forked
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the files, too")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        _train(options.train)
        return
    for name, files in _measure().items():
        folders = Counter(str(Path(file).parent) for file in files)
        print(f"{name:10} {len(files):4} files in {len(folders)} folders")
        if options.list:
            print(*(f"    {file}" for file in sorted(files)), sep="\n")


def _measure() -> dict[str, set[str]]:
    with tempfile.TemporaryDirectory(prefix="farandole-files-") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(_PROFILER)
        path = os.pathsep.join([name, str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        flags = ["-np", "3", "--min-np", "2", "--restarts", "0", "--fork-server", "off"]
        flags += ["--sample-ledger", str(folder / "ledger")]
        job = [sys.executable, "-m", "benchmarks.files_on_path", "--train", name]
        command = [sys.executable, "-m", "farandole", "run", *flags, *job]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
        if done.returncode != 0:
            raise SystemExit(f"the traced job failed:\n{done.stderr}")
        marks = {int(file.stem.partition("-")[2]): json.loads(file.read_text()) for file in folder.glob("marks-*.json")}
        calls = {int(file.stem.partition("-")[2]): json.loads(file.read_text()) for file in folder.glob("calls-*.json")}
    killed_ns = int(marks.pop(min(pid for pid in marks if "killed" in marks[pid]))["killed"])
    survivor = min(marks)
    said = marks[survivor]
    others = sorted(set(calls) - set(marks))  # in the order in which they were started
    launcher = others[0]
    coordinator = max(others, key=lambda pid: sum(file == "job/coordinator/decide.py" for _, file in calls[pid]))

    def files(pid: int, begin_ns: int, end_ns: int) -> set[str]:
        return {file for ns, file in calls[pid] if begin_ns <= ns <= end_ns}

    until_ns = said["stepped"] + 20_000_000
    kill = files(survivor, killed_ns, said["stepped"]) | files(launcher, killed_ns, until_ns)
    decision = files(coordinator, killed_ns, until_ns)
    before = {file for pid in (survivor, launcher, coordinator) for file in files(pid, said["trained"], killed_ns)}
    death = (kill | decision) - before
    ordinary = {name: files(survivor, *said[name]) for name in ("step", "backward", "allreduce")}
    return {"kill": kill, "decision": decision, "death": death, **ordinary}


def _train(folder: Path) -> None:
    """One worker of the job: it marks the moments, in nanoseconds of the monotonic clock."""
    import torch

    import farandole as fd
    from farandole.testing.quick_start import without_compiler

    torch.set_num_threads(1)
    torch.manual_seed(0)
    without_compiler()
    fd.init()
    size, rank = fd.size, fd.rank  # the first use of a name looks it up
    model = torch.nn.Linear(8, 1)
    optimizer = fd.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    x = torch.randn(STEPS * 6, 8)
    data = torch.utils.data.TensorDataset(x, x[:, :1])
    loader = fd.elastic.DataLoader(data, global_batch_size=6, seed=1)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    marks: dict[str, int | tuple[int, int]] = {}

    def write() -> None:
        (folder / f"marks-{os.getpid()}.json").write_text(json.dumps(marks))

    @fd.elastic.run
    def train(state: fd.elastic.TorchState) -> None:
        last_ns = 0
        for _ in loader.epochs(1):
            for inputs, targets in loader:
                time.sleep(0.02)  # so that timers come, too
                if state.step == BEGUN_AT:
                    marks["trained"] = time.monotonic_ns()
                if state.step == KILLED_AT and size() == 3 and rank() == 1:
                    marks["killed"] = time.monotonic_ns()
                    write()
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                begin_ns = time.monotonic_ns()
                loss.backward()
                end_ns = time.monotonic_ns()
                has_stepped = optimizer.step() is not False
                now_ns = time.monotonic_ns()
                if state.step == KILLED_AT - 10:
                    marks["step"], marks["backward"] = (last_ns, now_ns), (begin_ns, end_ns)
                if has_stepped and size() == 2:
                    marks.setdefault("stepped", now_ns)
                last_ns = now_ns
        fd.allreduce(torch.ones(4), name="traced")  # the first one of a name is agreed on, and remembered
        begin_ns = time.monotonic_ns()
        fd.allreduce(torch.ones(4), name="traced")
        marks["allreduce"] = (begin_ns, time.monotonic_ns())

    train(state)
    write()
    sys.modules["sitecustomize"].write()  # a worker leaves no time for what was registered before its own


if __name__ == "__main__":
    main()
