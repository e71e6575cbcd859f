"""The run loop of the commit rule, as in Horovod: a fault or a planned change leaves the function, the workers
regroup and agree on the state, and the function is called again.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from typing import TypeVar

from farandole.base.env import read_checkpoint_env
from farandole.base.liveness import status_reporting
from farandole.base.liveness.status_reporting import InPhase
from farandole.base.membership import Phase
from farandole.base.wire.link_messages import Elastic, Synced
from farandole.errors import (
    CollectiveMismatch,
    ConfigError,
    GenerationEnded,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    JobEnded,
    RecoverableError,
)
from farandole.integrations.ddp.module import adopt_modules
from farandole.integrations.horovod.commit_records import commit_records
from farandole.integrations.horovod.committed_state import CommittedState, can_be_staged, synchronize_commits
from farandole.integrations.horovod.host_update_listeners import PlannedUpdates
from farandole.integrations.horovod.named.engine import NAMED, NamedCollectives
from farandole.integrations.horovod.object_state import KeptValues, ObjectState, State, can_be_kept
from farandole.integrations.horovod.torch_state import TorchState
from farandole.training.collectives import world
from farandole.training.collectives.transport import Transport
from farandole.training.state import step
from farandole.training.state.deep_copy import finish_all
from farandole.training.state.session import SESSION, HostUpdateResult, RunLoop
from farandole.training.state.sync import SyncReport
from farandole.training.worker.checkpoints import Checkpoints, checkpoints
from farandole.training.worker.meetings import all_have_finished
from farandole.training.worker.signals import Signals
from farandole.training.worker.worker_job import WorkerJob
from farandole.training.worker.worker_recovery import regroup, report_first_step

logger = logging.getLogger("farandole")

ResultT = TypeVar("ResultT")

_PREPARED_UPDATE = struct.Struct("<2q")  # prepared, update


class CommitLoop(RunLoop):
    """A call of an elastic function. It answers the requests of state and optimizer."""

    def __init__(self, job: WorkerJob | None, state: State) -> None:
        self._job = job
        self._state = state
        self._committed = CommittedState(state) if isinstance(state, TorchState) else None
        self._updates = PlannedUpdates(job, state)
        self._records = commit_records(self._committed)
        self._values = KeptValues(state) if isinstance(state, ObjectState) and can_be_kept(state) else None
        self._checkpoints = _checkpoints(job, self._committed, self._values)
        self._commits = 0  # of this call; only for the log and the agent
        self._uncommitted = UncommittedSteps(state)
        self._is_changing = False  # the state becomes that of all workers, before they train on
        self._is_torn = False  # neither the last commit nor the next one is whole

    def run(self, call: Callable[[], ResultT]) -> ResultT:
        adopt_modules(vars(self._state).values())  # their optimizers step as always: a fault leaves the function
        SESSION.open(self, sampler_recorder=self._records)
        try:
            with Signals(self._job, lambda: not self._is_between_commits()), self._updates:
                try:
                    with InPhase(Phase.USER):
                        return self._run(call)
                except (JobEnded, SystemExit):
                    self._save_in_emergency()
                    raise
                finally:
                    if self._checkpoints is not None:
                        self._checkpoints.close()
        finally:
            SESSION.close()
            world.refuse_collectives(None)
            self._uncommitted.close()
            if self._records is not None:
                self._records.close()

    def _run(self, call: Callable[[], ResultT]) -> ResultT:
        self._enter()
        if self._checkpoints is not None:
            self._checkpoints.entered()
        while True:
            if self._records is not None:
                self._records.entered()
            try:
                result = call()
                world.raise_if_refused("the end of the elastic function")
            except HostsUpdatedInterrupt as interrupt:
                self._interrupted(interrupt)
            except CollectiveMismatch:
                raise
            except HorovodInternalError as error:
                self._failed(error)
            else:
                if all_have_finished(self._job):
                    if self._checkpoints is not None:
                        self._checkpoints.at_end()
                    return result
                self._roll_back()
            self._regroup()

    # Entering and leaving the function ------------------------------------------------------------------------

    def _enter(self) -> None:
        """Give all workers the same state: the source's; at the start of the job, rank 0's."""
        job = self._job
        step.close()
        if job is not None:
            job.link.send(Elastic())
            if job.is_newcomer() or job.has_to_regroup():
                self._regroup()
                return
        here = world.current()
        try:
            self._agree(here.transport, bootstrap=True)
        except RecoverableError:
            if job is None:
                raise
            self._regroup()
            return
        if job is not None:
            job.link.send(Synced(here.id.number))

    def _interrupted(self, interrupt: HostsUpdatedInterrupt) -> None:
        """Handle a planned change: the live state is kept."""
        logger.info("leaving the elastic function: %s", interrupt)
        if isinstance(self._state, TorchState):
            self._state.keep_live()
            self._uncommitted.committed()
        self._ask_for_regroup("the script raised HostsUpdatedInterrupt")

    def _failed(self, error: HorovodInternalError) -> None:
        """Handle a fault: return to the last commit. Raises `error` where there is no worker to regroup with."""
        if self._job is None and world.current().placement.size > 1:
            raise error
        logger.info("leaving the elastic function, back to the last commit: %s", error)
        self._ask_for_regroup(f"left the elastic function, {type(error).__name__}: {error}")
        self._roll_back()

    def _roll_back(self) -> None:
        if self._job is not None and not self._is_left_alone():
            self._job.quiesce()  # an operation in flight could still write into the restored tensors
        self._state.restore()
        self._uncommitted.undone()

    def _ask_for_regroup(self, reason: str) -> None:
        """End this worker's part of the generation, so that no worker waits for it in a collective, and have the
        coordinator end the generation for all. Perhaps this worker alone knows that it left the function."""
        if self._job is not None and world.current().placement.size > 1 and not self._job.has_to_regroup():
            world.current().transport.abort(reason)
            self._job.ask_for_regroup(reason)

    def _save_in_emergency(self) -> None:
        """Save the last commit of a job that ends unfinished."""
        if self._checkpoints is not None and self._checkpoints.is_emergency_writer() and not self._is_between_commits():
            self._is_torn = True
            self._roll_back()
            self._checkpoints.in_emergency()

    @property
    def _newest_commit(self) -> int:
        """The number of the newest commit: of the job where the state counts commits, else of this call."""
        return self._state._commits if isinstance(self._state, TorchState) else self._commits

    def _is_between_commits(self) -> bool:
        """Return whether no commit can be restored at this moment: see TorchState(commit_follows_step=True)."""
        return self._is_torn or world.are_refused()

    # The next generation --------------------------------------------------------------------------------------

    def _regroup(self) -> None:
        """Move to the same state on all members of the next generation, from any point at which the function was
        left."""
        step.close()
        finish_all()
        if self._job is None or self._is_left_alone():
            if self._job is not None:
                self._job.link.raise_if_over()  # the end of the job, too, ends collectives
            self._reset_and_agree(world.current().transport, bootstrap=False)
            return
        done = regroup(self._job, self._reset_and_agree)
        report_first_step(self._job, done, self._newest_commit, "commit", self._uncommitted.take_undone())
        done.log(f"commit {self._state._commits}" if isinstance(self._state, TorchState) else "commit rule")

    def _is_left_alone(self) -> bool:
        """Return whether there is no worker to regroup with: then only this worker has to begin again."""
        job = self._job
        is_alone = world.current().placement.size == 1
        return is_alone and (job is None or not (job.is_newcomer() or job.has_to_regroup()))

    def _reset_and_agree(self, transport: Transport, bootstrap: bool) -> SyncReport | None:
        self._is_changing = True
        try:
            self._reset()
            return self._agree(transport, bootstrap)
        finally:
            self._is_changing = False

    def _reset(self) -> None:
        """Run the reset callbacks after a change of the world. They run before the sync: what they change in the state
        (a learning rate that depends on size()) must reach all workers, and does when the source has it."""
        if isinstance(self._state, TorchState):
            for optimizer in self._state._optimizers():
                abandon = getattr(optimizer, "abandon_step", None)
                if abandon is not None:
                    abandon()
        self._state.on_reset()
        self._updates.repeat()

    def _agree(self, transport: Transport, bootstrap: bool) -> SyncReport | None:
        """Make the state the same on all ranks. Never skipped, whatever the change was."""
        if self._committed is not None and can_be_staged(self._committed.state):
            if self._checkpoints is not None:
                self._committed.capture()
                self._checkpoints.before_sync(transport.rank, bootstrap)
            return synchronize_commits(self._committed, transport, bootstrap)
        try:
            if self._values is not None and self._checkpoints is not None:
                self._checkpoints.before_sync(transport.rank, bootstrap)
            self._state.sync()
            if self._values is not None and self._checkpoints is not None:
                self._values.agree(transport)
        except CollectiveMismatch:
            raise
        except RecoverableError:
            self._roll_back()
            raise
        except HorovodInternalError as error:
            self._ask_for_regroup(f"sync() raised {type(error).__name__}: {error}")
            self._roll_back()
            raise GenerationEnded("sync", world.current().id.number, str(error)) from error
        return None

    # Requests of state and optimizer (state/session.py) ------------------------------------------------------

    def prepared(self) -> int:
        return self._job.link.prepared if self._job is not None else 0

    def agree(self, prepared_by_rank: list[int]) -> None:
        if self._job is not None:
            self._job.agree(prepared_by_rank)

    def receives_updates(self) -> bool:
        return self._job is not None or world.current().placement.size > 1

    def agreed_update(self) -> HostUpdateResult | None:
        """Agree on an update in one small all_gather; no communication when alone or under a fixed-size launcher. The
        samplers' data that only single ranks have is sent with it."""
        world.raise_if_refused("check_host_updates()")
        job, transport = self._job, world.current().transport
        if job is None:
            return None
        if job.link.is_over:
            job.link.raise_if_over()  # a worker alone is in no collective that would end
        number = job.link.prepared
        payload = _PREPARED_UPDATE.pack(number, self._updates.update(number))
        if transport.size > 1:
            payload += self._committed.take_news() if self._committed is not None else b""
            payloads = transport.all_gather(payload)
            for rank, each in enumerate(payloads):
                if self._committed is not None and rank != transport.rank:
                    self._committed.add_news(each[_PREPARED_UPDATE.size :])
        else:
            payloads = [payload]
        unpacked = [_PREPARED_UPDATE.unpack_from(each) for each in payloads]
        job.agree([prepared for prepared, _ in unpacked])
        if not job.has_to_regroup():
            return None
        update = HostUpdateResult.no_update
        for _, each in unpacked:
            update |= HostUpdateResult(each)
        return update

    def committing(self) -> None:
        """Begin a commit. Raises the error that has ended the generation where the script has caught it: batches have
        failed since, which the commit would count as done."""
        named = world.current().extensions.get(NAMED)
        if isinstance(named, NamedCollectives) and not self._is_changing:
            named.raise_if_failed()
        self._is_torn = True

    def committed(self) -> None:
        self._commits += 1
        self._uncommitted.committed()
        status_reporting.set_step(world.current().id.number, self._newest_commit)
        step.notify_decided()
        if self._values is not None:
            self._values.committed()
        if self._checkpoints is not None:
            self._checkpoints.begin_if_due(is_captured=False)
        self._is_torn = False


