"""Addresses as text."""

from __future__ import annotations

import pytest

from farandole.base.membership import Address
from farandole.job.launch.agent_command import _address


@pytest.mark.parametrize(("host", "text"), [("10.0.0.1", "10.0.0.1:80"), ("fd00::1", "[fd00::1]:80")])
def test_an_address_is_written_as_it_is_read(host: str, text: str) -> None:
    assert str(Address(host, 80)) == text
    assert _address(text) == Address(host, 80)
