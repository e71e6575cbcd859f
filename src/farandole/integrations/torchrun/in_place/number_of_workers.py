"""What a script trains may depend on the number of its workers. Then the job waits for each lost worker's replacement,
and becomes static where there will be none."""

from __future__ import annotations

from farandole.base.events.event import count
from farandole.base.wire.link_messages import WorkersFixed
from farandole.integrations.torchrun.in_place.script_loader import ScriptLoader
from farandole.integrations.torchrun.in_place.script_objects import line_of_script
from farandole.training.collectives import world
from farandole.training.worker.worker_job import WorkerJob

_NEVER = 1 << 62


class NumberOfWorkers:
    """What the script's own collectives say about it:

    - It gathers tensors of its batches, which have to have the same shape on all workers.
    - It reduces or gathers a tensor over all workers, through which gradients flow: torch's collective hands each
      worker the gradient of its own part only, so that their mean depends on the number of workers.

    Trials (division_trial.py) find out the rest: before the first step with another number, and, ever more rarely,
    before later ones, since labels may be rare, and a loss may be another one in later epochs.

    Attributes:
        gathers: The line of the first; empty: none was seen.
        differentiates: The line of the second; empty: none was seen.
        divides: Why the division of a batch matters: a clause; empty: it does not, as far as is known.
        trials: The number of trials so far; 0: none.
        due: The number of steps after which the next one is due.
    """

    def __init__(self, job: WorkerJob | None, loader: ScriptLoader) -> None:
        self._job, self._loader = job, loader
        self.gathers = self.differentiates = self.divides = ""
        self.trials = self.due = 0

    def note_gather(self, line: str) -> None:
        if not self.gathers:
            self.gathers = line
            self.fix()

    def note_gradients(self, line: str) -> None:
        """Called by the threads of autograd, too."""
        if not self.differentiates:
            self.differentiates = line
            self.fix()

    def note_trial(self, because: str, is_open: bool, step: int) -> None:
        """Take the result of a trial before this step, which is the same on all workers. `is_open`: it could not tell,
        and further ones would not either."""
        self.divides = because and f"{line_of_script()}: {because}"
        if because and self.trials:
            workers = world.current().placement.size
            text = (
                f"what {count(workers, 'worker')} of {self._loader.listed.workers} trained before step {step} may "
                f"differ: it was found then that at {self.divides}"
            )
            world.remark("late trial", text)
        self.due = _NEVER if is_open else step + (1 << self.trials)
        self.trials += 1
        self.fix()

    def has_to_try(self, step: int) -> bool:
        """Return whether a trial is due: workers are about to make this step that have another number."""
        loader, size = self._loader, world.current().placement.size
        is_open = not (self.divides or self.differentiates or loader.static_because)
        return self._job is not None and is_open and size != loader.listed.workers and step >= self.due

    def fix(self) -> None:
        """Tell the coordinator, as rank 0, if fewer workers would train something else."""
        if self._job is None or world.current().placement.rank != 0:
            return
        workers = self._loader.listed.workers
        if because := next(filter(None, map(self._why_not, range(1, workers))), ""):
            self._job.link.send(WorkersFixed(workers, because))

    def why_static(self) -> str:
        """Return why the job becomes static with the workers of now; empty: it does not."""
        return self._why_not(world.current().placement.size)

    def _why_not(self, size: int) -> str:
        loader = self._loader
        if self.differentiates and size != loader.listed.workers:
            return (
                f"{self.differentiates}: gradients flow through a tensor that the script reduces or gathers over all "
                f"workers, into the own part only, so they are others with {size} of {loader.listed.workers} workers"
            )
        if self.divides and size != loader.listed.workers:
            return (
                f"{self.divides}: the script would train something else with {size} of {loader.listed.workers} workers"
            )
        if self.gathers and loader.known == loader.epoch and not loader.listed.divides_equally(loader.cursor, size):
            return (
                f"{self.gathers}: the script gathers tensors of its batches, which have to be equally large, and its "
                f"global batches cannot be divided equally among {count(size, 'worker')}"
            )
        return ""
