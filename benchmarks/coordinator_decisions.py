"""What a job of thousands of workers costs its coordinator: the real decisions, with simulated agents and workers.

python -m benchmarks.coordinator_decisions --workers 8 64 512 4096 32768

Time is virtual: workers answer after random delays, mostly below a millisecond, sometimes a fifth of a second. The CPU
time is that of the coordinator alone: each arriving message is opened (MAC) and decoded, inputs that arrive together
are decided, events are formatted as log lines, and each message to an agent is encoded and sealed as one frame.

start   from the first agent to the last report of a confirmed state in generation 1
told    one worker is killed: from its exit until START of the next generation is told to all
back    from there until the survivors have reported their first steps, and the replacement trains with them
status  one answer to `farandole status`
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass

from farandole.base.config import JobConfig
from farandole.base.wire.authentication import Session
from farandole.base.wire.frames import AGENT_MESSAGES, decode, encode, frame
from farandole.job.coordinator.control_requests import status_of
from farandole.job.coordinator.decision_loop import rest_s
from farandole.job.coordinator.job import Job
from farandole.job.coordinator.transition import Action, AgentReported, Input, Log, SendAgent
from tests.support.simulated_job import SimulatedJob

SLOTS = 8
"""Workers on each host."""

_ARRIVE_WITHIN_S = 1.0  # the agents


@dataclass
class Cost:
    """The costs of one phase.

    cpu_s          of the coordinator
    took_s         in virtual time
    longest_s      the longest decision, with its messages
    messages_up    from agents, also for their workers; messages_down: to agents. Frames, as bytes_up and bytes_down
    """

    phase: str
    workers: int
    cpu_s: float = 0.0
    took_s: float = 0.0
    decisions: int = 0
    longest_s: float = 0.0
    messages_up: int = 0
    bytes_up: int = 0
    messages_down: int = 0
    bytes_down: int = 0


class MeasuredJob(SimulatedJob):
    """Measures its coordinator, which gathers inputs while it rests, as the real one does."""

    def __init__(self, workers: int, seed: int) -> None:
        super().__init__(JobConfig(workers), seed)
        self.costs: list[Cost] = []
        self._began_s = 0.0
        self._rests_until_s = 0.0
        self._coordinator, self._agent = Session(b"c" * 32, b"a" * 32), Session(b"a" * 32, b"c" * 32)

    def begin(self, phase: str) -> None:
        """Count the following decisions to this phase."""
        self._began_s = self.now_s
        self.costs.append(Cost(phase, self.job.config.num_proc))

    def gathers_s(self) -> float:
        return max(self._rests_until_s - self.now_s, 1e-6)

    def decide(self, job: Job, inputs: list[Input]) -> tuple[Job, list[Action], float | None]:
        frames_up = [self._agent.seal(encode(each.message)) for each in inputs if isinstance(each, AgentReported)]
        begin_s = time.process_time()
        for each in frames_up:
            decode(AGENT_MESSAGES, self._coordinator.open(each))
        after, actions, deadline_s = super().decide(job, inputs)
        frames_down = []
        for action in actions:
            if isinstance(action, SendAgent):
                frames_down.append(frame(self._coordinator.seal(encode(action.message))))
            elif isinstance(action, Log):
                action.event.line()
        took_s = time.process_time() - begin_s
        self._rests_until_s = self.now_s + took_s + rest_s(took_s)
        cost = self.costs[-1]
        cost.cpu_s += took_s
        cost.took_s = self.now_s + took_s - self._began_s
        cost.decisions += 1
        cost.longest_s = max(cost.longest_s, took_s)
        cost.messages_up += len(frames_up)
        cost.bytes_up += sum(4 + len(each) for each in frames_up)
        cost.messages_down += len(frames_down)
        cost.bytes_down += sum(map(len, frames_down))
        if cost.phase == "told" and after.generation is not job.generation:
            self.begin("back")
        return after, actions, deadline_s

    def check(self, inputs: list[Input], actions: list[Action]) -> None:
        """Check nothing: the property tests do, and it would take longer than the decisions."""


def measure(workers: int, seed: int) -> list[Cost]:
    """Play the phases of a job of this size."""
    job = MeasuredJob(workers, seed)
    job.begin("start")
    hosts = -(-workers // SLOTS)
    for index in range(hosts):
        slots = min(SLOTS, workers - index * SLOTS)
        job.after(_ARRIVE_WITHIN_S * index / hosts, lambda host=f"h{index}", slots=slots: job.connect(host, slots))  # type: ignore[misc]
    job.run()
    assert job.job.generation is not None
    assert len(job.job.generation.members) == workers
    job.begin("told")
    job.exit(job.alive()[workers // 2], -9)
    job.run()
    assert len(job.job.generation.members) == workers
    job.begin("status")
    cost, begin_s = job.costs[-1], time.process_time()
    cost.bytes_down = len(encode(status_of(job.job, job.now_s)))
    cost.cpu_s, cost.messages_down = time.process_time() - begin_s, 1
    return job.costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    print("phase   workers   CPU s  longest  decisions  messages up        MB  messages down        MB   took s")
    found: list[Cost] = []
    for workers in options.workers:
        for cost in measure(workers, options.seed):
            found.append(cost)
            print(
                f"{cost.phase:7} {cost.workers:7} {cost.cpu_s:7.3f} {1e3 * cost.longest_s:5.0f} ms {cost.decisions:10} "
                f"{cost.messages_up:12} {cost.bytes_up / 1e6:9.3f} "
                f"{cost.messages_down:14} {cost.bytes_down / 1e6:9.3f} {cost.took_s:8.2f}",
                flush=True,
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([asdict(each) for each in found], file, indent=1)


if __name__ == "__main__":
    main()
