"""The places of a script under the step rule, and the ways between them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from farandole.errors import StepError
from farandole.training.worker import place
from farandole.training.worker.place import MAY_FOLLOW, Place, moved, without_batch

pytestmark = pytest.mark.core

DOCS = Path(__file__).parents[3] / "docs" / "storeys" / "training.md"


@pytest.mark.parametrize(("one", "other"), list(itertools.product(Place, Place)))
def test_a_script_goes_only_the_ways_of_the_table(one: Place, other: Place) -> None:
    if other in MAY_FOLLOW[one]:
        assert moved(one, other) is other
    else:
        with pytest.raises(StepError, match=f"the script is {one}, and not {other}"):
            moved(one, other)


@pytest.mark.parametrize("one", [each for each in Place if each is not Place.ENTERING])
def test_a_newcomer_is_one_until_its_first_batch(one: Place) -> None:
    assert without_batch(one) is (Place.JOINED if one is Place.JOINED else Place.BEFORE)


def test_the_documentation_has_the_diagram_of_the_source() -> None:
    drawn = [each.strip() for each in (place.__doc__ or "").split("\n\n")[1].splitlines()]
    assert [each.strip() for each in DOCS.read_text().split("```text\n")[1].split("\n```")[0].splitlines()] == drawn
