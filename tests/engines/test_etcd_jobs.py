"""Jobs whose state is in a real etcd: faults of the coordinator, of the launcher and of etcd."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.job.coordinator.coordinator_factory import COORDINATOR_NAME
from farandole.testing.lab import Lab, why_not
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.etcd_server import INSTALLED, EtcdServer
from tests.support.jobs import check_job, farandole
from tests.support.lasting_job import LastingJob, further
from tests.support.moving_job import MovingJob

pytestmark = [pytest.mark.skipif(not INSTALLED, reason="no etcd is installed")]
in_lab = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SAMPLES, LONG_S = 600, 60.0


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    (tmp_path / "server").mkdir()
    with EtcdServer(tmp_path / "server") as server:
        yield server


def flags(etcd: EtcdServer, folder: Path, *others: str) -> list[str]:
    return ["--state", etcd.url(), "--token-file", str(folder / "token"), *others]


class EtcdJob(LastingJob):
    """A job on this machine whose state is in etcd."""

    def __init__(self, folder: Path, etcd: EtcdServer, *others: str) -> None:
        super().__init__(folder, *flags(etcd, folder, "-np", "3", *others))

    def said(self) -> str:
        return " ".join(self._output.read_text().split())

    def wait_for_event(self, kind: str) -> None:
        deadline_s = time.monotonic() + LONG_S
        while not self.events(kind):
            assert time.monotonic() < deadline_s, self.said()
            time.sleep(0.01)

    def lose_a_worker(self) -> None:
        """Kill rank 1."""
        victim = self.latest()[1]
        self.kill(victim["pid"])
        self.forget(victim)

    def wait_for_replacement(self) -> None:
        self.wait_until(lambda now: all_training(3)(now) and now[0]["generation"] >= 3, LONG_S)


# Faults of the coordinator and of etcd --------------------------------------------------------------------------------


@pytest.mark.timeout(150)
def test_a_coordinator_that_is_killed_costs_no_step_and_no_worker(tmp_path: Path, etcd: EtcdServer) -> None:
    with EtcdJob(tmp_path, etcd) as job:
        first = job.wait_until(all_training(3), LONG_S)
        for _ in range(3):
            job.kill_coordinator()
            job.wait_until(further(job.latest()), LONG_S)
        last = job.latest()
        job.finish()
    assert {each["pid"] for each in last.values()} == {each["pid"] for each in first.values()}
    assert len(job.events("GenerationStarted")) == 1
    proof = Proof(tmp_path)
    assert proof.redone() == 0
    check_job(proof, SAMPLES, workers_at_end=3)
    assert etcd.keys() == 0


@pytest.mark.timeout(150)
@pytest.mark.parametrize("is_killed", [False, True])
def test_etcd_that_is_away_for_a_while_delays_decisions_alone(
    tmp_path: Path, etcd: EtcdServer, is_killed: bool
) -> None:
    """Stopped for longer than the lease of the launcher, or killed. The workers train on; when one dies, it is replaced
    when etcd is back."""
    with EtcdJob(tmp_path, etcd) as job:
        job.wait_until(all_training(3), LONG_S)
        if is_killed:
            etcd.kill()
        else:
            etcd.suspend()
        job.wait_until(further(job.latest()), LONG_S)
        job.lose_a_worker()
        job.wait_for_event("StateUnwritten")
        if is_killed:
            etcd.restart()
        else:
            time.sleep(8)  # its leases end
            etcd.resume()
        job.wait_for_replacement()
        job.wait_for_event("StateWritten")
        job.finish()
    proof = Proof(tmp_path)
    assert proof.redone() <= 1
    check_job(proof, SAMPLES, workers_at_end=3)
    assert etcd.keys() == 0


@pytest.mark.timeout(150)
def test_a_coordinator_that_dies_while_etcd_is_away_costs_no_step(tmp_path: Path, etcd: EtcdServer) -> None:
    with EtcdJob(tmp_path, etcd) as job:
        first = job.wait_until(all_training(3), LONG_S)
        pid, _ = job.coordinator()
        etcd.kill()
        job.kill(pid)
        job.wait_for_event("StateUnwritten")
        job.wait_until(further(job.latest()), LONG_S)
        etcd.restart()
        job.wait_for_event("StateWritten")
        assert job.coordinator()[1] == 2
        last = job.latest()
        job.finish()
    assert {each["pid"] for each in last.values()} == {each["pid"] for each in first.values()}
    proof = Proof(tmp_path)
    assert proof.redone() == 0
    check_job(proof, SAMPLES, workers_at_end=3)


@pytest.mark.timeout(150)
def test_etcd_that_stays_away_ends_the_launcher_after_the_patience_and_the_same_command_continues(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    with EtcdJob(tmp_path, etcd, "--patience", "3") as job:
        job.wait_until(all_training(3), LONG_S)
        etcd.kill()
        job.lose_a_worker()
        assert job.wait(LONG_S) == 1
        said = job.said()
    assert "the state of the job cannot be written (etcd: 127.0.0.1:" in said
    assert "the workers continue, and decisions about the job wait for it, for at most 3 s" in said
    assert "the state of the job could not be written for 3 s (etcd: 127.0.0.1:" in said
    assert "so this launcher ends" in said or "this launcher ends. Start it again" in said
    etcd.restart()
    done = farandole("run", *flags(etcd, tmp_path, "-np", "3", "--patience", "3"), "true")
    assert done.returncode == 2
    assert "its job runs" in done.stderr  # it is kept


@pytest.mark.timeout(150)
def test_ctrl_c_twice_ends_a_launcher_that_cannot_reach_etcd(tmp_path: Path, etcd: EtcdServer) -> None:
    with EtcdJob(tmp_path, etcd) as job:
        job.wait_until(all_training(3), LONG_S)
        etcd.kill()
        job.process.send_signal(signal.SIGINT)
        job.wait_for_event("StateUnwritten")
        began_s = time.monotonic()
        job.process.send_signal(signal.SIGINT)
        assert job.wait(LONG_S) != 0
        assert time.monotonic() - began_s < 20
        assert "SIGINT was received, and the state of the job cannot be written (etcd: " in job.said()


# Bad input ------------------------------------------------------------------------------------------------------------


def test_what_cannot_work_is_said_before_anything_is_started(
    tmp_path: Path, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(url: str) -> str:
        done = farandole("run", "-np", "1", "--state", url, "--token-file", str(tmp_path / "token"), "true")
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) <= 2, done.stderr
        return done.stderr

    assert "the form is etcd://HOST[:PORT][,HOST[:PORT]...]/PREFIX" in told("etcd://127.0.0.1")
    assert "only on loopback the connection may be plain" in told("etcd://198.18.0.1/a")
    assert "etcd cannot be used: 127.0.0.1:1: [Errno 111] Connection refused" in told("etcd://127.0.0.1:1/a")
    etcd.require_password("right")
    monkeypatch.setenv("ETCDCTL_USER", "root:wrong")
    assert "authentication failed, invalid user ID or password" in told(etcd.url())


# Another machine ------------------------------------------------------------------------------------------------------


@in_lab
@pytest.mark.alone
@pytest.mark.timeout(200)
def test_the_same_command_on_another_machine_continues_the_job_and_the_older_launcher_is_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After kill -9; and while the older launcher is stopped, with its coordinator: it ends when it goes on. etcd is on
    a third machine, with TLS and a password."""
    (tmp_path / "server").mkdir()
    job_flags = ("-np", "2", "--local-slots", "0", "--detection-budget", "1")
    with Lab(hosts=4) as lab, EtcdServer(tmp_path / "server", lab.network.driver.address, has_tls=True) as etcd:
        etcd.require_password("right")
        for name, value in {**etcd.variables, "ETCDCTL_USER": "root:right"}.items():
            monkeypatch.setenv(name, value)
        with MovingJob(lab, tmp_path, *job_flags, by_addresses=True, url=etcd.url()) as job:
            first = job.wait_until(all_training(2), LONG_S)
            job.kill_launcher()
            job.train_on(20)
            job.start_on(lab.hosts[1])
            job.wait_for_agents(times=1)
            older = job.process
            for pid in lab.hosts[1].processes():
                lab.hosts[1].signal(pid, signal.SIGSTOP)
            job.wait_for_agents(times=1, told="has no connection to the coordinator (it has not answered for")
            job.start_on(lab.hosts[0])
            job.wait_for_agents(times=2)
            for pid in lab.hosts[1].processes():
                lab.hosts[1].signal(pid, signal.SIGCONT)
            older.send_signal(signal.SIGCONT)  # nsenter stops with its child
            assert older.wait(LONG_S) == 1
            job.train_on(20)
            assert "on host0, has taken this job over" in " ".join(job.said().split())
            last = job.latest()
            job.finish()
        assert etcd.keys() == 0
    assert job.pids(last) == job.pids(first)
    assert len(job.events("GenerationStarted")) == 1
    proof = Proof(tmp_path)
    assert proof.redone() == 0
    check_job(proof, SAMPLES, workers_at_end=2)


@in_lab
@pytest.mark.alone
@pytest.mark.timeout(200)
def test_a_job_whose_state_in_etcd_is_damaged_is_rebuilt_from_what_its_agents_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server").mkdir()
    with Lab(hosts=4) as lab, EtcdServer(tmp_path / "server", lab.network.driver.address, has_tls=True) as etcd:
        for name, value in etcd.variables.items():
            monkeypatch.setenv(name, value)
        flags = ("-np", "2", "--local-slots", "0")
        with MovingJob(lab, tmp_path, *flags, by_addresses=True, url=etcd.url()) as job:
            first = job.wait_until(all_training(2), LONG_S)
            job.kill_launcher()
            etcd.remove("jobs/a/state/")
            job.start_on(lab.hosts[1])
            job.wait_for_agents(times=1)
            job.kill_process(COORDINATOR_NAME)  # before it has decided anything
            job.wait_for_agents(times=2)
            job.wait_for_event("JobRebuilt")
            job.train_on(20)
            last = job.latest()
            job.finish()
    assert job.pids(last) == job.pids(first)
    proof = Proof(tmp_path)
    assert proof.redone() == 0
    check_job(proof, SAMPLES, workers_at_end=2)
