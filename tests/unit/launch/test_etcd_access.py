"""What `--state etcd://...` and the variables of etcdctl say: where etcd is, and how to be let in."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.base.env.cluster_variables import EtcdVariables, take_etcd_variables
from farandole.errors import ConfigError
from farandole.integrations.etcd.etcd_client import EtcdAccess

NOTHING = EtcdVariables()


@pytest.mark.parametrize(
    ("hosts", "endpoints"),
    [
        ("127.0.0.1:2380", (("127.0.0.1", 2380),)),
        ("localhost", (("localhost", 2379),)),
        ("[::1]:23,127.0.0.2", (("::1", 23), ("127.0.0.2", 2379))),
    ],
)
def test_hosts_have_the_port_of_etcd_unless_another_one_is_given(
    hosts: str, endpoints: tuple[tuple[str, int], ...]
) -> None:
    found = EtcdAccess.parse(f"etcd://{hosts}/jobs/a/", NOTHING)
    assert (found.endpoints, found.prefix) == (endpoints, "jobs/a")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("etcd://127.0.0.1", "with a PREFIX for the keys of this job"),
        ("etcd://127.0.0.1/", "with a PREFIX for the keys of this job"),
        ("etcd://127.0.0.1//", "with a PREFIX for the keys of this job"),
        ("etcd:///a", "'' is no HOST or HOST:PORT"),
        ("etcd://127.0.0.1:x/a", "'127.0.0.1:x' is no HOST or HOST:PORT"),
        ("etcd://127.0.0.1:0/a", "'127.0.0.1:0' is no HOST or HOST:PORT"),
        ("etcd://127.0.0.1:65536/a", "'127.0.0.1:65536' is no HOST or HOST:PORT"),
        ("etcd://[::1/a", r"'\[::1' is no HOST or HOST:PORT"),
        ("etcd://127.0.0.1,/a", "'' is no HOST or HOST:PORT"),
        ("etcd://127.0.0.1?x/a", r"'127.0.0.1\?x' is no HOST or HOST:PORT"),
    ],
)
def test_a_malformed_url_is_refused_with_its_form(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"the form is etcd://HOST.*{reason}"):
        EtcdAccess.parse(url, NOTHING)


def test_a_password_in_the_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="give user and password in ETCDCTL_USER") as raised:
        EtcdAccess.parse("etcd://root:hunter2@127.0.0.1/a", NOTHING)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("host", ["10.0.0.1", "etcd.example.org", "0.0.0.0"])
def test_another_machine_is_refused_without_tls(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"the path to {host}:2379 could read the password .*: set ETCDCTL_CACERT"):
        EtcdAccess.parse(f"etcd://127.0.0.1,{host}/a", NOTHING)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (EtcdVariables(user="root:right:er"), ("root", "right:er")),
        (EtcdVariables(user="root", password="right"), ("root", "right")),
        (NOTHING, ("", "")),
    ],
)
def test_the_password_follows_the_user_or_has_a_variable_of_its_own(
    variables: EtcdVariables, expected: tuple[str, str]
) -> None:
    access = EtcdAccess.parse("etcd://127.0.0.1/a", variables)
    assert (access.user, access.password) == expected
    assert "right" not in repr(access)


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "ca.pem")
    with pytest.raises(ConfigError, match=rf"the certificates for etcd \({missing}\) cannot be used"):
        EtcdAccess.parse("etcd://10.0.0.1/a", EtcdVariables(authority=missing))
    with pytest.raises(ConfigError, match="ETCDCTL_CERT needs ETCDCTL_CACERT"):
        EtcdAccess.parse("etcd://10.0.0.1/a", EtcdVariables(certificate=missing))


def test_user_and_password_are_taken_out_of_the_environment_of_workers() -> None:
    environment = {"ETCDCTL_USER": "root", "ETCDCTL_PASSWORD": "right", "ETCDCTL_CACERT": "ca.pem", "HOME": "/"}
    found = take_etcd_variables(environment)
    assert found == EtcdVariables(user="root", password="right", authority="ca.pem")
    assert environment == {"ETCDCTL_CACERT": "ca.pem", "HOME": "/"}
