"""What an agent may offer, at most."""

from __future__ import annotations

import pytest

from farandole.base.config import MOST_AGENTS, MOST_SLOTS, MOST_WORKERS, JobConfig
from farandole.base.wire.message import PROTOCOL_VERSION
from farandole.base.wire.messages import AgentHello
from farandole.errors import ConfigError
from farandole.job.coordinator.agent_greeting import why_not_admitted


def offer(slots: int = 1, agent: str = "a", host: str = "a") -> AgentHello:
    return AgentHello(agent, host, slots, PROTOCOL_VERSION)


def test_a_usual_agent_is_admitted() -> None:
    assert why_not_admitted(offer(slots=8), {"b": 8}) == ""
    assert why_not_admitted(offer(slots=MOST_SLOTS), {}) == ""


@pytest.mark.parametrize("slots", [-1, 0, MOST_SLOTS + 1, 10**9, 2**63 - 1])
def test_slots_out_of_bounds_are_refused_with_the_bounds(slots: int) -> None:
    assert why_not_admitted(offer(slots), {}) == f"it offers {slots} slots, an agent may offer 1 to {MOST_SLOTS}"


def test_a_name_is_not_a_way_to_fill_the_memory() -> None:
    assert "the name of its agent has 1000000 characters" in why_not_admitted(offer(agent="a" * 10**6), {})
    assert "the name of its host has 0 characters" in why_not_admitted(offer(host=""), {})


def test_the_agents_and_the_slots_of_all_are_limited() -> None:
    many = {str(number): 1 for number in range(MOST_AGENTS)}
    assert "agents have joined" in why_not_admitted(offer(), many)
    assert why_not_admitted(offer(agent="0"), many) == ""  # it connects again
    full = {str(number): MOST_SLOTS for number in range(MOST_WORKERS // MOST_SLOTS)}
    assert f"a job may have {MOST_WORKERS}" in why_not_admitted(offer(), full)


@pytest.mark.parametrize("setting", ["num_proc", "max_np", "spares"])
def test_a_job_of_a_billion_workers_is_a_mistake(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"must be at most 65536, got 1000000000"):
        JobConfig(**{"num_proc": 1, "max_np": None, setting: 10**9})
