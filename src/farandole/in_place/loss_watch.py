"""Watches the losses of a script, elastic in place: the last line of the job says where a loss depends on how a batch
is divided among the workers, and no trial can show it (division_trial.py), as with a batch that is no rows of tensors.
training.py asks."""

from __future__ import annotations

import torch

from farandole.collectives import world
from farandole.events import count
from farandole.in_place.loss_parts import Part, are_means, grow, parts_of
from farandole.in_place.script_frames import runs_in_autograd_function
from farandole.in_place.script_objects import line_of_script
from farandole.state import step
from farandole.state.step import Batch, StepStatus


class LossWatch:
    """The losses of a script.

    Args:
        workers: The number of workers at the start of the job.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._parts: dict[
            tuple[str, ...], tuple[int, list[Part]]
        ] = {}  # by their names: samples, parts; of all workers
        self._collective: tuple[Batch, str] | None = None  # of the current batch: the line of the script
        self._topics: set[str] = set()  # of the remarks that were made

    def note_collective(self) -> None:
        """Note that the script learns something of all workers' samples. Before the backward pass of a step that they
        share unequally, the loss may be divided by it, as by the number of all tokens: then the mean of the workers'
        gradients is right, and not the one by their samples."""
        batch = step.batch()
        if batch is None or step.status() is not StepStatus.OPEN or step.has_begun_pass():
            return
        is_known = self._collective is not None and self._collective[0] is batch
        is_equal = batch.global_batch.samples * world.current().placement.size == batch.global_batch.global_samples
        if not (is_known or is_equal or runs_in_autograd_function()):  # SyncBatchNorm's, which counts the samples
            self._collective = (batch, line_of_script())

    def look(self, loss: torch.Tensor) -> None:
        """Look at a loss of which the script is about to call backward()."""
        batch = step.batch()
        if batch is None or not batch.samples or step.status() is not StepStatus.OPEN:
            return
        parts, size = parts_of(loss), world.current().placement.size
        names = tuple(each.name for each in parts)
        if size == self._workers:
            self._parts[names] = (batch.samples, parts)
            return
        samples, before = self._parts.get(names, (0, []))
        if self._collective is not None and self._collective[0] is batch and not (parts and are_means(parts, before)):
            self._remark(
                "unequal shares",
                f"{self._collective[1]} reduces or gathers over the workers before backward(), in steps that they "
                f"share unequally ({batch.global_batch.global_samples} samples, {count(size, 'worker')}): where the "
                f"loss is divided by the result, samples of a larger share count more",
            )
        if before and grow(before, samples, parts, batch.samples):
            self._remark(
                "sum over samples",
                f"{line_of_script()}: the loss grows with the number of samples of a worker, as a sum over them does; "
                f"each has {self._workers / size:.3g} times as many with {count(size, 'worker')} instead of "
                f"{self._workers}, and gradients are as much larger: a mean over the samples does not depend on that",
            )
        if "weighted labels" not in self._topics and any(each.is_weighted() for each in parts):
            self._remark(
                "weighted labels",
                f"{line_of_script()}: the loss is a mean over labels that do not all count alike (ignore_index, class "
                f"weights), which each worker divides by those of its own samples: they count otherwise with "
                f"{count(size, 'worker')} than with {self._workers}",
            )

    def _remark(self, topic: str, text: str) -> None:
        if topic not in self._topics:
            self._topics.add(topic)
            world.remark(topic, text)
