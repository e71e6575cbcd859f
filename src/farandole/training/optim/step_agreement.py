"""The agreement of all ranks on a step: the header of this rank, and the conclusions from the headers of all ranks."""

from __future__ import annotations

import hashlib
import math
import operator
import struct
from collections.abc import Mapping, Sequence

import msgspec
import torch

from farandole.errors import CollectiveMismatch, ConfigError, StepError
from farandole.training.collectives import world
from farandole.training.optim.buckets import has_own_order
from farandole.training.state import step
from farandole.training.state.batch import Batch
from farandole.training.state.session import SESSION


def header_of(batch: Batch, plan: int, own_weight: float, audited: tuple[int, int] = (0, 0)) -> StepHeader:
    """Return the header of this rank. It must be made before anything is contributed, since the ledger's intent is
    written here. `plan`: parameters.digest(); `audited`: the digests of the header's last two fields."""
    global_batch = batch.global_batch
    return StepHeader(
        generation=world.current().id.number,
        step=SESSION.run_loop.steps_decided(),
        plan=plan,
        epoch=global_batch.epoch,
        start=global_batch.start,
        stop=global_batch.stop,
        samples=global_batch.samples,
        prepared=SESSION.run_loop.prepared(),
        weight=own_weight,
        ids_hash=SESSION.recorder.intend(batch),
        digest=SESSION.run_loop.digest(),
        saved=int(SESSION.run_loop.has_saved()),
        own_shard=audited[0],
        other_shard=audited[1],
        passed=step.facts().passed,
        content=global_batch.content,
    )


def packed_at_end(header: StepHeader) -> bytes:
    """Return the header as bytes, at the end of this rank's part of the step: it gets the time of that part."""
    own_ns = SESSION.timer.take_own_ns()
    return msgspec.structs.replace(header, own_ns=own_ns).pack() if own_ns else header.pack()


def conclude(headers: Sequence[StepHeader], batch: Batch) -> float:
    """Check that all ranks have reduced the same step. Returns the remaining factor for its gradients. Raises
    CollectiveMismatch, alike on every rank, if they have not."""
    all_headers = list(headers)
    check(all_headers)
    weight = total([header.weight for header in all_headers])
    SESSION.recorder.agree(sum(header.samples for header in all_headers), ids_hash(all_headers))
    step.facts().agree_on_passes(sum(each.samples for each in all_headers), sum(each.passed for each in all_headers))
    SESSION.run_loop.agree([header.prepared for header in all_headers])
    SESSION.run_loop.compare([header.digest for header in all_headers], any(header.saved for header in all_headers))
    if SESSION.timer.is_needed:
        SESSION.timer.agreed([header.samples for header in all_headers], [header.own_ns for header in all_headers])
    return batch.global_batch.global_samples / weight if weight else 1.0  # with 0, nothing was added up


def conclude_alone(batch: Batch) -> None:
    """Conclude the step of a single worker, without a comparison of headers. Raises if the generation has ended, as a
    reduction would."""
    world.raise_if_refused("gradients cannot be reduced")
    ids = SESSION.recorder.intend(batch)
    world.current().transport.barrier()
    SESSION.recorder.agree(batch.global_batch.samples, ids)
    step.facts().agree_on_passes(batch.global_batch.samples, step.facts().passed)
    SESSION.run_loop.agree([SESSION.run_loop.prepared()])


def absorb() -> bool:
    """Handle a failed collective of the open step. True: the step is aborted, and its batch comes again. False: this is
    not possible, and the error has to propagate."""
    if not step.is_undecided():
        return False
    step.abort()
    return SESSION.run_loop.can_repeat()


# fd.weight, and the weight of each loop body's gradient in that of the global batch -----------------------------------

NOT_GIVEN = -1.0
"""Value in a step header: the number of this rank's samples is the weight."""
NO_SAMPLES = -2.0
"""Value in a step header: this rank has no real sample of the global batch."""


