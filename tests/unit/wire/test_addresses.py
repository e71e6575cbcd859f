"""Addresses as text."""

from __future__ import annotations

import pytest

from farandole.base.membership import Address


@pytest.mark.parametrize(("host", "text"), [("10.0.0.1", "10.0.0.1:80"), ("fd00::1", "[fd00::1]:80")])
def test_an_address_is_written_as_it_is_read(host: str, text: str) -> None:
    assert str(Address(host, 80)) == text
    assert Address.parse(text) == Address(host, 80)


@pytest.mark.parametrize("text", ["", "80", ":80", "a:", "a:0", "a:65536", "a:x", "a:-1", "a:\N{SUPERSCRIPT TWO}"])
def test_other_text_is_no_address(text: str) -> None:
    assert Address.parse(text) is None
