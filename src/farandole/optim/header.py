"""The step header: numbers that are sent with the last reduction of a step, and prove that all ranks reduced the same.

Without it, the gradient of a rank that skipped a bad batch would be added to those of another batch, unnoticed. Pure.
"""

from __future__ import annotations

import operator
import struct

import msgspec

from farandole.errors import CollectiveMismatch

_LAYOUT = struct.Struct("<8qQdQq")
SIZE = _LAYOUT.size


class StepHeader(msgspec.Struct, frozen=True):  # made in each step: see state/global_batch.py
    """The data of one rank about the step that it reduces.

    generation  number of its generation
    step        decided steps before this one
    plan        digest of the reduced parameters (shapes and dtypes), 63 bits
    epoch, start, stop  the global batch; all -1 without a loader of Farandole
    samples     real samples of this rank's local batch
    prepared    number of the planned generation it holds; 0 for none
    ids_hash    hash of the samples of its local batch, where a sample ledger is kept; else 0
    weight      result of weighting.Weights.header_weight()
    digest      digest of a part of the state before the step (state/state_digest.py); 0 where nothing was hashed
    saved       1 where this rank has begun a checkpoint before the step
    """

    generation: int
    step: int
    plan: int
    epoch: int
    start: int
    stop: int
    samples: int
    prepared: int
    ids_hash: int = 0
    weight: float = -1.0
    digest: int = 0
    saved: int = 0

    def pack(self) -> bytes:
        return _LAYOUT.pack(
            self.generation,
            self.step,
            self.plan,
            self.epoch,
            self.start,
            self.stop,
            self.samples,
            self.prepared,
            self.ids_hash,
            self.weight,
            self.digest,
            self.saved,
        )

    @classmethod
    def unpack(cls, trailer: bytes) -> StepHeader:
        return cls(*_LAYOUT.unpack(trailer))


_MEANINGS = {
    "generation": "generation",
    "step": "step counter",
    "plan": "model (number, shapes or dtypes of the parameters)",
    "epoch": "epoch",
    "start": "first sample of the global batch",
    "stop": "end of the global batch",
}
"""The fields that are equal on all ranks, with their meanings."""

_same_everywhere = operator.attrgetter(*_MEANINGS)


def ids_hash(headers: list[StepHeader]) -> int:
    """Return the hash of the whole global batch."""
    return sum(header.ids_hash for header in headers) % 2**64


def check(headers: list[StepHeader]) -> None:
    """Raise CollectiveMismatch, alike on every rank, unless all headers belong to one step."""
    first = headers[0]
    if len(set(map(_same_everywhere, headers))) > 1:
        raise _difference(headers)
    if first.epoch >= 0:
        held = [header.samples for header in headers]
        whole, counted = first.stop - first.start, sum(held)
        if len(held) > 1 and all(samples == whole for samples in held):
            raise CollectiveMismatch(
                f"step {first.step}: each of the {len(held)} workers trained the whole global batch [{first.start}, "
                f"{first.stop}), as if it were alone: their loaders are not connected. Pass the loader to the "
                "state, TorchState(model=..., optimizer=..., loader=loader), and pass that state to the function under "
                "elastic.run; nothing was applied"
            )
        if counted != whole:
            raise CollectiveMismatch(
                f"step {first.step}: the workers' local batches hold {counted} samples, the global batch "
                f"[{first.start}, {first.stop}) holds {whole}; nothing was applied"
            )


def _difference(headers: list[StepHeader]) -> CollectiveMismatch:
    """Return the error that names the first field in which headers of different steps differ."""
    values = {field: [getattr(header, field) for header in headers] for field in _MEANINGS}
    field = next(field for field, by_rank in values.items() if len(set(by_rank)) > 1)
    by_rank = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[field]))
    return CollectiveMismatch(
        f"workers reduced different steps: they differ in {_MEANINGS[field]} ({by_rank}). Every worker must "
        f"run the loop body once for each batch it gets, with the same model; nothing was applied"
    )