def weight(n: float) -> None:
    """Set the weight of this loop body's loss, which is a mean over `n` items, such as tokens.

    Call it before backward(), in every loop body or in none. The gradient of a step is then that of the mean over all
    items of the global batch, however they are distributed; without it, all samples count alike. The weight of a dummy
    batch does not count.

    Args:
        n: Number of items, may be 0.

    Raises:
        StepError: No batch of a DataLoader of Farandole is out, or backward() of its loop body has run.
        ValueError: n is negative or not finite.
        CollectiveMismatch: Raised by backward() on all workers when only some of them have called weight().

    Examples:
        ```python
        state = fd.elastic.TorchState(model=model, optimizer=optimizer, loader=loader)


        @fd.elastic.run
        def train(state):
            for epoch in loader.epochs(1):
                for x, y in loader:
                    optimizer.zero_grad()
                    mask = y != 0
                    fd.weight(mask.sum())  # of this worker's local batch
                    losses = F.cross_entropy(model(x), y, reduction="none")
                    ((losses * mask).sum() / mask.sum().clamp(min=1)).backward()
                    optimizer.step()


        train(state)
        ```
    """
    number = float(n)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"weight: the number of items in the mean must be 0 or more, got {n}")
    if step.batch() is None:
        raise StepError("weight() can be called only within the loop over a DataLoader of Farandole")
    step.set_weight(number)


class Weights:
    """The weights of one global batch's loop bodies on this rank. `loss`: "mean" or "sum"."""

    def __init__(self, loss: str) -> None:
        self._loss = loss
        self._by_body: dict[int, float | None] = {}

    def forget(self) -> None:
        """Drop the weights for the next global batch."""
        self._by_body.clear()

    def record(self, batch: Batch) -> float:
        """Record the weight of a loop body. Returns the factor for its gradients. Raises StepError."""
        given = step.weight()
        if batch.is_dummy:
            return 0.0
        if self._loss == "sum":
            if given is not None:
                raise StepError(f'weight({given:g}) with loss="sum": a sum needs no weights; leave one of them out')
            return 1.0
        if given is not None and batch.is_strict and given % 1:
            raise StepError(
                f"weight({given:g}) in strict mode: sums of numbers with fractions depend on the number of workers; "
                f"count whole items"
            )
        self._by_body[batch.index] = given
        # Of the same magnitude as with equal samples, so that gradients neither overflow nor vanish on the way.
        return batch.weight if given is None else given / batch.global_batch.global_samples

    def header_weight(self) -> float:
        """Return the value for the step header: the sum of the weights, NOT_GIVEN or NO_SAMPLES. Raises StepError."""
        given = [each for each in self._by_body.values() if each is not None]
        if given and len(given) < len(self._by_body):
            raise StepError(
                "weight() was called in some micro-batches of a global batch and not in others; call it in all"
            )
        if given:
            return sum(given)
        return NOT_GIVEN if self._by_body else NO_SAMPLES


def total(weights: list[float]) -> float | None:
    """Return the weight of the global batch, from the headers of all ranks; None when its samples count.

    Raises CollectiveMismatch, alike on every rank, when only some ranks have called weight().
    """
    without = [rank for rank, each in enumerate(weights) if each == NOT_GIVEN]
    given = [each for each in weights if each >= 0]
    if given and without:
        raise CollectiveMismatch(
            f"ranks {without} did not call weight() for this global batch, other ranks did; call it on every worker, "
            f"in every loop body, or never; nothing was applied"
        )
    return sum(given) if given else None


# The step header ------------------------------------------------------------------------------------------------------
#
# The step header: numbers that are sent with the last reduction of a step, and prove that all ranks reduced the same.
#
# Without it, the gradient of a rank that skipped a bad batch would be added to those of another batch, unnoticed.

_LAYOUT = struct.Struct("<8qQdQqQQqqq")
HEADER_BYTES = _LAYOUT.size


