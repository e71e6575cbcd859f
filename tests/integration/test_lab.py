"""Hosts of our own: each has what a host has, faults do what they say, and nothing of a lab stays behind."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farandole.testing.lab import Host, Lab, LabError, why_not
from farandole.testing.lab.lab import leftovers, remove_leftovers
from farandole.testing.lab.tools import wait_until
from tests.scripts.lab_listener import PORT
from tests.support.jobs import SCRIPTS

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

DEADLINE_S = 10.0
SAY = f"import socket, sys; socket.socket(2, 2).sendto(sys.argv[2].encode(), (sys.argv[1], {PORT}))"


class Listener:
    """What a host hears."""

    def __init__(self, host: Host) -> None:
        self.host = host
        command = [sys.executable, "-I", "-S", str(SCRIPTS / "lab_listener.py")]
        self.process = host.start(command, stdout=subprocess.PIPE)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.wait_for("ready")

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line.decode().strip())

    def wait_for(self, last: str) -> list[str]:
        """Everything heard up to this."""
        heard = []
        while not heard or heard[-1] != last:
            heard.append(self._lines.get(timeout=DEADLINE_S))
        return heard


def say(host: Host, to: str, word: str) -> None:
    host.run([sys.executable, "-I", "-S", "-c", SAY, to, word])


def say_from_here(to: str, *words: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for word in words:
            sender.sendto(word.encode(), (to, PORT))


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=2) as lab:
        yield lab


@pytest.fixture
def ears(lab: Lab) -> list[Listener]:
    return [Listener(host) for host in lab.hosts]


def call(host: Host) -> socket.socket:
    connection = socket.create_connection((host.address, PORT), timeout=DEADLINE_S)
    connection.sendall(b"a")
    assert connection.recv(1) == b"a"
    return connection


# What a host is -----------------------------------------------------------------------------------------------------


def test_each_host_has_its_own_name_address_processes_and_shared_memory(lab: Lab) -> None:
    first, second = lab.hosts
    look = "hostname; ls /proc | grep -c '^[0-9]'; ls /dev/shm; touch /dev/shm/here; echo $TMPDIR"
    for host in lab.hosts:
        name, processes, folder = host.run(["sh", "-c", look]).split()
        assert name == host.name
        assert int(processes) < 10
        assert Path(folder) == host.folder
    assert first.run(["ls", "/dev/shm"]).split() == ["here"]
    assert not Path("/dev/shm/here").exists()
    assert first.address != second.address


def test_hosts_and_the_machine_reach_each_other_by_address_and_hosts_also_by_name(ears: list[Listener]) -> None:
    first, second = ears
    say(first.host, "host1", "one")
    say(second.host, first.host.address, "two")
    say_from_here(first.host.address, "three")
    assert second.wait_for("one") == ["one"]
    assert first.wait_for("three") == ["two", "three"]


def test_a_process_is_known_by_its_number_on_the_host(lab: Lab) -> None:
    host = lab.hosts[0]
    process = host.start(["sh", "-c", "echo $$; exec sleep 60"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        number = int(process.stdout.readline())
    assert number in host.processes()
    host.signal(number)
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    wait_until(lambda: number not in host.processes(), "it is reaped")
    with pytest.raises(ProcessLookupError, match=f"no process {number} on host0"):
        host.signal(number)


def test_orphans_are_reaped(lab: Lab) -> None:
    lab.hosts[0].run(["sh", "-c", "sleep 0.01 & exit"])
    wait_until(lambda: not lab.hosts[0].processes(), "nobody is left")


def test_a_command_that_fails_says_what_it_said(lab: Lab) -> None:
    with pytest.raises(LabError, match=r"on host0 ended with 2: ls: cannot access '/nowhere'"):
        lab.hosts[0].run(["ls", "/nowhere"])


# Faults of the network ----------------------------------------------------------------------------------------------


def test_a_cut_is_silent_and_a_connection_lives_on_when_it_is_healed(lab: Lab, ears: list[Listener]) -> None:
    first, second = ears
    with call(first.host) as connection:
        lab.network.cut(first.host)
        say_from_here(first.host.address, "lost")
        say(second.host, first.host.address, "lost, too")
        connection.sendall(b"b")
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        lab.network.heal(first.host)
        say_from_here(first.host.address, "here")
        assert first.wait_for("here") == ["here"]
        connection.settimeout(DEADLINE_S)
        assert connection.recv(1) == b"b"


def test_one_way_is_deaf_in_one_direction_only(lab: Lab, ears: list[Listener]) -> None:
    first, second = ears
    lab.network.one_way(first.host, second.host)
    say(first.host, second.host.address, "lost")
    say(second.host, first.host.address, "heard")
    say_from_here(second.host.address, "from the machine")
    assert first.wait_for("heard") == ["heard"]
    assert second.wait_for("from the machine") == ["from the machine"]
    lab.network.heal()
    say(first.host, second.host.address, "heard, too")
    assert second.wait_for("heard, too") == ["heard, too"]


def test_a_partition_divides_groups_and_the_machine_can_be_in_one(lab: Lab, ears: list[Listener]) -> None:
    first, second = ears
    lab.network.partition([first.host, lab.network.driver], [second.host])
    say(first.host, second.host.address, "lost")
    say_from_here(second.host.address, "lost")
    say_from_here(first.host.address, "heard")
    assert first.wait_for("heard") == ["heard"]
    lab.network.heal(second.host)
    say_from_here(second.host.address, "heard")
    assert second.wait_for("heard") == ["heard"]


def test_a_slow_cable_delivers_everything_late(lab: Lab, ears: list[Listener]) -> None:
    with call(ears[0].host) as connection:
        lab.network.rate(0, 8)  # a megabyte takes a second
        began = time.monotonic()
        connection.sendall(bytes(600_000))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
        assert time.monotonic() - began > 0.2
    lab.network.rate(0, None)


def test_some_packets_are_lost(lab: Lab, ears: list[Listener]) -> None:
    lab.network.loss(0, 0.3)
    for count in range(400):
        say_from_here(ears[0].host.address, f"word {count}")
    lab.network.loss(0, 0)
    say_from_here(ears[0].host.address, "end")
    arrived = len(ears[0].wait_for("end")) - 1
    assert 240 < arrived < 320, "280 are expected, give or take 9"


# Faults of hosts ----------------------------------------------------------------------------------------------------


def test_a_frozen_host_does_nothing_and_goes_on_when_it_thaws(ears: list[Listener]) -> None:
    with call(ears[0].host) as connection:
        ears[0].host.freeze()
        connection.sendall(b"b")
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        ears[0].host.thaw()
        connection.settimeout(DEADLINE_S)
        assert connection.recv(1) == b"b"


def test_the_clocks_of_hosts_differ_by_days_if_requested_and_their_dates_do_not() -> None:
    clocks = "import time; print(time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time())"

    def read(host: Host) -> list[float]:
        return [float(word) for word in host.run([sys.executable, "-I", "-S", "-c", clocks]).split()]

    with Lab(hosts=2, own_clocks=True) as lab:
        here = [time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time()]
        first, second = map(read, lab.hosts)
        lab.hosts[0].power_off()
        lab.hosts[0].boot()
        days = [[round((read - own) / 86400) for read, own in zip(each, here, strict=True)] for each in (first, second)]
        assert days == [[2, 4, 0], [5, 10, 0]]
        assert read(lab.hosts[0])[0] - first[0] > 86000


def test_a_crash_closes_connections_and_no_power_does_not(ears: list[Listener]) -> None:
    crashed, dark = ears
    with call(crashed.host) as one, call(dark.host) as other:
        crashed.host.crash()
        assert one.recv(1) == b""
        dark.host.power_off()
        other.settimeout(0.1)
        with pytest.raises(TimeoutError):
            other.recv(1)
    for ear in ears:
        assert ear.process.wait(DEADLINE_S) == -signal.SIGKILL
        assert not ear.host.is_up


def test_a_host_that_was_off_boots_with_nothing_running(lab: Lab, ears: list[Listener]) -> None:
    host = lab.hosts[0]
    before = int(host.run(["sh", "-c", "echo $$"]))
    host.power_off()
    with pytest.raises(LabError, match="host0 is off; boot"):
        host.run(["true"])
    host.boot()
    assert host.processes() == {}
    assert int(host.run(["sh", "-c", "echo $$"])) > before + 100, "no two processes of a host have the same number"
    say_from_here(Listener(host).host.address, "again")


def test_what_is_slow_and_what_was_not_can_be_hurried(lab: Lab) -> None:
    for mbit, share in ((None, 0.0), (5.0, 0.1), (2.0, 0.2), (None, 0.0)):
        lab.network.rate(0, mbit)
        lab.network.loss(0, share)


def test_a_frozen_host_can_lose_its_power(lab: Lab) -> None:
    process = lab.hosts[0].start(["sleep", "60"])
    wait_until(lambda: bool(lab.hosts[0].processes()), "it runs")
    lab.hosts[0].freeze()
    lab.hosts[0].power_off()
    assert process.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_host_short_of_memory_has_a_process_killed(lab: Lab) -> None:
    try:
        lab.hosts[0].limit_memory(64 << 20)
    except LabError as error:
        pytest.skip(str(error))
    process = lab.hosts[0].start([sys.executable, "-I", "-S", "-c", "bytearray(1 << 30)"])
    assert process.wait(DEADLINE_S) == -signal.SIGKILL


# Nothing stays ------------------------------------------------------------------------------------------------------


def devices() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def test_two_labs_at_once_do_not_hear_of_each_other() -> None:
    with Lab(hosts=1) as one, Lab(hosts=1) as other:
        assert one.hosts[0].address != other.hosts[0].address
        ears = [Listener(lab.hosts[0]) for lab in (one, other)]
        one.network.cut(*one.hosts)
        say_from_here(ears[1].host.address, "heard")
        assert ears[1].wait_for("heard") == ["heard"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_after_an_error(error: type[BaseException]) -> None:
    before = devices()
    lab = Lab(hosts=2)
    with contextlib.suppress(error), lab:
        process = lab.hosts[0].start(["sleep", "60"])
        lab.hosts[1].freeze()
        raise error
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert not Path(lab.hosts[0].folder).exists()
    assert devices() == before
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{lab.name}*"))


KILLED = """
import os, signal, subprocess
from farandole.testing.lab import Lab
with Lab(hosts=2) as lab:
    for host in lab.hosts:
        host.start(["sleep", "60"], stdout=subprocess.DEVNULL)
    lab.hosts[1].freeze()
    print(lab.name, lab.network._device, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_lab_removes_what_a_killed_one_has_left() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert done.returncode == -signal.SIGKILL
    name, device = done.stdout.split()
    assert any(each.startswith(name) for each in leftovers())
    with Lab(hosts=1) as living:
        assert not any(each.startswith(name) for each in leftovers())
        remove_leftovers()  # not what lives
        assert living.hosts[0].run(["hostname"]) == "host0\n"
    wait_until(lambda: device not in devices(), "the device is gone")


def test_without_root_it_says_so() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "from farandole.testing.lab import why_not; print(why_not())"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PATH": "/nowhere"},
    )
    assert said.stdout.startswith("hosts are made with commands that are not installed: ip, ")
    with contextlib.suppress(PermissionError):  # where even root may not become somebody else
        said = subprocess.run(
            [sys.executable, "-c", "from farandole.testing.lab import why_not; print(why_not())"],
            stdout=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_S,
            user=65534,
        )
        assert "need root" in said.stdout or said.returncode
