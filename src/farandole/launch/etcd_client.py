"""A client of etcd's version 3, by its JSON gateway: what the state of a job needs (launch/etcd_state.py).

https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/ describes the gateway. Keys and values travel as base64, numbers
of 64 bits as strings, and fields that are zero are left out.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import json
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farandole.errors import ConfigError, FarandoleError

DEADLINE_S = 2.0
"""For a connection, and for each wait on it."""

# Codes of gRPC (https://grpc.github.io/grpc/core/md_doc_statuscodes.html) of requests that may succeed later.
_LATER = {2, 4, 8, 10, 13, 14}  # unknown, deadline, no space, aborted, internal, unavailable
_OLD_TOKEN = ("invalid auth token", "revision of auth store is old")


class EtcdUnavailable(FarandoleError):
    """No endpoint has carried out the request; it may have been carried out nevertheless, and may be repeated."""


class EtcdRefused(FarandoleError):
    """The request is refused, and would be again."""


@dataclass(frozen=True)
class EtcdAccess:
    """Where etcd is, and how to be let in.

    endpoints  host and port of each member
    prefix     of the keys of one job, without a slash at its end
    user       and password; empty: etcd asks for none
    tls        None: the connections are plain
    """

    endpoints: tuple[tuple[str, int], ...]
    prefix: str
    user: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None

    @classmethod
    def parse(cls, url: str, environment: Mapping[str, str]) -> EtcdAccess:
        """Return the access to etcd://HOST:PORT[,HOST:PORT...]/PREFIX with the variables that etcdctl has:
        ETCDCTL_USER, ETCDCTL_PASSWORD, ETCDCTL_CACERT, ETCDCTL_CERT, ETCDCTL_KEY, ETCDCTL_INSECURE_TRANSPORT. Raises
        ConfigError."""
        hosts, slash, prefix = url.removeprefix("etcd://").partition("/")
        form = f"--state {url}: the form is etcd://HOST:PORT[,HOST:PORT...]/PREFIX"
        if "@" in hosts:
            raise ConfigError("--state etcd://...: give user and password in ETCDCTL_USER, not on the command line")
        if not slash or not prefix.strip("/"):
            raise ConfigError(f"{form}, with a prefix for the keys of this job")
        endpoints = []
        for each in hosts.split(","):
            host, _, digits = each.rpartition(":")
            port = int(digits) if digits.isascii() and digits.isdigit() else 0
            if not host or not 0 < port < 65536:
                raise ConfigError(f"{form}; {each!r} is no HOST:PORT")
            endpoints.append((host.strip("[]"), port))
        user, colon, password = environment.get("ETCDCTL_USER", "").partition(":")
        tls = _tls(environment)
        if tls is None and environment.get("ETCDCTL_INSECURE_TRANSPORT", "").lower() != "true":
            for host, port in endpoints:
                if not _is_loopback(host):
                    raise ConfigError(
                        f"--state {url}: the job's token would travel to {host}:{port} unencrypted; set "
                        "ETCDCTL_CACERT to the certificate of etcd's authority, or ETCDCTL_INSECURE_TRANSPORT=true "
                        "if you trust the network"
                    )
        password = password if colon else environment.get("ETCDCTL_PASSWORD", "")
        return cls(tuple(endpoints), prefix.rstrip("/"), user, password, tls)


@dataclass(frozen=True)
class KeyValue:
    """A key's value, with the numbers of the revisions in which it was created and last changed."""

    value: bytes
    created: int
    changed: int


