"""The cost of strict mode: step times of jobs with and without it, with one, two and four shards for each worker.

    python -m benchmarks.strict_cost [--rounds 40] [--turn 1] [--tasks mlp,resnet,gpt] [--batch 1] [--audits]

With --audits: jobs with one and two shards for each worker, whose steps are not audited, or all are. An audit of 1 % of
the shards audits one step in 100, or in 50.

The jobs of a task run at the same time and take turns: one trains while the others wait without a core. Each round has
a turn of each, and is compared in itself, since the machine is faster in some minutes than in others. An epoch, at
whose end strict mode hashes the state, has 60,000 samples, as that of MNIST; the time of a hash is printed, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gate import Gate, host
from benchmarks.jobs import farandole_run, run_processes
from benchmarks.ratios import Ratio, ratio_of

WORKERS = 2
_TRIAL = 20  # steps: the rehearsal, and the sizes of buckets that are tried out
_LONGEST_S = 3600.0
_SAMPLES = 60_000


class Condition(NamedTuple):
    """How a job trains: shards of each worker, 0: not strict; and the fraction of the shards that is audited."""

    shards: int
    audit: float = 0.0


class Turn(NamedTuple):
    """The mean times of a step in one turn: of the clock, and of the processor that a worker uses."""

    step_ms: float
    cpu_ms: float


MODES = (Condition(0), Condition(1), Condition(2), Condition(4))
AUDITS = (Condition(1), Condition(1, audit=1.0), Condition(2), Condition(2, audit=0.5))

QUANTITIES: tuple[tuple[str, Callable[[Turn], float]], ...] = (
    ("step", lambda turn: turn.step_ms),
    ("of the processor", lambda turn: turn.cpu_ms),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--turn", type=float, default=1.0, metavar="SECONDS", help="at least 3 steps")
    parser.add_argument("--tasks", default="mlp,resnet,gpt")
    parser.add_argument("--batch", type=int, default=1, help="the task's samples of a worker are multiplied by this")
    parser.add_argument("--audits", action="store_true", help="measure the audit instead")
    parser.add_argument("--place", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--gate", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.place is not None:
        train(options)
        return
    for task in options.tasks.split(","):
        if options.audits:
            measure_audits(options, task)
        else:
            measure_modes(options, task)


def measure_modes(options: argparse.Namespace, task: str) -> None:
    """Print what strict mode costs, by shards of a worker."""
    (plain, _), *others = results_of(options, task)
    for name, value in QUANTITIES:
        print(f"{task}, {name}: {statistics.median(map(value, plain)):.2f} ms without strict mode", flush=True)
        for mode, (turns, _) in zip(MODES[1:], others, strict=True):
            print(f"    {mode.shards} shards of a worker: {_cost(_ratio(turns, plain, value))}", flush=True)
    print(f"    the hash of an epoch: {statistics.median(hash_ms for _, hash_ms in others):.1f} ms", flush=True)


def measure_audits(options: argparse.Namespace, task: str) -> None:
    """Print what an audit of 1 % of the shards costs."""
    turns = [turns for turns, _ in results_of(options, task)]
    for place, plain in enumerate(turns[::2]):
        shards = AUDITS[2 * place].shards
        for name, value in QUANTITIES:
            ratio = _ratio(turns[2 * place + 1], plain, value)
            of_one_percent = Ratio(*(1 + 0.01 * shards * (each - 1) for each in ratio))
            print(
                f"{task}, {shards} shards of a worker, {name}: {statistics.median(map(value, plain)):.2f} ms; "
                f"where each step is audited {_cost(ratio)}, so 1 % of the shards costs {_cost(of_one_percent, 2)}",
                flush=True,
            )


def _ratio(turns: Sequence[Turn], plain: Sequence[Turn], value: Callable[[Turn], float]) -> Ratio:
    return ratio_of([value(a) / value(b) for a, b in zip(turns, plain, strict=True)])


def _cost(ratio: Ratio, digits: int = 1) -> str:
    low, middle, high = (f"{100 * (each - 1):+.{digits}f}" for each in ratio)
    return f"{middle} % [{low}, {high}]"


def results_of(options: argparse.Namespace, task: str) -> list[tuple[list[Turn], float]]:
    """Return the turns of the jobs, one job for each condition, and the milliseconds of a hash of the state."""
    store = host("127.0.0.1")
    arguments = ["--tasks", task, "--rounds", str(options.rounds), "--turn", str(options.turn)]
    arguments += ["--batch", str(options.batch), "--gate", f"127.0.0.1:{store.port}"]
    arguments += ["--audits"] if options.audits else []
    conditions = conditions_of(options)
    with ThreadPoolExecutor() as jobs, tempfile.TemporaryDirectory(prefix="farandole-bench-") as folder:
        started = [
            jobs.submit(_run, condition, [*arguments, "--place", str(place)], Path(folder, str(place)))
            for place, condition in enumerate(conditions)
        ]
        results = [each.result() for each in started]
    return [([Turn(*turn) for turn in each["turns"]], each["hash_ms"]) for each in results]


def conditions_of(options: argparse.Namespace) -> Sequence[Condition]:
    """Return the conditions that are compared."""
    return AUDITS if options.audits else MODES


def _run(condition: Condition, arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    folder.mkdir()
    flags = ["--shards", str(WORKERS * condition.shards)] if condition.shards else []
    command = [*farandole_run(WORKERS, "shm", flags), sys.executable, "-m", "benchmarks.strict_cost"]
    return run_processes(command, [*arguments, "--folder", str(folder)], folder, _LONGEST_S)


# The worker -----------------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Be a worker of the job `options.place`: train in its turns."""
    import torch
    from torch.utils.data import Subset

    import farandole as fd
    from benchmarks.models import TASKS

    torch.set_num_threads(1)
    fd.init()
    place, jobs, task = options.place, len(conditions_of(options)), TASKS[options.tasks]
    condition = conditions_of(options)[place]
    gate = Gate(options.gate, jobs * WORKERS)
    torch.manual_seed(0)
    model = task.build()
    optimizer = fd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    audit = condition.audit if condition.shards else None
    rows = task.data()
    data = Subset(rows, [index % len(rows) for index in range(_SAMPLES)])
    loader = fd.elastic.DataLoader(data, WORKERS * options.batch * task.batch, seed=0, audit=audit)
    state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)
    turns: list[Turn] = []
    hash_ms = 0.0

    @fd.elastic.run
    def run(state: fd.elastic.TorchState) -> None:
        nonlocal hash_ms
        batches = ((x, y) for _ in loader.epochs(10**6) for x, y in loader)

        def steps(count: int) -> Turn:
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(count):
                for x, y in batches:
                    optimizer.zero_grad()
                    task.loss(model, x, y).backward()
                    if optimizer.step():
                        break
            times = time.perf_counter() - began_s, time.process_time() - began_cpu_s
            return Turn(*(1e3 * each / count for each in times))

        is_first = place == 0 and fd.rank() == 0
        for slot in range(jobs):
            if slot == place:
                steps(_TRIAL)
                step_ms = steps(3).step_ms
                began_s = time.perf_counter()
                state.hash()
                hash_ms = 1e3 * (time.perf_counter() - began_s)
            gate.wait_for_all()
        in_turn = gate.agree(max(3, round(1e3 * options.turn / step_ms)) if is_first else None)
        for number in range(options.rounds):
            for slot in range(jobs):
                if (slot + number) % jobs == place:
                    steps(1)  # what it needs is not in the cache
                    turns.append(steps(in_turn))
                gate.wait_for_all()

    run(state)
    if fd.rank() == 0:
        (options.folder / "result.json").write_text(json.dumps({"turns": turns, "hash_ms": hash_ms}))


if __name__ == "__main__":
    main()
