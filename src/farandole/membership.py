"""Who is in a job: values that workers, agents and the coordinator share. Pure; never imports torch."""

from __future__ import annotations

import msgspec


class GenerationId(msgspec.Struct, frozen=True, array_like=True):
    """Identity of one agreed membership. Data paths compare it for equality, never by order.

    run_id       changes when a job restarts from a durable checkpoint without a holder of its state
    coordinator_epoch  counts the starts of the job's coordinator
    number       counts the generations of the job, from 1; never used twice
    nonce        random, so that two coordinators cannot produce the same identity
    """

    run_id: int
    coordinator_epoch: int
    number: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.number}"


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a process listens: a numeric host address and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """Another worker, as its neighbours on the data path need to know it."""

    worker: str
    rank: int
    address: Address


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """A worker's place in one generation. All ranks are dense and may change with the generation;
    the slot of a worker does not."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class Shortfall(msgspec.Struct, frozen=True):
    """Training that was promised, by epochs(total) or by a framework's trainer, and not done.

    epochs, epochs_left  promised; not begun, or ended before their last batch. 0 of a promise that counts steps
    steps, steps_left    promised; not made. 0 where they cannot be counted, as of streams
    """

    epochs: int
    epochs_left: int
    steps: int
    steps_left: int


class Progress(msgspec.Struct, frozen=True, order=True, array_like=True):
    """How far a worker's state is. Ordered; after a fault the highest progress wins.

    step      decided optimizer steps since the start of the job
    epoch     completed epochs
    cursor    samples of the current epoch that decided steps have consumed
    boundary  boundaries passed (each next batch, epoch advance, commit)
    """

    run_id: int = 1
    step: int = 0
    epoch: int = 0
    cursor: int = 0
    boundary: int = 0


class Origin(msgspec.Struct, frozen=True):
    """Where the numbers of a job with checkpoints begin: above all that jobs with the same folder have used.

    run_id      of this job
    generation  the highest number so far; the first generation gets the next one
    has_checkpoint  there is one to go on from
    """

    run_id: int
    generation: int
    has_checkpoint: bool = False
