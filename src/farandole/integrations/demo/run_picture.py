"""Draws what the workers' records say as an SVG: when each worker trained, and the moment of the kill up close."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

WIDTH, ROW, LEFT, TOP = 860, 26, 110, 46
COLOURS = ("#4269d0", "#efb118", "#3ca951", "#a463f2")
STYLE = "text{font:13px sans-serif;fill:#444}.title{font-weight:bold;fill:#222}"


def draw(records: list[dict[str, Any]], killed_pid: int, killed_ns: int, path: Path) -> None:
    """Two panels: the whole job in seconds, and 0.1 s before to 0.3 s after the kill in milliseconds. Each mark is
    an applied step."""
    steps: dict[int, list[int]] = defaultdict(list)
    for record in records:
        if "after" in record:
            steps[record["pid"]].append(record["ns"])
    pids = sorted(steps, key=lambda pid: steps[pid][0])
    begin = min(times[0] for times in steps.values())
    end = max(times[-1] for times in steps.values())
    height = 2 * (TOP + ROW * len(pids) + 34)
    parts = _panel(steps, pids, 0, "the whole job", begin, end, killed_pid, killed_ns, 1e9, "s")
    near = (killed_ns - 100_000_000, killed_ns + 300_000_000)
    parts += _panel(steps, pids, height // 2, "around the kill", *near, killed_pid, killed_ns, 1e6, "ms")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"><style>{STYLE}</style>'
    back = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    path.write_text("\n".join([head, back, *parts, "</svg>\n"]))


def _panel(
    steps: dict[int, list[int]],
    pids: list[int],
    top: int,
    title: str,
    begin: int,
    end: int,
    killed_pid: int,
    killed_ns: int,
    unit_ns: float,
    unit: str,
) -> list[str]:
    scale = (WIDTH - LEFT - 30) / (end - begin)

    def x(ns: int) -> float:
        return LEFT + (ns - begin) * scale

    bottom = top + TOP + ROW * len(pids)
    parts = [f'<text class="title" x="{LEFT}" y="{top + 24}">{title}: each mark is an applied step</text>']
    for row, pid in enumerate(pids):
        y = top + TOP + ROW * row
        colour = COLOURS[row % len(COLOURS)]
        marks = sorted({round(x(ns), 1) for ns in steps[pid] if begin <= ns <= end})
        lines = "".join(f"M{mark} {y + 4}v{ROW - 8}" for mark in marks)
        parts.append(f'<text x="10" y="{y + 18}">worker {row}</text>')
        parts.append(f'<path d="{lines}" stroke="{colour}" stroke-width="1.2"/>')
        if pid == killed_pid:
            parts.append(f'<text x="{x(killed_ns) + 8:.0f}" y="{y + 18}">kill -9</text>')
    parts.append(f'<path d="M{x(killed_ns):.1f} {top + TOP - 6}V{bottom}" stroke="#d33" stroke-width="1.5"/>')
    ticks = 8
    for tick in range(ticks + 1):
        ns = begin + (end - begin) * tick // ticks
        origin = begin if unit == "s" else killed_ns
        label = f"{(ns - origin) / unit_ns:.0f} {unit}"
        parts.append(f'<text x="{x(ns):.0f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    return parts
