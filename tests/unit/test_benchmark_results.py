"""From the times of the benchmarks to ratios, a picture and a page."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot, report
from benchmarks.step_time import quartiles

MACHINE = {"cores": 2, "processor": "x86_64", "kernel": "6", "python": "3.11", "torch": "2.6", "date": "2026-01-01T00"}
SVG = "{http://www.w3.org/2000/svg}"


def row(transport: str, workers: int, label: str, ratio: float) -> dict[str, Any]:
    ms = {"farandole": 10 * ratio, "ddp": 10.0, "plain_ddp": 11.0, "none": 5.0, "one": 4.0}
    return {
        "model": label,
        "label": label,
        "workers": workers,
        "transport": transport,
        "use": "farandole",
        "ms": ms,
        "ratio": {"ddp": [ratio - 0.1, ratio, ratio + 0.1], "plain_ddp": [0.7] * 3, "none": [2.0] * 3},
        "floor_over_ddp": [0.5] * 3,
    }


ROWS = [row(transport, n, label, 0.8) for transport in ("tcp", "shm") for n in (2, 4) for label in ("A & B", "C")]


def test_ratios_are_taken_turn_by_turn() -> None:
    """A moment that is ten times as slow hits both, and changes no ratio."""
    assert quartiles([1.0, 20.0, 3.0], [2.0, 40.0, 6.0]) == [0.5, 0.5, 0.5]


def test_the_picture_has_a_bar_for_each_row_and_for_each_mean() -> None:
    root = ElementTree.fromstring(plot.picture(ROWS, MACHINE))
    said = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert len(said) == len(ROWS) + 4
    assert all("0.80 of DDP" in each for each in said)


def test_the_threads_of_data_parallel_have_a_table() -> None:
    ratios = {"speed": {"ours": [1.4, 1.5, 1.6], "inside": [1.0, 1.2, 1.3]}, "processor": [1, 1.1, 1.2]}
    row = {"label": "A", "samples": 16, "threads": 2, "ms": {"one": 8.0}, "bound": [1.7, 1.8, 1.9], **ratios}
    text = report.tables({"machine": MACHINE, "measured": {"data_parallel": "2026-11-26"}, "data_parallel": [row]})
    assert "| A | 16 | 2 | 8.0 ms | **1.50** (1.40 to 1.60) | 1.20 | 1.10 | 1.80 |" in text


def test_a_picture_of_a_single_row_has_no_mean() -> None:
    root = ElementTree.fromstring(plot.picture(ROWS[:1], MACHINE))
    assert len(list(root.iter(f"{SVG}title"))) == 1


def test_publishing_replaces_what_is_between_the_marks_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    measured = {"step_time": "2026-11-24", "recovery": "2026-11-26"}
    report.write({"machine": MACHINE, "measured": measured, "step_time": ROWS}, page)
    text = page.read_text()
    assert "Measured 2026-11-24 to 2026-11-26: " in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert text.count("**0.80** (0.70 to 0.90)") == len(ROWS)


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="tables go between"):
        report.write({"machine": MACHINE}, page)


def test_the_page_of_the_documentation_has_the_marks() -> None:
    text = report.PAGE.read_text()
    assert 0 < text.find(report.BEGIN) < text.find(report.END)
