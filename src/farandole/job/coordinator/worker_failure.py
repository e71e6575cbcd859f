"""The response to the death of a worker, or of an agent with all its workers. Then regroup.py forms a generation.
Pure.

before generation 1   killed by a signal: replaced, or its host is banned; anything else ends the job, and so does any
                      loss of a worker that has met others in a process group of torch.distributed
a static script       exit code 0: one worker is done; anything else ends the job; so it is in a job that has become
                      static (shutdown.py)
either of these       with --max-restarts: all workers are started again, or the job ends (whole_restart.py)
an elastic job        a member: lost, whatever its exit code, and the survivors regroup; the job ends with success when
                      all have exited with code 0 (regroup.py);
                      others: replaced, or they had left anyway;
                      with --on-failure host the whole host is banned (capacity.py), in the same regroup
after the release     exit code 0: done; anything else is reported and makes the job fail
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from farandole.base.events import AgentWasLost, WorkerEnded, WorkerLost
from farandole.base.wire.messages import SpawnFailed, WorkerExited
from farandole.job.coordinator import backoff, capacity, regroup, whole_restart
from farandole.job.coordinator.hosts import quarantine_host
from farandole.job.coordinator.inputs import AgentLost
from farandole.job.coordinator.job import Job, Loss, LostMember, Worker
from farandole.job.coordinator.sentences import format_exit, listed, worker_name
from farandole.job.coordinator.transition import Transition


@dataclass(frozen=True)
class ExitRecord:
    """A worker whose process is gone. `how` is the predicate of its end ("it ..."); no exit code: not started, or agent
    lost. `noticed`: as in LostMember; `silent_s`: how long its host had been silent by now."""

    worker: Worker
    how: str
    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()
    noticed: str = "its exit"
    silent_s: float = 0.0

    def sentence(self, job: Job) -> str:
        raised = f", having raised {self.worker.raised}" if self.worker.raised else ""
        return f"{worker_name(job, self.worker)} {self.how}{raised}"


def worker_gone(transition: Transition, worker: Worker, message: WorkerExited | SpawnFailed) -> None:
    """Handle a worker whose process is gone and reaped."""
    if isinstance(message, SpawnFailed):
        gone = ExitRecord(worker, f"could not be started: {message.error}")
    else:
        if not transition.job.is_elastic:
            whole_restart.report_failure(transition, worker, message)
        how = format_exit(message.exit_code)
        gone = ExitRecord(worker, _with_reason(worker, how), message.exit_code, message.last_lines)
    _gone(transition, [gone])


def worker_dying(transition: Transition, worker: Worker) -> None:
    """Handle a worker that will do nothing any more although its exit is not known yet: members need not wait for the
    exit. The report and the cost of the loss are decided at the exit."""
    job = transition.job
    is_needed = job.is_elastic and not job.is_released and job.is_member(worker.name)
    if not is_needed or worker.has_left or worker.is_dying or job.config.on_failure == "host":
        return
    transition.change_worker(worker.name, is_dying=True)
    loss = Loss(ExitRecord(worker, _with_reason(worker, "is dying")).sentence(job), worker.raised, worker.name)
    transition.change(losses=(*transition.job.losses, loss))
    regroup.record_lost_member(transition, LostMember(worker.name, "the end of its main thread"))
    if worker.raised:
        transition.change_slot(worker.slot, is_held_back=True)
    transition.faults.append(loss.sentence)


def _with_reason(worker: Worker, how: str) -> str:
    return f"was stopped because {worker.killed_for}, and {how}" if worker.killed_for else how


def agent_lost(transition: Transition, input: AgentLost) -> None:
    """Handle the loss of an agent: all its workers are lost at once, in one regroup, together with its slots."""
    agent = transition.job.agents.get(input.agent)
    if agent is None or not agent.is_connected:
        return
    transition.change(agents={**transition.job.agents, agent.name: replace(agent, is_connected=False)})
    if input.lease_end_s is not None:
        transition.change(lease_end_s=max(input.lease_end_s, transition.job.lease_end_s or input.lease_end_s))
    for slot in [slot for slot in transition.job.slots if slot.agent == agent.name]:
        capacity.close_slot(transition, slot)
        transition.change_slot(slot, is_given_up=False)
    workers = [worker for worker in transition.job.workers.values() if worker.slot.agent == agent.name]
    transition.log(AgentWasLost(agent.name, input.reason, tuple(worker.name for worker in workers)))
    for worker in workers:
        if not transition.job.is_elastic:
            whole_restart.report_failure(transition, worker, None)
    how = f"was lost with agent {agent.name}"
    noticed = f"the silence of agent {agent.name}" if input.silent_s else f"the end of agent {agent.name}"
    _gone(transition, [ExitRecord(worker, how, noticed=noticed, silent_s=input.silent_s) for worker in workers])
    if transition.job.is_released:
        return  # the training is complete, unless a member was lost with the agent (shutdown.py)
    if not (transition.job.may_get_slots() or any(agent.is_connected for agent in transition.job.agents.values())):
        transition.end(1, f"Agent {agent.name} was the last one and is lost: {input.reason}.")


def _gone(transition: Transition, gone: list[ExitRecord]) -> None:
    transition.forget(one.worker.name for one in gone)
    if transition.job.whole_restart is not None:
        for one in gone:
            _log_end(transition, one)
        return
    unexpected = []
    for one in gone:
        # A worker that left, or that was stopped before it became a member, may end with any exit code.
        was_member = transition.job.is_member(one.worker.name) or one.worker.is_dying
        expected = one.worker.has_left or (one.worker.killed_for and not was_member)
        if expected:
            transition.log(WorkerEnded(one.worker.name, one.worker.slot.index, one.how))
        else:
            unexpected.append(one)
            backoff.count_failure(transition, one.worker, one.exit_code)
    if transition.job.generation is None:
        _before_generation_1(transition, unexpected)
    elif transition.job.is_released:
        _after_release(transition, unexpected)
    elif transition.job.is_elastic:
        _elastic(transition, unexpected)
    else:
        _static(transition, unexpected)


def _elastic(transition: Transition, gone: list[ExitRecord]) -> None:
    losses = []
    for one in gone:
        if one.exit_code == 0 and not any(transition.job.each_survivor()):
            _log_end(transition, one)
        else:
            _log_loss(transition, one)
        if one.worker.is_dying:
            _complete_loss(transition, one)
        elif transition.job.is_member(one.worker.name):
            losses.append(Loss(one.sentence(transition.job), one.worker.raised, exit_code=one.exit_code))
            if one.worker.raised:
                # If all raise the same exception, none is restarted: wait until the others prove to be healthy
                # (regroup.py).
                transition.change_slot(one.worker.slot, is_held_back=True)
    stopped = _take_hosts_out(transition, gone)
    if losses or stopped:
        transition.change(losses=(*transition.job.losses, *losses))
        transition.faults += [*(loss.sentence for loss in losses), *stopped]


def _complete_loss(transition: Transition, one: ExitRecord) -> None:
    """Complete the loss, if it still counts, that was recorded when the worker was dying."""
    losses = [
        replace(loss, sentence=one.sentence(transition.job), dying=None, exit_code=one.exit_code)
        if loss.dying == one.worker.name
        else loss
        for loss in transition.job.losses
    ]
    transition.change(losses=tuple(losses))


def _take_hosts_out(transition: Transition, gone: list[ExitRecord]) -> list[str]:
    """Ban the hosts; return one sentence for each banned host that had more members than those that are gone."""
    if transition.job.config.on_failure != "host":
        return []
    hosts = dict.fromkeys(transition.job.host_of(one.worker) for one in gone)
    stopped = {host: quarantine_host(transition, host) for host in hosts}
    return [f"stopping {listed(names)} on {host} with it" for host, names in stopped.items() if names]


def _static(transition: Transition, gone: list[ExitRecord]) -> None:
    for one in gone:
        if not transition.job.is_member(one.worker.name):
            _log_loss(transition, one)
        elif one.exit_code == 0:
            _log_end(transition, one)
            transition.change_slot(one.worker.slot, is_held_back=True)
        else:
            _log_loss(transition, one, may_be_replaced=False)
            if _all_restart(transition, one.sentence(transition.job)):
                continue
            so_far = whole_restart.attempts_so_far(transition.job)
            transition.end(
                _exit_code_after(one),
                f"{one.sentence(transition.job)}{so_far and f' ({so_far})'}. {_why_others_end(transition.job)}",
            )
    if not transition.job.survivors() and transition.job.whole_restart is None:
        transition.end(0, "All workers exited with code 0.")


def _why_others_end(job: Job) -> str:
    """Return a sentence: why the members of a static job cannot continue without the lost one."""
    if job.static_because:
        return f"The job had become static, so the others cannot continue without it: {job.static_because}."
    return (
        "No worker had entered an elastic function, so the others cannot continue without it: they may wait for it in "
        "the set-up, or their training is not elastic (under --in-place the log of rank 0 says why). Start the job "
        "again, or with --max-restarts N, which starts all workers again."
    )


def _exit_code_after(one: ExitRecord) -> int:
    """Return the exit code of a job that ends because of this worker."""
    return one.exit_code if one.exit_code and one.exit_code > 0 else 1


def _end_process_group(transition: Transition, one: ExitRecord) -> None:
    """End a job whose workers have met in a process group of torch.distributed only: such a group ends with the first
    worker that is lost, and a replacement would wait for ever for the others."""
    _log_loss(transition, one, may_be_replaced=False)
    transition.end(
        _exit_code_after(one),
        f"{one.sentence(transition.job)}. The workers train in a process group of torch.distributed, which cannot "
        "continue without it: wrap the training in an elastic function to survive a loss.",
    )


def _all_restart(transition: Transition, reason: str) -> bool:
    """Begin to restart all workers, if that is possible; return whether they are restarted."""
    if whole_restart.is_possible(transition.job):
        whole_restart.begin(transition, reason)
    return transition.job.whole_restart is not None


def _before_generation_1(transition: Transition, gone: list[ExitRecord]) -> None:
    for one in gone:
        sentence, called = one.sentence(transition.job), one.worker.address is not None
        if one.exit_code == 0 and not called:
            _log_end(transition, one)
            transition.change_slot(one.worker.slot, is_held_back=True)
            transition.change(plain_exits=(*transition.job.plain_exits, one.worker.name))
            if not one.worker.has_met:
                transition.change(never_met=(*transition.job.never_met, one.worker.name))
            continue
        if one.worker.has_met and not called and transition.job.config.max_restarts is None:
            _end_process_group(transition, one)
            continue
        # A worker that fails by itself at the start is not started again; a killed worker is.
        _log_loss(transition, one, may_be_replaced=_may_be_replaced_alone(transition.job, one))
        when = "while it waited in init() for the other workers" if called else "before it called init()"
        could_start = one.exit_code is not None or not transition.job.agents[one.worker.slot.agent].is_connected
        if one.exit_code != 0 and could_start and transition.job.config.max_restarts is not None:
            if not _all_restart(transition, sentence):
                transition.end(_exit_code_after(one), f"{sentence} ({whole_restart.attempts_so_far(transition.job)}).")
        elif one.exit_code is not None and one.exit_code >= 0:
            transition.end(one.exit_code or 1, f"{sentence} {when}; a failed start is not repeated.")
        elif one.exit_code is None and transition.job.agents[one.worker.slot.agent].is_connected:
            transition.end(1, f"{sentence}.")
        elif transition.job.config.on_failure == "host":
            _take_hosts_out(transition, [one])
        elif one.exit_code is not None and capacity.restarts_left(transition.job, one.worker.slot) == 0:
            transition.end(
                1,
                f"{sentence} {when}, and its slot's restart budget is used up "
                f"(--restarts {transition.job.config.restarts}).",
            )


def _may_be_replaced_alone(job: Job, one: ExitRecord) -> bool:
    return job.config.max_restarts is None and one.exit_code is not None and one.exit_code < 0


def _after_release(transition: Transition, gone: list[ExitRecord]) -> None:
    for one in gone:
        if one.worker.is_dying:
            _log_loss(transition, one, may_be_replaced=False)
        elif one.exit_code == 0 or not transition.job.is_member(one.worker.name):
            _log_end(transition, one)
        else:
            _log_loss(transition, one, may_be_replaced=False)
            transition.change(losses=(*transition.job.losses, Loss(one.sentence(transition.job), one.worker.raised)))


def _log_loss(transition: Transition, one: ExitRecord, may_be_replaced: bool = True) -> None:
    worker = one.worker
    is_agent_there = transition.job.agents[worker.slot.agent].is_connected  # else its slot is gone, too
    budget_counts = transition.job.config.on_failure == "slot" and is_agent_there and may_be_replaced
    left = capacity.restarts_left(transition.job, worker.slot) if budget_counts else None
    transition.log(WorkerLost(worker.name, worker.slot.index, one.how, left, one.last_lines))
    if worker.is_dying or transition.job.is_member(worker.name):
        silent_since_s = transition.now_s - one.silent_s if one.silent_s else None
        regroup.record_lost_member(
            transition, LostMember(worker.name, one.noticed, silent_since_s, one.how, one.last_lines)
        )


def _log_end(transition: Transition, one: ExitRecord) -> None:
    transition.log(WorkerEnded(one.worker.name, one.worker.slot.index, one.how))
