"""Two strict jobs are compared by the hashes of their states."""

from __future__ import annotations

import json

import pytest

from farandole.training.ledger.check import Line, check
from farandole.training.ledger.findings import Findings, as_json, compare, format_comparison, format_findings
from farandole.training.ledger.records import Hashed, Opened, Record, Started, decode, encode


def findings_of(*hashes: tuple[int, str]) -> Findings:
    records: list[Record] = [
        Opened(1, "whole", "w0", "a", 7, 0),
        Started(1, 1, "nonce", 0, 1, 0, 0, 0, 8),
        *(Hashed(1, 1, step, step // 4 - 1, text) for step, text in hashes),
    ]
    return check([Line("w0-abc-0000.jsonl", number, decode(encode(each))) for number, each in enumerate(records)])


def test_a_ledger_has_the_hash_of_each_epoch() -> None:
    findings = findings_of((4, "aa"), (8, "bb"), (4, "aa"))
    assert findings.hashes == {4: "aa", 8: "bb"}
    assert findings.is_exact
    assert "2 hashes of the state; after step 8: bb" in list(format_findings(findings))
    assert json.loads(as_json(findings))["hashes"] == {"4": "aa", "8": "bb"}


def test_two_hashes_after_one_step_are_no_strict_job() -> None:
    findings = findings_of((4, "aa"), (4, "cc"))
    assert not findings.is_exact
    assert findings.problems == ["the state after step 4 has two hashes, aa and cc, although the job was strict"]


@pytest.mark.parametrize(
    ("others", "line", "is_equal"),
    [
        (((4, "aa"), (8, "bb")), "the same state: yes, by 2 hashes, the last one after step 8", True),
        (((8, "bb"), (12, "dd")), "the same state: yes, by 1 hash, the last one after step 8", True),
        (((4, "aa"), (8, "xx")), "the same state: NO, since step 8 at the latest; they were equal after step 4", False),
        (((4, "xx"),), "the same state: NO, since step 4 at the latest", False),
        (((5, "aa"),), "the same state: UNKNOWN: the ledgers have no hashes after the same steps", False),
    ],
)
def test_a_comparison_tells_the_first_difference(
    others: tuple[tuple[int, str], ...], line: str, is_equal: bool
) -> None:
    comparison = compare(findings_of((4, "aa"), (8, "bb")), findings_of(*others))
    assert comparison.is_equal == is_equal
    assert format_comparison(comparison).startswith(line)
