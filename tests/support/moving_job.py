"""A job on the hosts of a lab whose launcher is killed, and started again on another host."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from farandole.job.coordinator.coordinator_factory import COORDINATOR_NAME, FACTORY_NAME
from farandole.testing import running_job
from farandole.testing.lab import Host, Lab
from tests.support.jobs import ELASTIC_JOB

_DEADLINE_S, _PORT = 60.0, 29400


class MovingJob(running_job.RunningJob):
    """`farandole run --state` of elastic_job.py on the first host of a lab, which trains until `finish()`, and an agent
    on each of the last two. What they print is in files of `folder`.

    by_addresses  the agents know the addresses of the first two hosts, and the token; else the job file
    url           of the state; empty: it is in a folder
    source        the folder of the launcher's package; None: that of the tests
    slots         of each agent
    """

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        *flags: str,
        by_addresses: bool = False,
        source: Path | None = None,
        slots: int = 1,
        url: str = "",
    ) -> None:
        self._lab, self._place, self._source = lab, lab.hosts[0], source
        self.state, self._stop, self.output = folder / "state", folder / "stop", folder / "output"
        self._flags = ["--state", url or str(self.state), "--events", str(folder / "events.jsonl"), *flags]
        self._words = ["--epochs", "1000000", "--stop", str(self._stop), "--item-ms", "1"]
        self._agents: list[subprocess.Popen[bytes]] = []
        where = ["--job-file", str(self.state / "job")]
        if by_addresses:
            token = str(folder / "token")
            self._flags += ["--port", str(_PORT), "--token-file", token, "--job-file", str(folder / "unused")]
            addresses = ",".join(f"{host.address}:{_PORT}" for host in lab.hosts[:2])
            where = ["--join", addresses, "--token-file", token]
        super().__init__(self._flags, ELASTIC_JOB, self._words, folder, self.output)
        job_file = Path(self._flags[-1]) if by_addresses else self.state / "job"
        self._wait_until(job_file.exists)
        for host in lab.hosts[-2:]:
            words = ["agent", *where, "--host", host.name, "--slots", str(slots), "--verbose"]
            with (folder / f"agent-{host.name}").open("wb") as output:
                self._agents.append(host.start([sys.executable, "-m", "farandole", *words], stderr=output))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.said(), *self.told())
        for host in self._lab.hosts:
            for pid in host.processes():
                with contextlib.suppress(ProcessLookupError):
                    host.signal(pid)

    def _start(
        self, command: Sequence[str], output: IO[bytes] | None, environment: Mapping[str, str] | None
    ) -> subprocess.Popen[bytes]:
        # The folder of running jobs is not shared: a launcher removes the files of processes that it does not see, and
        # the hosts have process ids of their own.
        environment = {**(environment or os.environ), "XDG_RUNTIME_DIR": str(self._place.folder)}
        if self._source is not None:
            environment["PYTHONPATH"] = f"{self._source}:{environment.get('PYTHONPATH', '')}"
        return self._place.start(command, environment=environment, stdout=output, stderr=subprocess.STDOUT)

    def said(self) -> str:
        """What all launchers have printed."""
        return self.output.read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind, of all launchers. The last line may not be complete yet."""
        lines = (self.folder / "events.jsonl").read_bytes().split(b"\n")[:-1]
        return [each for each in map(json.loads, lines) if each["event"] == kind]

    def command(self) -> list[str]:
        """The command of the launcher."""
        script = [sys.executable, str(ELASTIC_JOB), *self._words, "--records", str(self.folder)]
        return [*running_job.FARANDOLE_RUN, *self._flags, *script]

    def kill_launcher(self) -> None:
        """kill -9 of the launcher, with the agent in it."""
        (pid,) = self._launchers(self._place)
        self._place.signal(pid)
        self.process.wait(_DEADLINE_S)

    def power_off(self) -> None:
        """Power the host of the launcher off: nobody is told anything."""
        self._place.power_off()
        self.process.wait(_DEADLINE_S)

    def start_on(self, host: Host, source: Path | None = None) -> None:
        """Start the same command there, with the package in the folder `source`."""
        self._place, self._source = host, source
        with self.output.open("ab") as output:
            self.process = self._start(self.command(), output, None)

    def finish(self) -> None:
        """Let it end."""
        self._stop.touch()
        assert self.wait(_DEADLINE_S) == 0, self.said()
        for agent in self._agents:
            assert agent.wait(_DEADLINE_S) == 0

    def kill_process(self, name: str) -> None:
        """kill -9 of the launcher's process of this name: COORDINATOR_NAME or FACTORY_NAME."""
        for pid in self._named(name):
            with contextlib.suppress(OSError):
                self._place.signal(pid)

    def wait_for_end_of_coordinator(self) -> None:
        """Wait until the coordinator of a launcher that was killed has ended, too: until then it may write."""
        self._wait_until(lambda: not list(self._named(COORDINATOR_NAME)))

    def _named(self, name: str) -> Iterator[int]:
        for pid, outside in self._place.processes().items():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{outside}/comm").read_text().strip() == name:
                    yield pid

    def kill_worker(self, record: Mapping[str, Any]) -> None:
        """kill -9 of the worker with this record."""
        (host,) = (each for each in self._lab.hosts if each.name == record["host"])
        host.signal(record["pid"])

    def supersede(self) -> None:
        """Let the launcher believe that another one has taken over, which it survives where a network file system has
        released its lock."""
        (self.state / "lock").write_text('{"launcher":"another","host":"elsewhere","pid":7}')
        self.process.wait(_DEADLINE_S)

    def train_on(self, steps: int) -> None:
        """Wait until the workers have applied so many further steps."""
        before = max(map(step, self.latest().values()))
        self._wait_until(lambda: max(map(step, self.latest().values())) >= before + steps)

    def wait_for_agents(self, times: int, told: str = "has reached the coordinator again") -> None:
        """Wait until both agents have told so often that they have reached a coordinator again, or something else."""
        self._wait_until(lambda: all(" ".join(text.split()).count(told) == times for text in self.told()))

    def wait_for_event(self, kind: str) -> None:
        """Wait until a launcher has reported an event of this kind."""
        self._wait_until(lambda: bool(self.events(kind)))

    def told(self) -> list[str]:
        """What the agents have printed."""
        return [(self.folder / f"agent-{each.name}").read_text() for each in self._lab.hosts[-2:]]

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def pids(self, latest: Mapping[int, Mapping[str, Any]]) -> set[tuple[str, int]]:
        """The workers of the agents: host and process."""
        names = {each.name for each in self._lab.hosts[-2:]}
        return {(each["host"], each["pid"]) for each in latest.values() if each["host"] in names}

    def _launchers(self, host: Host) -> Iterator[int]:
        for pid, outside in host.processes().items():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{outside}/cmdline").read_bytes().split(b"\0")
                name = Path(f"/proc/{outside}/comm").read_text().strip()
                if words[1:4] == [b"-m", b"farandole", b"run"] and name not in (COORDINATOR_NAME, FACTORY_NAME):
                    yield pid


def step(record: Mapping[str, Any]) -> int:
    """The step of a record."""
    return int(record.get("before", record.get("after", 0)))
