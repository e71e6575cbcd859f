"""State and ObjectState: commits, host messages, callbacks."""

from __future__ import annotations

from typing import Any

import pytest

from farandole.errors import ConfigError, HostsUpdatedInterrupt
from farandole.integrations.horovod.object_state import ObjectState, State
from farandole.training.state.session import HostUpdateResult

pytestmark = pytest.mark.core


def alone(**values: Any) -> ObjectState:
    return ObjectState(lambda value: value, lambda: 0, **values)


def test_restore_returns_to_the_last_commit_in_depth() -> None:
    state = alone(batch=0, trail=[[]])
    state.batch, state.trail[0] = 3, [1, 2, 3]
    state.commit()
    state.batch = 4
    state.trail[0].append(4)
    state.restore()
    assert (state.batch, state.trail) == (3, [[1, 2, 3]])
    state.trail[0].append(5)
    state.restore()
    assert state.trail == [[1, 2, 3]], "what restore() gives out is not the commit itself"


def test_before_the_first_commit_restore_returns_to_what_was_given() -> None:
    state = alone(trail=[])
    state.trail.append(1)
    state.restore()
    assert state.trail == []


def test_values_that_cannot_be_copied_are_refused_when_the_state_is_made() -> None:
    with pytest.raises(ConfigError, match=r"state\.lines"):
        alone(lines=(line for line in "ab"))


def test_sync_takes_the_values_of_rank_0_and_keeps_them() -> None:
    state = ObjectState(lambda _: {"batch": 20}, lambda: 1, batch=21)
    state.sync()
    assert state.batch == 20
    state.batch = 22
    state.restore()
    assert state.batch == 20


@pytest.mark.parametrize(
    ("results", "skip_sync"),
    [
        ([HostUpdateResult.added], False),
        ([HostUpdateResult.removed], True),
        ([HostUpdateResult.removed, HostUpdateResult.added], False),
    ],
)
def test_host_messages_interrupt_once_and_say_what_happened(results: list[int], skip_sync: bool) -> None:
    state = alone()
    for place, result in enumerate(results):
        state.on_hosts_updated(1000.0 + place, result)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is skip_sync
    state.commit()


def test_two_messages_within_one_second_both_count() -> None:
    state = alone()
    state.on_hosts_updated(1000.1, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    state.on_hosts_updated(1000.2, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()


def test_an_interrupt_keeps_what_is_live_and_the_commit_before_it() -> None:
    state = alone(batch=0)
    state.on_hosts_updated(1.0, HostUpdateResult.added)
    state.batch = 5
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    assert state.batch == 5
    state.batch = 6
    state.restore()
    assert state.batch == 5


def test_on_reset_forgets_messages_and_calls_reset_before_the_callbacks() -> None:
    calls = []

    class Mine(State):
        def reset(self) -> None:
            calls.append("reset")

    state = Mine(lambda value: value, lambda: 0)
    state.register_reset_callbacks([lambda: calls.append("first")])
    state.register_reset_callbacks([lambda: calls.append("second")])
    state.on_hosts_updated(1.0, HostUpdateResult.added)
    state.on_reset()
    assert calls == ["reset", "first", "second"]
    state.check_host_updates()


def test_host_update_results_are_horovods_numbers() -> None:
    assert [HostUpdateResult.no_update, HostUpdateResult.removed, HostUpdateResult.added] == [0, 1, 2]
    assert HostUpdateResult.removed | HostUpdateResult.added == HostUpdateResult.mixed == 3
