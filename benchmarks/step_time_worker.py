"""One worker of the step time benchmark: the same model trained in several ways, in turns. step_time.py starts it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import farandole as fd
from benchmarks import ways
from benchmarks.models import TASKS
from benchmarks.turns import agreed, slowest, time_ms, turns
from farandole.collectives import world
from farandole.state.background_copy import finish_all

_TURN_MS = 250.0  # of DDP: long beside a noisy moment, short beside a noisy minute
_MOST_STEPS = 50
_WARM_UP = 3  # steps: the second one of Adam and of DDP is not yet like the others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=TASKS, required=True)
    parser.add_argument("--ways", nargs="+", choices=ways.WAYS, required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="after which no turn begins")
    parser.add_argument("--steps", type=int, default=1, help="fewest steps in a turn")
    parser.add_argument("--folder", type=Path, required=True, help="an empty one, for the result too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fd.init()
    dist.init_process_group(
        "gloo", init_method=f"file://{options.folder}/store", rank=fd.rank(), world_size=fd.size()
    )  # fmt: skip
    steps, state = _steps(options)
    times = measure(state, steps, options) if state is not None else _measured(steps, options)
    if fd.rank() == 0:
        used = type(world.current().transport).__name__
        (options.folder / "result.json").write_text(json.dumps({"transport_class": used, "times_ms": times}))
    dist.barrier()
    dist.destroy_process_group()


def _steps(options: argparse.Namespace) -> tuple[dict[str, ways.Step], Any]:
    """Of each way the step; and a state, where a way needs the elastic function."""
    task, steps, state = TASKS[options.model], {}, None
    for way in options.ways:
        if way in ("farandole", "elastic_ddp"):
            steps[way], state = getattr(ways, way)(task)
        elif way == "horovod":
            steps[way], state = ways.horovod(task, commit_follows_step="promised" in options.ways)
        elif way not in ("commit", "promised"):
            steps[way] = getattr(ways, way)(task)
    if "commit" in options.ways:
        steps["commit"] = _committed(state, steps["horovod"])
    if "promised" in options.ways:
        steps["promised"] = _promised(state, steps["horovod"])
        steps["horovod"] = _unpromised(state, steps["horovod"])
    return steps, state


def _committed(state: Any, step: ways.Step) -> ways.Step:
    """The commit comes first: what it does in the background ends within its own turn."""

    def run() -> None:
        state.commit()
        step()

    return run


def _promised(state: Any, step: ways.Step) -> ways.Step:
    def run() -> None:
        step()
        state.commit()

    return run


def _unpromised(state: Any, step: ways.Step) -> ways.Step:
    """Without commits: where the last one left its copy to be made, it is made here, in a step that does not count."""

    def run() -> None:
        finish_all()
        step()

    return run


@fd.elastic.run
def measure(state: Any, steps: dict[str, ways.Step], options: argparse.Namespace) -> dict[str, list[float]]:
    return _measured(steps, options)


def _measured(steps: dict[str, Callable[[], None]], options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of a step on the slowest rank, of each way in each turn."""
    for step in steps.values():
        time_ms(step, _WARM_UP)
    first = next(iter(steps))
    in_turn = int(agreed(max(options.steps, min(_MOST_STEPS, _TURN_MS // time_ms(steps[first], 2)))))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in turns(options.turns, options.seconds):
        order = list(steps.items())
        for name, step in order if turn % 2 == 0 else reversed(order):  # drift of the machine helps nobody
            if name == "horovod" and "promised" in steps:
                step()  # the first after commits may still have a copy to make
            dist.barrier()
            times[name].append(time_ms(step, in_turn))
    return {name: slowest(each) for name, each in times.items()}


if __name__ == "__main__":
    main()
