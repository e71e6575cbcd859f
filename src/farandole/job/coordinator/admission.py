"""The limits on agents that join a job: each slot and each agent costs the coordinator memory and time in each
decision. Pure. agent_greeting.py asks it before an agent counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from farandole.base.config import LONGEST_NAME, MOST_AGENTS, MOST_SLOTS, MOST_WORKERS
from farandole.base.wire.messages import AgentHello


def why_not_admitted(hello: AgentHello, others: Mapping[str, int]) -> str:
    """Return why an agent must not join; empty if it may.

    Args:
        hello: What it offers.
        others: The slots of the agents that are connected, by their names.
    """
    for what, name, most in (("agent", hello.agent, 2 * LONGEST_NAME), ("host", hello.host, LONGEST_NAME)):
        if not 0 < len(name) <= most:
            return f"the name of its {what} has {len(name)} characters, it needs 1 to {most}"
    if not 1 <= hello.slots <= MOST_SLOTS:
        return f"it offers {hello.slots} slots, an agent may offer 1 to {MOST_SLOTS}"
    before = {name: slots for name, slots in others.items() if name != hello.agent}
    if len(before) >= MOST_AGENTS:
        return f"{len(before)} agents have joined, and a job may have {MOST_AGENTS}"
    if sum(before.values()) + hello.slots > MOST_WORKERS:
        return (
            f"it offers {hello.slots} slots beside {sum(before.values())} of other agents, and a job may have "
            f"{MOST_WORKERS}"
        )
    return ""
