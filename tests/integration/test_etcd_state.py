"""The state of a job in etcd when answers are lost, requests are carried out late, and leases end."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator

import pytest

from farandole.base.config import JobConfig
from farandole.base.wire.authentication import new_token
from farandole.errors import ConfigError
from farandole.integrations.etcd import etcd_state
from farandole.integrations.etcd.etcd_state import EtcdState
from farandole.job.coordinator.journal import Journal
from farandole.job.launch.job_state import StateUnavailable
from tests.support.etcd_double import EtcdDouble

COMMAND, CONFIG, TOKEN = ("python", "train.py"), JobConfig(3), new_token()
LARGE = os.urandom(2_500_000)
OPENED: list[EtcdState] = []
STOPPED: list[EtcdState] = []


@pytest.fixture
def etcd() -> Iterator[EtcdDouble]:
    with EtcdDouble() as double:
        yield double
        while STOPPED:
            STOPPED.pop()._is_closed = False
        while OPENED:
            OPENED.pop().close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_state, "LEASE_S", -1.5)  # another launcher is waited for half a second
    monkeypatch.setattr(etcd_state, "_RENEW_S", 0.02)


def opened(etcd: EtcdDouble, *, command: tuple[str, ...] = COMMAND, token: bytes = TOKEN) -> EtcdState:
    state = EtcdState(etcd.access(), command, CONFIG, token)
    OPENED.append(state)
    return state


def begun(etcd: EtcdDouble, *states: bytes) -> EtcdState:
    """A launcher that has begun, with these states of its coordinator."""
    state = opened(etcd)
    state.begin(None)
    for each in states:
        write(state, each)
    return state


def write(state: EtcdState, data: bytes) -> None:
    Journal(state.journal_files, state.job_id).write(data)
    state.write_copy(Journal(state.journal_files, state.job_id).newest())


def stop(state: EtcdState) -> None:
    """Let nothing renew its lease, as when its process is stopped."""
    STOPPED.append(state)
    state._is_closed = True
    state._must_look.set()
    state._renewing.join()


def resume(state: EtcdState) -> None:
    """Renew once more, as after that."""
    state._is_closed = False
    with state._changing:
        state._take_again(state._client)


def read_by_the_next(etcd: EtcdDouble) -> bytes | None:
    etcd.end_leases()
    state = opened(etcd)
    state.begin(None)
    data = Journal(state.journal_files, state.job_id).read()
    state.close()
    return data


def test_the_next_launcher_has_the_job_and_the_newest_state_and_a_job_that_is_over_is_forgotten(
    etcd: EtcdDouble,
) -> None:
    former = begun(etcd, b"one", b"two")
    former.close()
    state = opened(etcd)
    assert (state.is_continued, state.job_id, state.number) == (True, former.job_id, 1)
    state.begin(None)
    assert state.number == 2
    assert Journal(state.journal_files, state.job_id).read() == b"two"
    state.end(is_over=True)
    write(state, b"of a coordinator that still ends")
    assert etcd.names() == ["owner"]
    state.close()
    assert etcd.names() == []


def test_the_token_is_not_in_etcd_and_must_be_the_same(etcd: EtcdDouble) -> None:
    begun(etcd, b"one").close()
    assert all(TOKEN not in base64.b64decode(each.value) for each in etcd.keys.values())
    with pytest.raises(ConfigError, match="its job has another token; give the same --token-file"):
        opened(etcd, token=new_token())
    assert etcd.names() == ["head", "job", "state/0000000000000001/0"]


@pytest.mark.parametrize("answered", range(3))
def test_a_state_is_complete_when_the_answer_to_one_of_its_parts_was_lost(etcd: EtcdDouble, answered: int) -> None:
    state = begun(etcd, b"one")
    stop(state)
    Journal(state.journal_files, state.job_id).write(LARGE)
    content = Journal(state.journal_files, state.job_id).newest()
    with pytest.MonkeyPatch.context() as patched:
        transact, left = state._client.transact, iter([*range(answered), None])

        def lose(*arguments: object) -> int:
            etcd.loses = 0 if next(left, 0) is not None else 2
            return transact(*arguments)  # type: ignore[arg-type]

        patched.setattr(state._client, "transact", lose)
        with pytest.raises(StateUnavailable):
            state.write_copy(content)
    assert read_until_written(etcd, state, content) == LARGE


def read_until_written(etcd: EtcdDouble, state: EtcdState, content: bytes) -> bytes | None:
    for _ in range(3):
        try:
            state.write_copy(content)
            break
        except StateUnavailable:
            pass
    else:
        raise AssertionError("it was never written")
    assert len(etcd.names()) == 3 + 3  # the older parts are gone
    return read_by_the_next(etcd)


@pytest.mark.parametrize("data", [b"two", LARGE])
def test_a_request_that_is_carried_out_late_changes_nothing(etcd: EtcdDouble, data: bytes) -> None:
    """etcd was stopped: the launcher has repeated the request, with a newer state, when it is carried out."""
    state = begun(etcd, b"one")
    stop(state)
    state._client.close()
    etcd.holds = 1
    with pytest.raises(StateUnavailable, match="Remote end closed"):
        write(state, data)
    write(state, b"three")
    etcd.carry_out_held()
    assert read_by_the_next(etcd) == b"three"


def test_a_launcher_whose_lease_has_ended_takes_it_again_where_nobody_has_taken_over(etcd: EtcdDouble) -> None:
    state = begun(etcd, b"one")
    stop(state)
    etcd.end_leases()
    with pytest.raises(StateUnavailable, match="lease in etcd has ended"):
        write(state, b"two")
    resume(state)
    write(state, b"three")
    assert state.successor() == ""
    stop(state)
    assert read_by_the_next(etcd) == b"three"


@pytest.mark.parametrize("is_over", [False, True])
def test_a_launcher_that_was_superseded_can_write_nothing_and_hears_of_it(etcd: EtcdDouble, is_over: bool) -> None:
    older = begun(etcd, b"one")
    stop(older)
    etcd.end_leases()
    newer = begun(etcd, b"two")
    with pytest.raises(StateUnavailable):
        write(older, b"three")
    if is_over:
        newer.end(is_over=True)
        newer.close()
    resume(older)
    assert older.successor() == ("which has ended since" if is_over else str(newer._owner))
    with pytest.raises(StateUnavailable):
        write(older, b"three")
    older.end(is_over=True)
    assert etcd.names() == ([] if is_over else ["head", "job", "owner", "state/0000000000000002/0"])
    newer.close()


def test_a_launcher_that_was_stopped_before_it_began_does_not_begin_from_an_older_state(etcd: EtcdDouble) -> None:
    """It has read the state; then the older one, which was stopped as well, has gone on and written another one."""
    older = begun(etcd, b"one")
    stop(older)
    etcd.end_leases()
    newer = opened(etcd)
    stop(newer)
    etcd.end_leases()
    resume(older)
    write(older, b"two")
    etcd.end_leases()
    resume(newer)
    with pytest.raises(ConfigError, match="lease in etcd has ended; start the command again"):
        newer.begin(None)
    assert read_by_the_next(etcd) == b"two"


def test_a_state_of_which_a_part_is_missing_or_damaged_is_lost_and_the_coordinator_is_told_why(
    etcd: EtcdDouble,
) -> None:
    state = begun(etcd, LARGE)
    state.close()
    (part,) = (key for key in etcd.keys if base64.b64decode(key).endswith(b"/1"))
    kept = etcd.keys[part]
    kept.value = base64.b64encode(b"x" * 1_000_000).decode()
    state = opened(etcd)
    assert "has a complete state" in state.lost
    state.close()
    del etcd.keys[part]
    state = opened(etcd)
    assert (state.is_continued, state.lost) == (True, "a part of jobs/a/state/0000000000000001/ is missing")
    state.begin(None)
    state.end(is_over=False)
    assert "job" in etcd.names()  # the coordinator has not begun: the agents may wait
    state.close()


def test_an_owner_whose_answer_was_lost_is_the_owner(etcd: EtcdDouble) -> None:
    state = opened(etcd)
    stop(state)
    former = state._lease
    with state._changing:
        state._take_again(state._client)  # the key is its own: it goes with the new lease
    assert state._lease != former
    state._client.revoke(former)
    assert etcd.names() == ["owner"]
