"""The README, and the page for PyPI that is made of it."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MOST_LINES = 120


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < MOST_LINES


def test_all_links_and_pictures_of_the_page_for_pypi_are_absolute_and_lead_to_files() -> None:
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    links = re.findall(r"\]\(([^)]+)\)", module.for_pypi(README, source))
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    ours = [link.removeprefix(f"{source}/") for link in links if link.startswith(source)]
    assert all((ROOT / re.sub(r"^(blob|raw)/main/", "", link).partition("#")[0]).exists() for link in ours)
    assert f"]({source}/raw/main/docs/demo.svg)" in module.for_pypi(README, source)
