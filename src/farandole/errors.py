"""Every exception of Farandole.

FarandoleError
├── RecoverableError       the run loop handles it: regroup, then go on
│   ├── PeerLost           a rank vanished inside a collective
│   └── GenerationEnded    the generation was aborted, or a planned change waits; also for later calls
└── FatalError             a person has to act
    ├── ConfigError        flags, arguments or environment that cannot work
    ├── NotInitialized     a call that needs init() came before it
    ├── CollectiveMismatch ranks disagree on what they are doing
    ├── StepError          the training loop broke a rule of the step
    ├── DataError          data set, loader or cursor do not fit together
    ├── AuthenticationError  the other side of a connection did not prove the job token
    ├── ProtocolError      the other side of a connection said something it must not say
    └── JobEnded           the coordinator ended the job, or agent and coordinator are gone
"""

from __future__ import annotations


class FarandoleError(RuntimeError):
    """Base of all."""


class RecoverableError(FarandoleError):
    """The elastic run loop catches it, regroups and goes on. Outside an elastic function it ends the worker."""


class PeerLost(RecoverableError):
    """A rank vanished inside a collective. worker/run_loop.py catches it and regroups."""

    def __init__(self, op: str, generation: int, rank: int, detail: str = "") -> None:
        super().__init__(op, generation, rank, detail)
        self.op, self.generation, self.rank, self.detail = op, generation, rank, detail

    def __str__(self) -> str:
        why = f" ({self.detail})" if self.detail else ""
        return f"{self.op} failed in generation {self.generation}: lost rank {self.rank}{why}"


class GenerationEnded(RecoverableError):
    """The generation ended by an abort. Sticky: every later call of that generation raises it too."""

    def __init__(self, op: str, generation: int, reason: str = "") -> None:
        super().__init__(op, generation, reason)
        self.op, self.generation, self.reason = op, generation, reason

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"{self.op}: generation {self.generation} has ended{why}"


class FatalError(FarandoleError):
    """Nothing to recover; a person has to act."""


class ConfigError(FatalError, ValueError):
    """Flags, arguments or environment that cannot work."""


class NotInitialized(FatalError, ValueError):
    """A call that needs `init()` came before it (a ValueError, as in Horovod)."""


class CollectiveMismatch(FatalError):
    """Ranks disagree on what they are doing: operation, shape, dtype, step or samples."""


class StepError(FatalError):
    """The training loop broke a rule of the step, for example two backward passes for one batch."""


class DataError(FatalError, ValueError):
    """Data set, loader or cursor do not fit together."""


class AuthenticationError(FatalError):
    """The other side of a connection did not prove the job token."""


class ProtocolError(FatalError):
    """The other side of a connection said something it must not say."""


class JobEnded(FatalError):
    """The coordinator ended the job, or agent and coordinator are gone."""
