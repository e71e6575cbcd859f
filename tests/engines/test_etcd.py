"""The state of a job in a real etcd; test_etcd_jobs.py has whole jobs."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.base.config import JobConfig
from farandole.base.env.cluster_variables import EtcdVariables, take_etcd_variables
from farandole.base.wire.authentication import new_token
from farandole.errors import ConfigError
from farandole.integrations.etcd.etcd_client import EtcdAccess
from farandole.integrations.etcd.etcd_state import EtcdState
from farandole.job.coordinator.journal import Journal
from farandole.job.launch.job_state import StateUnavailable
from tests.support.etcd_server import INSTALLED, EtcdServer

pytestmark = [pytest.mark.skipif(not INSTALLED, reason="no etcd is installed")]

COMMAND, CONFIG, TOKEN = ("python", "train.py"), JobConfig(3), new_token()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path) as server:
        yield server


def opened(etcd: EtcdServer, command: tuple[str, ...] = COMMAND, variables: EtcdVariables | None = None) -> EtcdState:
    return EtcdState(EtcdAccess.parse(etcd.url(), variables or EtcdVariables()), command, CONFIG, TOKEN)


def written(state: EtcdState, data: bytes) -> None:
    Journal(state.journal_files, state.job_id).write(data)
    state.write_copy(Journal(state.journal_files, state.job_id).newest())


def read(state: EtcdState) -> bytes | None:
    state.begin(None)
    return Journal(state.journal_files, state.job_id).read()


def until_written(state: EtcdState, data: bytes) -> None:
    deadline_s = time.monotonic() + 20
    while True:
        try:
            written(state, data)
            return
        except StateUnavailable:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)


def fill(state: EtcdState) -> None:
    for _ in range(20):
        written(state, os.urandom(2_000_000))


def test_the_next_launcher_has_the_job_and_the_newest_state(etcd: EtcdServer) -> None:
    former = opened(etcd)
    assert not former.is_continued
    former.begin(None)
    for each in (b"one", b"two"):
        written(former, each)
    former.close()
    state = opened(etcd)
    assert (state.is_continued, state.job_id) == (True, former.job_id)
    assert read(state) == b"two"
    assert state.number == 2
    state.end(is_over=True)
    state.close()
    assert etcd.keys() == 0


def test_a_state_above_the_limit_of_a_request_is_written_and_the_older_one_removed(etcd: EtcdServer) -> None:
    former = opened(etcd)
    former.begin(None)
    data = os.urandom(4_000_000)
    written(former, os.urandom(3_000_000))
    written(former, data)
    assert etcd.keys() == 3 + 5  # owner, job, head
    former.close()
    state = opened(etcd)
    assert read(state) == data
    state.close()


def test_a_second_launcher_is_told_who_has_the_job(etcd: EtcdServer) -> None:
    state = opened(etcd)
    with pytest.raises(ConfigError, match=rf"another launcher \(process {os.getpid()} on .*\) has it"):
        opened(etcd)
    state.close()


def test_a_launcher_whose_lease_has_ended_takes_it_again_where_nobody_else_has(etcd: EtcdServer) -> None:
    state = opened(etcd)
    state.begin(None)
    written(state, b"one")
    etcd.ask("lease/revoke", ID=state._lease)
    until_written(state, b"two")
    assert state.successor() == ""
    state.close()


def test_a_launcher_whose_job_was_taken_over_can_write_no_more(etcd: EtcdServer) -> None:
    older = opened(etcd)
    older.begin(None)
    written(older, b"one")
    older._is_closed = True  # its machine is suspended: nothing renews its lease
    older._renewing.join()
    newer = opened(etcd)
    assert read(newer) == b"one"
    with pytest.raises(StateUnavailable, match="lease in etcd has ended"):
        written(older, b"of the older one")
    newer.close()
    older._client.close()
    state = opened(etcd)
    assert read(state) == b"one"
    state.close()


def test_another_command_is_refused(etcd: EtcdServer) -> None:
    state = opened(etcd)
    state.begin(None)
    state.close()
    with pytest.raises(ConfigError, match=r"its job runs python train.py, not python other.py"):
        opened(etcd, ("python", "other.py"))


def test_etcd_that_was_killed_has_the_state_when_it_is_back(etcd: EtcdServer) -> None:
    state = opened(etcd)
    state.begin(None)
    written(state, b"one")
    etcd.kill()
    with pytest.raises(StateUnavailable, match=r"127.0.0.1:.*Connection refused"):
        written(state, b"two")
    etcd.restart()
    until_written(state, b"three")
    state.close()
    state = opened(etcd)
    assert read(state) == b"three"
    state.close()


def test_a_wrong_password_is_refused_and_a_right_one_let_in(etcd: EtcdServer) -> None:
    etcd.require_password("right")
    with pytest.raises(ConfigError, match="authentication failed, invalid user ID or password"):
        opened(etcd, variables=EtcdVariables(user="root:wrong"))
    with pytest.raises(ConfigError, match="user name is empty"):
        opened(etcd)
    state = opened(etcd, variables=EtcdVariables(user="root", password="right"))
    state.begin(None)
    written(state, b"one")
    etcd.kill()
    etcd.restart()  # which has forgotten the tokens
    until_written(state, b"two")
    state.close()


def test_a_role_for_the_prefix_of_the_job_is_enough(etcd: EtcdServer) -> None:
    etcd.ask("auth/role/add", name="jobs")
    first, end = (base64.b64encode(each).decode() for each in (b"jobs/a/", b"jobs/a0"))
    permission = {"permType": "READWRITE", "key": first, "range_end": end}
    etcd.ask("auth/role/grant", name="jobs", perm=permission)
    etcd.ask("auth/user/add", name="jobs", password="right")
    etcd.ask("auth/user/grant", user="jobs", role="jobs")
    etcd.require_password("of root")
    variables = EtcdVariables(user="jobs:right")
    state = opened(etcd, variables=variables)
    state.begin(None)
    written(state, os.urandom(2_000_000))
    state.close()
    state = opened(etcd, variables=variables)
    state.begin(None)
    written(state, b"two")
    time.sleep(2)  # its lease is renewed
    written(state, b"three")
    state.end(is_over=True)
    state.close()
    assert etcd.keys() == 0
    with pytest.raises(ConfigError, match="permission denied"):
        EtcdState(EtcdAccess.parse(etcd.url("jobs/b"), variables), COMMAND, CONFIG, TOKEN)


def test_etcd_that_is_down_is_a_clear_error(etcd: EtcdServer) -> None:
    etcd.kill()
    with pytest.raises(ConfigError, match=r"etcd cannot be used: 127.0.0.1:.*Connection refused"):
        opened(etcd)


def test_etcd_that_is_full_says_so(tmp_path: Path) -> None:
    with EtcdServer(tmp_path, "127.0.0.1", False, "--quota-backend-bytes", "16000000") as etcd:
        state = opened(etcd)
        state.begin(None)
        with pytest.raises(StateUnavailable, match="database space exceeded"):
            fill(state)
        state.close()


def test_certificates_of_both_sides_are_checked(tmp_path: Path) -> None:
    with EtcdServer(tmp_path, has_tls=True) as etcd:
        variables = take_etcd_variables(etcd.variables)
        state = opened(etcd, variables=variables)
        state.begin(None)
        written(state, b"one")
        state.close()
        with pytest.raises(ConfigError, match=r"etcd cannot be used: 127\.0\.0\.1:"):
            opened(etcd, variables=EtcdVariables(authority=variables.authority))
        with pytest.raises(ConfigError, match=r"etcd cannot be used: 127\.0\.0\.1:"):
            opened(etcd)
        (tmp_path / "other").mkdir()
        with EtcdServer(tmp_path / "other", has_tls=True) as other:
            authority = take_etcd_variables(other.variables).authority
            with pytest.raises(ConfigError, match="certificate verify failed"):
                opened(etcd, variables=EtcdVariables(authority=authority))
