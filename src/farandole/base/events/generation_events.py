"""Events of generations: why a new one comes, how it starts, and its cost."""

from __future__ import annotations

from typing import Literal

from farandole.base.events.event import Event, count, named


class RegroupBegan(Event, level="warning"):
    """A fault ended the running generation; `number` is the next one."""

    number: int
    reason: str
    survivors: tuple[str, ...]

    def line(self) -> str:
        who = f"with {named(self.survivors)}" if self.survivors else "without survivors"
        return f"regrouping for generation {self.number} {who}: {self.reason}"


class ChangePlanned(Event):
    """Members were asked to move to generation `number` at their next boundary."""

    sentence = "generation {number} is planned: {reason}"
    number: int
    reason: str


class TooFewWorkers(Event, level="warning"):
    """Survivors are ready, and wait until enough other workers have come."""

    number: int
    present: int
    min_np: int
    timeout_s: float

    def line(self) -> str:
        return (
            f"generation {self.number} needs {count(self.min_np, 'worker')} and has {self.present}; "
            f"waiting for up to {self.timeout_s:g} s (--elastic-timeout)"
        )


class GenerationStarted(Event):
    """A generation started. `workers` by rank. `regroup_s`: from the fault or the plan to START; 0 for the first
    generation."""

    number: int
    workers: tuple[str, ...]
    bootstrap: bool
    regroup_s: float

    def line(self) -> str:
        after = f" after {1000 * self.regroup_s:.0f} ms" if self.regroup_s else ""
        who = f"{count(len(self.workers), 'worker')}: {named(self.workers)}"
        return f"generation {self.number} starts{after} with {who}"


class TransportChosen(Event):
    """The transport of a generation was chosen. `way` describes it for people; later generations have the same unless a
    new event reports another."""

    sentence = "transport of generation {number}: {way}"
    number: int
    way: str


class LinksDistrusted(Event, level="warning"):
    """Connections between living workers kept failing, or were proved to be broken; these workers are stopped to remove
    them. `between`: the hosts and addresses of those that were between hosts."""

    number: int
    links: tuple[str, ...]
    workers: tuple[str, ...]
    is_proved: bool = False
    between: tuple[str, ...] = ()

    def line(self) -> str:
        what = "between living workers are broken" if self.is_proved else "failed again"
        where = f"{', '.join(self.links)}: {'; '.join(self.between)}" if self.between else ", ".join(self.links)
        return f"connections {what} in generation {self.number} ({where}); stopping {named(self.workers)}"


class Recovered(Event):
    """All members have applied a step again, after a fault or a planned change; the event has the durations.
    Milliseconds, one after the other; those after START are of `slowest`, the member that took longest.

    lost           members that were lost, and how they ended; `last_lines` of their stderr
    noticed        the sign by which the coordinator noticed it. A worker's actual time of death is unknown: the time
                   begins here
    silent_ms      the time for which a host had been silent when the recovery began
    ready_ms       until all members were quiescent and START was sent
    connected_ms   until the data connections existed
    synced_ms      until all members had the state
    first_step_ms  until a step was applied
    steps_redone, samples_redone  begun before, and repeated; under the commit rule those since the commit
    counts         the unit of progress, as in FirstStep (wire/link_messages.py)
    began_at       progress in that unit when training continued
    lost_at        least progress in that unit when no holder of the state was left: training continued from a
                   checkpoint. None: a worker held the state
    """

    number: int
    is_planned: bool
    reason: str
    lost: tuple[str, ...]
    noticed: tuple[str, ...]
    last_lines: tuple[str, ...]
    total_ms: float
    silent_ms: float
    ready_ms: float
    connected_ms: float
    synced_ms: float
    first_step_ms: float
    slowest: str
    steps_redone: int
    samples_redone: int
    counts: Literal["step", "commit"] = "step"
    began_at: int = 0
    lost_at: int | None = None

    def line(self) -> str:
        what = f"from the loss of {', '.join(self.lost)}" if self.lost else f"({self.reason})"
        verb = "changed" if self.is_planned and not self.lost else "recovered"
        phases = [
            *([f"noticed by {' and '.join(self.noticed)}"] if self.noticed else []),
            *([f"silent {self.silent_ms:.0f}"] if self.silent_ms else []),
            f"ready {self.ready_ms:.0f}",
            f"connected {self.connected_ms:.0f}",
            f"synced {self.synced_ms:.0f}",
            f"first step {self.first_step_ms:.0f}",
        ]
        back = f"; {self._how_far_back()}" if self._how_far_back() else ""
        return f"{verb} in {self.total_ms:.0f} ms {what}: {', '.join(phases)}{back}; slowest {self.slowest}"

    def _how_far_back(self) -> str:
        if self.lost_at is not None:
            # Steps are observed only now and then: the last observed one may be older than the checkpoint.
            lost_at = f" from {self.counts} {self.lost_at} or later" if self.lost_at > self.began_at else ""
            return f"went back{lost_at} to the checkpoint at {self.counts} {self.began_at}"
        redone = count(self.steps_redone, "step")
        if self.counts == "step" or not self.steps_redone:
            return f"{redone} redone" if self.steps_redone else ""
        if not self.began_at:
            return f"went back {redone} to the beginning, since nothing was committed"
        return f"went back {redone} to commit {self.began_at}"