def _checkpoints(
    job: WorkerJob | None, committed: CommittedState | None, values: KeptValues | None
) -> Checkpoints | None:
    """Return the checkpoints of the loop. Raises ConfigError for a state that cannot be taken apart, in a job that is
    to write checkpoints."""
    if committed is not None and can_be_staged(committed.state):
        return checkpoints(job, committed, "commit")
    if values is not None:
        return checkpoints(job, values, "commit")
    if read_checkpoint_env() is not None:
        raise ConfigError(
            "--checkpoint needs a TorchState or an ObjectState that does not override save(), restore() or sync(), "
            "and has no handlers of its own, since Farandole cannot save their data; without --checkpoint, "
            "state.save_once() lets one worker write a file"
        )
    return None


# The cost of a rollback to the last commit, for the report of a recovery ----------------------------------------------


class UncommittedSteps:
    """Counts the steps of the state's first optimizer since the last commit: 0 for a state that has none."""

    def __init__(self, state: State) -> None:
        optimizers = state._optimizers() if isinstance(state, TorchState) else []
        self._hooks = [each.register_step_post_hook(self._stepped) for each in optimizers[:1]]
        self._count = self._undone = 0

    def committed(self) -> None:
        """Reset the count: the steps done so far are kept."""
        self._count = 0

    def undone(self) -> None:
        """Note that the state went back to the last commit."""
        self._undone, self._count = self._undone + self._count, 0

    def take_undone(self) -> int:
        """Return the steps undone since the last call."""
        undone, self._undone = self._undone, 0
        return undone

    def close(self) -> None:
        """Remove the hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()

    def _stepped(self, *_: object) -> None:
        self._count += 1
