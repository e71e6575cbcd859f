"""Step time against DDP on Gloo: for each model, number of workers and transport one job with Farandole, and one
without. They take turns. What init() does to a process, DDP's do not have.

Ratios are taken turn by turn, so that they compare moments that were equally noisy, and are given as quartiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import two_hosts
from benchmarks.gate import host
from benchmarks.jobs import TRANSPORTS, OneHost, busy_processes
from benchmarks.models import TASKS
from benchmarks.ways import COMMITS

Row = dict[str, Any]

USES = {"farandole": "its loader", "horovod": "as Horovod", "elastic_ddp": "as DDP"}  # what Farandole is used with
BESIDE = ("ddp", "plain_ddp", "none", "one")  # what it is compared with
_COMMIT_STEPS = 4  # in a turn, so that most commits are those of a job that commits all the time


def table(
    models: Sequence[str],
    workers: Sequence[int],
    transports: Sequence[str],
    uses: Sequence[str],
    turns: int,
    seconds: float,
    is_small: bool = False,
    busy: int = 0,
) -> list[Row]:
    """Measure, and print each row when it is there.

    is_small  with the models' small batches
    busy      number of processes beside the workers that take all the processor time they can get
    """
    what = f"step time{' with small batches' if is_small else ''}{f' beside {busy} busy processes' if busy else ''}"
    print(f"\n{what}, one thread each; ratios: median [quartiles] of turns")
    print(
        f"{'model':>15} {'workers':>7} {'transport':>13} {'used':>10} {'Farandole':>10} {'DDP':>8} {'plain':>8} "
        f"{'no comm.':>8} {'one pr.':>8}   / DDP              / plain DDP        / no comm."
    )
    rows = []
    for transport in transports:
        across = transport == "hierarchical"
        if across and (reason := two_hosts.why_not()) is not None:
            print(f"{'':>23} {TRANSPORTS[transport]:>13}: left out, {reason}", flush=True)
            continue
        for use in uses:
            for count in workers:
                if across and count < two_hosts.FEWEST:
                    continue
                for model in models:
                    rows.append(against_ddp(model, count, transport, use, turns, seconds, is_small, busy))
                    _print(rows[-1])
    print_means(rows)
    return rows


def against_ddp(
    model: str,
    workers: int,
    transport: str,
    use: str,
    turns: int,
    seconds: float,
    is_small: bool = False,
    busy: int = 0,
) -> Row:
    with busy_processes(busy):
        said = _run(model, workers, transport, [use], turns, seconds, beside=BESIDE, is_small=is_small)
    times = said["times_ms"]
    return {
        "model": model,
        "label": TASKS[model].label,
        "batch": TASKS[model].small if is_small else TASKS[model].batch,
        "workers": workers,
        "transport": transport,
        "transport_class": said["transport_class"],
        "use": use,
        "busy": busy,
        "turns": len(times[use]),
        "ms": {"farandole": _median(times[use]), **{way: _median(times[way]) for way in BESIDE}},
        "ratio": {way: quartiles(times[use], times[way]) for way in BESIDE},
        "floor_over_ddp": quartiles(times["none"], times["ddp"]),
    }


def commit_table(transports: Sequence[str], turns: int, seconds: float) -> list[Row]:
    """What state.commit() in every step adds to it: 25 M parameters and Adam's moments, 300 MB in all."""
    print("\nstate.commit() in every step, 25 M parameters with Adam, 2 workers; share of the step: median [quartiles]")
    rows = []
    for transport in transports:
        if transport != "hierarchical":  # where workers are does not matter
            for way, label in COMMITS.items():
                beside = "farandole" if way == "with_loader" else "horovod"
                times = _run("deep", 2, transport, [beside, way], turns, seconds, _COMMIT_STEPS)["times_ms"]
                share = [value - 1 for value in quartiles(times[way], times[beside])]
                rows.append({"transport": transport, "way": way, "step_ms": _median(times[beside]), "share": share})
                print(
                    f"{TRANSPORTS[transport]:>15} {label:>24} {rows[-1]['step_ms']:7.1f} ms without "
                    f"{100 * share[1]:+6.1f} % [{100 * share[0]:+.1f}, {100 * share[2]:+.1f}]",
                    flush=True,
                )
    return rows