class StepHeader(msgspec.Struct, frozen=True):  # made in each step: see state/step.py
    """The data of one rank about the step that it reduces.

    generation  number of its generation
    step        decided steps before this one
    plan        digest of the reduced parameters (shapes, dtypes, orders in memory), 63 bits
    epoch, start, stop  the global batch; all -1 without a loader of Farandole
    samples     real samples of this rank's local batch
    prepared    number of the planned generation it holds; 0 for none
    ids_hash    hash of the samples of its local batch, where a sample ledger is kept; else 0
    weight      result of weighting.Weights.header_weight()
    digest      digest of a part of the state before the step (state/state_digest.py); 0 where nothing was hashed
    saved       1 where this rank has begun a checkpoint before the step
    own_shard   in an audited step, digest of this rank's audited shard
    other_shard  in an audited step, digest of the shard of another rank that it has computed again
    own_ns      time that this rank has taken for its part of the step without waiting for others; 0: not measured
    passed      samples of this rank's local batch for which a backward pass has run
    content     hash of samples of the global batch, where they come from streams; else 0
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
    own_shard: int = 0
    other_shard: int = 0
    own_ns: int = 0
    passed: int = 0
    content: int = 0

    def pack(self) -> bytes:
        return _LAYOUT.pack(*msgspec.structs.astuple(self))

    @classmethod
    def unpack(cls, trailer: bytes) -> StepHeader:
        return cls(*_LAYOUT.unpack(trailer))


_MEANINGS = {
    "generation": "generation",
    "step": "step counter",
    "plan": "model (number, shapes, dtypes or memory formats of the parameters)",
    "epoch": "epoch",
    "start": "first sample of the global batch",
    "stop": "end of the global batch",
    "content": "samples",
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
    is_at_one_place = len({(each.epoch, each.start, each.step) for each in headers}) == 1
    if is_at_one_place and any(header.content for header in headers):
        return _other_streams(headers)
    values = {field: [getattr(header, field) for header in headers] for field in _MEANINGS}
    field = next(field for field, by_rank in values.items() if len(set(by_rank)) > 1)
    by_rank = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values[field]))
    return CollectiveMismatch(
        f"workers reduced different steps: they differ in {_MEANINGS[field]} ({by_rank}). Every worker must "
        f"run the loop body once for each batch it gets, with the same model; nothing was applied"
    )


def _other_streams(headers: list[StepHeader]) -> CollectiveMismatch:
    """Return the error for workers that read different samples where all read the same stream."""
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, header in enumerate(headers):
        groups.setdefault((header.content, header.stop), []).append(rank)
    ranks = ", others to ".join(f"ranks {each}" for each in groups.values())
    return CollectiveMismatch(
        f"the data set of the StreamLoader yields other samples to {ranks}, in the global batch that begins with "
        f"sample {headers[0].start} of epoch {headers[0].epoch}: every worker has to read the same samples in the same "
        f"order, of which the loader gives each a part. Do not divide the data set by rank (RANK, WORLD_SIZE, "
        f"split_by_node, split_dataset_by_node), shuffle it with a seed that is the same everywhere, such as the "
        f"number that set_epoch() gets, and draw random numbers in transform=, not in the data set; with values that "
        f"differ by nature give sample_key=. Nothing was applied"
    )


# Properties of an optimizer's parameters that are known before a reduction. step_reduction.py and
# bucketed_gradients.py use it.


def check_devices(parameters: Mapping[torch.Tensor, str]) -> None:
    """Raise ConfigError unless all parameters are on one device, the CPU or another one that has memory."""
    first: torch.device | None = None
    for parameter, name in parameters.items():
        first = first or parameter.device
        if parameter.device != first or first.type == "meta":
            devices = sorted({str(each.device) for each in parameters})
            raise ConfigError(
                f"{name} of shape {tuple(parameter.shape)} is on {parameter.device}, and the optimizer's parameters "
                f"are on {', '.join(devices)}; a worker trains on one device: move the model to it, as in "
                f"model.to(fd.device()), before the optimizer is created"
            )


def describe(parameters: Mapping[torch.Tensor, str]) -> list[str]:
    """Return name, shape, dtype and order in memory of each parameter."""
    return [f"{name} {_kind(parameter)}" for parameter, name in parameters.items()]


def digest(parameters: Mapping[torch.Tensor, str]) -> int:
    """Return 63 bits that tell models apart by number, shapes, dtypes and orders in memory of their parameters; not by
    names."""
    text = ";".join(_kind(parameter) for parameter in parameters)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _kind(parameter: torch.Tensor) -> str:
    order = f" in memory by strides {parameter.stride()}" if has_own_order(parameter) else ""
    return f"{tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}{order}"
