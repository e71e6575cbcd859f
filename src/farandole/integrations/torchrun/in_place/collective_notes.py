"""What is noted of the collectives that a script calls: whether its training depends on the number of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from farandole.integrations.torchrun.in_place.script_frames import runs_in_autograd_function
from farandole.integrations.torchrun.in_place.script_objects import kept_count, kept_rank, line_of_script
from farandole.training.collectives import world
from farandole.training.state import step

if TYPE_CHECKING:
    from farandole.integrations.torchrun.in_place.script_step_loop import InPlaceLoop
    from farandole.integrations.torchrun.in_place.training import Training


class CollectiveNotes:
    """Those of one training; torch_patches.py calls it before each collective of the script."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._kept_count = ""  # a variable of the script that has the number of workers of the start

    def note_gather(self, tensor: torch.Tensor) -> None:
        """Note that the script is about to gather this tensor from all workers: whether it has a row for each sample of
        the batch, and whether gradients flow into the own rows. A Function of the script, or of torch, brings those of
        the other workers itself."""
        loop, batch = self._training.loop, step.batch()
        if loop is None or batch is None or not batch.samples or not tensor.dim():
            return
        if tensor.dtype is torch.uint8 and tensor.dim() == 1:  # an object, as all_gather_object() sends it
            return
        rows = tensor.shape[0]
        if rows and rows % batch.samples == 0 and (batch.samples > 1 or tensor.dim() > 1):
            if not loop.number.gathers:
                loop.number.note_gather(line_of_script())
            if not runs_in_autograd_function():
                self._note_gradients(tensor, loop)

    def note_reduction(self, tensor: torch.Tensor) -> None:
        """Note that the script is about to reduce this tensor over all workers: whether gradients flow through the
        result, as through a loss, is known when they do. A copy of a loss for the log has a graph, too."""
        loop, of_start = self._training.loop, self._training.workers
        size = world.current().placement.size if world.is_entered() else of_start
        if loop is not None and size != of_start and not self._training.passes_over and not self._kept_count:
            self._kept_count = kept_count(of_start)
            if self._kept_count:
                text = (
                    f"{line_of_script()} reduces over {size} workers, and the script may compute with {of_start}, "
                    f"the number of its start, in {self._kept_count}: get_world_size() is the one of now"
                )
                world.remark("number of workers", text)
        if loop is not None and step.batch() is not None:
            self._note_gradients(tensor, loop)

    def note_broadcast(self, source: int) -> None:
        """Note that the script is about to send something from this rank: where the worker that was started as rank 0
        is lost, the one that is rank 0 now may not know that it is."""
        training = self._training
        if training.loop is None or training.passes_over or training.is_first_rank:
            return
        if source or world.current().placement.rank:
            return
        if name := kept_rank(training.shares.at_start[0]):
            text = (
                f"{line_of_script()} sends from rank 0, which is another worker than at the start, with "
                f"{name} = {training.shares.at_start[0]}: it may not have computed what it sends"
            )
            world.remark("sent by rank 0", text)

    def _note_gradients(self, tensor: torch.Tensor, loop: InPlaceLoop) -> None:
        if loop.number.differentiates or not tensor.requires_grad or tensor.is_leaf:
            return
        line = line_of_script()

        tensor.register_hook(lambda _: loop.number.note_gradients(line))  # type: ignore[no-untyped-call]
