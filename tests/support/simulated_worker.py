"""A worker as seen by the coordinator: its answers to orders, and their times. Mirrors farandole.training.worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farandole.base.membership import DataAddress
from farandole.base.wire.link_messages import (
    Abort,
    Elastic,
    Failed,
    Finished,
    FirstStep,
    Hello,
    Leaving,
    Left,
    LinkBroken,
    Newcomer,
    Prepare,
    Probe,
    Probed,
    Ready,
    Released,
    Start,
    Stop,
    Synced,
)
from farandole.base.wire.message import PROTOCOL_VERSION

if TYPE_CHECKING:
    from tests.support.simulated_generation import SimulatedGeneration
    from tests.support.simulated_job import SimulatedJob


class SimulatedWorker:
    """A worker's process. `look()` is its main thread: it takes the next action, given the messages of the link.

    current   generation it is in                    ordered   newest ABORT
    prepared  newest PREPARE that still counts       ready     number for which it sent READY, and waits for START
    synced, stepped, finished   generation in which it reported so
    waits_in  generation without progress, in which it probes its neighbours
    steps     in its state
    """

    def __init__(self, world: SimulatedJob, name: str, agent: str, slot: int, attempt: int = 0) -> None:
        self.world, self.name, self.agent, self.slot, self.attempt = world, name, agent, slot, attempt
        self.is_alive, self.hangs = True, False
        self.is_elastic = self.is_failing = self.has_left = False
        self.current = self.ordered = self.prepared = self.ready = self.synced = self.finished = self.waits_in = 0
        self.stepped = self.steps = 0

    @property
    def generation(self) -> SimulatedGeneration | None:
        """The generation that it entered last, if it is a member of one."""
        generation = self.world.generations.get(self.current)
        return generation if generation is not None and self.name in generation.ranks else None

    def note_presence(self) -> None:
        """Tell the other members whether this worker is in their generation. Call it after each change."""
        if (generation := self.generation) is None:
            return
        if self.is_alive and self.is_in(self.current):
            generation.absent.discard(self.name)
        else:
            generation.absent.add(self.name)

    def die(self) -> None:
        """End the process."""
        self.is_alive = False
        self.note_presence()

    def boot(self) -> None:
        """Import modules, then call init()."""
        world, dice = self.world, self.world.random.random
        self.hangs = dice() < world.habits.hangs
        if self.hangs:
            return
        if dice() < world.habits.crashes:
            code = world.random.choice([1, 3, -9, -11, 0])
            world.after(self._pause_s(), lambda: world.exit(self, code))
        elif world.habits.calls_init:
            address = DataAddress("127.0.0.1", 20000 + len(world.workers))
            hello = Hello(self.name, "", 1, PROTOCOL_VERSION, address)
            world.after(self._pause_s(), lambda: world.say(self, hello) if self.is_alive else None)
        else:
            self._look_soon()  # a plain script trains at once

    def is_in(self, number: int) -> bool:
        """Return whether it runs this generation and has received no message that ends it."""
        return self.current == number and self.ordered <= number and self.is_elastic and not self.is_failing

    def hear(self, message: object) -> None:
        """Handle a message in the link's thread."""
        match message:
            case Newcomer(_):
                self.world.after(self._pause_s(), self._enter_elastic)
                return
            case Start(id):
                assert id.number > max(self.current, self.ordered - 1), f"{self.name} hears an outdated START: {id}"
                if self.generation is not None:
                    self.generation.absent.add(self.name)
                self.current, self.prepared, self.ready = id.number, 0, 0
                if not self.is_elastic:
                    self.world.after(self._pause_s(), self._enter_elastic)
            case Abort(number):
                self.ordered, self.prepared = number, 0
            case Prepare(number):
                self.prepared = number
            case Probe(number):
                self.probe(number)
            case Released():
                code = 0 if self.world.random.random() >= self.world.habits.fails_late else -6
                self.world.after(self._pause_s(), lambda: self.world.exit(self, code))
                return
            case Left():
                self.has_left = True
                code = self.world.random.choice([0, 0, 1, -15])
                self.world.after(self._pause_s(), lambda: self.world.exit(self, code))
                return
            case Stop():
                self.world.after(self.world.delay_s(), lambda: self.world.exit(self, 1))
                return
        self.note_presence()
        self._look_soon()

    def look(self) -> None:
        """Run the main thread."""
        if not self.is_alive or self.hangs or self.has_left or self.is_failing:
            return
        if not self.is_elastic:
            if self.world.is_training_over and not self.world.habits.is_elastic:
                self.world.exit(self, 0)
            return
        if self.ordered > max(self.current, self.ready):
            self._say_ready(self.ordered)
        elif self.current and self.ordered <= self.current and self.ready <= self.current:
            self._train()

    def fail(self, summary: str, exits: bool = True) -> None:
        """Let user code raise."""
        if self.is_alive and self.current:
            self.is_failing = True
            self.note_presence()
            self.world.say(self, Failed(summary, f"Traceback ...\n{summary}"))
            if exits:
                self.world.after(self._pause_s(), lambda: self.world.exit(self, 1))

    def leave(self) -> None:
        """Receive SIGTERM."""
        if self.is_alive and self.is_elastic:
            self.world.say(self, Leaving())

    def wait_for_bytes(self) -> None:
        """Probe the neighbours if no byte moves any more, after half the budget, and later again."""
        number = self.current
        if number and number != self.waits_in and self.world.is_stuck(number):
            self.waits_in = number
            half_s = self.world.job.config.detection_budget_s / 2
            for times in (1, 3, 7, 15):
                self.world.after(half_s * times + self.world.delay_s(), lambda: self._probe_if_stuck(number))

    def probe(self, number: int) -> None:
        """Probe in the link's thread, whatever the main thread does. Takes as long as a neighbour does not answer."""
        if not self.is_alive or not self.is_in(number):
            return
        peers = self.world.peers_of(self)
        silent = [peer.name for peer in peers if self.world.is_silent(self, peer)]
        around = self.world.generations[number].neighbours(self.name)
        # A worker whose host is gone has no answer; where only the process is gone, the kernel answers.
        gone = [name for name in sorted(around) if not self.world.workers[name].is_alive]
        silent += [name for name in gone if self.world.random.random() < 0.5]
        found = Probed(number, tuple(sorted(around.difference(silent))), tuple(silent))
        takes_s = self.world.job.config.detection_budget_s / 8 if silent else 0.0
        self.world.after(takes_s, lambda: self.world.say(self, found) if self.is_alive else None)

    def _probe_if_stuck(self, number: int) -> None:
        if self.current == number and self.world.is_stuck(number):
            self.probe(number)
        elif self.waits_in == number:
            self.waits_in = 0

    def _enter_elastic(self) -> None:
        if self.is_alive and not self.is_elastic and self.world.habits.is_elastic:
            self.is_elastic = True
            self.note_presence()
            self.world.say(self, Elastic())
            self._look_soon()

    def _train(self) -> None:
        """Sync with the others, then continue until a planned boundary or the end of training."""
        world, number, generation = self.world, self.current, self.generation
        if generation is None or generation.absent:
            return
        if world.is_stuck(number):
            self.wait_for_bytes()
            return
        if generation.step is None:
            steps = [world.workers[name].steps for name in generation.members]
            generation.step = world.training.has_met(generation, steps)
            self._wake_all(generation)
        world.training.trains(generation)
        if self.synced != number:
            broken = [p for p in world.peers_of(self) if frozenset((p.name, self.name)) in world.bad_links]
            for peer in broken:
                world.say(self, LinkBroken(number, peer.name, "connect", "timed out"))
            if not broken:
                self.synced, self.steps = number, generation.step
                generation.unsynced.discard(self.name)
                world.say(self, Synced(number))
                if not generation.unsynced:
                    self._wake_all(generation)
            return
        if generation.unsynced:
            return
        if self.stepped != number:
            self.stepped, self.steps = number, self.steps + 1
            world.say(self, FirstStep(number, 0.001, 0.001, 0.002, 0.003, 0.004, 0, 0))
        if world.habits.agrees:
            self._follow_all(generation)
        else:
            self._decide_alone()

    def _follow_all(self, generation: SimulatedGeneration) -> None:
        """Agree on a boundary, or on the end of training, and act accordingly."""
        workers = self.world.workers
        if generation.agreed is None:
            if self.prepared and all(workers[name].prepared == self.prepared for name in generation.members):
                generation.agreed = self.prepared
                self._wake_all(generation)
            elif self.world.is_training_over:
                generation.agreed = "finish"
                self._wake_all(generation)
        if generation.agreed == "finish":
            self._finish()
        elif isinstance(generation.agreed, int) and self.ready != generation.agreed:
            self._say_ready(generation.agreed)

    def _decide_alone(self) -> None:
        finishes = self.world.is_training_over and self.world.random.random() < 0.5
        if self.finished == self.current:
            return
        if self.prepared and not finishes:
            self._say_ready(self.prepared)
        elif self.world.is_training_over:
            self._finish()

    def _finish(self) -> None:
        if self.finished != self.current:
            self.finished = self.current
            self.world.say(self, Finished(self.current))

    def _say_ready(self, number: int) -> None:
        self.ready = number
        self.world.say(self, Ready(number))

    def _look_soon(self) -> None:
        self.world.after(self.world.delay_s(), self.look)

    def _wake_all(self, generation: SimulatedGeneration) -> None:
        for name in generation.members:
            self.world.workers[name]._look_soon()

    def _pause_s(self) -> float:
        return self.world.random.uniform(0.0, 0.5)
