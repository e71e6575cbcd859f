"""Hosts as people write them, and whether a name means this machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from farandole.errors import ConfigError
from farandole.job.engines.host_list import HostSlots, is_this_machine, parse_hostfile, parse_hosts


def test_hosts_keep_their_order_and_have_one_slot_unless_they_say_more() -> None:
    assert parse_hosts("b:2, a ,c.example.org:16") == (
        HostSlots("b", 2),
        HostSlots("a", 1),
        HostSlots("c.example.org", 16),
    )
    assert parse_hosts("a,b:3", default_slots=4) == (HostSlots("a", 4), HostSlots("b", 3))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a:two", "whole number, got 'two'"),
        ("a:0", "host a needs at least 1 slot, got 0"),
        ("a:2,,b:2", "'' is not a valid host name"),
        ("a:2,a:3", "host a is listed twice"),
        ("-np:2", "'-np' is not a valid host name"),
        ("a;rm:2", "'a;rm' is not a valid host name"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match="write them as host1:2,host2:4") as raised:
        parse_hosts(text)
    assert says in str(raised.value)


def test_a_hostfile_has_a_host_in_each_line(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the fast ones\nb slots=2\n\na   slots = 4   # and a slow one\nc\n")
    assert parse_hostfile(path) == (HostSlots("b", 2), HostSlots("a", 4), HostSlots("c", 1))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("a slots=x", "whole number, got 'x'"),
        ("a slots=-1", "at least 1 slot, got -1"),
        ("a slot=2", "must look like 'host slots=2'"),
        ("b slots=2", "host b is listed twice"),
    ],
)
def test_a_wrong_line_of_a_hostfile_is_named_and_shown(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"b slots=2\n\n{line}\n")
    with pytest.raises(ConfigError) as raised:
        parse_hostfile(path)
    assert f"{path}, line 3, {line!r}: " in str(raised.value)
    assert says in str(raised.value)


def test_a_hostfile_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_hostfile(tmp_path / "nothing")
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(ConfigError, match="contains no host"):
        parse_hostfile(tmp_path / "empty")


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.0.0.2", socket.gethostname()])
def test_several_names_mean_this_machine(name: str) -> None:
    assert is_this_machine(name)


@pytest.mark.parametrize("name", ["192.0.2.1", "no-such-host.invalid"])
def test_other_names_do_not(name: str) -> None:
    assert not is_this_machine(name)
