"""The last reduction of a step: the header of this rank, and the conclusions from the headers of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from farandole.collectives import world
from farandole.optim.header import StepHeader, check, ids_hash
from farandole.optim.weighting import total
from farandole.state import loop_hooks, recording, step
from farandole.state.global_batch import Batch


def header_of(batch: Batch, plan: int, own_weight: float) -> StepHeader:
    """Return the header of this rank. It must be made before anything is contributed, since the ledger's intent is
    written here. `plan`: parameters.digest()."""
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
        weight=own_weight,
        ids_hash=recording.intend(batch),
        digest=loop_hooks.digest(),
        saved=int(loop_hooks.has_saved()),
    )


def conclude(headers: Sequence[StepHeader], batch: Batch) -> float:
    """Check that all ranks have reduced the same step. Returns the remaining factor for its gradients. Raises
    CollectiveMismatch, alike on every rank, if they have not."""
    all_headers = list(headers)
    check(all_headers)
    weight = total([header.weight for header in all_headers])
    recording.agree(sum(header.samples for header in all_headers), ids_hash(all_headers))
    loop_hooks.agree([header.prepared for header in all_headers])
    loop_hooks.compare([header.digest for header in all_headers], any(header.saved for header in all_headers))
    return batch.global_batch.global_samples / weight if weight else 1.0  # with 0, nothing was added up


def absorb() -> bool:
    """Handle a failed collective of the open step. True: the step is aborted, and its batch comes again. False: this is
    not possible, and the error has to propagate."""
    if not step.is_undecided():
        return False
    step.abort()
    return loop_hooks.can_repeat()