def alone_table(models: Sequence[str], turns: int, seconds: float) -> list[Row]:
    """A world of one under `farandole run`, against plain torch."""
    print("\none worker under `farandole run` / plain torch; ratio: median [quartiles]")
    rows = []
    for model in models:
        for use in USES:
            for is_items in (False, True):
                times = _run(model, 1, "tcp", [use], turns, seconds, beside=["none"], is_items=is_items)["times_ms"]
                ratio = quartiles(times[use], times["none"])
                place = {"model": model, "label": TASKS[model].label, "use": use, "items": is_items}
                rows.append({**place, "plain_ms": _median(times["none"]), "ratio": ratio})
                print(
                    f"{TASKS[model].label:>15} {USES[use]:>10} {'items' if is_items else 'tensors':>8} "
                    f"{_median(times['none']):7.1f} ms plain  {_text(ratio)}",
                    flush=True,
                )
    return rows


def print_means(rows: Sequence[Row]) -> None:
    """Over the models, geometric."""
    for key in dict.fromkeys((row["transport"], row["use"], row["workers"]) for row in rows):
        chosen = [row for row in rows if (row["transport"], row["use"], row["workers"]) == key]
        over = {way: statistics.geometric_mean(row["ratio"][way][1] for row in chosen) for way in BESIDE}
        print(
            f"geometric mean over {len(chosen)} models, {TRANSPORTS[key[0]]}, {USES[key[1]]}, {key[2]} workers: "
            f"{over['ddp']:.2f} of DDP, {over['plain_ddp']:.2f} of plain DDP, {over['none']:.2f} of no communication"
        )


def quartiles(times: Sequence[float], beside: Sequence[float]) -> list[float]:
    """Of the ratios of each turn: first quartile, median, third quartile."""
    ratios = [a / b for a, b in zip(times, beside, strict=True)]
    return [round(value, 4) for value in statistics.quantiles(ratios, n=4, method="inclusive")]


def _run(
    model: str,
    workers: int,
    transport: str,
    ways: Sequence[str],
    turns: int,
    seconds: float,
    steps: int = 1,
    beside: Sequence[str] = (),
    is_small: bool = False,
    is_items: bool = False,
) -> dict[str, Any]:
    """Of one job, or of two that take turns: one with Farandole, and one without, for the ways `beside`."""
    processes = workers * (2 if beside else 1)
    arguments = ["--model", model, "--turns", str(turns), "--seconds", str(seconds), "--steps", str(steps)]
    arguments += ["--processes", str(processes), "--order", *ways, *beside]
    arguments += ["--small"] if is_small else []
    arguments += ["--items"] if is_items else []
    across = transport == "hierarchical"
    with two_hosts.TwoHosts() if across else OneHost() as place, ThreadPoolExecutor() as jobs:
        meeting = host(place.address)
        arguments += ["--gate", f"{place.address}:{meeting.port}"]
        ours = jobs.submit(place.run_worker, "step_time_worker", workers, transport, [*arguments, "--ways", *ways])
        if not beside:
            return ours.result()
        theirs = jobs.submit(place.run_plain, "step_time_worker", workers, [*arguments, "--ways", *beside])
        said, others = ours.result(), theirs.result()
    return {**said, "times_ms": {**said["times_ms"], **others["times_ms"]}}


def _print(row: Row) -> None:
    ms = "".join(f"{row['ms'][way]:6.1f}ms " for way in BESIDE)
    ratios = "  ".join(_text(row["ratio"][way]) for way in ("ddp", "plain_ddp", "none"))
    print(
        f"{row['label']:>15} {row['workers']:7d} {TRANSPORTS[row['transport']]:>13} {USES[row['use']]:>10} "
        f"{row['ms']['farandole']:8.1f}ms {ms}  {ratios}",
        flush=True,
    )


def _text(ratio: Sequence[float]) -> str:
    return f"{ratio[1]:.2f} [{ratio[0]:.2f}, {ratio[2]:.2f}]"


def _median(times: Sequence[float]) -> float:
    return round(statistics.median(times), 3)
