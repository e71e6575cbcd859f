"""Preemption notices: a machine of a cloud learns from the cloud's metadata service that it will be taken away, and its
agent leaves the job in order. agent_command.py and job_runner.py run it.

No request is sent unless a user asks for it. The service, at a link-local address, also hands out credentials of the
machine: networks watch and block it, and where there is no such service a request may hang. `auto` determines the cloud
from what the firmware tells about the machine (the DMI tables, which the kernel shows as files), so that it sends
nothing on a machine of no known cloud.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from farandole.base.config import Preemption
from farandole.base.events.event import Event
from farandole.base.events.host_events import PreemptionAnnounced, PreemptionUnwatched, PreemptionWatched
from farandole.base.machine import wall_time_s
from farandole.errors import FarandoleError

_DMI = Path("/sys/class/dmi/id")
_AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"  # of Azure's machines, not of others on Hyper-V

_RESERVE_S = 5.0  # before the machine is gone, to end the agent
_ANSWER_S = 5.0  # for a whole answer
_ANSWER_BYTES = 1 << 20
_AFTER_FAILURE_S = (5.0, 60.0)  # between two attempts: doubled with each failure in a row
_FAILURES_REPORTED = 3  # in a row; a single one is not worth a warning


@dataclass(frozen=True)
class Notice:
    """What a cloud announces.

    reason      for the log
    must_leave  False: the machine stays, or may well stay
    left_s      seconds that are left; None: unknown
    """

    reason: str
    must_leave: bool = True
    left_s: float | None = None

    @property
    def time_to_leave_s(self) -> float:
        """Seconds that workers may take to reach a boundary; 0: their usual grace period."""
        return 0.0 if self.left_s is None else max(0.0, self.left_s - _RESERVE_S)


class NoticeSource(Protocol):
    """A place of a metadata service where notices appear."""

    every_s: float
    """Seconds between two calls."""

    async def look(self) -> Notice | None:
        """Ask once, which may wait for a change. Return the notice; None: there is none. Raises MetadataUnavailable."""
        ...


class MetadataUnavailable(FarandoleError):
    """The metadata service did not answer, or not in a way that makes sense."""


def cloud_of_machine(folder: Path = _DMI) -> str:
    """Return the cloud of this machine as its firmware tells it, without any request; "none" for no known cloud.

    The same properties are used by cloud-init (tools/ds-identify: dscheck_Ec2, dscheck_GCE, dscheck_Azure).
    """

    def read(name: str) -> str:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (folder / name).read_text().strip()
        return ""

    if read("sys_vendor") == "Amazon EC2" or read("bios_vendor") == "Amazon EC2":
        return "aws"
    if read("product_name") == "Google Compute Engine":
        return "gcp"
    if read("chassis_asset_tag") == _AZURE_ASSET_TAG:
        return "azure"
    return "none"


async def watch_for_notices(
    setting: Preemption,
    on_notice: Callable[[Notice], None],
    on_event: Callable[[Event], None],
    *,
    after_failure_s: tuple[float, float] = _AFTER_FAILURE_S,
) -> None:
    """Call `on_notice` for each new notice; until it is cancelled. A service that fails is reported once, and asked
    again later: nothing else depends on it."""
    cloud = cloud_of_machine() if setting.cloud == "auto" else setting.cloud
    if cloud == "none":
        if setting.cloud == "auto":
            on_event(PreemptionUnwatched("this machine is of no known cloud (--preemption auto)", is_tried_again=False))
        await asyncio.Event().wait()
    on_event(PreemptionWatched(cloud))
    failures = 0  # in a row, of all sources

    async def follow(source: NoticeSource) -> None:
        nonlocal failures
        seen: set[str] = set()
        pause_s, longest_s = after_failure_s
        while True:
            try:
                notice = await source.look()
            except Exception as error:  # noqa: BLE001 - whatever the service sends, training goes on
                failures += 1
                if failures == _FAILURES_REPORTED:
                    why = str(error) if isinstance(error, MetadataUnavailable) else f"{type(error).__name__}: {error}"
                    on_event(PreemptionUnwatched(f"{cloud}: {why}", is_tried_again=True))
                await asyncio.sleep(pause_s)
                pause_s = min(longest_s, 2 * pause_s)
                continue
            failures, pause_s = 0, after_failure_s[0]
            if notice is not None and notice.reason not in seen:
                seen.add(notice.reason)
                on_event(PreemptionAnnounced(notice.reason, notice.must_leave))
                on_notice(notice)
            await asyncio.sleep(source.every_s)

    async with asyncio.TaskGroup() as group:
        for source in _SOURCES[cloud](Metadata(setting.endpoint)):
            group.create_task(follow(source))


# Requests -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """An answer of a metadata service."""

    status: int
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case


class Metadata:
    """A client of a metadata service. It never uses a proxy of the environment, and follows no redirection."""

    def __init__(self, endpoint: str) -> None:
        url = urllib.parse.urlsplit(endpoint)
        self._host, self._port, self._prefix = url.hostname or "", url.port or 80, url.path.rstrip("/")
        self._authority = url.netloc

    async def request(
        self, path: str, headers: Mapping[str, str], *, method: str = "GET", within_s: float | None = None
    ) -> Answer:
        """Send a request. Raises MetadataUnavailable when there is no whole answer within the time."""
        within_s = _ANSWER_S if within_s is None else within_s
        try:
            async with asyncio.timeout(within_s):
                return _parse(await self._exchange(path, headers, method))
        except TimeoutError:
            raise MetadataUnavailable(f"http://{self._authority}{path} gave no answer within {within_s:g} s") from None
        except (OSError, http.client.HTTPException, UnicodeError, ValueError) as error:
            raise MetadataUnavailable(f"http://{self._authority}{path}: {error or type(error).__name__}") from None

    async def _exchange(self, path: str, headers: Mapping[str, str], method: str) -> bytes:
        """Return the bytes of the answer. The server closes the connection after it."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            lines = [f"{method} {self._prefix}{path} HTTP/1.1", f"Host: {self._authority}", "Connection: close"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            lines += ["Content-Length: 0"] if method == "PUT" else []
            writer.write("\r\n".join([*lines, "", ""]).encode("ascii"))
            data = b""
            while chunk := await reader.read(1 << 16):
                data += chunk
                if len(data) > _ANSWER_BYTES:
                    raise ValueError(f"the answer is longer than {_ANSWER_BYTES} bytes")
            return data
        finally:
            writer.transport.abort()


