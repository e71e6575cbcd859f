"""Results as the tables of docs/benchmarks.md, between its two marks: `python -m benchmarks.report results.json`."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROOT, TRANSPORTS
from benchmarks.ways import COMMITS

Row = dict[str, Any]

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
PAGE = ROOT / "docs" / "benchmarks.md"
_USES = {"farandole": "its loader", "horovod": "as Horovod is used", "elastic_ddp": "DistributedDataParallel"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    write(json.loads(options.results.read_text()), PAGE)


def write(results: Row, page: Path) -> None:
    """Replace what is between the marks. Raises ValueError when the page has none."""
    text = page.read_text()
    before, found, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found and found_end):
        raise ValueError(f"{page} has no {BEGIN} ... {END}, which the tables go between")
    page.write_text(f"{before}{BEGIN}\n{tables(results)}\n{END}{after}")


def tables(results: Row) -> str:
    """Markdown of all parts that were measured."""
    parts = {
        "recovery": _recovery,
        "in_place": _in_place,
        "restart": _restart,
        "host_faults": _host_faults,
        "patience": _patience,
        "step_time": _step_time,
        "small_batches": _small_batches,
        "busy_machine": _busy_machine,
        "all_reduce": _all_reduce,
        "commit": _commit,
        "memory": _memory,
        "data_parallel": _data_parallel,
        "alone": _alone,
    }
    lines = [line for name, write_part in parts.items() if results.get(name) for line in write_part(results[name])]
    machine = results["machine"]
    days = sorted({date[:10] for date in results["measured"].values()})
    measured = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    lines.append(
        f"Measured {measured}: {machine['cores']} cores, {machine['processor']}, "
        f"Linux {machine['kernel']}, Python {machine['python']}, torch {machine['torch']}."
    )
    return "\n".join(lines)


def _recovery(rows: Sequence[Row]) -> Iterator[str]:
    yield "## A worker is killed"
    yield "`kill -9` of a random worker, again and again, each time after the last one's replacement has joined;"
    yield "until the *slowest* survivor has applied a step of a later generation. Its death is known before the kernel"
    yield "has freed its memory ([how](decisions/processes-of-a-host.md#an-exit-notice)). With 25 M parameters most of"
    yield "the time is the step itself, and of a join the 300 MB that the newcomer copies. No survivor leaves its"
    yield "process or its function. Other work is what a script computes in each step beside its training: 10 ms of"
    yield "processor time, in Python."
    yield ""
    columns = ("parameters", "workers", "loader processes of each", "other work", "kills", "median step", "median")
    yield f"| {' | '.join(columns)} | worst | pause at a join, median | worst |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row['parameters']} | {row['workers']} | {row['loader_processes']} "
            f"| {row.get('other_ms', 0):g} ms | {row['kills']} "
            f"| {row['median_step_ms']:.1f} ms | **{row['recovery_median_ms']:.0f} ms** "
            f"| {row['recovery_worst_ms']:.0f} ms | {row['join_pause_median_ms']:.0f} ms "
            f"| {row['join_pause_worst_ms']:.0f} ms |"
        )
    yield ""


def _in_place(rows: Sequence[Row]) -> Iterator[str]:
    yield "## A worker of an unchanged script is killed"
    yield "A script of torchrun with `DistributedSampler` and DDP, 0.025 M parameters, under"
    yield "[`farandole run --in-place`](scripts-of-torchrun.md). `kill -9` of a random worker, each time after the last"
    yield "one's replacement has joined; until the *slowest* survivor has applied a step among those that are left."
    yield ""
    yield "| workers | kills | median step | median | worst |"
    yield "|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row['workers']} | {row['kills']} | {row['median_step_ms']:.1f} ms "
            f"| **{row['recovery_median_ms']:.0f} ms** | {row['recovery_worst_ms']:.0f} ms |"
        )
    yield ""


def _restart(rows: Sequence[Row]) -> Iterator[str]:
    yield "The same script as a static job with `--max-restarts`, restarted as a whole, in turns with torchrun:"
    yield "from the `kill -9` of one worker to the first step of all workers of the next attempt."
    yield ""
    yield "| launcher | workers | times | median | best | worst |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        name = "`farandole torchrun`" if row["launcher"] == "farandole" else "torchrun"
        yield (
            f"| {name} | {row['workers']} | {len(row['seconds'])} | **{row['median_s']:.2f} s** "
            f"| {row['best_s']:.2f} s | {row['worst_s']:.2f} s |"
        )
    yield ""


def _host_faults(rows: Sequence[Row]) -> Iterator[str]:
    first = rows[0]
    yield f"## Faults of hosts, noticed within {first['budget_s']:g} s"
    yield f"{first['hosts']} hosts of a [lab](chaos.md#the-lab) with a worker of the small model on each,"
    yield f"`--detection-budget {first['budget_s']:g}`. From the fault until both survivors have applied a step of a"
    yield "later generation."
    yield ""
    yield "| fault at one host | times | median | worst |"
    yield "|---|---|---|---|"
    for row in rows:
        yield f"| {row['fault']} | {len(row['ms'])} | **{row['median_ms']:.0f} ms** | {row['worst_ms']:.0f} ms |"
    yield ""


def _patience(row: Row) -> Iterator[str]:
    yield "## Slow is not lost"
    yield f"{row['hosts']} hosts of a lab, the default detection budget, {row['busy_processes']} processes that take"
    yield f"all the processor time they can get, and one worker that kept its interpreter for 2 s, {row['holds']} times"
    lost = f"{len(row['verdicts'])} times somebody was" if row["verdicts"] else "nobody was"
    yield f"in {row['minutes']:.0f} minutes: {lost} declared lost."
    yield ""


def _step_time(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Step time"
    yield "For each row a job with Farandole and one without, which take turns. Ratios: medians of those of the turns,"
    yield "with quartiles."
    yield "DDP is set up to be as fast as it gets: gradients are views of its buckets, buffers are not sent. Plain DDP"
    yield "is `DistributedDataParallel(model)`."
    yield ""
    yield "![Step time relative to DDP on Gloo, by model and transport](step-time.svg)"
    yield ""
    yield from _against_ddp(rows)


def _small_batches(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Step time with small batches"
    batches = dict.fromkeys((row["label"], row["batch"]) for row in rows)
    yield "As above, with fewer samples for each worker, as where a global batch is divided among many: communication"
    yield f"is more of a step. Samples: {', '.join(f'{label} {batch}' for label, batch in batches)}."
    yield ""
    yield from _against_ddp(rows)


def _busy_machine(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Step time on a busy machine"
    yield f"As under [step time](#step-time), beside {rows[0]['busy']} processes that take all the time they get."
    yield ""
    yield from _against_ddp(rows)


def _against_ddp(rows: Sequence[Row]) -> Iterator[str]:
    columns = (
        "model",
        "workers",
        "transport",
        "used with",
        "Farandole",
        "DDP",
        "plain DDP",
        "no communication",
        "one process",
    )
    yield f"| {' | '.join(columns)} | / DDP | / plain DDP | / no communication |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        ms = row["ms"]
        low, ratio, high = row["ratio"]["ddp"]
        yield (
            f"| {row['label']} | {row['workers']} | {TRANSPORTS[row['transport']]} | {_USES[row['use']]} "
            f"| {ms['farandole']:.1f} ms | {ms['ddp']:.1f} ms | {ms['plain_ddp']:.1f} ms | {ms['none']:.1f} ms "
            f"| {ms['one']:.1f} ms | **{ratio:.2f}** ({low:.2f} to {high:.2f}) | {row['ratio']['plain_ddp'][1]:.2f} "
            f"| {row['ratio']['none'][1]:.2f} |"
        )
    yield ""
    for transport, use, workers in dict.fromkeys((row["transport"], row["use"], row["workers"]) for row in rows):
        chosen = [row for row in rows if (row["transport"], row["use"], row["workers"]) == (transport, use, workers)]
        mean, over_plain, over_none = (
            statistics.geometric_mean(row["ratio"][way][1] for row in chosen) for way in ("ddp", "plain_ddp", "none")
        )
        floor = statistics.geometric_mean(row["floor_over_ddp"][1] for row in chosen)
        yield (
            f"- {TRANSPORTS[transport]}, {_USES[use]}, {workers} workers: geometric mean over {len(chosen)} models "
            f"**{mean:.2f}** of DDP, worst {max(row['ratio']['ddp'][1] for row in chosen):.2f}; "
            f"{over_plain:.2f} of plain DDP; {over_none:.2f} times no communication, which is {floor:.2f} of DDP"
        )
    yield ""


def _all_reduce(rows: Sequence[Row]) -> Iterator[str]:
    yield "## All-reduce"
    yield "Ours and torch's Gloo, in turns: back to back, and each one after a barrier. GB/s are the tensor's bytes by"
    yield "time, back to back; those of a copy of as many bytes, on all ranks at once, say what the memory allows."
    yield ""
    yield "| ranks | transport | bytes | back to back | Gloo | after a barrier | Gloo | GB/s | copy |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        ms = row["ms"]
        yield (
            f"| {row['ranks']} | {TRANSPORTS[row['transport']]} | {row['bytes']:,} | {ms['ours']:.3f} ms "
            f"| {ms['gloo']:.3f} ms | {ms['ours_apart']:.3f} ms | {ms['gloo_apart']:.3f} ms "
            f"| {row['bytes'] / ms['ours'] / 1e6:.2f} | {row['bytes'] / ms['copy'] / 1e6:.2f} |"
        )
    yield ""


def _commit(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Commits"
    yield "What `state.commit()` in every step adds to it: 25 M parameters with Adam (300 MB), 2 workers. With"
    yield "Farandole's loader each decided step is one already; the other two are for scripts with torch's."
    yield ""
    yield "| transport | commit | step without commits | a commit adds |"
    yield "|---|---|---|---|"
    for row in rows:
        low, share, high = (100 * value for value in row["share"])
        yield (
            f"| {TRANSPORTS[row['transport']]} | {COMMITS[row['way']]} | {row['step_ms']:.1f} ms "
            f"| **{share:.1f} %** ({low:.1f} to {high:.1f} %) |"
        )
    yield ""


def _memory(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Memory"
    yield "Of one worker of two: 25 M parameters with Adam. Anonymous memory, and its part of shared memory; without"
    yield "the code of libraries."
    yield ""
    yield "| | memory | more than DDP |"
    yield "|---|---|---|"
    for row in rows:
        if row["way"] == "ddp":
            yield f"| DDP, `gradient_as_bucket_view` | {row['mb']:.0f} MB | |"
        else:
            more = 100 * (row["over_ddp"] - 1)
            yield f"| Farandole, {TRANSPORTS[row['transport']]} | {row['mb']:.0f} MB | **{more:.1f} %** |"
    yield ""


def _data_parallel(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Threads"
    yield "One process with `fd.DataParallel` beside the plain module with one thread, and with as many threads within"
    yield "each operation of torch; times of one thread by those of each, in turns: higher is faster."
    yield "Processor time is DataParallel's by one thread's; the bound is what free cores would bring at most."
    yield ""
    yield "| model | samples | threads | one thread | DataParallel | within operations | processor time | bound |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        low, speed, high = row["speed"]["ours"]
        yield (
            f"| {row['label']} | {row['samples']} | {row['threads']} | {row['ms']['one']:.1f} ms "
            f"| **{speed:.2f}** ({low:.2f} to {high:.2f}) | {row['speed']['inside'][1]:.2f} "
            f"| {row['processor'][1]:.2f} | {row['bound'][1]:.2f} |"
        )
    yield ""


def _alone(rows: Sequence[Row]) -> Iterator[str]:
    yield "## One worker"
    yield "`farandole run -np 1` beside plain torch, in turns. The data set is a TensorDataset, or one of which torch"
    yield "fetches each sample by itself, as most are."
    yield ""
    yield "| model | used with | data set | plain torch | Farandole / plain torch |"
    yield "|---|---|---|---|---|"
    for row in rows:
        low, ratio, high = row["ratio"]
        yield (
            f"| {row['label']} | {_USES[row['use']]} | {'samples' if row.get('items') else 'tensors'} "
            f"| {row['plain_ms']:.1f} ms | **{ratio:.3f}** ({low:.3f} to {high:.3f}) |"
        )
    yield ""


if __name__ == "__main__":
    main()
