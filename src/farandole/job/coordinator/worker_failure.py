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
                      with --on-failure host the whole host is banned (hosts.py), in the same regroup
after the release     exit code 0: done; anything else is reported and makes the job fail
"""

from __future__ import annotations

from typing import Any, TypeAlias

from farandole.base.events.host_events import AgentWasLost
from farandole.base.events.worker_events import WorkerEnded, WorkerLost
from farandole.base.wire.messages import SpawnFailed, WorkerExited
from farandole.job.coordinator import capacity, hosts, regroup, whole_restart
from farandole.job.coordinator.job import Job, Loss, Worker
from farandole.job.coordinator.sentences import format_exit, listed, worker_name
from farandole.job.coordinator.transition import AgentLost, Transition

Gone: TypeAlias = tuple[Worker, Loss]
"""A worker whose process is gone, and its death."""


def _loss(job: Job, worker: Worker, how: str, is_over: bool = True, **more: Any) -> Loss:
    """Return the death of a worker that `how`; unless `is_over` it is dying. `more`: as in Loss."""
    raised = f", having raised {worker.raised}" if worker.raised else ""
    number = job.generation_number if job.is_member(worker.name) and not worker.is_dying else 0
    sentence = f"{worker_name(job, worker)} {how}{raised}"
    return Loss(worker.name, sentence, how if is_over else "", raised=worker.raised, number=number, **more)


def worker_gone(transition: Transition, worker: Worker, message: WorkerExited | SpawnFailed) -> None:
    if isinstance(message, WorkerExited) and not transition.job.is_elastic:
        whole_restart.report_failure(transition, worker, message)
    if transition.job.ending is not None:
        transition.forget([worker.name])
        return
    if isinstance(message, SpawnFailed):
        loss = _loss(transition.job, worker, f"could not be started: {message.error}")
    else:
        how = _with_reason(worker, format_exit(message.exit_code))
        loss = _loss(transition.job, worker, how, exit_code=message.exit_code, last_lines=message.last_lines)
    _gone(transition, [(worker, loss)])


def worker_dying(transition: Transition, worker: Worker) -> None:
    """Handle a worker that will do nothing any more although its exit is not known yet: members need not wait for the
    exit. The report and the cost of the loss are decided at the exit."""
    job = transition.job
    is_needed = job.is_elastic and not job.is_released and job.is_member(worker.name)
    if not is_needed or worker.has_left or worker.is_dying or job.config.on_failure == "host":
        return
    how = _with_reason(worker, "is dying")
    loss = _loss(job, worker, how, is_over=False, noticed="the end of its main thread")
    transition.change_worker(worker.name, is_dying=True)
    regroup.record_loss(transition, loss)
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
    transition.change_agent(agent.name, is_connected=False)
    if transition.job.ending is not None:
        transition.forget(name for name, each in transition.job.workers.items() if each.slot.agent == agent.name)
        return
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
    since_s = transition.now_s - input.silent_s if input.silent_s else None
    job = transition.job
    losses = [_loss(job, worker, how, noticed=noticed, silent_since_s=since_s) for worker in workers]
    _gone(transition, list(zip(workers, losses, strict=True)))
    if transition.job.is_released:
        return  # the training is complete, unless a member was lost with the agent (shutdown.py)
    if not (transition.job.may_get_slots() or any(agent.is_connected for agent in transition.job.agents.values())):
        transition.end(1, f"Agent {agent.name} was the last one and is lost: {input.reason}.")


def _gone(transition: Transition, gone: list[Gone]) -> None:
    transition.forget(worker.name for worker, _ in gone)
    if transition.job.whole_restart is not None:
        for worker, loss in gone:
            _log_end(transition, worker, loss)
        return
    unexpected = []
    for worker, loss in gone:
        # A worker that left, or that was stopped before it became a member, may end with any exit code.
        was_member = transition.job.is_member(worker.name) or worker.is_dying
        if worker.has_left or (worker.killed_for and not was_member):
            _log_end(transition, worker, loss)
        else:
            unexpected.append((worker, loss))
            hosts.count_failure(transition, worker, loss.exit_code)
    if transition.job.generation is None:
        _before_generation_1(transition, unexpected)
    elif transition.job.is_released:
        _after_release(transition, unexpected)
    elif transition.job.is_elastic:
        _elastic(transition, unexpected)
    else:
        _static(transition, unexpected)


def _elastic(transition: Transition, gone: list[Gone]) -> None:
    faults = []
    for worker, loss in gone:
        if loss.exit_code == 0 and not any(transition.job.each_survivor()):
            _log_end(transition, worker, loss)
        else:
            _log_loss(transition, worker, loss)
        if worker.is_dying or transition.job.is_member(worker.name):
            regroup.record_loss(transition, loss)
        if not worker.is_dying and transition.job.is_member(worker.name):
            faults.append(loss.sentence)
            if worker.raised:
                # If all raise the same exception, none is restarted: wait until the others prove to be healthy
                # (regroup.py).
                transition.change_slot(worker.slot, is_held_back=True)
    transition.faults += [*faults, *_take_hosts_out(transition, gone)]


def _take_hosts_out(transition: Transition, gone: list[Gone]) -> list[str]:
    """Ban the hosts; return one sentence for each banned host that had more members than those that are gone."""
    if transition.job.config.on_failure != "host":
        return []
    failed = dict.fromkeys(transition.job.host_of(worker) for worker, _ in gone)
    stopped = {host: hosts.quarantine_host(transition, host) for host in failed}
    return [f"stopping {listed(names)} on {host} with it" for host, names in stopped.items() if names]


def _static(transition: Transition, gone: list[Gone]) -> None:
    for worker, loss in gone:
        if not transition.job.is_member(worker.name):
            _log_loss(transition, worker, loss)
        elif loss.exit_code == 0:
            _log_end(transition, worker, loss)
            transition.change_slot(worker.slot, is_held_back=True)
        else:
            _log_loss(transition, worker, loss, may_be_replaced=False)
            if _all_restart(transition, loss.sentence):
                continue
            so_far = whole_restart.attempts_so_far(transition.job)
            transition.end(
                _exit_code_after(loss),
                f"{loss.sentence}{so_far and f' ({so_far})'}. {_why_others_end(transition.job)}",
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


def _exit_code_after(loss: Loss) -> int:
    return loss.exit_code if loss.exit_code and loss.exit_code > 0 else 1


def _end_process_group(transition: Transition, worker: Worker, loss: Loss) -> None:
    """End a job whose workers have met in a process group of torch.distributed only: such a group ends with the first
    worker that is lost, and a replacement would wait for ever for the others."""
    _log_loss(transition, worker, loss, may_be_replaced=False)
    transition.end(
        _exit_code_after(loss),
        f"{loss.sentence}. The workers train in a process group of torch.distributed, which cannot "
        "continue without it: wrap the training in an elastic function to survive a loss.",
    )


def _all_restart(transition: Transition, reason: str) -> bool:
    """Begin to restart all workers, if that is possible; return whether they are restarted."""
    if whole_restart.is_possible(transition.job):
        whole_restart.begin(transition, reason)
    return transition.job.whole_restart is not None


def _before_generation_1(transition: Transition, gone: list[Gone]) -> None:
    for worker, loss in gone:
        sentence, called = loss.sentence, worker.address is not None
        if loss.exit_code == 0 and not called:
            _log_end(transition, worker, loss)
            transition.change_slot(worker.slot, is_held_back=True)
            transition.change(plain_exits=(*transition.job.plain_exits, worker.name))
            if not worker.has_met:
                transition.change(never_met=(*transition.job.never_met, worker.name))
            continue
        if worker.has_met and not called and transition.job.config.max_restarts is None:
            _end_process_group(transition, worker, loss)
            continue
        # A worker that fails by itself at the start is not started again; a killed worker is.
        was_killed = loss.exit_code is not None and loss.exit_code < 0
        is_alone = transition.job.config.max_restarts is None
        _log_loss(transition, worker, loss, may_be_replaced=was_killed and is_alone)
        when = "while it waited in init() for the other workers" if called else "before it called init()"
        could_start = loss.exit_code is not None or not transition.job.agents[worker.slot.agent].is_connected
        if loss.exit_code != 0 and could_start and transition.job.config.max_restarts is not None:
            if not _all_restart(transition, sentence):
                transition.end(_exit_code_after(loss), f"{sentence} ({whole_restart.attempts_so_far(transition.job)}).")
        elif loss.exit_code is not None and loss.exit_code >= 0:
            transition.end(loss.exit_code or 1, f"{sentence} {when}; a failed start is not repeated.")
        elif loss.exit_code is None and transition.job.agents[worker.slot.agent].is_connected:
            transition.end(1, f"{sentence}.")
        elif transition.job.config.on_failure == "host":
            _take_hosts_out(transition, [(worker, loss)])
        elif loss.exit_code is not None and capacity.restarts_left(transition.job, worker.slot) == 0:
            transition.end(
                1,
                f"{sentence} {when}, and its slot's restart budget is used up "
                f"(--restarts {transition.job.config.restarts}).",
            )


def _after_release(transition: Transition, gone: list[Gone]) -> None:
    for worker, loss in gone:
        if not worker.is_dying and (loss.exit_code == 0 or not transition.job.is_member(worker.name)):
            _log_end(transition, worker, loss)
        else:
            _log_loss(transition, worker, loss, may_be_replaced=False)
            regroup.record_loss(transition, loss)


def _log_loss(transition: Transition, worker: Worker, loss: Loss, may_be_replaced: bool = True) -> None:
    is_agent_there = transition.job.agents[worker.slot.agent].is_connected  # else its slot is gone, too
    budget_counts = transition.job.config.on_failure == "slot" and is_agent_there and may_be_replaced
    left = capacity.restarts_left(transition.job, worker.slot) if budget_counts else None
    transition.log(WorkerLost(worker.name, worker.slot.index, loss.how, left, loss.last_lines))


def _log_end(transition: Transition, worker: Worker, loss: Loss) -> None:
    transition.log(WorkerEnded(worker.name, worker.slot.index, loss.how))
