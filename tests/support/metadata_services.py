"""The metadata services of clouds, played by a server on this machine.

The forms of the answers are those of the clouds' pages: AWS, "Spot Instance interruption notices", "EC2 instance
rebalance recommendations" and "Use IMDSv2" in the EC2 user guide; Google Cloud, "Query metadata server for maintenance
event notices" and "View and query VM metadata" (waiting for changes); Azure, "Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.local_server import LocalServer

Reply = tuple[int, dict[str, str], str]

AWS_NOT_FOUND = """<?xml version="1.0" encoding="iso-8859-1"?>
<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0 Transitional//EN"
\t"http://www.w3.org/TR/xhtml1/DTD/xhtml1-transitional.dtd">
<html xmlns="http://www.w3.org/1999/xhtml" xml:lang="en" lang="en">
 <head><title>404 - Not Found</title></head>
 <body><h1>404 - Not Found</h1></body>
</html>
"""


class MetadataService:
    """A server of one cloud. `values` may be changed while it runs; `trouble` overrides all answers:

    "hang" (no answer), "slow" (a byte each 50 ms, for ever), "garbage" (no HTTP), "endless", or a status as a number
    """

    def __init__(self, play: Callable[[MetadataService, str, str, dict[str, str]], Reply], **values: Any) -> None:
        self.values, self.trouble = values, ""
        self.requests: list[str] = []
        self.changed = threading.Condition()
        self._ends = threading.Event()
        self._play = play
        self._server = LocalServer(self._serve)

    @property
    def url(self) -> str:
        return self._server.url

    def set(self, **values: Any) -> None:
        with self.changed:
            self.values.update(values)
            self.changed.notify_all()

    def __enter__(self) -> MetadataService:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self.set()
        self._server.stop()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        method, path = handler.command, handler.path
        self.requests.append(f"{method} {path}")
        if self.trouble and self._makes_trouble(handler):
            handler.close_connection = True
            return
        headers = {name.lower(): value for name, value in handler.headers.items()}
        failure: Reply | None = (int(self.trouble), {}, "") if self.trouble else None
        status, added, text = failure or self._play(self, method, path, headers)
        body = text.encode()
        handler.send_response(status)
        for name, value in {**added, "Content-Length": str(len(body))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    def _makes_trouble(self, handler: BaseHTTPRequestHandler) -> bool:
        if self.trouble == "hang":
            self._ends.wait(60)
        elif self.trouble == "garbage":
            handler.wfile.write(b"\x00\xff this is not HTTP\r\n\r\n")
        elif self.trouble in ("slow", "endless"):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            while not self._ends.wait(0.05 if self.trouble == "slow" else 0):
                handler.wfile.write(b"x" if self.trouble == "slow" else b"x" * 65536)
        else:
            return False
        return True


def aws() -> MetadataService:
    """IMDSv2; values: `action`, `rebalance` (None: 404), `token`."""

    def play(service: MetadataService, method: str, path: str, headers: dict[str, str]) -> Reply:
        if path == "/latest/api/token":
            is_valid = method == "PUT" and headers.get("x-aws-ec2-metadata-token-ttl-seconds", "").isdecimal()
            return (200, {"Content-Type": "text/plain"}, service.values["token"]) if is_valid else (400, {}, "")
        if headers.get("x-aws-ec2-metadata-token") != service.values["token"]:
            return 401, {}, ""
        value = {
            "/latest/meta-data/spot/instance-action": service.values["action"],
            "/latest/meta-data/events/recommendations/rebalance": service.values["rebalance"],
        }.get(path)
        if value is None:
            return 404, {"Content-Type": "text/html"}, AWS_NOT_FOUND
        return 200, {"Content-Type": "text/plain"}, value if isinstance(value, str) else json.dumps(value)

    return MetadataService(play, action=None, rebalance=None, token="AQAEAHJ0cm9rZW4=")


def gcp() -> MetadataService:
    """Values: `preempted`, `maintenance`. A request that waits is answered at the change, or after its time."""

    def play(service: MetadataService, method: str, path: str, headers: dict[str, str]) -> Reply:
        if headers.get("metadata-flavor") != "Google":
            return 403, {}, "Missing Metadata-Flavor:Google header."
        url = urlsplit(path)
        name = {
            "/computeMetadata/v1/instance/preempted": "preempted",
            "/computeMetadata/v1/instance/maintenance-event": "maintenance",
        }.get(url.path)
        if name is None:
            return 404, {"Metadata-Flavor": "Google"}, ""
        query = {key: value[0] for key, value in parse_qs(url.query).items()}
        deadline_s = time.monotonic() + float(query.get("timeout_sec", "3600"))
        with service.changed:
            while query.get("wait_for_change") == "true" and query.get("last_etag") == _etag(service.values[name]):
                if service._ends.is_set() or not service.changed.wait(deadline_s - time.monotonic()):
                    break
            value = service.values[name]
        headers_out = {"Metadata-Flavor": "Google", "Content-Type": "application/text", "ETag": _etag(value)}
        return 200, headers_out, value

    return MetadataService(play, preempted="FALSE", maintenance="NONE")


def _etag(value: str) -> str:
    return f"{hash(value) & 0xFFFFFFFFFFFFFFFF:016x}"


def azure() -> MetadataService:
    """Values: `events`, of a machine whose name is vm_0."""

    def play(service: MetadataService, method: str, path: str, headers: dict[str, str]) -> Reply:
        url = urlsplit(path)
        if headers.get("metadata") != "true" or "api-version" not in parse_qs(url.query):
            return 400, {}, '{"error": "Bad request. Required metadata header not specified"}'
        if url.path == "/metadata/instance/compute/name":
            return 200, {"Content-Type": "text/plain; charset=utf-8"}, "vm_0"
        if url.path != "/metadata/scheduledevents":
            return 404, {}, ""
        document = {"DocumentIncarnation": 1, "Events": service.values["events"]}
        return 200, {"Content-Type": "application/json; charset=utf-8"}, json.dumps(document)

    return MetadataService(play, events=[])


def azure_event(kind: str, machine: str = "vm_0", status: str = "Scheduled") -> dict[str, object]:
    """An event as Azure shows it."""
    return {
        "EventId": "f020ba2e-3bc0-4c40-a10b-86575a9eabd5",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": [machine],
        "EventStatus": status,
        "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT" if status == "Scheduled" else "",
        "Description": "Host server is undergoing maintenance.",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }
