"""A double of a Kubernetes API server, as far as it concerns pods: create, patch, delete, list and watch.

It keeps resource versions and the changes since some version, answers 410 Gone before it, sends bookmarks, and can drop
or stall its watches, forbid requests, or send an error in a watch. Real clients talk to it (KUBECONFIG).
"""

from __future__ import annotations

import copy
import json
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.support.local_server import LocalServer

Pod = dict[str, Any]

NAMESPACE = "training"
_BOOKMARK_S = 0.2


class ApiServer:
    """A server on this machine, used with `with`. Its switches may be set at any time:

    forbids      the requests that are answered by 403, such as {"list", "watch"}
    garbage      what watches send instead of events
    stalls       watches send nothing any more, and do not end
    keeps        the number of changes that are kept for watches
    """

    def __init__(self, bookmarks: bool = True, keeps: int = 1000) -> None:
        self.forbids: set[str] = set()
        self.stalls = False
        self.garbage = b""
        self.keeps, self._bookmarks = keeps, bookmarks
        self.requests: list[str] = []
        self._pods: dict[str, Pod] = {}
        self._changes: list[tuple[int, str, Pod]] = []
        self._version, self._oldest = 1000, 1000
        self._changed = threading.Condition()
        self._watch_epoch = 0
        self._error: dict[str, Any] | None = None
        self._is_over = False
        self._server = LocalServer(self._serve)

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig for this server, and return its path."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "double", "cluster": {"server": self._server.url}}],
            "users": [{"name": "tester", "user": {"token": "abc"}}],
            "contexts": [{"name": "it", "context": {"cluster": "double", "user": "tester", "namespace": NAMESPACE}}],
            "current-context": "it",
        }
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        return path

    def drop_watches(self) -> None:
        """Cut the connections of all watches."""
        with self._changed:
            self._watch_epoch += 1
            self._changed.notify_all()

    def forget_changes(self) -> None:
        """Let all versions before now be too old for a watch."""
        with self._changed:
            self._changes.clear()
            self._oldest = self._version

    def fail_watches(self, code: int, message: str) -> None:
        """Send an error in all watches that run."""
        with self._changed:
            self._error = {"kind": "Status", "code": code, "reason": "Expired", "message": message}
            self._changed.notify_all()

    def count(self, verb: str) -> int:
        """Return the number of requests of this kind: "list" or "watch"."""
        return self.requests.count(verb)

    def __enter__(self) -> ApiServer:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        self.drop_watches()
        self._server.stop()

    # Objects ----------------------------------------------------------------------------------------------------------

    def create(self, pod: Pod) -> Pod:
        with self._changed:
            metadata = {"uid": str(uuid.uuid4()), "namespace": NAMESPACE, **pod["metadata"]}
            return self._put("ADDED", {**pod, "metadata": metadata, "status": pod.get("status", {"phase": "Pending"})})

    def patch(self, name: str, change: dict[str, Any]) -> Pod:
        """Apply a merge patch."""
        with self._changed:
            return self._put("MODIFIED", _merged(self._pods[name], change))

    def delete(self, name: str, grace_s: float) -> Pod:
        """Mark the pod as being deleted; without grace delete it."""
        with self._changed:
            if grace_s:
                marked = {"metadata": {"deletionTimestamp": _now(), "deletionGracePeriodSeconds": int(grace_s)}}
                return self._put("MODIFIED", _merged(self._pods[name], marked))
            pod = self._put("DELETED", self._pods[name])
            del self._pods[name]
            return pod

    def _put(self, kind: str, pod: Pod) -> Pod:
        self._version += 1
        pod = copy.deepcopy(pod)
        pod["metadata"]["resourceVersion"] = str(self._version)
        self._pods[pod["metadata"]["name"]] = pod
        self._changes.append((self._version, kind, pod))
        while len(self._changes) > self.keeps:
            self._oldest = self._changes.pop(0)[0]
        self._changed.notify_all()
        return pod

    # Requests ---------------------------------------------------------------------------------------------------------

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        url = urlsplit(handler.path)
        query = {key: value[0] for key, value in parse_qs(url.query).items()}
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        content = json.loads(body) if body else {}
        parts = url.path.strip("/").split("/")  # api/v1/namespaces/NAMESPACE/pods[/NAME[/status]]
        verb = "watch" if query.get("watch") in ("true", "True") else "list"
        name = parts[5] if len(parts) > 5 else ""
        self.requests.append(verb if handler.command == "GET" else handler.command)
        if parts[:5] != ["api", "v1", "namespaces", NAMESPACE, "pods"]:
            _send(handler, 404, _status(404, "NotFound", f"there is no {url.path}"))
        elif handler.command == "GET" and verb in self.forbids:
            who = f"system:serviceaccount:{NAMESPACE}:default"
            text = f'pods is forbidden: User "{who}" cannot {verb} resource "pods" in API group "" in the namespace'
            _send(handler, 403, _status(403, "Forbidden", f'{text} "{NAMESPACE}"'))
        elif handler.command == "POST":
            _send(handler, 201, self.create(content))
        elif name and name not in self._pods:
            _send(handler, 404, _status(404, "NotFound", f'pods "{name}" not found'))
        elif handler.command == "PATCH":
            _send(handler, 200, self.patch(name, content))
        elif handler.command == "DELETE":
            _send(handler, 200, self.delete(name, float(content.get("gracePeriodSeconds", 30))))
        elif verb == "watch":
            self._watch(handler, query)
        else:
            with self._changed:
                items = [pod for pod in self._pods.values() if _matches(pod, query.get("labelSelector", ""))]
                metadata = {"resourceVersion": str(self._version)}
                _send(handler, 200, {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items})

    def _watch(self, handler: BaseHTTPRequestHandler, query: dict[str, str]) -> None:
        version, selector = int(query["resourceVersion"]), query.get("labelSelector", "")
        with self._changed:
            epoch = self._watch_epoch
            if version < self._oldest:
                _send(handler, 410, _status(410, "Expired", f"too old resource version: {version} ({self._oldest})"))
                return
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        deadline_s = time.monotonic() + float(query.get("timeoutSeconds", "3600"))
        bookmarks = self._bookmarks and query.get("allowWatchBookmarks") in ("true", "True")
        bookmark_s = time.monotonic() + _BOOKMARK_S
        while True:
            with self._changed:
                self._changed.wait(0.05)
                if epoch != self._watch_epoch or self._is_over:
                    handler.close_connection = True
                    return  # without the last chunk: the connection is cut
                if self.stalls:
                    continue
                news = [each for each in self._changes if each[0] > version]
                error, now = self._error, self._version
                self._error = None
            for number, kind, pod in news:
                version = number
                if _matches(pod, selector):
                    _chunk(handler, {"type": kind, "object": pod})
            if self.garbage:
                _write(handler, self.garbage)
            if error is not None:
                _chunk(handler, {"type": "ERROR", "object": error})
            elif bookmarks and time.monotonic() > bookmark_s:
                bookmark_s = time.monotonic() + _BOOKMARK_S
                pod = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": str(now)}}
                _chunk(handler, {"type": "BOOKMARK", "object": pod})
                version = max(version, now)
            if error is not None or time.monotonic() > deadline_s:
                handler.wfile.write(b"0\r\n\r\n")
                return


def _chunk(handler: BaseHTTPRequestHandler, event: dict[str, Any]) -> None:
    """Send an event in two chunks: nothing may depend on where they end."""
    line = json.dumps(event).encode() + b"\n"
    for part in (line[:20], line[20:]):
        _write(handler, part)


def _write(handler: BaseHTTPRequestHandler, part: bytes) -> None:
    handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
    handler.wfile.flush()


def _send(handler: BaseHTTPRequestHandler, code: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    handler.send_response(code)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def _status(code: int, reason: str, message: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


def _matches(pod: Pod, selector: str) -> bool:
    labels = pod["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in (each.split("=") for each in selector.split(",") if each))


def _merged(target: Any, change: Any) -> Any:
    if not isinstance(change, dict) or not isinstance(target, dict):
        return copy.deepcopy(change)
    return {**target, **{key: _merged(target.get(key), value) for key, value in change.items()}}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
