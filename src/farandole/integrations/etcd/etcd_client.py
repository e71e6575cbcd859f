"""A client of etcd's version 3, by its JSON gateway: what the state of a job needs (integrations/etcd/etcd_state.py).

https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/ describes the gateway. Keys and values travel as base64, numbers
of 64 bits as strings, and fields that are zero are left out.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import json
import ssl
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from farandole.base.env.cluster_variables import EtcdVariables
from farandole.errors import ConfigError, FarandoleError

DEADLINE_S = 2.0
"""For a connection, and for each wait on it."""

_PORT = 2379
_LONGEST_ANSWER = 16_000_000  # of a part of a state, or an error
_SHOWN = 120

# Codes of gRPC (https://grpc.github.io/grpc/core/md_doc_statuscodes.html) of requests that may succeed later.
_LATER = {2, 4, 8, 10, 13, 14}  # unknown, deadline, no space, aborted, internal, unavailable
_OLD_TOKEN = ("invalid auth token", "revision of auth store is old")


class EtcdUnavailable(FarandoleError):
    """No endpoint has carried out the request; it may have been carried out nevertheless, or be so later."""


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
    def parse(cls, url: str, variables: EtcdVariables) -> EtcdAccess:
        """Return the access to etcd://HOST[:PORT][,HOST[:PORT]...]/PREFIX with the identity that etcdctl would have.
        Raises ConfigError."""
        hosts, _, prefix = url.removeprefix("etcd://").partition("/")
        if "@" in hosts:
            raise ConfigError("--state etcd://...: give user and password in ETCDCTL_USER, not on the command line")
        form = f"--state {url}: the form is etcd://HOST[:PORT][,HOST[:PORT]...]/PREFIX"
        if not prefix.strip("/"):
            raise ConfigError(f"{form}, with a PREFIX for the keys of this job")
        endpoints = []
        for each in hosts.split(","):
            try:
                found = urllib.parse.urlsplit(f"//{each}")
                host, port = found.hostname, _PORT if found.port is None else found.port
            except ValueError:  # a port that is no number, or an address that is none
                host, port = None, 0
            if not host or not port or found.netloc != each:
                raise ConfigError(f"{form}; {each!r} is no HOST or HOST:PORT")
            endpoints.append((host, port))
        tls = _tls(variables)
        for host, port in endpoints if tls is None else ():
            if not _is_loopback(host):
                raise ConfigError(
                    f"--state {url}: whoever is on the path to {host}:{port} could read the password and change the "
                    "state of the job: set ETCDCTL_CACERT to the certificate of etcd's authority (only on loopback the "
                    "connection may be plain)"
                )
        user, colon, password = variables.user.partition(":")
        return cls(tuple(endpoints), prefix.rstrip("/"), user, password if colon else variables.password, tls)


class KeyValue(msgspec.Struct, frozen=True):
    """A key's value, with the numbers of the revisions in which it was created and last changed."""

    created: int = msgspec.field(name="create_revision")
    changed: int = msgspec.field(name="mod_revision")
    value: bytes = b""


class _Found(msgspec.Struct):
    kvs: tuple[KeyValue, ...] = ()


class _Header(msgspec.Struct):
    revision: int


class _Transacted(msgspec.Struct):
    header: _Header
    succeeded: bool = False


class _Granted(msgspec.Struct):
    lease: int = msgspec.field(name="ID")


class _Renewed(msgspec.Struct):
    ttl_s: int = msgspec.field(name="TTL", default=0)


class _KeptAlive(msgspec.Struct):
    result: _Renewed


class _Authenticated(msgspec.Struct):
    token: str


AnswerT = TypeVar("AnswerT", bound=msgspec.Struct)


class EtcdClient:
    """One connection at a time, to the endpoint that has answered last. For one thread at a time."""

    def __init__(self, access: EtcdAccess) -> None:
        self._access = access
        self._connection: http.client.HTTPConnection | None = None
        self._first = 0  # the endpoint that is tried first
        self._token = ""

    def get(self, key: str) -> KeyValue | None:
        """Return the value of a key; None: it does not exist. Raises EtcdUnavailable and EtcdRefused, as all do."""
        found = _typed(self._call("kv/range", {"key": _base64(key)}), _Found).kvs
        return found[0] if found else None

    def transact(self, compare: Sequence[Mapping[str, Any]], success: Sequence[Mapping[str, Any]]) -> int:
        """Do all of `success` if all of `compare` holds, else nothing. Return the number of the revision with these
        changes; 0: nothing was done."""
        answer = _typed(self._call("kv/txn", {"compare": compare, "success": success}), _Transacted)
        return answer.header.revision if answer.succeeded else 0

    def grant_lease(self, ttl_s: int) -> str:
        """Return the number of a new lease."""
        return str(_typed(self._call("lease/grant", {"TTL": str(ttl_s)}), _Granted).lease)

    def keep_alive(self, lease: str) -> bool:
        """Renew a lease. False: it has ended."""
        return _typed(self._call("lease/keepalive", {"ID": lease}), _KeptAlive).result.ttl_s > 0

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
            except (OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
            except EtcdUnavailable as error:
                problem = str(error)
            else:
                self._first = endpoints.index((connection.host, connection.port))
                return answer
            if index >= reused:
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
        answer = self._post(connection, "auth/authenticate", json.dumps(asked).encode())
        self._token = _typed(answer, _Authenticated).token
        return self._post(connection, path, data)

    def _post(self, connection: http.client.HTTPConnection, path: str, data: bytes) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = self._token
        connection.request("POST", f"/v3/{path}", data, headers)
        response = connection.getresponse()
        content = response.read(_LONGEST_ANSWER)
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            shown = content[:_SHOWN].decode(errors="replace").strip()
            raise EtcdUnavailable(f"it does not answer as etcd 3.4 or newer does (status {response.status}: {shown!r})")
        if response.status != http.client.OK or "error" in answer:
            problem = answer.get("message", answer.get("error"))
            raise (EtcdUnavailable if answer.get("code") in _LATER else EtcdRefused)(str(problem))
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


def _typed(answer: Mapping[str, Any], type_: type[AnswerT]) -> AnswerT:
    try:
        return msgspec.convert(answer, type_, strict=False)
    except msgspec.ValidationError as error:
        raise EtcdRefused(f"it answers as something else than etcd does ({error})") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _tls(variables: EtcdVariables) -> ssl.SSLContext | None:
    if not variables.authority:
        if variables.certificate:
            raise ConfigError("ETCDCTL_CERT needs ETCDCTL_CACERT, the certificate of etcd's authority")
        return None
    try:
        context = ssl.create_default_context(cafile=variables.authority)
        if variables.certificate:
            context.load_cert_chain(variables.certificate, variables.key or None)
    except OSError as error:  # ssl.SSLError is one
        names = ", ".join(filter(None, (variables.authority, variables.certificate, variables.key)))
        raise ConfigError(f"the certificates for etcd ({names}) cannot be used: {error}") from None
    return context
