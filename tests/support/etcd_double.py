"""A double of etcd's JSON gateway, as far as etcd_client.py uses it: what a real etcd does rarely, on demand."""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any

from farandole.integrations.etcd.etcd_client import EtcdAccess
from tests.support.local_server import LocalServer


@dataclass
class _Key:
    value: str
    created: int
    changed: int
    lease: str


class EtcdDouble:
    """A server on this machine, used with `with`. Its switches may be set at any time:

    answers       what is sent next, as (status, body), instead of an answer
    loses         the number of requests that are carried out, but not answered
    holds         the number of requests that are neither carried out nor answered, until `carry_out_held()`
    users         name and password of those who are let in; empty: everybody is
    asked         the paths of all requests
    """

    def __init__(self) -> None:
        self.answers: list[tuple[int, bytes]] = []
        self.loses = self.holds = 0
        self.users: dict[str, str] = {}
        self.asked: list[str] = []
        self.keys: dict[str, _Key] = {}
        self._leases: set[str] = set()
        self._tokens: set[str] = set()
        self._held: list[tuple[str, dict[str, Any]]] = []
        self._revision = 1
        self._lock = threading.Lock()
        self._server = LocalServer(self._serve)

    def __enter__(self) -> EtcdDouble:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()

    @property
    def port(self) -> int:
        return int(self._server.url.rpartition(":")[2])

    def access(self, user: str = "", password: str = "") -> EtcdAccess:
        return EtcdAccess((("127.0.0.1", self.port),), "jobs/a", user, password)

    def names(self) -> list[str]:
        """The keys, below the prefix."""
        return sorted(base64.b64decode(key).decode().removeprefix("jobs/a/") for key in self.keys)

    def end_leases(self) -> None:
        """As if no launcher had been heard of for long."""
        with self._lock:
            self._leases.clear()
            self.keys = {key: each for key, each in self.keys.items() if each.lease == "0"}

    def forget_tokens(self) -> None:
        """As a server does that is started again."""
        self._tokens.clear()

    def carry_out_held(self) -> None:
        """Do at last what was held."""
        held, self._held = self._held, []
        for path, body in held:
            self._do(path, body)

    # Requests --------------------------------------------------------------------------------------------

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.removeprefix("/v3/")
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.asked.append(path)
        if self.answers:
            self._send(handler, *self.answers.pop(0))
            return
        if self.holds or self.loses:
            if self.holds:
                self.holds -= 1
                self._held.append((path, body))
            else:
                self.loses -= 1
                self._do(path, body)
            handler.close_connection = True
            return
        if path == "auth/authenticate":
            self._authenticate(handler, body)
        elif self.users and handler.headers.get("Authorization") not in self._tokens:
            self._refuse(handler, 16, "etcdserver: invalid auth token")
        else:
            self._send(handler, 200, json.dumps(self._do(path, body)).encode())

    def _authenticate(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if self.users.get(body["name"]) != body["password"]:
            self._refuse(handler, 3, "etcdserver: authentication failed, invalid user ID or password")
            return
        token = f"token.{len(self.asked)}"
        self._tokens.add(token)
        self._send(handler, 200, json.dumps({"token": token}).encode())

    def _refuse(self, handler: BaseHTTPRequestHandler, code: int, message: str) -> None:
        self._send(handler, 400, json.dumps({"error": message, "code": code, "message": message}).encode())

    def _send(self, handler: BaseHTTPRequestHandler, status: int, data: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _do(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            match path:
                case "kv/range":
                    found = self.keys.get(body["key"])
                    return {"header": self._header(), **({} if found is None else {"kvs": [self._shown(found)]})}
                case "kv/txn":
                    return self._transact(body)
                case "lease/grant":
                    self._revision += 1
                    self._leases.add(str(self._revision))
                    return {"ID": str(self._revision), "TTL": body["TTL"]}
                case "lease/keepalive":
                    return {"result": {"ID": body["ID"], **({"TTL": "6"} if body["ID"] in self._leases else {})}}
                case "lease/revoke":
                    self._leases.discard(body["ID"])
                    self.keys = {key: each for key, each in self.keys.items() if each.lease != body["ID"]}
                    return {"header": self._header()}
        raise AssertionError(path)

    def _transact(self, body: dict[str, Any]) -> dict[str, Any]:
        for each in body["compare"]:
            found = self.keys.get(each["key"])
            field, expected = (
                ("created", "create_revision") if each["target"] == "CREATE" else ("changed", "mod_revision")
            )
            if (0 if found is None else getattr(found, field)) != int(each[expected]):
                return {"header": self._header()}
        self._revision += 1
        for each in body["success"]:
            if (put := each.get("request_put")) is not None:
                former = self.keys.get(put["key"])
                created = self._revision if former is None else former.created
                self.keys[put["key"]] = _Key(put["value"], created, self._revision, put["lease"])
            else:
                self._delete(**each["request_delete_range"])
        return {"header": self._header(), "succeeded": True}

    def _delete(self, key: str, range_end: str = "") -> None:
        first, end = base64.b64decode(key), base64.b64decode(range_end)
        for each in [*self.keys]:
            name = base64.b64decode(each)
            if name == first or (end and first <= name < end):
                del self.keys[each]

    def _header(self) -> dict[str, str]:
        return {"revision": str(self._revision)}

    def _shown(self, key: _Key) -> dict[str, str]:
        return {"value": key.value, "create_revision": str(key.created), "mod_revision": str(key.changed)}
