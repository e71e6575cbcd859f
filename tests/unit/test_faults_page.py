"""The page on faults names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "faults.md").read_text()


def test_every_test_that_the_page_on_faults_names_is_there() -> None:
    file, named = None, 0
    for name in re.findall(r"`((?:\w+/)+test_\w+\.py|test_\w+)`", PAGE):
        if name.endswith(".py"):
            file = TESTS / name
            assert file.exists(), name
        else:
            named += 1
            assert file is not None, name
            assert f"def {name}(" in file.read_text(), f"{name} in {file}"
    assert named > 30
