"""Kubernetes: a job whose pods are processes of this machine, which an API server reports.

The server is a double (tests/support/api_server.py), or a real one without kubelets: FARANDOLE_TEST_KUBECONFIG names a
kubeconfig whose user may create, patch and delete pods in the namespace of its context.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from farandole.base.events.host_events import PodsNotWatched
from farandole.integrations.kubernetes.kubernetes_pods import PodWatch
from farandole.job.engines.engine_interface import HostReports
from farandole.job.engines.host_list import PodSelection
from tests.engines.contract import EngineJob, check_contract, hosts_of
from tests.support.api_server import NAMESPACE, ApiServer
from tests.support.jobs import processes_with
from tests.support.waiting import EventLog, run

kubernetes_asyncio = pytest.importorskip(
    "kubernetes_asyncio", reason="needs the package kubernetes_asyncio: make test-engines"
)

REAL = os.environ.get("FARANDOLE_TEST_KUBECONFIG", "")
LABELS = {"app.kubernetes.io/instance": "contract", "app.kubernetes.io/component": "worker"}
SELECTOR = ",".join(f"{key}={value}" for key, value in LABELS.items())


class Pods:
    """Requests about pods, with the client library: also for a real server."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig

    def create(self, name: str) -> str:
        """Create a pod of the job and return its UID."""
        pod = {
            "metadata": {"name": name, "labels": LABELS},
            "spec": {
                "nodeName": "no-such-node",
                "restartPolicy": "Never",
                "containers": [{"name": "worker", "image": "none"}],
            },
        }
        created = self._call(lambda api, namespace: api.create_namespaced_pod(namespace, pod))
        self.patch(name, {"status": {"phase": "Running", "containerStatuses": [_container({"running": {}})]}})
        return str(created.metadata.uid)

    def patch(self, name: str, change: dict[str, Any]) -> None:
        self._call(
            lambda api, namespace: api.patch_namespaced_pod_status(
                name, namespace, change, _content_type="application/merge-patch+json"
            )
        )

    def ended(self, name: str, code: int) -> None:
        """Report what a kubelet does when the only container has ended."""
        state = {"terminated": {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}}
        phase = "Succeeded" if code == 0 else "Failed"
        self.patch(name, {"status": {"phase": phase, "containerStatuses": [_container(state)]}})

    def delete(self, name: str, grace_s: int) -> None:
        body = {"gracePeriodSeconds": grace_s}
        with contextlib.suppress(kubernetes_asyncio.client.ApiException):
            self._call(lambda api, namespace: api.delete_namespaced_pod(name, namespace, body=body))

    def _call(self, request: Callable[[Any, str], Coroutine[Any, Any, Any]]) -> Any:
        async def call() -> Any:
            from kubernetes_asyncio import client, config

            configuration = client.Configuration()
            loader = await config.load_kube_config(str(self._kubeconfig), client_configuration=configuration)
            namespace = loader.current_context["context"].get("namespace", "default")
            async with client.ApiClient(configuration) as api:
                return await request(client.CoreV1Api(api), namespace)

        return asyncio.run(call())


def _container(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "worker",
        "image": "none",
        "imageID": "",
        "ready": True,
        "restartCount": 0,
        "state": state,
    }


