"""The membership of a job: values that workers, agents and the coordinator share. Pure; never imports torch."""

from __future__ import annotations

import enum

import msgspec


class GenerationId(msgspec.Struct, frozen=True, array_like=True):
    """The identity of one agreed membership. Data paths compare it for equality, never by order.

    Attributes:
        run_id: Changes when a job restarts from a durable checkpoint without a holder of its state.
        coordinator_epoch: Counts the starts of the job's coordinator.
        number: Counts the generations of the job, from 1; never used twice.
        nonce: Random, so that two coordinators cannot produce the same identity.
    """

    run_id: int
    coordinator_epoch: int
    number: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.number}"


class Address(msgspec.Struct, frozen=True, array_like=True):
    """The address at which a process listens: a numeric host address and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address | None:
        """Return the address in HOST:PORT; None: there is none."""
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        is_port = port.isascii() and port.isdigit() and 0 < int(port) <= 65535
        return cls(host, int(port)) if host and is_port else None


class DataAddress(Address, frozen=True, array_like=True):
    """The address of a worker for its peers.

    Attributes:
        others: Further numeric addresses of its machine, with the same port. Not every peer reaches all of them.
        network: The network stack that has these addresses (machine.network_stack()); empty: unknown.
    """

    others: tuple[str, ...] = ()
    network: str = ""

    @property
    def hosts(self) -> tuple[str, ...]:
        """All addresses of its machine."""
        return (self.host, *self.others)


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """Another worker, as its neighbours on the data path need to know it."""

    worker: str
    rank: int
    address: DataAddress


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """The ranks of a worker in one generation. All ranks are dense and may change with the generation; the slot of a
    worker does not. The local rank is the number of the slot, while the host has no empty slots below."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class Shortfall(msgspec.Struct, frozen=True):
    """Training that was promised, by epochs(total) or by a framework's trainer, and not done.

    Attributes:
        epochs, epochs_left: Promised; not begun, or ended before their last batch. 0 for a promise that counts steps.
        steps, steps_left: Promised; not made. 0 where they cannot be counted, as for streams.
    """

    epochs: int
    epochs_left: int
    steps: int
    steps_left: int


class Progress(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The progress of a worker's state. Ordered; after a fault the highest progress wins.

    Attributes:
        step: Decided optimizer steps since the start of the job.
        epoch: Completed epochs.
        cursor: Samples of the current epoch that decided steps have consumed.
        boundary_number: Boundaries behind a batch, regroups, ends of epochs, and completed calls of Epoch.once().
    """

    run_id: int = 1
    step: int = 0
    epoch: int = 0
    cursor: int = 0
    boundary_number: int = 0


class Origin(msgspec.Struct, frozen=True):
    """The first numbers of a job with checkpoints: above all numbers that jobs with the same folder have used.

    Attributes:
        run_id: That of this job.
        generation: The highest number so far; the first generation gets the next one.
        has_checkpoint: There is a checkpoint to resume from.
    """

    run_id: int
    generation: int
    has_checkpoint: bool = False


# The status of a worker, as far as others can see it.
#
# Workers report it (liveness/status_reporting.py), agents read and forward it, the coordinator evaluates it
# (coordinator/hang_detection.py).


LONGEST_BETWEEN_S = 2.0
"""The longest interval, in seconds, between two reports of an agent, also when nothing has changed."""


class Phase(enum.IntEnum):
    """The phase of the main thread of a worker."""

    OUTSIDE = 0  # before the elastic function, or after it
    USER = 1  # the script's own code
    WAITING = 2  # for other workers, in a collective
    REGROUPING = 3  # between two generations
    FINISHED = 4  # at the end of the elastic function, waiting for the others


class Meeting(enum.IntEnum):
    """Whether a worker has met the others, in init() or in a process group of torch.distributed."""

    UNKNOWN = 0
    ALONE = 1  # it has made a step of an optimizer, and has not
    MET = 2


class WorkerStatus(msgspec.Struct, frozen=True):
    """The status of a worker at one moment. An equal `count` means that nothing has changed. `step` counts decided
    steps, or commits where steps are not counted."""

    count: int
    generation: int
    step: int
    phase: Phase


class WorkerTelemetry(msgspec.Struct, frozen=True, omit_defaults=True):
    """The measurements of a worker, for the page and for metrics. Decisions never depend on them. In JSON, a field is
    left out when it is 0 or empty.

    Attributes:
        step_s: Mean seconds of the last steps, those of about a second; 0: unknown.
        waiting_s: Seconds of these in which the main thread waited for other workers. The worker with the least of
            them is the one for which the others wait.
        epoch, trained, samples: The worker's epoch; the samples of it that were trained, by all workers together, each
            of them once; the samples that it has: 0 if that is unknown.
        resident_bytes: Memory of its process, without that of its loader processes.
        cpu_s: Processor time of its process since its start.
        cores: Processor cores that the process has used since the measurement before.
        values: The newest numbers of `state.log()`, by name.
        share, speed: With `--balance auto`, the worker's part of a global batch, from 0 to 1, and its speed in samples
            per second, without its waiting for others.
    """

    step_s: float = 0.0
    waiting_s: float = 0.0
    epoch: int = 0
    trained: int = 0
    samples: int = 0
    resident_bytes: int = 0
    cpu_s: float = 0.0
    cores: float = 0.0
    values: dict[str, float] = {}
    share: float = 0.0
    speed: float = 0.0
