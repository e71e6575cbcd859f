"""The membership of a job. `decide` is the whole coordinator; sockets, processes and clocks are a shell around it."""

from farandole.job.coordinator.decide import decide, next_deadline
from farandole.job.coordinator.inputs import (
    AgentConnected,
    AgentLost,
    AgentReported,
    DrainRequested,
    HostsOffered,
    Input,
    ScaleRequested,
    StepsSeen,
    StepsStalled,
    StopRequested,
    Tick,
    UndrainRequested,
)
from farandole.job.coordinator.job import Job, new_job
from farandole.job.coordinator.transition import Action, EndJob, Log, SendAgent

__all__ = [
    "Action",
    "AgentConnected",
    "AgentLost",
    "AgentReported",
    "DrainRequested",
    "EndJob",
    "HostsOffered",
    "Input",
    "Job",
    "Log",
    "ScaleRequested",
    "SendAgent",
    "StepsSeen",
    "StepsStalled",
    "StopRequested",
    "Tick",
    "UndrainRequested",
    "decide",
    "new_job",
    "next_deadline",
]