class PodCluster:
    """Pods of one container, which are agents on this machine. A thread plays the kubelets and the Job's controller: it
    reports containers that have ended, and makes a new pod for one that failed."""

    program = (sys.executable, "-m", "farandole", "run")

    def __init__(self, folder: Path, kubeconfig: Path) -> None:
        self._pods = Pods(kubeconfig)
        self._token_file = folder / "token"
        self._token_file.touch(0o600)
        self._token_file.write_text(secrets.token_hex(32))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        # A node that is lost leaves its temporary files.
        self.environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "TMPDIR": str(folder)}
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._silent: list[tuple[subprocess.Popen[bytes], list[int]]] = []
        self._count = 0
        self._prefix = f"contract-{secrets.token_hex(3)}-"
        self._ends = threading.Event()
        self._kubelets = threading.Thread(target=self._play_kubelets, daemon=True)
        self._kubelets.start()

    def flags(self, hosts: int) -> list[str]:
        for _ in range(hosts):
            self.add_host()
        return [
            *("-np", str(hosts), "--max-np", "9", "--kubernetes", SELECTOR),
            *("--host", "127.0.0.1", "--port", str(self._port), "--token-file", str(self._token_file)),
        ]

    def add_host(self) -> None:
        name, self._count = f"{self._prefix}{self._count}", self._count + 1
        uid = self._pods.create(name)
        command = [
            *(sys.executable, "-m", "farandole", "agent", "--join", f"127.0.0.1:{self._port}"),
            *("--host", name, "--id", uid, "--token-file", str(self._token_file), "--left-exit-code", "143"),
        ]
        self.agents[name] = subprocess.Popen(
            command, env=self.environment, start_new_session=True, stderr=subprocess.DEVNULL
        )

    def kill_worker(self, host: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def kill_agent(self, host: str) -> None:
        os.kill(self.agents[host].pid, signal.SIGKILL)

    def cut_off(self, host: str) -> bool:
        """Lose a node: its processes stand still, and the cluster deletes its pod without having heard of them."""
        agent = self.agents.pop(host)
        pids = [*processes_with(f"{host}\0"), *_descendants(agent.pid)]
        self._silent.append((agent, pids))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        self._pods.delete(host, grace_s=0)
        return True

    def give_notice(self, host: str) -> bool:
        """Delete the pod, as an eviction does: the cluster says so at once, and SIGTERM may come later."""
        self._pods.delete(host, grace_s=30)
        return True

    def control_flags(self) -> list[str]:
        return []

    def end_container(self, host: str) -> None:
        """Kill all processes of a pod in one moment, as the kernel does with a container that is out of memory."""
        pids = _descendants(self.agents[host].pid)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def leftovers(self) -> list[str]:
        for agent, pids in self._silent:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.wait()
        self._silent.clear()
        deadline_s = time.monotonic() + 20
        while (left := processes_with(self._prefix)) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return [str(pid) for pid in left]

    def close(self) -> None:
        self._ends.set()
        self._kubelets.join()
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        self.leftovers()

    def _play_kubelets(self) -> None:
        while not self._ends.wait(0.05):
            for name, agent in list(self.agents.items()):
                if (code := agent.poll()) is None:
                    continue
                del self.agents[name]
                self._pods.ended(name, code if code >= 0 else 128 - code)
                self._pods.delete(name, grace_s=0)
                if code not in (0, 143):
                    self.add_host()


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
    return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[PodCluster]:
    with contextlib.ExitStack() as stack:
        kubeconfig = Path(REAL) if REAL else stack.enter_context(ApiServer()).kubeconfig(tmp_path)
        made = PodCluster(tmp_path, kubeconfig)
        stack.callback(made.close)
        yield made


@pytest.mark.timeout(240)
def test_kubernetes_meets_the_contract(tmp_path: Path, cluster: PodCluster) -> None:
    figures = check_contract(cluster, tmp_path)
    print(figures)
    assert figures.redone_by_drain == figures.redone_by_notice == 0, figures
    assert figures.agent_killed_ms < 1000, figures
    assert figures.cut_off_ms < 2000, figures  # the cluster's word comes before the detection budget of 3 s


@pytest.mark.timeout(240)
def test_the_end_of_a_container_is_known_before_the_detection_budget(tmp_path: Path, cluster: PodCluster) -> None:
    with EngineJob(cluster, tmp_path, hosts=2, flags=["--detection-budget", "20"]) as job:
        job.train_with(2)
        cluster.end_container(hosts_of(job)[1])
        while not (lost := job.events("AgentWasLost")):
            job.train_with(2)
        job.train_with(2)  # in a new pod
        assert job.stop() == 0
    assert "its pod has ended: Error (exit code 137)" in lost[0]["reason"]
    recovered = next(event for event in job.events("Recovered") if event["lost"])
    assert recovered["silent_ms"] + recovered["total_ms"] < 10_000
    assert cluster.leftovers() == []


def test_without_the_role_the_job_is_unharmed_and_says_what_is_missing(tmp_path: Path) -> None:
    with ApiServer() as server, contextlib.ExitStack() as stack:
        cluster = PodCluster(tmp_path, server.kubeconfig(tmp_path))
        stack.callback(cluster.close)
        flags = cluster.flags(2)
        server.forbids = {"list", "watch"}
        with EngineJob(_Given(cluster, flags), tmp_path) as job:
            job.train_with(2)
            assert hosts_of(job)[0].startswith("contract-")
            # A death is detected without the cluster.
            cluster.kill_worker(hosts_of(job)[1], job.latest()[1]["pid"])
            job.train_with(2)
            server.forbids = set()
            assert job.stop() == 0
        [event] = job.events("PodsNotWatched")
    assert f"Role of namespace {NAMESPACE} with the verbs get, list and watch for pods" in event["reason"]
    assert "cannot list resource" in event["reason"]
    assert cluster.leftovers() == []


class _Given:
    """A cluster whose flags were made before."""

    def __init__(self, cluster: PodCluster, flags: list[str]) -> None:
        self.program, self.environment, self._flags = cluster.program, cluster.environment, flags

    def flags(self, hosts: int) -> list[str]:
        return self._flags

    def control_flags(self) -> list[str]:
        return []


# The watch alone, with the double: everything that a server and a network can do to it --------------------------------


class Reported:
    """Keeps what a watch reports."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, ...]] = []

    @property
    def target(self) -> HostReports:
        return HostReports(
            lambda agent, reason: self.reports.append(("leaving", agent, reason)),
            lambda agent, reason, are_workers_gone: self.reports.append(("gone", agent, reason, str(are_workers_gone))),
        )

    def kinds(self) -> list[tuple[str, str]]:
        """What was reported about which pod, by its name."""
        return [(kind, agent.partition("/")[0]) for kind, agent, *_ in self.reports]

    async def until(self, *kinds: tuple[str, str]) -> None:
        while self.kinds() != list(kinds):
            assert len(self.reports) <= len(kinds), self.reports
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def watching(server: ApiServer, log: EventLog | None = None, watch_s: int = 30) -> AsyncIterator[Reported]:
    """A watch of the job's pods in the double."""
    reported = Reported()
    watch = PodWatch(PodSelection(SELECTOR), log or EventLog(), watch_s=watch_s, again_s=(0.02, 0.05))
    task = asyncio.create_task(watch.run(reported.target))
    try:
        yield reported
        assert not task.done(), task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


def pod(name: str, **status: Any) -> dict[str, Any]:
    spec = {"restartPolicy": "Never", "containers": [{"name": "worker"}]}
    return {"metadata": {"name": name, "labels": LABELS}, "spec": spec, "status": {"phase": "Running", **status}}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    with ApiServer() as double:
        monkeypatch.setattr(
            "kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(double.kubeconfig(tmp_path))
        )
        yield double


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_pod_is_followed_from_its_deletion_to_its_end(server: ApiServer) -> None:
    async def scenario() -> None:
        server.create(pod("a"))
        async with watching(server) as reported:
            await until(lambda: server.count("watch") == 1)
            server.create({**pod("other"), "metadata": {"name": "other"}})  # of another job
            server.delete("other", grace_s=0)
            server.delete("a", grace_s=30)
            await reported.until(("leaving", "a"))
            server.patch("a", {"status": {"phase": "Succeeded", "containerStatuses": [_container(_EXITED)]}})
            server.delete("a", grace_s=0)
            await reported.until(("leaving", "a"), ("gone", "a"))
            assert reported.reports[1][3] == "True"

    run(scenario())


_EXITED = {"terminated": {"exitCode": 143, "reason": "Error"}}


def test_a_pod_of_the_same_name_is_another_agent(server: ApiServer) -> None:
    async def scenario() -> None:
        first = server.create(pod("a"))["metadata"]["uid"]
        async with watching(server) as reported:
            await until(lambda: server.count("watch") == 1)
            server.delete("a", grace_s=0)
            second = server.create(pod("a"))["metadata"]["uid"]
            await reported.until(("gone", "a"))
            server.delete("a", grace_s=0)
            await reported.until(("gone", "a"), ("gone", "a"))
            assert [agent for _, agent, *_ in reported.reports] == [f"a/{first}", f"a/{second}"]
            assert reported.reports[0][3] == "False"  # the cluster has not heard the end of its containers

    run(scenario())


def test_what_happened_while_a_watch_was_cut_is_seen_by_the_next_list(server: ApiServer) -> None:
    async def scenario() -> None:
        server.create(pod("a"))
        server.create(pod("b"))
        async with watching(server) as reported:
            for lists in range(1, 4):
                await until(lambda lists=lists: server.count("watch") >= lists)
                server.drop_watches()
                await until(lambda lists=lists: server.count("list") > lists)
            await until(lambda: server.count("watch") == 4)
            server.stalls = True
            server.delete("a", grace_s=0)
            server.drop_watches()
            await reported.until(("gone", "a"))

    run(scenario())


def test_a_watch_that_stalls_is_replaced(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.integrations.kubernetes.kubernetes_pods._REQUEST_S", 0.5)

    async def scenario() -> None:
        server.create(pod("a"))
        async with watching(server, watch_s=1) as reported:
            await until(lambda: server.count("watch") == 1)
            server.stalls = True
            server.delete("a", grace_s=0)
            await until(lambda: server.count("watch") == 2)
            server.stalls = False
            await reported.until(("gone", "a"))
            assert server.count("list") == 1  # the next watch has continued at the same version

    run(scenario())


@pytest.mark.parametrize("how", ["answer", "event"])
def test_a_version_that_is_too_old_leads_to_a_new_list(server: ApiServer, how: str) -> None:
    log = EventLog()

    async def scenario() -> None:
        server.create(pod("a"))
        async with watching(server, log, watch_s=1) as reported:
            await until(lambda: server.count("watch") == 1)
            if how == "answer":
                server.stalls = True
                server.create(pod("b"))
                server.forget_changes()
                server.drop_watches()
                server.stalls = False
            else:
                server.fail_watches(410, "too old resource version")
            await until(lambda: server.count("list") == 2 and server.count("watch") >= 2)
            server.delete("a", grace_s=0)
            await reported.until(("gone", "a"))

    run(scenario())
    assert log.events == []  # that is normal


def test_bookmarks_keep_a_quiet_watch_young(server: ApiServer) -> None:
    async def scenario() -> None:
        server.create(pod("a"))
        async with watching(server, watch_s=1) as reported:
            await until(lambda: server.count("watch") == 1)
            for number in range(3):  # changes of other pods, which the watch does not see
                server.create({**pod(f"other-{number}"), "metadata": {"name": f"other-{number}"}})
            await asyncio.sleep(0.5)  # longer than the time between two bookmarks
            server.forget_changes()
            await until(lambda: server.count("watch") >= 2)
            assert server.count("list") == 1
            server.delete("a", grace_s=0)
            await reported.until(("gone", "a"))

    run(scenario())


def test_an_eviction_is_known_by_its_condition_before_the_deletion(server: ApiServer) -> None:
    async def scenario() -> None:
        server.create(pod("a"))
        async with watching(server) as reported:
            await until(lambda: server.count("watch") == 1)
            condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
            server.patch("a", {"status": {"conditions": [{**condition, "message": "Eviction API: evicting"}]}})
            server.delete("a", grace_s=30)
            await reported.until(("leaving", "a"))
            assert reported.reports[0][2] == "its pod is evicted: Eviction API: evicting"

    run(scenario())


def test_a_server_that_forbids_fails_or_is_away_is_reported_once_and_asked_again(server: ApiServer) -> None:
    log = EventLog()

    async def scenario() -> None:
        server.forbids = {"list", "watch"}
        server.create(pod("a"))
        async with watching(server, log) as reported:
            await until(lambda: server.count("list") >= 3)
            server.forbids = set()
            await until(lambda: server.count("watch") == 1)
            server.fail_watches(500, "etcdserver: leader changed")
            await until(lambda: server.count("watch") == 2)
            server.delete("a", grace_s=0)
            await reported.until(("gone", "a"))

    run(scenario())
    forbidden, failed = (event.line() for event in log.of(PodsNotWatched))
    assert "`farandole kubernetes manifest` prints both" in forbidden
    assert "etcdserver: leader changed" in failed


def test_a_role_without_watch_is_reported_once(server: ApiServer) -> None:
    log = EventLog()

    async def scenario() -> None:
        server.forbids = {"watch"}
        async with watching(server, log):
            await until(lambda: server.count("watch") >= 4)

    run(scenario())
    assert ["cannot watch resource" in event.line() for event in log.of(PodsNotWatched)] == [True]


@pytest.mark.parametrize("garbage", [b"what?\n", b'{"type": "ADDED"}\n', b'{"type": "ADDED", "object": {}}\n', b"[]\n"])
def test_garbage_of_a_server_ends_no_watch_for_ever(server: ApiServer, garbage: bytes) -> None:
    log = EventLog()

    async def scenario() -> None:
        server.create(pod("a"))
        async with watching(server, log) as reported:
            server.garbage = garbage
            await until(lambda: bool(log.of(PodsNotWatched)))
            server.garbage = b""
            server.delete("a", grace_s=0)
            await reported.until(("gone", "a"))

    run(scenario())


def test_without_a_cluster_the_event_says_where_access_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    log = EventLog()

    async def scenario() -> None:
        watch = PodWatch(PodSelection(SELECTOR), log, again_s=(0.02, 0.05))
        task = asyncio.create_task(watch.run(Reported().target))
        await until(lambda: bool(log.of(PodsNotWatched)))
        task.cancel()
        await asyncio.wait([task])

    run(scenario())
    assert "neither of a pod nor by KUBECONFIG" in log.of(PodsNotWatched)[0].line()
