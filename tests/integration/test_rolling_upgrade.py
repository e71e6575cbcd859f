"""A job begins with one release of Farandole and goes on with another one: what workers and users notice of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import farandole
from farandole.base.wire.message import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from farandole.job.coordinator.coordinator_factory import COORDINATOR_NAME, FACTORY_NAME
from farandole.job.coordinator.journal import FORMAT
from farandole.testing.lab import Lab, why_not
from farandole.testing.proof import Proof
from farandole.testing.running_job import all_training
from tests.support.jobs import check_job
from tests.support.moving_job import MovingJob

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

SAMPLES, LONG_S = 600, 60.0
FLAGS = ("-np", "2", "--local-slots", "0")
VERSION = f'__version__ = "{farandole.__version__}"'
PROTOCOLS = "PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION = "

MIGRATIONS = f"""
def _renamed(content: Any) -> Any:
    content["state"]["cleared_for"] = content["state"].pop("attempt")
    return content


MIGRATIONS = {{{FORMAT}: _renamed}}
"""


def release(folder: Path) -> Path:
    """The folder of a copy of this release."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(farandole.__file__).parent, folder / "farandole", ignore=ignored)
    return folder


def change(source: Path, file: str, *changes: tuple[str, str]) -> None:
    path = source / "farandole" / file
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def newer_release(folder: Path) -> Path:
    """One with another protocol and another format: a field of the coordinator's state has another name."""
    source, newest = release(folder), PROTOCOL_VERSION
    change(source, "__init__.py", (VERSION, '__version__ = "9.0"'))
    both = (f"{PROTOCOLS}{newest}, {OLDEST_PROTOCOL_VERSION}", f"{PROTOCOLS}{newest + 1}, {newest}")
    change(source, "base/wire/message.py", both)
    change(
        source,
        "job/coordinator/journal.py",
        (f"FORMAT = {FORMAT}", f"FORMAT = {FORMAT + 1}"),
        ("MIGRATIONS: Mapping[int, Callable[[Any], Any]] = {2: _with_one_record_of_a_death}", MIGRATIONS),
        ("    attempt: int\n", "    cleared_for: int\n"),
    )
    renamed = (("attempt=self._attempt", "cleared_for=self._attempt"), ("state.attempt", "state.cleared_for"))
    change(source, "job/coordinator/server.py", *renamed)
    return source


@pytest.mark.timeout(200)
def test_a_newer_release_takes_over_and_an_older_one_says_what_to_do(tmp_path: Path) -> None:
    """Its coordinator reads the state of the older one, and serves the agents of the older one: it loses none of their
    workers, and replaces one that dies. The older release, which cannot read its state, leaves the job alone."""
    newer = newer_release(tmp_path / "newer")
    with Lab(hosts=4) as lab, MovingJob(lab, tmp_path, *FLAGS) as job:
        first = job.wait_until(all_training(2), LONG_S)
        job.kill_launcher()
        job.start_on(lab.hosts[1], newer)
        job.wait_for_agents(times=1)
        job.train_on(20)
        assert job.pids(job.latest()) == job.pids(first)
        assert len(job.events("GenerationStarted")) == 1
        job.kill_launcher()
        job.start_on(lab.hosts[0])
        assert job.process.wait(LONG_S) == 2
        told = " ".join(job.said().split())
        assert f"was written by Farandole 9.0 (protocol {PROTOCOL_VERSION + 1}) in format {FORMAT + 1}" in told
        newer_one = f"Farandole 9.0 (protocol {PROTOCOL_VERSION + 1}) or a newer"
        assert f"which reads 2 to {FORMAT}: continue with {newer_one}" in told
        job.train_on(20)
        job.start_on(lab.hosts[1], newer)
        job.wait_for_agents(times=2)
        last = job.latest()
        assert job.pids(last) == job.pids(first)
        victim = last[0]
        job.kill_worker(victim)
        job.forget(victim)
        job.wait_until(lambda now: all_training(2)(now) and now[0]["generation"] > victim["generation"], LONG_S)
        job.finish()
    proof = Proof(tmp_path)
    assert proof.redone() <= 1
    check_job(proof, SAMPLES, workers_at_end=2)


@pytest.mark.timeout(200)
def test_a_launcher_whose_package_is_changed_on_the_disk_goes_on_until_it_is_started_again(tmp_path: Path) -> None:
    """Its next coordinator is of the release that it has loaded. When it cannot have one any more, it says so, and the
    same command continues the job with the release that is on the disk."""
    source = release(tmp_path / "installed")
    with Lab(hosts=4) as lab, MovingJob(lab, tmp_path, *FLAGS, source=source) as job:
        first = job.wait_until(all_training(2), LONG_S)
        change(source, "__init__.py", (VERSION, '__version__ = "9.0"'))
        job.kill_process(COORDINATOR_NAME)
        job.wait_for_agents(times=1)
        job.train_on(20)
        job.kill_process(FACTORY_NAME)
        job.kill_process(COORDINATOR_NAME)
        assert job.process.wait(LONG_S) == 1
        told = " ".join(job.said().split())
        assert f"Farandole was changed on the disk since this launcher, {farandole.__version__} (protocol" in told
        assert "was started, so this launcher ends. Start it again: the agents of other machines wait for it" in told
        job.train_on(20)
        job.start_on(lab.hosts[0], source)
        job.wait_for_agents(times=2)
        last = job.latest()
        job.finish()
    assert job.pids(last) == job.pids(first)
    proof = Proof(tmp_path)
    assert proof.redone() == 0
    check_job(proof, SAMPLES, workers_at_end=2)
