"""The pods of a job on Kubernetes, watched by the coordinator. Their agents join by themselves; what the cluster knows
of a pod, and a heartbeat does not, is reported: it is being deleted or evicted, its containers have ended, it is gone.

The client library is imported only here, when the watch begins (the extra farandole[kubernetes]).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farandole.base.events.event import Event
from farandole.base.events.host_events import PodsNotWatched
from farandole.errors import ConfigError, FarandoleError
from farandole.job.engines.engine_interface import HostReports
from farandole.job.engines.host_list import PodSelection

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_WATCH_S = 30  # the server ends a watch then: one that has silently stopped is known as such soon after
_REQUEST_S = 10.0
_AGAIN_S = (1.0, 30.0)  # between two attempts after a failure: doubled by each further one
_UNAUTHORIZED, _FORBIDDEN, _GONE = 401, 403, 410

PodObject = Mapping[str, Any]


@dataclass(frozen=True)
class PodEnd:
    """What a pod's object says about its end.

    leaving           the reason why its agent will be ended; empty: it will not
    gone              the reason why its agent is gone; empty: it is not
    are_workers_gone  the kubelet has reported the end of its containers
    """

    leaving: str = ""
    gone: str = ""
    are_workers_gone: bool = False


def agent_of_pod(pod: PodObject) -> str:
    """Return the name of the agent in a pod, which the agent gets by --host and --id. A pod that is made anew under the
    same name has another UID, and is another agent."""
    return f"{pod['metadata']['name']}/{pod['metadata']['uid']}"


def judge_pod(pod: PodObject) -> PodEnd:
    """Return what the object of a pod says about its end."""
    status = pod.get("status") or {}
    containers = [each.get("state") or {} for each in status.get("containerStatuses") or ()]
    ended = [state["terminated"] for state in containers if state.get("terminated")]
    phase = status.get("phase", "")
    # A container of another restart policy than Never is started again, and may have been by now.
    is_final = (pod.get("spec") or {}).get("restartPolicy") == "Never"
    if phase in ("Succeeded", "Failed") or (is_final and containers and len(ended) == len(containers)):
        why = status.get("reason") or next((each.get("reason") for each in ended if each.get("reason")), "") or phase
        codes = ", ".join(str(each.get("exitCode")) for each in ended)
        # A node that is lost has its pods marked as failed without a word from it.
        return PodEnd(
            gone=f"its pod has ended: {why}" + (f" (exit code {codes})" if codes else ""),
            are_workers_gone=bool(ended) and len(ended) == len(containers),
        )
    for condition in status.get("conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return PodEnd(leaving=f"its pod is evicted: {condition.get('message') or condition.get('reason')}")
    if pod["metadata"].get("deletionTimestamp"):
        return PodEnd(leaving="its pod is being deleted")
    return PodEnd()


class PodBook:
    """The pods that are known, and what has been reported about them; by UID."""

    def __init__(self, reports: HostReports) -> None:
        self._reports = reports
        self._agents: dict[str, str] = {}
        self._is_leaving: set[str] = set()
        self._is_gone: set[str] = set()

    def listed(self, pods: list[PodObject]) -> None:
        """Follow a whole list: pods that are missing in it are gone."""
        uids = {pod["metadata"]["uid"] for pod in pods}
        for uid in [uid for uid in self._agents if uid not in uids]:
            self._forget(uid, "its pod does not exist any more", are_workers_gone=False)
        for pod in pods:
            self.changed(pod)

    def changed(self, pod: PodObject) -> None:
        """Follow the new state of a pod."""
        uid, end = pod["metadata"]["uid"], judge_pod(pod)
        agent = self._agents.setdefault(uid, agent_of_pod(pod))
        if end.gone and uid not in self._is_gone:
            self._is_gone.add(uid)
            self._reports.gone(agent, end.gone, end.are_workers_gone)
        elif end.leaving and not end.gone and uid not in self._is_leaving:
            self._is_leaving.add(uid)
            self._reports.leaving(agent, end.leaving)

    def deleted(self, pod: PodObject) -> None:
        """Follow the deletion of a pod. By force it may precede the end of its processes."""
        self.changed(pod)
        self._forget(pod["metadata"]["uid"], "its pod was deleted", judge_pod(pod).are_workers_gone)

    def _forget(self, uid: str, reason: str, are_workers_gone: bool) -> None:
        agent = self._agents.pop(uid)
        if uid not in self._is_gone:
            self._reports.gone(agent, reason, are_workers_gone)
        self._is_gone.discard(uid)
        self._is_leaving.discard(uid)


class PodWatch:
    """A HostWatch of the pods of a job. A cluster that cannot be asked is reported as an event, and asked again later:
    the job goes on, since its agents' heartbeats do not need the cluster."""

    def __init__(
        self,
        selection: PodSelection,
        on_event: Callable[[Event], None],
        *,
        watch_s: int = _WATCH_S,
        again_s: tuple[float, float] = _AGAIN_S,
    ) -> None:
        self._selection, self._on_event = selection, on_event
        self._watch_s, self._again_s = watch_s, again_s
        self._library = _library()
        self._failures = 0
        self._reported = ""

    async def run(self, reports: HostReports) -> None:
        """Report what happens to the pods, until it is cancelled."""
        book = PodBook(reports)
        while True:
            try:
                async with self._connect() as pods:
                    await self._follow(pods, book)
            except _Outdated:
                await asyncio.sleep(self._again_s[0])
                continue
            except _Failed as error:
                self._failed(str(error))
            except Exception as error:  # noqa: BLE001 - whatever a cluster and its client do, the job goes on
                self._failed(f"{type(error).__name__}: {error}")
            first_s, longest_s = self._again_s
            await asyncio.sleep(min(longest_s, first_s * 2 ** min(self._failures - 1, 16)))

    async def _follow(self, pods: _PodRequests, book: PodBook) -> None:
        """List the pods, and watch them from there on. Raises _Outdated when the list has to be read again."""
        found, version = await pods.list()
        book.listed(found)
        while True:
            async with contextlib.aclosing(pods.watch(version, self._watch_s)) as changes:
                async for kind, thing in changes:
                    if kind == "DELETED":
                        book.deleted(thing)
                    elif kind in ("ADDED", "MODIFIED"):
                        book.changed(thing)
                    version = thing["metadata"]["resourceVersion"]  # also of a BOOKMARK, which has nothing else
                    self._succeeded()
            self._succeeded()

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncIterator[_PodRequests]:
        """Read the configuration anew each time: credentials and addresses change."""
        client, config = self._library
        configuration = client.Configuration()
        namespace = self._selection.namespace
        try:
            try:
                config.load_incluster_config(client_configuration=configuration)
                if not namespace:
                    namespace = _NAMESPACE_FILE.read_text().strip()
            except config.ConfigException:
                loader = await config.load_kube_config(client_configuration=configuration, persist_config=False)
                context = (loader.current_context or {}).get("context", {})
                namespace = namespace or context.get("namespace") or "default"
        except (config.ConfigException, OSError) as error:
            raise _Failed(f"there is no access to a cluster, neither of a pod nor by KUBECONFIG: {error}") from None
        async with client.ApiClient(configuration) as api:
            yield _PodRequests(client.CoreV1Api(api), namespace, self._selection.labels)

    def _failed(self, reason: str) -> None:
        self._failures += 1
        if reason != self._reported:
            self._reported = reason
            self._on_event(PodsNotWatched(reason))

    def _succeeded(self) -> None:
        self._failures, self._reported = 0, ""


