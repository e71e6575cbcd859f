"""What it costs a job to be observed: step time, and CPU time, in turns within one job of two workers.

python -m benchmarks.observation_cost                          # 13 minutes; the machine has nothing else to do

none     nobody looks: the page's process and its readers are stopped, and the loop logs nothing
pages    20 pages are open, and metrics are scraped each second
all      one page is open, metrics are scraped each second, and the loop calls state.log() in each step; the job has
         --events, --progress always and, where OpenTelemetry is installed, --traces
tracked  the same, and the loop also calls Tracker.log() in each step, which writes a file

The turns are those of the same processes, since two jobs differ by more than what is measured; each round has all of
them in another order. The program that reads the pages, in place of browsers on other machines, needs the same cores,
and is a part of what is measured. A ratio is the mean over all rounds, without the highest and the lowest fifth of
them, with the interval in which it is with a probability of 95 % (bootstrap). "Fast steps" are those of which three
quarters are slower: other programs on the machine change them least. They have what a step itself costs; what processes
beside it cost is CPU time of the cores that they share.

What cannot change with the turns, the progress line and the file of events, is measured as CPU time of the launcher and
the coordinator, in a job that has them, the page and a reader, and in one without. What each step calls is measured in
nanoseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import importlib.util
import itertools
import mmap
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.ratios import ratio_of

CONDITIONS = ("none", "pages", "all", "tracked")

_SETTLE_S = 0.3  # after a change of turns, which is not measured
_DEADLINE_S = 120.0
_JOBS = 4
_TURNS_OF_A_JOB = 10


class Turn(NamedTuple):
    """A turn: the mean step time, that of a step of which three quarters were slower, the CPU seconds of the workers in
    a step, and of the other processes in a second."""

    step_s: float
    fast_s: float
    worker_cpu_s: float
    page: float
    launcher: float


class Job:
    """A job of two workers that can be observed in turns."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, collector: str = "", is_observed: bool = True
    ) -> None:
        folder.mkdir()
        self._steps, self._flag, self._log = folder / "steps", folder / "flag", folder / "log"
        self._flag.write_bytes(bytes(mmap.PAGESIZE))
        train = ["-m", "benchmarks.observation_cost", "--train", str(folder), "--model", options.model]
        flags = ["-np", "2"]
        if is_observed:
            flags += ["--page=127.0.0.1:0", "--progress", "always", "--events", str(folder / "events.jsonl")]
            flags += [f"--traces={collector}"] if collector else []
        self._turn_s, self._pages = options.turn, options.pages
        self._processes = contextlib.ExitStack()
        command = [sys.executable, "-m", "farandole", "run", *flags, sys.executable, *train]
        self._launcher = self._processes.enter_context(
            subprocess.Popen(command, stdout=self._log.open("wb"), stderr=subprocess.STDOUT)
        )
        self._processes.callback(self._launcher.terminate)
        try:
            self._begin()
        except BaseException:
            self._processes.close()
            raise

    def _begin(self) -> None:
        deadline_s = time.monotonic() + _DEADLINE_S
        while not self._steps.exists() or self._steps.stat().st_size < 20_000:  # some hundreds of steps
            if self._launcher.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(self._log.read_text())
            time.sleep(0.1)
        found = re.search(r"page: (\S+)", self._log.read_text())
        everything = psutil.Process(self._launcher.pid).children(recursive=True)
        self._page = [each for each in everything if "--from-launcher" in each.cmdline()]
        self._workers = [each for each in everything if _is_worker(each)]
        self._others = [each for each in everything if each not in (*self._page, *self._workers)]
        self._others.append(psutil.Process(self._launcher.pid))
        assert len(self._workers) == 2, [each.cmdline() for each in everything]
        sizes = (("pages", self._pages), ("one", 1)) if found is not None else ()
        self._readers = {name: self._reader(found[1], n) for name, n in sizes if found is not None}
        self._flags = mmap.mmap(os.open(self._flag, os.O_RDWR), mmap.PAGESIZE)

    def _reader(self, url: str, pages: int) -> int:
        command = [sys.executable, "-m", "benchmarks.page_cost", "--read", url, "--pages", str(pages)]
        reader = self._processes.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        self._processes.callback(reader.kill)
        assert reader.stdout is not None
        reader.stdout.readline()
        return reader.pid

    def turn(self, condition: str) -> Turn:
        """Train for a turn, observed or not."""
        self._observe(condition)
        time.sleep(_SETTLE_S)
        before, began_s = self._cpu_s(), time.monotonic()
        time.sleep(self._turn_s)
        after, ended_s = self._cpu_s(), time.monotonic()
        at_s = [each for each in self._step_ends() if began_s <= each <= ended_s]
        workers, page, launcher = (b - a for a, b in zip(before, after, strict=True))
        took_s = ended_s - began_s
        steps = (len(at_s) - 1) * took_s / (at_s[-1] - at_s[0])
        durations_s = [b - a for a, b in itertools.pairwise(at_s)]
        fast_s = statistics.quantiles(durations_s, n=4)[0]
        return Turn(statistics.fmean(durations_s), fast_s, workers / steps, page / took_s, launcher / took_s)

    def _observe(self, condition: str) -> None:
        self._flags[0], self._flags[1] = condition in ("all", "tracked"), condition == "tracked"
        is_seen = condition != "none"
        reader = {"none": "", "pages": "pages"}.get(condition, "one")
        for name, pid in self._readers.items():
            os.kill(pid, signal.SIGCONT if name == reader else signal.SIGSTOP)
        for page in self._page:
            os.kill(page.pid, signal.SIGCONT if is_seen else signal.SIGSTOP)

    def _cpu_s(self) -> tuple[float, float, float]:
        return _cpu_s(self._workers), _cpu_s(self._page), _cpu_s(self._others)

    def _step_ends(self) -> list[float]:
        """Return the times of the last steps."""
        with self._steps.open("rb") as file:
            file.seek(max(0, self._steps.stat().st_size - 1_000_000))
            return [float(each) for each in file.read().split(b"\n")[1:-1]]

    def close(self) -> None:
        """End all processes."""
        for pid in (*self._readers.values(), *(page.pid for page in self._page)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._processes.close()


def _is_worker(process: psutil.Process) -> bool:
    return process.cmdline()[1:3] == ["-m", "benchmarks.observation_cost"]


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds of all threads, to the nanosecond (Documentation/scheduler/sched-stats.rst)."""
    total_ns = 0
    for process in processes:
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Print the ratios of the job's turns."""
    has_traces = importlib.util.find_spec("opentelemetry") is not None
    with _collector() if has_traces else contextlib.nullcontext("") as collector:
        job = Job(options, folder / "turns", collector)
        try:
            rounds = list(_rounds(job, options.conditions, options.rounds))
        finally:
            job.close()
    base = [each["none"] for each in rounds]
    print(f"step time {1e3 * statistics.median(each.step_s for each in base):.2f} ms, {len(rounds)} rounds")
    quantities: tuple[tuple[str, Callable[[Turn], float]], ...] = (
        ("step time", lambda turn: turn.step_s),
        ("of fast steps", lambda turn: turn.fast_s),
        ("CPU time of a step", lambda turn: turn.worker_cpu_s),
    )
    for name in options.conditions[1:]:
        turns = [each[name] for each in rounds]
        for title, value in quantities:
            ratio = ratio_of([value(a) / value(b) for a, b in zip(turns, base, strict=True)])
            print(f"{name:<7} {title:<19} {ratio}")
        page = 100 * statistics.median(each.page for each in turns)
        print(f"{name:<7} {'process of the page':<19} {page:.2f} % of a core", flush=True)


def measure_launcher(options: argparse.Namespace, folder: Path) -> None:
    """Print the CPU time of the launcher and the coordinator in a job that is observed, and in one that is not."""
    shares: dict[bool, list[float]] = {True: [], False: []}
    for number in range(_JOBS):
        is_observed = number % 2 == 0
        job = Job(options, folder / f"launcher{number}", is_observed=is_observed)
        try:
            turns = [job.turn("tracked" if is_observed else "none") for _ in range(_TURNS_OF_A_JOB)]
        finally:
            job.close()
        shares[is_observed] += [each.launcher for each in turns]
    observed, plain = (100 * statistics.median(shares[each]) for each in (True, False))
    print(
        f"launcher and coordinator: {observed:.2f} % of a core, {plain:.2f} % in a job that nobody observes", flush=True
    )


def _rounds(job: Job, conditions: Sequence[str], count: int) -> Iterator[Mapping[str, Turn]]:
    draw = random.Random(1)
    for _ in range(count):
        order = draw.sample(conditions, len(conditions))
        yield {condition: job.turn(condition) for condition in order}


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    """Take spans, and forget them."""

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        server.shutdown()


# The worker -----------------------------------------------------------------------------------------------------------


def _train(folder: Path, model_name: str) -> None:
    """Be a worker; rank 0 writes when each step has ended."""
    import torch

    import farandole as fd
    from benchmarks.models import TASKS

    task = TASKS[model_name]
    torch.set_num_threads(1)
    fd.init()
    model = task.build()
    optimizer: Any = fd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3, fused=True))
    loader = fd.elastic.DataLoader(task.data(), task.batch * fd.size(), seed=0)
    tracker = fd.elastic.Tracker(folder / "metrics.csv")
    state: Any = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader, tracker=tracker)
    flags = mmap.mmap(os.open(folder / "flag", os.O_RDWR), mmap.PAGESIZE)

    @fd.elastic.run
    def train(state: Any) -> None:
        with (folder / "steps").open("a", buffering=1) as records:
            for _ in loader.epochs(1_000_000):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss = task.loss(model, x, y)
                    loss.backward()
                    optimizer.step()
                    if flags[0]:
                        state.log(loss=loss, lr=1e-3)
                    if flags[1]:
                        tracker.log(state.step, loss=loss, lr=1e-3)
                    if fd.rank() == 0:
                        records.write(f"{time.monotonic():.6f}\n")

    train(state)