class _Received:
    """The part of a socket that http.client.HTTPResponse needs."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _parse(data: bytes) -> Answer:
    response = http.client.HTTPResponse(_Received(data))  # type: ignore[arg-type]
    response.begin()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, response.read().decode("utf-8"), headers)


def _check(answer: Answer, what: str, allowed: tuple[int, ...] = (200,)) -> None:
    if answer.status not in allowed:
        raise MetadataUnavailable(f"{what}: the answer is {answer.status}, not {' or '.join(map(str, allowed))}")


def _parse_json(text: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise MetadataUnavailable(f"{what}: the answer is not a JSON object: {text[:80]!r}")
    return value


def _seconds_until(text: object, format: str) -> float | None:
    """Return the seconds until a time of UTC; None for an empty or unknown form, which must not hide a notice."""
    try:
        at = datetime.strptime(str(text), format).replace(tzinfo=UTC)
    except ValueError:
        return None
    return max(0.0, at.timestamp() - wall_time_s())


# Amazon Web Services --------------------------------------------------------------------------------------------------
#
# The pages of https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/: spot-instance-termination-notices.html and
# rebalance-recommendations.html (both are 404 until there is a notice, and are to be asked for every 5 seconds), and
# instancedata-data-retrieval.html (the token of IMDSv2).

_AWS_TOKEN_TTL_S = 21600


class _AwsSession:
    """The token of IMDSv2, renewed when it is refused."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._token = ""

    async def get(self, path: str) -> Answer:
        for _ in range(2):
            if not self._token:
                headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_AWS_TOKEN_TTL_S)}
                answer = await self._metadata.request("/latest/api/token", headers, method="PUT")
                _check(answer, "/latest/api/token")
                if not answer.text.isascii() or not answer.text.isprintable():
                    raise MetadataUnavailable("/latest/api/token: the answer is not a token")
                self._token = answer.text.strip()
            answer = await self._metadata.request(path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:
                break
            self._token = ""  # it is over, or the machine was moved
        return answer


class _AwsPage:
    """A page that is there once there is a notice, which `judge` returns."""

    every_s = 5.0

    def __init__(self, session: _AwsSession, path: str, judge: Callable[[str, dict[str, Any]], Notice]) -> None:
        self._session, self._path, self._judge = session, path, judge

    async def look(self) -> Notice | None:
        answer = await self._session.get(self._path)
        _check(answer, self._path, (200, 404))
        return None if answer.status == 404 else self._judge(self._path, _parse_json(answer.text, self._path))


def _judge_interruption(path: str, action: dict[str, Any]) -> Notice:
    verb, at = action.get("action"), action.get("time")  # "terminate", "2017-09-18T08:22:00Z"
    if verb not in ("terminate", "stop", "hibernate"):
        raise MetadataUnavailable(f"{path}: the action {verb!r} is unknown")
    return Notice(f"AWS: the spot instance will {verb} at {at}", left_s=_seconds_until(at, "%Y-%m-%dT%H:%M:%SZ"))


def _judge_rebalance(_path: str, recommendation: dict[str, Any]) -> Notice:
    at = recommendation.get("noticeTime")  # "2020-10-27T08:22:00Z"
    return Notice(f"AWS: the spot instance has an elevated risk of interruption since {at}", must_leave=False)


def _aws(metadata: Metadata) -> list[NoticeSource]:
    session = _AwsSession(metadata)
    return [
        _AwsPage(session, "/latest/meta-data/spot/instance-action", _judge_interruption),
        _AwsPage(session, "/latest/meta-data/events/recommendations/rebalance", _judge_rebalance),
    ]


# Google Cloud ---------------------------------------------------------------------------------------------------------
#
# https://cloud.google.com/compute/docs/instances/spot and .../docs/metadata/getting-live-migration-notice: the values
# `preempted` (FALSE, TRUE; 30 seconds before the end) and `maintenance-event` (60 seconds, with GPUs an hour before).
# https://cloud.google.com/compute/docs/metadata/querying-metadata#waitforchange: a request that waits for a change.

_GCP_WAIT_S = 60
_GCP_PATH = "/computeMetadata/v1/instance/"


class _GcpValue:
    """Waits for changes of a value. `judge` returns the notice for a value, and None for one that means nothing."""

    every_s = 1.0  # each request waits for a change itself

    def __init__(self, metadata: Metadata, name: str, judge: Callable[[str], Notice | None]) -> None:
        self._metadata, self._name, self._judge = metadata, name, judge
        self._etag = ""

    async def look(self) -> Notice | None:
        path = _GCP_PATH + self._name
        if self._etag:  # the first request does not wait: the value may have changed before
            wait = {"wait_for_change": "true", "timeout_sec": _GCP_WAIT_S, "last_etag": self._etag}
            path += f"?{urllib.parse.urlencode(wait)}"
        within_s = _ANSWER_S + (_GCP_WAIT_S if self._etag else 0)
        answer = await self._metadata.request(path, {"Metadata-Flavor": "Google"}, within_s=within_s)
        _check(answer, _GCP_PATH + self._name)
        if answer.headers.get("metadata-flavor") != "Google":
            raise MetadataUnavailable(f"{_GCP_PATH}{self._name}: this is not the metadata service of Google Cloud")
        self._etag = answer.headers.get("etag", "")
        if not self._etag:
            await asyncio.sleep(_ANSWER_S)  # nothing can be waited for
        return self._judge(answer.text.strip())


def _judge_preempted(value: str) -> Notice | None:
    if value not in ("TRUE", "FALSE"):
        raise MetadataUnavailable(f"{_GCP_PATH}preempted: the value {value[:80]!r} is unknown")
    return Notice("GCP: the instance is being preempted", left_s=30.0) if value == "TRUE" else None


def _judge_maintenance(value: str) -> Notice | None:
    if value == "NONE":
        return None
    if value == "MIGRATE_ON_HOST_MAINTENANCE":
        return Notice("GCP: the instance will be migrated, and goes on running", must_leave=False)
    if value == "TERMINATE_ON_HOST_MAINTENANCE":
        return Notice("GCP: the instance will be stopped for maintenance of its host")
    raise MetadataUnavailable(f"{_GCP_PATH}maintenance-event: the value {value[:80]!r} is unknown")


def _gcp(metadata: Metadata) -> list[NoticeSource]:
    return [
        _GcpValue(metadata, "preempted", _judge_preempted),
        _GcpValue(metadata, "maintenance-event", _judge_maintenance),
    ]


# Azure ----------------------------------------------------------------------------------------------------------------
#
# https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events: the events of all machines of a scale set
# or an availability set are shown to each of them. The first request enables the service, and may take two minutes.

_AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_AZURE_FIRST_S = 130.0
_AZURE_LEAVING = {
    "Preempt": "the spot machine will be deleted",
    "Terminate": "the machine will be deleted",
    "Reboot": "the machine will be restarted",
    "Redeploy": "the machine will be moved to another host, and its memory is lost",
}


class _AzureEvents:
    every_s = 1.0  # as the page recommends: a preemption is announced 30 seconds before

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._name = ""
        self._is_enabled = False

    async def look(self) -> Notice | None:
        headers = {"Metadata": "true"}
        if not self._name:
            answer = await self._metadata.request(_AZURE_NAME, headers)
            _check(answer, _AZURE_NAME)
            self._name = answer.text.strip()
        within_s = _ANSWER_S if self._is_enabled else _AZURE_FIRST_S
        answer = await self._metadata.request(_AZURE_EVENTS, headers, within_s=within_s)
        _check(answer, _AZURE_EVENTS)
        events = _parse_json(answer.text, _AZURE_EVENTS).get("Events")
        if not isinstance(events, list):
            raise MetadataUnavailable(f"{_AZURE_EVENTS}: the answer has no list of events")
        self._is_enabled = True
        notices = [notice for event in events if (notice := self._judge(event)) is not None]
        return min(notices, key=lambda notice: not notice.must_leave, default=None)

    def _judge(self, event: object) -> Notice | None:
        if not isinstance(event, dict) or self._name not in (event.get("Resources") or ()):
            return None
        kind, status = event.get("EventType"), event.get("EventStatus")
        if status not in ("Scheduled", "Started"):
            return None  # it is over, or was withdrawn
        if kind not in _AZURE_LEAVING:  # Freeze: a pause of some seconds
            return Notice(f"Azure: event {kind} is {status}", must_leave=False)
        at = event.get("NotBefore")  # empty once it has started
        left_s = _seconds_until(at, "%a, %d %b %Y %H:%M:%S GMT")
        return Notice(f"Azure: {_AZURE_LEAVING[kind]}" + (f" at {at}" if at else ""), left_s=left_s)


def _azure(metadata: Metadata) -> list[NoticeSource]:
    return [_AzureEvents(metadata)]


_SOURCES: Mapping[str, Callable[[Metadata], list[NoticeSource]]] = {"aws": _aws, "gcp": _gcp, "azure": _azure}
