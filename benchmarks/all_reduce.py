"""How long one all-reduce takes: each of our transports, torch's Gloo, and a copy of as many bytes, in turns.
The hierarchical one and its Gloo are measured between two hosts (two_hosts.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import two_hosts
from benchmarks.jobs import TRANSPORTS, OneHost

Row = dict[str, Any]

SIZES = (4, 4096, 102_400, 1 << 20, 4 << 20, 25 << 20, 100 << 20)  # bytes


def table(ranks: Sequence[int], transports: Sequence[str], turns: int, seconds: float) -> list[Row]:
    """Measure, and print each job's rows when they are there."""
    print("\none all-reduce, one thread each, in turns within one job; GB/s: bytes of the tensor / time")
    print(
        f"{'ranks':>5} {'transport':>13} {'bytes':>10}   {'back to back:':>13}{'Gloo':>10}{'Gloo/ours':>10}   "
        f"{'after a barrier:':>16}{'Gloo':>10}{'Gloo/ours':>10}   {'GB/s':>6} {'copy':>6}"
    )
    rows = []
    for transport in transports:
        across = transport == "hierarchical"
        if across and (reason := two_hosts.why_not()) is not None:
            print(f"{'':>5} {TRANSPORTS[transport]:>13}: left out, {reason}", flush=True)
            continue
        for count in ranks:
            if across and count < two_hosts.FEWEST:
                continue
            arguments = ["--sizes", *map(str, SIZES), "--turns", str(turns), "--seconds", str(seconds)]
            with two_hosts.TwoHosts() if across else OneHost() as place:
                said = place.run_worker("all_reduce_worker", count, transport, arguments)
            for times in said["rows"]:
                row = {"ranks": count, "transport": transport, "transport_class": said["transport_class"]}
                rows.append({**row, "bytes": times.pop("bytes"), "ms": times})
                _print(rows[-1])
    return rows


def _print(row: Row) -> None:
    ms = row["ms"]
    print(
        f"{row['ranks']:5d} {TRANSPORTS[row['transport']]:>13} {row['bytes']:10d}   {ms['ours']:11.3f}ms"
        f"{ms['gloo']:8.3f}ms{ms['gloo'] / ms['ours']:10.2f}   {ms['ours_apart']:14.3f}ms{ms['gloo_apart']:8.3f}ms"
        f"{ms['gloo_apart'] / ms['ours_apart']:10.2f}   {row['bytes'] / ms['ours'] / 1e6:6.2f} "
        f"{row['bytes'] / ms['copy'] / 1e6:6.2f}",
        flush=True,
    )
