"""The step times as a picture: `python -m benchmarks.plot results.json picture.svg`. Draws SVG itself, so that the
same numbers give the same file, and a changed number a small difference."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.jobs import TRANSPORTS

Row = dict[str, Any]

# From the fastest to the slowest; told apart also by those who do not see colours.
COLOURS = {"shm": "#1b4965", "hierarchical": "#2a9d8f", "tcp": "#5fa8d3"}
_INK, _FAINT, _GRID = "#22303c", "#62717f", "#e4e9ee"
_WIDTH, _LEFT, _RIGHT = 920, 64, 24
_PANEL, _TOP, _GAP = 250, 92, 74  # heights: of the bars of one number of workers, above them, between
_FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    results = json.loads(options.results.read_text())
    options.picture.write_text(picture(results["step_time"], results["machine"]))


def picture(rows: Sequence[Row], machine: Row) -> str:
    """An SVG: for each number of workers the models, for each of them a bar for each transport."""
    rows = [row for row in rows if row["use"] == "farandole"] or list(rows)
    sizes = sorted({row["workers"] for row in rows})
    transports = [name for name in COLOURS if any(row["transport"] == name for row in rows)]
    height = _TOP + len(sizes) * (_PANEL + _GAP) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="{escape(_FONT)}" '
        f'role="img" aria-label="Step time of Farandole relative to DDP on Gloo">',
        f'<rect width="{_WIDTH}" height="{height}" rx="10" fill="#ffffff"/>',
        _text(_LEFT, 34, "Step time relative to DDP on Gloo", size=20, weight=600),
        _text(_LEFT, 55, "Less is faster. Medians of interleaved turns; whiskers are quartiles.", fill=_FAINT),
        *_legend(transports),
    ]
    top = max(1.1, max(row["ratio"]["ddp"][2] for row in rows) + 0.06)
    for place, size in enumerate(sizes):
        y = _TOP + place * (_PANEL + _GAP) + 28
        parts += _panel([row for row in rows if row["workers"] == size], transports, size, y, _Scale(y, top))
    where = f"{machine['cores']} cores, {machine['processor']}, torch {machine['torch']}; one thread for each worker"
    parts.append(_text(_WIDTH - _RIGHT, height - 12, where, size=11, fill=_FAINT, anchor="end"))
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """Where a ratio lies, in a panel that begins at `y` and reaches up to `top`."""

    def __init__(self, y: float, top: float) -> None:
        self.y, self.top = y, top

    def __call__(self, ratio: float) -> float:
        return self.y + _PANEL * (1 - ratio / self.top)


def _panel(rows: Sequence[Row], transports: Sequence[str], size: int, y: float, scale: _Scale) -> Iterator[str]:
    yield _text(_LEFT, y - 10, f"{size} workers" if size > 1 else "1 worker", size=14, weight=600)
    right = _WIDTH - _RIGHT
    for ratio in (0.0, 0.25, 0.5, 0.75):
        yield _line(_LEFT, scale(ratio), right, scale(ratio), _GRID)
        yield _text(_LEFT - 10, scale(ratio) + 4, f"{ratio:.2f}", size=12, fill=_FAINT, anchor="end")
    groups = _groups(rows)
    width = (right - _LEFT) / len(groups)
    for place, (label, members) in enumerate(groups):
        yield from _group(members, transports, _LEFT + place * width, width, scale)
        weight = 600 if label == "geometric mean" else 400
        yield _text(_LEFT + (place + 0.5) * width, y + _PANEL + 20, label, size=13, weight=weight, anchor="middle")
    yield _line(_LEFT, scale(1.0), right, scale(1.0), "#c1121f", thick=1.5, dashes="6 4")
    yield _text(_LEFT - 10, scale(1.0) + 4, "DDP", size=12, fill="#c1121f", weight=600, anchor="end")


def _groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows of each model; where there are several, a last group with their means."""
    labels = list(dict.fromkeys(row["label"] for row in rows))
    groups = [(label, [row for row in rows if row["label"] == label]) for label in labels]
    if len(groups) < 2:
        return groups
    means = []
    for transport in dict.fromkeys(row["transport"] for row in rows):
        chosen = [row for row in rows if row["transport"] == transport]
        ratio = statistics.geometric_mean(row["ratio"]["ddp"][1] for row in chosen)
        floor = statistics.geometric_mean(row["floor_over_ddp"][1] for row in chosen)
        means.append({"transport": transport, "ratio": {"ddp": [ratio] * 3}, "floor_over_ddp": [floor] * 3})
    return [*groups, ("geometric mean", means)]


def _group(rows: Sequence[Row], transports: Sequence[str], x: float, width: float, scale: _Scale) -> Iterator[str]:
    bar = min(40.0, 0.8 * width / len(transports))
    left = x + (width - bar * len(transports)) / 2
    for place, transport in enumerate(transports):
        for row in rows:
            if row["transport"] == transport:
                yield from _bar(row, left + place * bar, bar, scale)


def _bar(row: Row, x: float, width: float, scale: _Scale) -> Iterator[str]:
    low, ratio, high = row["ratio"]["ddp"]
    floor, middle = row["floor_over_ddp"][1], x + width / 2
    colour = COLOURS[row["transport"]]
    said = f"{TRANSPORTS[row['transport']]}: {ratio:.2f} of DDP; without communication {floor:.2f}"
    yield f"<g><title>{escape(said)}</title>"
    yield (
        f'<rect x="{x + 2:.1f}" y="{scale(ratio):.1f}" width="{width - 4:.1f}" '
        f'height="{scale(0) - scale(ratio):.1f}" rx="2" fill="{colour}"/>'
    )
    if high > low:
        yield _line(middle, scale(low), middle, scale(high), "#ffffff", thick=3)
        yield _line(middle, scale(low), middle, scale(high), _INK, thick=1.2)
    yield _line(x, scale(floor), x + width, scale(floor), "#ffffff", thick=5)
    yield _line(x, scale(floor), x + width, scale(floor), _INK, thick=2)
    above = min(scale(max(ratio, high)), scale(floor)) - 6
    if abs(above - scale(1.0)) < 12:  # not into the line of DDP
        above = scale(1.0) - 6
    yield _text(middle, above, f"{ratio:.2f}", size=12, weight=600, anchor="middle")
    yield "</g>"


def _legend(transports: Sequence[str]) -> Iterator[str]:
    x, y = float(_LEFT), 80
    for transport in transports:
        yield f'<rect x="{x:.0f}" y="{y - 11}" width="13" height="13" rx="2" fill="{COLOURS[transport]}"/>'
        yield _text(x + 19, y, TRANSPORTS[transport], size=13)
        x += 19 + 7.2 * len(TRANSPORTS[transport]) + 22
    yield _line(x, y - 5, x + 18, y - 5, _INK, thick=2)
    yield _text(x + 25, y, "without communication", size=13)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, thick: float = 1.0, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{thick:g}"{dashed}/>'
    )


def _text(
    x: float, y: float, text: str, size: int = 13, fill: str = _INK, weight: int = 400, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


if __name__ == "__main__":
    main()
