"""One process of the step time benchmark: models trained in one way or several, in turns with those of other jobs.
step_time.py starts it, under `farandole run` or by itself: then nothing of Farandole is in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import ways
from benchmarks.gate import Gate
from benchmarks.models import TASKS, Items
from benchmarks.turns import FEWEST, slowest, time_ms

_TURN_MS = 250.0  # of the way that sets the pace: long beside a noisy moment, short beside a noisy minute
_MOST_STEPS = 50
_WARM_UP = 3  # steps: the second one of Adam and of DDP is not yet like the others
_TRIAL = 20  # steps: Farandole tries out sizes of buckets in fewer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=TASKS, required=True)
    parser.add_argument("--ways", nargs="+", choices=ways.WAYS, required=True, help="of this job")
    parser.add_argument("--order", nargs="+", choices=ways.WAYS, required=True, help="those of all jobs")
    parser.add_argument("--small", action="store_true", help="the model's small batches")
    parser.add_argument("--items", action="store_true", help="a data set of which each sample is fetched by itself")
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="after which no turn begins")
    parser.add_argument("--steps", type=int, default=1, help="fewest steps in a turn")
    parser.add_argument("--gate", required=True, help="HOST:PORT where all jobs meet")
    parser.add_argument("--processes", type=int, required=True, help="of all jobs")
    parser.add_argument("--rank", type=int, help="without Farandole: of this process, and of how many")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--folder", type=Path, required=True, help="an empty one, for the result too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gate = Gate(options.gate, options.processes)
    if options.rank is None:
        _with_farandole(gate, options)
    else:
        _join_gloo(options, options.rank, options.ranks)
        _end(options, "", _measured(gate, _steps(options)[0], options))


def _with_farandole(gate: Gate, options: argparse.Namespace) -> None:
    import farandole as fd
    from farandole.training.collectives import world

    fd.init()
    _join_gloo(options, fd.rank(), fd.size())
    steps, state = _steps(options)
    used = type(world.current().transport).__name__
    _end(options, used, fd.elastic.run(lambda state: _measured(gate, steps, options))(state))


def _join_gloo(options: argparse.Namespace, rank: int, ranks: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{options.folder}/store", rank=rank, world_size=ranks)


def _end(options: argparse.Namespace, transport_class: str, times: dict[str, list[float]]) -> None:
    if dist.get_rank() == 0:
        (options.folder / "result.json").write_text(json.dumps({"transport_class": transport_class, "times_ms": times}))
    dist.barrier()
    dist.destroy_process_group()


def _steps(options: argparse.Namespace) -> tuple[dict[str, ways.Step], Any]:
    """Of each way the step; and a state, where a way needs the elastic function."""
    task, steps, state = TASKS[options.model], {}, None
    data: Any = task.data
    task = dataclasses.replace(task, batch=task.small) if options.small else task
    task = dataclasses.replace(task, data=lambda: Items(data())) if options.items else task
    for way in options.ways:
        if way in ("farandole", "elastic_ddp"):
            steps[way], state = getattr(ways, way)(task)
        elif way == "horovod":
            steps[way], state = ways.horovod(task, commit_follows_step="promised" in options.ways)
        elif way not in ways.COMMITS:
            steps[way] = getattr(ways, way)(task)
    if "with_loader" in options.ways:
        steps["with_loader"] = _followed_by_commit(state, steps["farandole"])
    if "commit" in options.ways:
        steps["commit"] = _committed(state, steps["horovod"])
    if "promised" in options.ways:
        steps["promised"] = _followed_by_commit(state, steps["horovod"])
        steps["horovod"] = _unpromised(state, steps["horovod"])
    return steps, state


def _committed(state: Any, step: ways.Step) -> ways.Step:
    """The commit comes first: what it does in the background ends within its own turn."""

    def run() -> None:
        state.commit()
        step()

    return run


def _followed_by_commit(state: Any, step: ways.Step) -> ways.Step:
    def run() -> None:
        step()
        state.commit()

    return run


def _unpromised(state: Any, step: ways.Step) -> ways.Step:
    """Without commits: where the last one left its copy to be made, it is made here, in a step that does not count."""
    from farandole.training.state.deep_copy import finish_all

    def run() -> None:
        finish_all()
        step()

    return run


def _measured(gate: Gate, steps: dict[str, ways.Step], options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of a step on the slowest rank, of each way of this job in each turn."""
    for name in options.order:
        if name in steps:
            time_ms(steps[name], _TRIAL if name == "farandole" else _WARM_UP)
        gate.wait_for_all()
    first = options.order[0]  # it sets the pace: how many steps a turn has, and how many turns there are
    sets_pace = first in steps and dist.get_rank() == 0
    step_ms = time_ms(steps[first], 2) if first in steps else 1.0
    in_turn = gate.agree(int(max(options.steps, min(_MOST_STEPS, _TURN_MS // step_ms))) if sets_pace else None)
    times: dict[str, list[float]] = {name: [] for name in steps}
    begin_s = time.perf_counter()
    for turn in range(options.turns):
        is_late = turn >= FEWEST and time.perf_counter() - begin_s > options.seconds
        if gate.agree(int(is_late) if sets_pace else None):
            break
        for name in options.order if turn % 2 == 0 else reversed(options.order):  # drift helps nobody
            if name in steps:
                if name == "horovod" and "promised" in steps:
                    steps[name]()  # the first after commits may still have a copy to make
                dist.barrier()
                times[name].append(time_ms(steps[name], in_turn))
            gate.wait_for_all()
    return {name: slowest(each) for name, each in times.items()}


if __name__ == "__main__":
    main()
