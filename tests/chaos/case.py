"""One job of a chaos run and the faults that happen to it: all of it follows from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from farandole.testing.faults.drawing import MOST_WORKERS, Shape, draw
from farandole.testing.faults.fault_plan import Plan
from tests.gallery.catalogue import BODIES
from tests.scripts.chaos_job import EPOCHS, STEPS_PER_EPOCH

BUDGET_S = 2.0
WIDE = 512
_OWN_BODY = 0.4


@dataclass(frozen=True)
class Case:
    """body         of the gallery; "": the loop of chaos_job.py, which alone has the next two
    num_workers  loader processes of each worker
    width        of the model: a state of some kilobytes, or of 4 MB
    transport    auto: shared memory on one host; or tcp, in which survivors can differ by a step
    pace_ms      what a step waits beside what it computes
    """

    seed: int
    body: str
    shape: Shape
    num_workers: int
    width: int
    transport: str
    pace_ms: float
    mean_each_step: bool
    has_ledger: bool
    plan: Plan

    def __str__(self) -> str:
        shape = self.shape
        after = "who is lost is replaced" if shape.replaces else "nobody is replaced"
        where = f" and {shape.spares} spares" * bool(shape.spares) + f" on {shape.hosts} hosts" * bool(shape.hosts)
        loaders = f" with {self.num_workers} loader processes" if self.num_workers else ""
        job = f"body {self.body}" if self.body else f"width {self.width}"
        how = f"{job}, {self.transport}, {after}"
        return f"seed {self.seed}: {shape.workers} workers{where}{loaders}, {how}; {self.plan}"

    def as_json(self) -> dict[str, Any]:
        shape = self.shape
        return {
            "seed": self.seed,
            "body": self.body,
            "hosts": shape.hosts,
            "workers": shape.workers,
            "spares": shape.spares,
            "replaces": shape.replaces,
            "loader_processes": self.num_workers,
            "width": self.width,
            "transport": self.transport,
            "plan": str(self.plan),
        }


def case_of(seed: int, hosts: int = 0, spares: int = 0) -> Case:
    """The job of a seed: on this machine, or on so many hosts of a lab; with so many spares."""
    chance = random.Random(f"{seed} on {hosts}" + f" with {spares}" * bool(spares))
    shape = Shape(
        workers=max(hosts, chance.choice([2, 3, 3, MOST_WORKERS])),
        hosts=hosts,
        epochs=EPOCHS,
        steps=STEPS_PER_EPOCH,
        replaces=bool(hosts or spares) or chance.random() < 0.7,
        budget_s=BUDGET_S,
        spares=spares,
    )
    return Case(
        seed=seed,
        body=_body(seed),
        shape=shape,
        num_workers=chance.choice([0, 0, 2]),
        width=chance.choice([8, 8, WIDE]),
        transport=chance.choice(["auto", "tcp"]),
        pace_ms=chance.choice([1.0, 3.0, 6.0]),
        mean_each_step=chance.random() < 0.5,
        has_ledger=chance.random() < 0.5,
        plan=draw(chance, shape),
    )


def _body(seed: int) -> str:
    """Of random numbers of its own: the rest of a seed's job is what it was before there were bodies."""
    chance = random.Random(f"the body of {seed}")
    fitting = [body.name for body in BODIES.values() if body.fits_chaos]
    return "" if chance.random() < _OWN_BODY else chance.choice(fitting)
