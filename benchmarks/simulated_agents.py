"""Agents of many hosts in one process, for benchmarks/coordinator_server.py: real connections, simulated workers.

Each line on stdin is an order: "kill w5" ends a worker, "train" and "pause" let the workers make steps or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys

from farandole.base.liveness.heartbeats import Heartbeats, heartbeat_period_s
from farandole.base.machine import installed_software, now_s
from farandole.base.membership import LONGEST_BETWEEN_S, Address, Phase, WorkerStatus, WorkerTelemetry
from farandole.base.wire.channel import Channel, connect
from farandole.base.wire.frames import TO_AGENT
from farandole.base.wire.link_messages import (
    Abort,
    Elastic,
    FirstStep,
    Hello,
    Newcomer,
    Prepare,
    Ready,
    Synced,
    ToWorker,
    WorkerMessage,
)
from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.base.wire.messages import (
    AgentHello,
    CoordinatorHeartbeat,
    ForwardToWorkers,
    FromWorker,
    Heartbeat,
    JobOver,
    Kill,
    Spawn,
    StartWorkers,
    ToAgent,
    Welcome,
    WorkerExited,
)
from farandole.job.agent.agent import STATUS_EVERY_S
from farandole.job.agent.worker_telemetry import TELEMETRY_EVERY_S

_DIALS_AT_A_TIME = 16
_AGAIN_S = 0.5


class Fleet:
    """All agents; `is_training` lets the statuses of their workers change."""

    def __init__(self, port: int, token: bytes, agents: int, slots: int, seed: int) -> None:
        self.port, self.token, self.slots = port, token, slots
        self.random = random.Random(seed)
        self.is_training = True
        self.agents = [SimulatedAgent(self, f"h{index}") for index in range(agents)]
        self.dials = asyncio.Semaphore(_DIALS_AT_A_TIME)

    async def run(self) -> None:
        orders = asyncio.create_task(self._obey())
        try:
            await asyncio.gather(*(agent.run() for agent in self.agents))
        finally:
            orders.cancel()

    async def _obey(self) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := (await reader.readline()).decode().split():
            if line[0] == "kill":
                for agent in self.agents:
                    agent.exit(line[1], -9)
            else:
                self.is_training = line[0] == "train"


class SimulatedAgent:
    """One agent with its workers."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet, self._name = fleet, name
        self._workers: dict[str, bool] = {}  # by name, whether it has entered its elastic function
        self._steps = 0
        self._heartbeats = Heartbeats(now_s())
        self._channel: Channel[ToAgent]
        self._every_s = 0.0

    async def run(self) -> None:
        async with self._fleet.dials:
            self._channel = await self._dial()
            software = installed_software()
            self._channel.send(
                AgentHello(
                    self._name, self._name, self._fleet.slots, PROTOCOL_VERSION, "p", is_apart=True, software=software
                )
            )
            welcome = await self._channel.receive()
            assert isinstance(welcome, Welcome), welcome
        tasks = [
            asyncio.create_task(self._beat()),
        ]
        self._every_s = heartbeat_period_s(welcome.detection_budget_s)
        try:
            with contextlib.suppress(ConnectionError):
                while not isinstance(message := await self._channel.receive(), JobOver):
                    self._obey(message)
        finally:
            for task in tasks:
                task.cancel()
            self._channel.close()

    async def _dial(self) -> Channel[ToAgent]:
        """Connect; again while the coordinator or this process is too busy for the deadline of the handshake."""
        while True:
            try:
                return await connect("127.0.0.1", self._fleet.port, self._fleet.token, None, TO_AGENT)
            except ConnectionError:
                await asyncio.sleep(_AGAIN_S)

    def exit(self, worker: str, exit_code: int) -> None:
        if worker in self._workers:
            del self._workers[worker]
            self._channel.send(WorkerExited(worker, exit_code))

    async def _beat(self) -> None:
        await asyncio.sleep(self._fleet.random.uniform(0.0, self._every_s))
        reported, reported_s, looked_s, measured_s = -1, 0.0, 0.0, 0.0
        while True:
            statuses = telemetry = None
            if now_s() - looked_s >= STATUS_EVERY_S:
                looked_s = now_s()
                self._steps += self._fleet.is_training
                if reported != self._steps or looked_s - reported_s >= LONGEST_BETWEEN_S:
                    reported, reported_s = self._steps, looked_s
                    status = WorkerStatus(self._steps, 1, self._steps, Phase.USER)
                    statuses = dict.fromkeys(self._workers, status)
            if now_s() - measured_s >= TELEMETRY_EVERY_S:
                measured_s = now_s()
                telemetry = {worker: self._measurement() for worker in self._workers}
            sequence = self._heartbeats.next(now_s())
            self._channel.send(Heartbeat(sequence, self._heartbeats.received, statuses, telemetry))
            await asyncio.sleep(self._every_s)

    def _measurement(self) -> WorkerTelemetry:
        step_s = self._fleet.random.uniform(0.3, 0.5)
        values = {"loss": self._fleet.random.random(), "lr": 1e-3}
        return WorkerTelemetry(step_s, step_s / 5, 0, 12 * self._steps, 1_000_000, 1 << 30, 100.0, 0.9, values)

    def _obey(self, message: ToAgent) -> None:
        match message:
            case CoordinatorHeartbeat(sequence, received, every_s):
                self._heartbeats.record(sequence, received)
                self._every_s = every_s
            case Spawn(name):
                self._workers[name] = False
                address = Address("127.0.0.1", 20000 + int(name[1:]) % 40000)
                self._say(name, 0.5, Hello(name, "", 1, PROTOCOL_VERSION, address))
            case Kill(name):
                self.exit(name, -15)
            case ForwardToWorkers(names, told):
                for name in names:
                    self._tell(name, told)
            case StartWorkers(starts):
                for name, start in starts.items():
                    self._started(name, start.id.number)

    def _tell(self, name: str, message: ToWorker) -> None:
        match message:
            case Abort(number) | Prepare(number):
                self._say(name, 0.1, Ready(number))
            case Newcomer():
                self._workers[name] = True
                self._say(name, 0.1, Elastic())

    def _started(self, name: str, number: int) -> None:
        said: list[WorkerMessage] = [Synced(number), FirstStep(number, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)]
        if not self._workers[name]:
            self._workers[name] = True
            said.insert(0, Elastic())
        self._say(name, 0.2, *said)

    def _say(self, name: str, within_s: float, *said: WorkerMessage) -> None:
        """Let a worker send messages, one soon after the other, after a random time."""
        loop, at_s = asyncio.get_running_loop(), self._fleet.random.uniform(0.0, within_s)
        for message in said:
            loop.call_later(at_s, self._send, name, message)
            at_s += 0.01

    def _send(self, name: str, message: WorkerMessage) -> None:
        if name in self._workers:
            self._channel.send(FromWorker(name, message))


def main() -> None:
    port, token, agents, slots, seed = sys.argv[1:]
    asyncio.run(_run(int(port), bytes.fromhex(token), int(agents), int(slots), int(seed)))


async def _run(port: int, token: bytes, agents: int, slots: int, seed: int) -> None:
    await Fleet(port, token, agents, slots, seed).run()


if __name__ == "__main__":
    main()
