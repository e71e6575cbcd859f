"""The exceptions of Farandole.

FarandoleError
├── HorovodInternalError   a collective failed: Horovod's name, for scripts that catch or raise it
│   ├── RecoverableError   the run loop handles it: regroup, then go on
│   │   ├── PeerLost       a rank was lost inside a collective
│   │   ├── ShardsDiffer   two ranks have computed a shard of strict mode differently; the step comes again
│   │   └── GenerationEnded  the generation was aborted, or a planned change waits; also for later calls
│   └── CollectiveMismatch ranks disagree on the operation; fatal too
└── FatalError             a user has to act
    ├── ConfigError        invalid flags, arguments or environment
    ├── NotInitialized     a call that needs init() came before it
    ├── GroupOutdated      a process group of an earlier generation was used
    ├── ShardLost          a part of a sharded state has no holder any more
    ├── StateDiverged      workers at the same step had different states
    ├── WrongResult        a worker has computed a shard of strict mode wrongly
    ├── StepError          the training loop broke a rule of the step
    ├── DataError          data set, loader or cursor do not fit together
    ├── AuthenticationError  the other side of a connection did not prove the job token
    ├── ProtocolError      the other side of a connection sent an invalid message
    └── JobEnded           the coordinator ended the job, or agent and coordinator are gone

HostsUpdatedInterrupt      no error: a planned change waits, the commit rule's run loop regroups
"""

from __future__ import annotations


class FarandoleError(RuntimeError):
    """The base class of all exceptions of Farandole."""


class HorovodInternalError(FarandoleError):
    """A collective failed. Under the commit rule the run loop restores the last commit and regroups."""


class RecoverableError(HorovodInternalError):
    """An error on which the elastic run loop regroups and goes on. Outside an elastic function it ends the worker."""


class PeerLost(RecoverableError):
    """A rank was lost inside a collective. worker/run_loop.py catches it and regroups."""

    def __init__(self, op: str, generation: int, rank: int, detail: str = "") -> None:
        super().__init__(op, generation, rank, detail)
        self.op, self.generation, self.rank, self.detail = op, generation, rank, detail

    def __str__(self) -> str:
        why = f" ({self.detail})" if self.detail else ""
        return f"{self.op} failed in generation {self.generation}: lost rank {self.rank}{why}"


class GenerationEnded(RecoverableError):
    """The generation was aborted. Every later call of that generation raises it too."""

    def __init__(self, op: str, generation: int, reason: str = "") -> None:
        super().__init__(op, generation, reason)
        self.op, self.generation, self.reason = op, generation, reason

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"{self.op}: generation {self.generation} has ended{why}"


class ShardsDiffer(RecoverableError):
    """Two ranks have computed the same shard of strict mode, with different results. Nothing was applied."""


class FatalError(FarandoleError):
    """An error without recovery; a user has to act."""


class ConfigError(FatalError, ValueError):
    """The flags, arguments or environment are invalid."""


class NotInitialized(FatalError, ValueError):
    """A call that needs `init()` came before it (a ValueError, as in Horovod)."""


class GroupOutdated(FatalError):
    """A subgroup of torch.distributed belongs to an earlier generation. Its ranks are other workers now, or none."""


class ShardLost(FatalError):
    """A part of a sharded state was lost with the last worker that held it, and there is no checkpoint."""


class StateDiverged(FatalError):
    """Workers at the same step had different states, and TorchState(on_divergence="fail") ends the job then."""


class WrongResult(FatalError):
    """In strict mode, this worker has computed a shard wrongly, or it cannot be found out which of two workers has."""


class CollectiveMismatch(FatalError, HorovodInternalError):
    """Ranks disagree on the operation, shape, dtype, step or samples.

    A repetition would not help, so the run loop does not catch it.
    """


class StepError(FatalError):
    """The training loop broke a rule of the step, for example two backward passes for one batch."""


class DataError(FatalError, ValueError):
    """Data set, loader or cursor do not fit together."""


class AuthenticationError(FatalError):
    """The other side of a connection did not prove the job token."""


class ProtocolError(FatalError):
    """The other side of a connection sent an invalid message."""


class JobEnded(FatalError):
    """The coordinator ended the job, or agent and coordinator are gone."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or will be removed: raised on all ranks by the same commit() or check_host_updates().

    `skip_sync` is kept for scripts that read it; Farandole always syncs the state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync

    def __str__(self) -> str:
        return "hosts were added or will be removed; regrouping"
