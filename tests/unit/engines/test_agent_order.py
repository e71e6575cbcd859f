"""The order of an agent, as the arguments that an engine starts it with."""

from __future__ import annotations

from farandole.base.membership import Address
from farandole.job.engines.engine_interface import AgentOrder
from farandole.job.launch.agent_command import agent_parser


def test_an_agent_that_an_engine_starts_watches_the_notices_of_its_own_machine() -> None:
    plain = AgentOrder("b", 2, (Address("10.0.0.1", 29400),), b"token")
    assert "--preemption" not in plain.arguments()
    watching = AgentOrder("b", 2, (Address("10.0.0.1", 29400),), b"token", preemption="auto")
    command, *arguments = watching.arguments()
    assert command == "agent"
    assert agent_parser().parse_args(arguments).preemption == "auto"
