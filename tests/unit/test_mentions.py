"""Files, folders and functions that docstrings, comments and pages mention exist."""

from __future__ import annotations

import ast
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "farandole"
STOREYS = ("base", "job", "training", "integrations")
PAGES = ("architecture.md", "when-a-worker-dies.md", "glossary.md", *(f"storeys/{name}.md" for name in STOREYS))

FILE = re.compile(r"(?<![\w./-])(?:\w+/)*\w+\.py\b")
FOLDER = re.compile(r"`((?:[\w-]+/)+)`")
PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")
FUNCTIONS = re.compile(r"`((?:\w+/)*\w+\.py)` \((`\w+`(?:, `\w+`)*)\)")

ELSEWHERE = {
    "distributed_c10d.py": "torch's",
    "script.py": "the script of a user",
    "state.py": "accelerate's",
    "train.py": "the script of a user",
}
"""Files that are not in the repository, with the reason to mention them."""


def paths() -> list[str]:
    """All Python files, and their folders with a slash at the end, relative to the repository."""
    tops = (ROOT / name for name in ("src", "tests", "benchmarks", "examples", "docs", "farandole-horovod"))
    files = [path.relative_to(ROOT) for top in tops for path in top.rglob("*.py")]
    folders = {parent for file in files for parent in file.parents}
    return [f"/{file}" for file in files] + [f"/{folder}/" for folder in folders]


EXISTING = paths()


SOURCES = {"torch/": Path(torch.__file__).parent, "Lib/": Path(sysconfig.get_path("stdlib"))}
"""The folders of the sources that comments cite, by the beginning of the mentions."""

ARE_CITED_VERSIONS = torch.__version__.startswith("2.13.")


def exists(mention: str) -> bool:
    for beginning, folder in SOURCES.items():
        if mention.startswith(beginning):
            return not ARE_CITED_VERSIONS or (folder / mention.removeprefix(beginning)).exists()
    return mention in ELSEWHERE or any(path.endswith(f"/{mention}") for path in EXISTING)


def texts(path: Path) -> Iterator[str]:
    """The comments of a source, its docstrings, and the strings that describe attributes."""
    with tokenize.open(path) as file:
        yield from (token.string for token in tokenize.generate_tokens(file.readline) if token.type == tokenize.COMMENT)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def missing_in(text: str) -> list[str]:
    return [mention for mention in FILE.findall(text) if not exists(mention)]


def test_every_file_that_a_docstring_or_comment_mentions_exists() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {mention}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for text in texts(path)
        for mention in missing_in(text)
    ]
    assert found == []


def test_every_file_that_a_decision_or_the_page_of_the_tests_mentions_exists() -> None:
    pages = [*sorted((ROOT / "docs" / "decisions").glob("*.md")), ROOT / "tests" / "README.md"]
    assert [f"{page.name}: {mention}" for page in pages for mention in missing_in(page.read_text())] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_file_folder_and_function_that_a_page_mentions_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert missing_in(text) == []
    assert [folder for folder in FOLDER.findall(text) if not exists(folder)] == []
    for mention, names in FUNCTIONS.findall(text):
        (path,) = (path for path in PACKAGE.rglob("*.py") if str(path).endswith(f"/{mention}"))
        for name in re.findall(r"\w+", names):
            assert re.search(rf"(def|class) {name}\b|^{name}\b", path.read_text(), re.MULTILINE), f"{mention} ({name})"


def test_every_page_that_a_source_mentions_exists() -> None:
    tops = (path for name in ("src", "tests", "benchmarks", "examples", ".ci") for path in (ROOT / name).rglob("*"))
    sources = [path for path in tops if path.suffix in (".py", ".md", ".toml", "") and path.is_file()]
    mentions = {mention for path in sources for mention in PAGE.findall(path.read_text(errors="ignore"))}
    assert len(mentions) > 10
    assert [mention for mention in sorted(mentions) if not (ROOT / mention).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md"])
def test_every_link_of_a_page_outside_of_the_site_leads_to_a_file(page: str) -> None:
    place = ROOT / page
    assert [link for link in LINK.findall(place.read_text()) if not (place.parent / link).exists()] == []


def test_a_file_that_is_gone_is_found(tmp_path: Path) -> None:
    source = tmp_path / "a.py"
    source.write_text(
        '"""As gone.py does; see job/coordinator/decide.py."""\nx = 1  # data/decide.py\n"""By decide.py."""\n'
    )
    assert [mention for text in texts(source) for mention in missing_in(text)] == ["data/decide.py", "gone.py"]


def test_the_exceptions_are_needed() -> None:
    mentioned = {mention for path in PACKAGE.rglob("*.py") for text in texts(path) for mention in FILE.findall(text)}
    assert ELSEWHERE.keys() <= mentioned
