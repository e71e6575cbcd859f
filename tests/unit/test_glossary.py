"""The glossary and the code use the same terms, and a module's basename identifies it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "farandole"
MOST_TERMS = 60

REPEATED_BASENAMES = {
    "__init__": "the name that Python gives to the module of a package",
}
"""Basenames that several modules may have, with the reason."""


def terms() -> list[str]:
    return re.findall(r"\*\*([^*]+)\*\*", (ROOT / "docs" / "glossary.md").read_text())


def form_of(term: str) -> re.Pattern[str]:
    """Matches the term in prose, snake_case and CamelCase, singular and plural."""
    return re.compile("[ _-]?".join(map(re.escape, re.split("[ -]", term))) + "s?", re.IGNORECASE)


def test_the_glossary_has_at_most_sixty_terms_each_defined_once() -> None:
    found = terms()
    assert 20 < len(found) <= MOST_TERMS
    assert [term for term, count in Counter(found).items() if count > 1] == []


def test_every_term_of_the_glossary_occurs_in_the_code() -> None:
    code = "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
    assert [term for term in terms() if not form_of(term).search(code)] == []


def test_a_term_is_found_in_every_form_and_a_missing_one_is_not() -> None:
    for text in ("control blocks", "CONTROL_BLOCK_BYTES", "class ControlBlock", "own_control_blocks"):
        assert form_of("control block").search(text)
    assert not form_of("control block").search("the control of a block")


def test_no_basename_occurs_twice_in_the_package() -> None:
    """The alias is left out: its paths are Horovod's."""
    modules = [
        path for path in PACKAGE.rglob("*.py") if PACKAGE / "integrations" / "horovod" / "alias" not in path.parents
    ]
    counts = Counter(path.stem for path in modules)
    assert len(modules) > 100
    assert sorted(stem for stem, count in counts.items() if count > 1 and stem not in REPEATED_BASENAMES) == []