class EtcdClient:
    """One connection at a time, to the endpoint that has answered last. For one thread at a time."""

    def __init__(self, access: EtcdAccess) -> None:
        self._access = access
        self._connection: http.client.HTTPConnection | None = None
        self._first = 0  # the endpoint that is tried first
        self._token = ""

    def get(self, key: str) -> KeyValue | None:
        """Return the value of a key; None: it does not exist. Raises EtcdUnavailable and EtcdRefused, as all do."""
        found = self._call("kv/range", {"key": _base64(key)}).get("kvs", [])
        return _key_value(found[0]) if found else None

    def transact(self, compare: Sequence[Mapping[str, Any]], success: Sequence[Mapping[str, Any]]) -> bool:
        """Do all of `success` if all of `compare` holds, else nothing. Return whether it was done."""
        return bool(self._call("kv/txn", {"compare": compare, "success": success}).get("succeeded"))

    def grant_lease(self, ttl_s: int) -> str:
        """Return the number of a new lease."""
        return str(self._call("lease/grant", {"TTL": str(ttl_s)})["ID"])

    def keep_alive(self, lease: str) -> bool:
        """Renew a lease. False: it has ended."""
        return int(self._call("lease/keepalive", {"ID": lease}).get("result", {}).get("TTL", 0)) > 0

    def revoke(self, lease: str) -> None:
        """End a lease, and remove the keys that have it."""
        self._call("lease/revoke", {"ID": lease})

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Let one endpoint after the other try it."""
        data, problems = json.dumps(body).encode(), []
        endpoints = self._access.endpoints
        reused = int(self._connection is not None)  # such a connection may have ended since: try the endpoint anew
        for index in range(len(endpoints) + reused):
            if self._connection is None:
                self._connection = self._connect(*endpoints[(self._first + index - reused) % len(endpoints)])
            connection = self._connection
            try:
                answer = self._authenticated(connection, path, data)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = str(error) or type(error).__name__
            except EtcdUnavailable as error:
                problem = str(error)
            else:
                self._first = endpoints.index((connection.host, connection.port))
                return answer
            problems.append(f"{connection.host}:{connection.port}: {problem}")
            self.close()
        raise EtcdUnavailable("; ".join(problems))

    def _connect(self, host: str, port: int) -> http.client.HTTPConnection:
        if self._access.tls is None:
            return http.client.HTTPConnection(host, port, timeout=DEADLINE_S)
        return http.client.HTTPSConnection(host, port, timeout=DEADLINE_S, context=self._access.tls)

    def _authenticated(self, connection: http.client.HTTPConnection, path: str, data: bytes) -> dict[str, Any]:
        """Do it with a token, where there is a user; tokens end after minutes, and when etcd is started again."""
        if not self._access.user:
            return self._post(connection, path, data)
        if self._token:
            try:
                return self._post(connection, path, data)
            except EtcdRefused as error:
                if not any(each in str(error) for each in _OLD_TOKEN):
                    raise
        self._token = ""
        asked = {"name": self._access.user, "password": self._access.password}
        self._token = self._post(connection, "auth/authenticate", json.dumps(asked).encode())["token"]
        return self._post(connection, path, data)

    def _post(self, connection: http.client.HTTPConnection, path: str, data: bytes) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        connection.request("POST", f"/v3/{path}", data, headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        if not isinstance(answer, dict):
            raise EtcdRefused("it is no etcd with the JSON gateway of version 3")
        if response.status != http.client.OK or "error" in answer:
            problem = str(answer.get("message", answer.get("error")))
            raise (EtcdUnavailable if answer.get("code") in _LATER else EtcdRefused)(problem)
        return answer


# Parts of a transaction -----------------------------------------------------------------------------------------------


def created_in(key: str, revision: int) -> dict[str, Any]:
    """Return the condition that a key was created in this revision; 0: that it does not exist."""
    return {"key": _base64(key), "target": "CREATE", "result": "EQUAL", "create_revision": str(revision)}


def changed_in(key: str, revision: int) -> dict[str, Any]:
    """Return the condition that a key was last changed in this revision; 0: that it does not exist."""
    return {"key": _base64(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def put(key: str, value: bytes, lease: str = "0") -> dict[str, Any]:
    """Return the operation that sets a key, which is removed with the lease."""
    return {"request_put": {"key": _base64(key), "value": base64.b64encode(value).decode(), "lease": lease}}


def delete(key: str, end: str = "") -> dict[str, Any]:
    """Return the operation that removes a key, or all keys from `key` to before `end`."""
    return {"request_delete_range": {"key": _base64(key), **({"range_end": _base64(end)} if end else {})}}


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _key_value(found: Mapping[str, Any]) -> KeyValue:
    value = base64.b64decode(found.get("value", ""))
    return KeyValue(value, int(found["create_revision"]), int(found["mod_revision"]))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _tls(environment: Mapping[str, str]) -> ssl.SSLContext | None:
    authority = environment.get("ETCDCTL_CACERT")
    certificate, key = environment.get("ETCDCTL_CERT"), environment.get("ETCDCTL_KEY")
    if authority is None:
        if certificate is not None:
            raise ConfigError("ETCDCTL_CERT needs ETCDCTL_CACERT, the certificate of etcd's authority")
        return None
    try:
        context = ssl.create_default_context(cafile=authority)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        names = ", ".join(os.fspath(each) for each in (authority, certificate, key) if each)
        raise ConfigError(f"the certificates of etcd ({names}) cannot be used: {error}") from None
    return context
