"""What happens when a worker dies, or an agent with all its workers. Then regroup.py makes a generation.

before generation 1   killed by a signal: replaced, or its host is out; anything else ends the job
a static script       exit code 0: one worker is done; anything else ends the job
an elastic job        a member: lost, whatever its exit code, and the survivors regroup;
                      others: replaced, or they had left anyway;
                      with --on-failure host the whole host is out (quarantine.py), in the same regroup
after the release     exit code 0: done; anything else is reported and makes the job fail
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from farandole.coordinator import quarantine, recovery, regroup, resting, slots, words
from farandole.coordinator.draft import Draft
from farandole.coordinator.inputs import AgentLost
from farandole.coordinator.job import Job, Loss, Victim, Worker
from farandole.events import AgentWasLost, WorkerEnded, WorkerLost
from farandole.messages import SpawnFailed, WorkerExited


@dataclass(frozen=True)
class Gone:
    """A worker whose process is gone. `how` follows "it"; no exit code: not started, or agent lost. `noticed` and
    `silent_s`: as in Victim."""

    worker: Worker
    how: str
    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()
    noticed: str = "its exit"
    silent_s: float = 0.0

    def sentence(self, job: Job) -> str:
        raised = f", having raised {self.worker.raised}" if self.worker.raised else ""
        return f"{words.worker_name(job, self.worker)} {self.how}{raised}"


def worker_gone(draft: Draft, worker: Worker, message: WorkerExited | SpawnFailed) -> None:
    """One process is gone and reaped."""
    if isinstance(message, SpawnFailed):
        gone = Gone(worker, f"could not be started: {message.error}")
    else:
        how = words.exit_in_words(message.exit_code)
        gone = Gone(worker, _with_reason(worker, how), message.exit_code, message.last_lines)
    _gone(draft, [gone])


def worker_dying(draft: Draft, worker: Worker) -> None:
    """It will do nothing any more, though its exit is not known yet: members need not wait for that. What is said of
    the loss, and what it costs, is decided at the exit."""
    job = draft.job
    is_needed = job.is_elastic and not job.is_released and job.is_member(worker.name)
    if not is_needed or worker.has_left or worker.is_dying or job.config.on_failure == "host":
        return
    draft.change_worker(worker.name, is_dying=True)
    loss = Loss(Gone(worker, _with_reason(worker, "is dying")).sentence(job), worker.raised, worker.name)
    draft.change(losses=(*draft.job.losses, loss))
    recovery.note_victim(draft, Victim(worker.name, "the end of its main thread"))
    if worker.raised:
        draft.change_slot(worker.slot, is_held_back=True)
    regroup.abort(draft, loss.sentence)


def _with_reason(worker: Worker, how: str) -> str:
    return f"was stopped because {worker.killed_for}, and {how}" if worker.killed_for else how


def agent_lost(draft: Draft, input: AgentLost) -> None:
    """All workers of the agent are lost at once, in one regroup; their slots are gone with it."""
    agent = draft.job.agents.get(input.agent)
    if agent is None or not agent.is_connected:
        return
    draft.change(agents={**draft.job.agents, agent.name: replace(agent, is_connected=False)})
    if input.lease_end_s is not None:
        draft.change(lease_end_s=max(input.lease_end_s, draft.job.lease_end_s or input.lease_end_s))
    for slot in [slot for slot in draft.job.slots if slot.agent == agent.name]:
        slots.close(draft, slot)
        draft.change_slot(slot, is_given_up=False)
    workers = [worker for worker in draft.job.workers.values() if worker.slot.agent == agent.name]
    draft.log(AgentWasLost(agent.name, input.reason, tuple(worker.name for worker in workers)))
    how, noticed = f"was lost with agent {agent.name}", f"the silence of agent {agent.name}"
    _gone(draft, [Gone(worker, how, noticed=noticed, silent_s=input.silent_s) for worker in workers])
    if not (draft.job.may_get_slots() or any(agent.is_connected for agent in draft.job.agents.values())):
        draft.end(1, f"Agent {agent.name} was the last one and is lost: {input.reason}.")


def _gone(draft: Draft, gone: list[Gone]) -> None:
    draft.forget(one.worker.name for one in gone)
    unexpected = []
    for one in gone:
        # A worker that left, or that was stopped before it became a member, ends as it likes.
        was_member = draft.job.is_member(one.worker.name) or one.worker.is_dying
        expected = one.worker.has_left or (one.worker.killed_for and not was_member)
        if expected:
            draft.log(WorkerEnded(one.worker.name, one.worker.slot.index, one.how))
        else:
            unexpected.append(one)
            resting.worker_lost(draft, one.worker, one.exit_code)
    if draft.job.generation is None:
        _before_generation_1(draft, unexpected)
    elif draft.job.is_released:
        _after_release(draft, unexpected)
    elif draft.job.is_elastic:
        _elastic(draft, unexpected)
    else:
        _static(draft, unexpected)


def _elastic(draft: Draft, gone: list[Gone]) -> None:
    losses = []
    for one in gone:
        _log_loss(draft, one)
        if one.worker.is_dying:
            _say_how(draft, one)
        elif draft.job.is_member(one.worker.name):
            losses.append(Loss(one.sentence(draft.job), one.worker.raised))
            if one.worker.raised:
                # If all raise the same, nobody is restarted: wait for the others to prove well (regroup.py).
                draft.change_slot(one.worker.slot, is_held_back=True)
    stopped = _take_hosts_out(draft, gone)
    if losses or stopped:
        draft.change(losses=(*draft.job.losses, *losses))
        reasons = [*(loss.sentence for loss in losses), *stopped]
        regroup.abort(draft, "; ".join(reasons))


def _say_how(draft: Draft, one: Gone) -> None:
    """Its loss, if it counts still, was noted when it was dying; now more is known of it."""
    told = [
        replace(loss, sentence=one.sentence(draft.job), dying=None) if loss.dying == one.worker.name else loss
        for loss in draft.job.losses
    ]
    draft.change(losses=tuple(told))


def _take_hosts_out(draft: Draft, gone: list[Gone]) -> list[str]:
    """One sentence for each host that is out now and had more members than those that are gone."""
    if draft.job.config.on_failure != "host":
        return []
    stopped = {host: quarantine.take_out(draft, host) for host in {draft.job.host_of(one.worker): None for one in gone}}
    return [f"{words.listed(names)} on {host} had to go with it" for host, names in stopped.items() if names]


def _static(draft: Draft, gone: list[Gone]) -> None:
    for one in gone:
        if not draft.job.is_member(one.worker.name):
            _log_loss(draft, one)
        elif one.exit_code == 0:
            _log_end(draft, one)
            draft.change_slot(one.worker.slot, is_held_back=True)
        else:
            _log_loss(draft, one, may_be_replaced=False)
            code = one.exit_code if one.exit_code and one.exit_code > 0 else 1
            draft.end(
                code,
                f"{one.sentence(draft.job)}. No worker had entered an elastic function, so the "
                "others cannot go on without it: wrap the training in an elastic function to survive this.",
            )
    if not draft.job.survivors():
        draft.end(0, "All workers exited with code 0.")


def _before_generation_1(draft: Draft, gone: list[Gone]) -> None:
    for one in gone:
        sentence, called = one.sentence(draft.job), one.worker.address is not None
        if one.exit_code == 0 and not called:
            _log_end(draft, one)
            draft.change_slot(one.worker.slot, is_held_back=True)
            draft.change(plain_exits=(*draft.job.plain_exits, one.worker.name))
            continue
        # What fails by itself at the start is not started again; what was killed is.
        _log_loss(draft, one, may_be_replaced=one.exit_code is not None and one.exit_code < 0)
        when = "while it waited in init() for the other workers" if called else "before it called init()"
        if one.exit_code is not None and one.exit_code >= 0:
            draft.end(one.exit_code or 1, f"{sentence} {when}; a start that fails is not repeated.")
        elif one.exit_code is None and draft.job.agents[one.worker.slot.agent].is_connected:
            draft.end(1, f"{sentence}.")
        elif draft.job.config.on_failure == "host":
            _take_hosts_out(draft, [one])
        elif one.exit_code is not None and slots.restarts_left(draft.job, one.worker.slot) == 0:
            draft.end(
                1,
                f"{sentence} {when}, and its slot's restart budget is used up "
                f"(--restarts {draft.job.config.restarts}).",
            )


def _after_release(draft: Draft, gone: list[Gone]) -> None:
    for one in gone:
        if one.worker.is_dying:
            _log_loss(draft, one, may_be_replaced=False)
        elif one.exit_code == 0 or not draft.job.is_member(one.worker.name):
            _log_end(draft, one)
        else:
            _log_loss(draft, one, may_be_replaced=False)
            draft.change(losses=(*draft.job.losses, Loss(one.sentence(draft.job), one.worker.raised)))


def _log_loss(draft: Draft, one: Gone, may_be_replaced: bool = True) -> None:
    worker = one.worker
    is_agent_there = draft.job.agents[worker.slot.agent].is_connected  # else its slot is gone, too
    budget_counts = draft.job.config.on_failure == "slot" and is_agent_there and may_be_replaced
    left = slots.restarts_left(draft.job, worker.slot) if budget_counts else None
    draft.log(WorkerLost(worker.name, worker.slot.index, one.how, left, one.last_lines))
    if worker.is_dying or draft.job.is_member(worker.name):
        recovery.note_victim(draft, Victim(worker.name, one.noticed, one.silent_s, one.how, one.last_lines))


def _log_end(draft: Draft, one: Gone) -> None:
    draft.log(WorkerEnded(one.worker.name, one.worker.slot.index, one.how))