# Single calls ---------------------------------------------------------------------------------------------------------


def measure_calls(folder: Path) -> None:
    """Print what each call costs that a step makes."""
    import torch

    import farandole as fd
    from farandole.base.liveness import status_reporting
    from farandole.base.liveness.status_reporting import OwnStatusPage, StatusPage, WaitingForPeers

    fd.init()
    page = StatusPage()
    status_reporting._page = OwnStatusPage(page.path)
    loss, numbers = torch.tensor(0.5, requires_grad=True), iter(range(10**9))
    state: Any = fd.elastic.State(bcast_object=lambda each: each, get_rank=lambda: 0)
    tracker = fd.elastic.Tracker(folder / "calls.csv")

    def wait() -> None:
        with WaitingForPeers():
            pass

    calls: dict[str, Callable[[], object]] = {
        "status of a step": lambda: status_reporting.set_step(1, next(numbers), 0, 120, 600),
        "measurement of a wait": wait,
        "state.log() of a loss and a number, within 50 ms": lambda: state.log(loss=loss, lr=1e-3),
        "state.log() of a loss that is read, and a number": lambda: state.log(loss=loss.detach(), lr=1e-3),
        "Tracker.log() of a loss and a number, rank 0": lambda: tracker.log(next(numbers), loss=loss, lr=1e-3),
    }
    for name, call in calls.items():
        print(f"{name}: {_ns(call):,.0f} ns")


def _ns(call: Callable[[], object], calls: int = 20_000, repeats: int = 7) -> float:
    """Return the nanoseconds of a call: the median of some thousands of them each."""
    taken = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append(1e9 * (time.perf_counter() - began_s) / calls)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--turn", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--pages", type=int, default=20)
    parser.add_argument("--only", choices=CONDITIONS[1:], help="beside none; without the other measurements")
    parser.add_argument("--model", default="mlp", help="one of benchmarks.models.TASKS")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        _train(options.train, options.model)
        return
    options.conditions = (CONDITIONS[0], options.only) if options.only else CONDITIONS
    with tempfile.TemporaryDirectory() as folder:
        if not options.only:
            measure_calls(Path(folder))
            measure_launcher(options, Path(folder))
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
