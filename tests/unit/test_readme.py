"""The README, and the page for PyPI that is made of it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MOST_LINES = 120
SOURCE = "https://git.example/farandole"


@pytest.fixture(scope="module")
def for_pypi() -> Callable[[str, str | None], str]:
    """The function by which hatch_build.py makes the page."""
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.for_pypi  # type: ignore[no-any-return]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < MOST_LINES


def test_all_links_and_pictures_of_the_page_for_pypi_are_absolute_and_lead_to_files(
    for_pypi: Callable[[str, str | None], str],
) -> None:
    page = for_pypi(README, SOURCE)
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    ours = [link.removeprefix(f"{SOURCE}/") for link in links if link.startswith(SOURCE)]
    assert all((ROOT / re.sub(r"^(blob|raw)/main/", "", link).partition("#")[0]).exists() for link in ours)
    assert f"]({SOURCE}/raw/main/docs/demo.svg)" in page


def test_without_a_repository_the_page_for_pypi_has_no_link_that_leads_nowhere(
    for_pypi: Callable[[str, str | None], str],
) -> None:
    page = for_pypi(README, None)
    assert [link for link in re.findall(r"\]\(([^)]+)\)", page) if not link.startswith("https://")] == []
    assert "a tutorial of ten minutes" in page
    assert "demo.svg" not in page
