"""Variables of etcdctl: how the launcher of a job is let into etcd (integrations/etcd/etcd_client.py)."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from msgspec import Struct, field

from farandole.base.env.agent_env import read_variables


class EtcdVariables(Struct, frozen=True):
    """The variables of etcdctl (https://github.com/etcd-io/etcd/tree/release-3.4/etcdctl) for its identity.

    Attributes:
        user: The name, or NAME:PASSWORD; empty: etcd asks for none.
        password: Of that user, where `user` has none.
        authority: The file with the certificate of the authority of etcd's servers; empty: connections are plain.
        certificate, key: The files with the client's certificate and its key; empty: it has none.
    """

    user: str = field(name="ETCDCTL_USER", default="")
    password: str = field(name="ETCDCTL_PASSWORD", default="")
    authority: str = field(name="ETCDCTL_CACERT", default="")
    certificate: str = field(name="ETCDCTL_CERT", default="")
    key: str = field(name="ETCDCTL_KEY", default="")


def take_etcd_variables(environ: MutableMapping[str, str] = os.environ) -> EtcdVariables:
    """Return the variables, and remove user and password from the environment: no worker needs them."""
    found = read_variables(environ, EtcdVariables)
    for name in ("ETCDCTL_USER", "ETCDCTL_PASSWORD"):
        environ.pop(name, None)
    return found