class _Outdated(Exception):
    """The list of pods has to be read again: the server does not know its version any more."""


class _Failed(FarandoleError):
    """The cluster could not be asked."""


class _PodRequests:
    """Requests about the pods of a selection. They raise _Failed and _Outdated."""

    def __init__(self, api: Any, namespace: str, labels: str) -> None:
        self._api, self._namespace, self._labels = api, namespace, labels

    async def list(self) -> tuple[list[PodObject], str]:
        """Return all pods, and the version of the list."""
        async with self._response("list", _REQUEST_S) as response:
            content = await response.json()
        if not isinstance(content, dict) or "metadata" not in content:
            raise _Failed("the answer to a list of pods is no list")
        return content.get("items") or [], content["metadata"]["resourceVersion"]

    async def watch(self, version: str, watch_s: int) -> AsyncGenerator[tuple[str, PodObject], None]:
        """Yield the changes since a version, until the server or the network ends the request."""
        import aiohttp

        options = {"watch": True, "resource_version": version, "timeout_seconds": watch_s}
        async with self._response("watch", watch_s + _REQUEST_S, allow_watch_bookmarks=True, **options) as response:
            line = b""
            try:
                async for chunk in response.content.iter_any():
                    *lines, line = (line + chunk).split(b"\n")
                    for each in filter(None, lines):
                        yield self._event(each)
            except TimeoutError:
                return  # it has stalled: the next watch continues at the same version
            except aiohttp.ClientError:
                raise _Outdated from None  # it was cut: a list shows whether the server is there

    def _event(self, line: bytes) -> tuple[str, PodObject]:
        try:
            event = json.loads(line)
            kind, thing = event["type"], event["object"]
        except (ValueError, KeyError, TypeError):
            raise _Failed(f"a watch of pods has sent {line[:80]!r}") from None
        if kind == "ERROR":
            if thing.get("code") == _GONE:
                raise _Outdated
            raise _Failed(f"a watch of pods has failed: {thing.get('message')}")
        return kind, thing

    @contextlib.asynccontextmanager
    async def _response(self, verb: str, within_s: float, **options: Any) -> AsyncIterator[Any]:
        """Send a request, and yield the answer to it, whose status is 200."""
        import aiohttp  # the client library needs it

        try:
            response = await self._api.list_namespaced_pod(
                self._namespace,
                label_selector=self._labels,
                _preload_content=False,
                _request_timeout=aiohttp.ClientTimeout(total=within_s, sock_connect=_REQUEST_S),
                **options,
            )
        except TimeoutError:
            raise _Failed(f"the server did not answer to a {verb} in time") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Failed(f"the server cannot be reached: {error or type(error).__name__}") from None
        try:
            if response.status == _GONE:
                raise _Outdated
            if response.status != 200:
                raise _Failed(await self._why(verb, response))
            yield response
        finally:
            response.close()

    async def _why(self, verb: str, response: Any) -> str:
        """Return why a request was refused, in a way that tells what to do."""
        try:
            message = json.loads(await response.text()).get("message", "")
        except (ValueError, AttributeError):
            message = ""
        reason = f"the server answers {response.status} {response.reason or ''}".rstrip()
        if response.status in (_UNAUTHORIZED, _FORBIDDEN):
            return (
                f"{reason} ({message}): the service account of the coordinator's pod needs a Role of namespace "
                f"{self._namespace} with the verbs get, list and watch for pods, and a RoleBinding to it; "
                "`farandole kubernetes manifest` prints both"
            )
        return f"{reason} ({message})" if message else reason


def _library() -> tuple[Any, Any]:
    try:
        from kubernetes_asyncio import client, config
    except ImportError as error:
        raise ConfigError(
            f"--kubernetes needs the package kubernetes_asyncio ({error}): pip install 'farandole[kubernetes]'"
        ) from None
    return client, config
