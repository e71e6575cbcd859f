"""The last reduction of a step: what this rank says in its header, and what follows from everybody's."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.collectives import world
from farandole.optim.header import StepHeader, check, ids_hash
from farandole.optim.weighting import total
from farandole.state import loop_hooks, recording, step
from farandole.state.global_batch import Batch


def header_of(batch: Batch, plan: int, weight_said: float) -> StepHeader:
    """To be made before anything is contributed: the ledger's intent is written here. `plan`: parameters.digest()."""
    global_batch = batch.global_batch
    return StepHeader(
        generation=world.current().id.number,
        step=loop_hooks.steps_decided(),
        plan=plan,
        epoch=global_batch.epoch,
        start=global_batch.start,
        stop=global_batch.stop,
        samples=global_batch.samples,
        prepared=loop_hooks.prepared(),
        weight=weight_said,
        ids_hash=recording.intend(batch),
        digest=loop_hooks.digest(),
        saved=int(loop_hooks.has_saved()),
    )


def conclude(headers: Sequence[StepHeader], batch: Batch) -> float:
    """All ranks have reduced the same step; what its gradients are to be multiplied by yet. Raises
    CollectiveMismatch, alike on every rank, unless they have."""
    said = list(headers)
    check(said)
    weight = total([header.weight for header in said])
    recording.agree(sum(header.samples for header in said), ids_hash(said))
    loop_hooks.agree([header.prepared for header in said])
    loop_hooks.compare([header.digest for header in said], any(header.saved for header in said))
    return batch.global_batch.global_samples / weight if weight else 1.0  # with 0, nothing was added up


def absorb() -> bool:
    """A collective of the step that is open has failed. True: the step is aborted, and its batch comes again; False:
    it cannot, and the error has to leave."""
    if not step.is_undecided():
        return False
    step.aborted()
    return loop_hooks.can_repeat()
