"""The network of a lab: a router, a cable to each host and one to the machine; and its faults.

The router is a network namespace without a name. It lives as long as the process that holds it, which lives as long as
the lab. The machine's own network is not changed: it gets one more device, with one address and one route, which
disappear with the router.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
from collections.abc import Iterable
from typing import Protocol

from farandole.testing.lab.tools import Cgroup, LabError, in_network_of, ip, run

_MOST_HOSTS = 200
_TRIES = 20
_SILENT_RULES = 100  # before the kernel's own, which begin at 32766


class NetworkNode(Protocol):
    """A host, or the machine itself: any object with an address."""

    name: str
    address: str


class Driver:
    """The machine itself, as seen by its hosts."""

    name = "driver"

    def __init__(self, address: str) -> None:
        self.address = address

    def __repr__(self) -> str:
        return f"driver ({self.address})"


class Network:
    """The network of a lab. A fault drops packets silently: the sender gets no error. See the example of `Lab`.

    Args:
        cgroup: The control group of its process.

    Attributes:
        driver: The machine itself, as a place of the network.

    Raises:
        LabError: A command of the network failed.
    """

    def __init__(self, cgroup: Cgroup) -> None:
        self._holder = subprocess.Popen(
            cgroup.entering(["unshare", "--net", "sh", "-c", "echo; exec cat"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is handled by the lab
        )
        self._rules: set[tuple[str, ...]] = set()
        self._hosts: dict[int, int] = {}  # by index, a process of each
        self._slow: set[int] = set()
        self._lossy: set[int] = set()
        try:
            assert self._holder.stdout is not None
            if not self._holder.stdout.readline():
                raise LabError(f"no network namespace: unshare ended with {self._holder.wait()}")
            self.driver = self._connect_machine()
        except BaseException:
            self.close()
            raise

    # Cables ----------------------------------------------------------------------------------------------

    def address_of(self, index: int) -> str:
        """Return the address of a host.

        Args:
            index: Its number in the lab, from 0.

        Raises:
            ValueError: The index is beyond the maximum of hosts.
        """
        if not 0 <= index < _MOST_HOSTS:
            raise ValueError(f"a lab has up to {_MOST_HOSTS} hosts; host {index} was requested")
        return f"{self._net}.{index + 11}"

    def connect(self, index: int, pid: int) -> None:
        """Connect the cable of a host to a network namespace.

        Args:
            index: The number of the host, which must have no cable.
            pid: A process in the namespace.
        """
        device, address = f"host{index}", self.address_of(index)
        self._hosts[index] = pid
        ip(self._pid, f"link add {device} type veth peer name eth0 netns {pid}", *self._end(device, address))
        ip(
            pid,
            "link set lo up",
            f"address add {address}/32 dev eth0",
            "link set eth0 up",
            f"route add {self._router} dev eth0 scope link src {address}",
            f"route add default via {self._router} dev eth0 src {address}",
        )

    def add_address(self, index: int, address: str) -> None:
        """Give a running host a second address, as if of a second network: faults do not concern it.

        Args:
            index: The number of the host.
            address: The address.
        """
        ip(self._hosts[index], f"address add {address}/32 dev eth0")
        ip(self._pid, f"route replace {address} dev host{index} scope link src {self._router}")

    def remove_address(self, index: int, address: str) -> None:
        """Take a second address from a running host.

        Args:
            index: The number of the host.
            address: The address.
        """
        ip(self._hosts[index], f"address delete {address}/32 dev eth0")
        ip(self._pid, f"route delete {address} dev host{index}")

    def disconnect(self, index: int) -> None:
        """Remove the cable of a host, with its settings; dropped packets are still dropped.

        Args:
            index: The number of the host.
        """
        # It may have disappeared with the host's namespace already.
        subprocess.run(in_network_of(self._pid, ["ip", "link", "delete", f"host{index}"]), capture_output=True)
        self._hosts.pop(index, None)
        self._slow.discard(index)
        self._lossy.discard(index)

    # Faults ----------------------------------------------------------------------------------------------

    def cut(self, *places: NetworkNode) -> None:
        """Drop all packets from and to these places."""
        self._add(rule for place in places for rule in (("from", place.address), ("to", place.address)))

    def one_way(self, sender: NetworkNode, receiver: NetworkNode) -> None:
        """Drop all packets of one direction; the other direction is open.

        Args:
            sender: A host, or the machine itself (`driver`).
            receiver: The place that its packets do not reach.
        """
        self._add([("from", sender.address, "to", receiver.address)])

    def partition(self, *groups: Iterable[NetworkNode]) -> None:
        """Let each group reach only its own members. Places in no group reach all others."""
        sets = [list(group) for group in groups]
        pairs = [(a, b) for one in sets for other in sets if one is not other for a in one for b in other]
        self._add(("from", a.address, "to", b.address) for a, b in pairs)

    def heal(self, *places: NetworkNode) -> None:
        """Stop dropping packets from or to these places. Without places: for all."""
        addresses = {place.address for place in places}
        healed = {rule for rule in self._rules if not places or addresses & set(rule)}
        if healed:
            ip(self._pid, *[f"rule delete {_line(rule)}" for rule in healed])
        self._rules -= healed

    def rate(self, index: int, mbit: float | None) -> None:
        """Limit the rate to and from a host: faster packets wait, or are lost when they would wait too long.

        Args:
            index: The number of the host.
            mbit: Megabits per second; None: no limit.
        """
        ends = ((self._pid, f"host{index}"), (self._hosts[index], "eth0"))
        for pid, device in ends:
            if mbit is not None:
                shape = ["tbf", "rate", f"{mbit:g}mbit", "burst", "64kb", "latency", "400ms"]
                _tc(pid, "qdisc", "replace", "dev", device, "root", *shape)
            elif index in self._slow:
                _tc(pid, "qdisc", "delete", "dev", device, "root")
        (self._slow.discard if mbit is None else self._slow.add)(index)

    def loss(self, index: int, share: float) -> None:
        """Lose a part of the packets to and from a host, each at random.

        Args:
            index: The number of the host.
            share: The fraction of the packets, from 0 to 1; 0: none.

        Raises:
            ValueError: The fraction is not from 0 to 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"the share of packets that are lost is from 0 to 1, not {share}")
        device = f"host{index}"
        if index in self._lossy:
            _tc(self._pid, "qdisc", "delete", "dev", device, "clsact")
            self._lossy.discard(index)
        if share == 0:
            return
        # Few kernels have netem; this program of the classic packet filter runs on all: load a random word, drop (2)
        # when it is below the limit, else let it pass (0).
        program = f"4,32 0 0 {0xFFFFF000 + 56},53 1 0 {min(2**32 - 1, round(share * 2**32))},6 0 0 2,6 0 0 0"
        _tc(self._pid, "qdisc", "add", "dev", device, "clsact")
        self._lossy.add(index)
        for direction in ("ingress", "egress"):
            _tc(self._pid, "filter", "add", "dev", device, direction, "bpf", "da", "bytecode", program)

    # The end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove the router, its cables, and the machine's device. Idempotent."""
        if self._holder.poll() is None:
            device = getattr(self, "_device", None)
            if device is not None:
                subprocess.run(["ip", "link", "delete", device], capture_output=True)
            self._holder.send_signal(signal.SIGKILL)
            self._holder.wait()
        for stream in (self._holder.stdin, self._holder.stdout):
            if stream is not None:
                stream.close()

    # Helpers ---------------------------------------------------------------------------------------------

    @property
    def _pid(self) -> int:
        return self._holder.pid

    def _connect_machine(self) -> Driver:
        """Connect the machine by the first free network of the range for measurements (RFC 2544) on this machine."""
        device = f"frl{secrets.token_hex(4)}"
        run(["ip", "link", "add", device, "type", "veth", "peer", "name", "driver", "netns", str(self._pid)])
        self._device = device
        run(["ip", "link", "set", device, "up"])
        for _ in range(_TRIES):
            self._net = f"198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}"
            self._router, address = f"{self._net}.2", f"{self._net}.1"
            if run(["ip", "route", "show", "to", "match", address, "table", "all", "scope", "link"]).strip():
                continue
            run(["ip", "address", "add", f"{address}/32", "dev", device])
            try:
                # The kernel refuses a second route to the same network: of two labs, one tries another.
                route = f"{self._net}.0/24 via {self._router} dev {device} onlink src {address}"
                run(["ip", "route", "add", *route.split()])
            except LabError:
                run(["ip", "address", "delete", f"{address}/32", "dev", device])
                continue
            run(in_network_of(self._pid, ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]))
            ip(self._pid, "link set lo up", *self._end("driver", address))
            return Driver(address)
        raise LabError(f"no network of 198.18.0.0/15 is free on this machine, of {_TRIES} that were tried")

    def _end(self, device: str, address: str) -> list[str]:
        """Return the commands for the router's end of a cable: one address on all of them, and a route to the other
        end."""
        return [
            f"address add {self._router}/32 dev {device}",
            f"link set {device} up",
            f"route replace {address} dev {device} scope link src {self._router}",
        ]

    def _add(self, rules: Iterable[tuple[str, ...]]) -> None:
        new = set(rules) - self._rules
        if new:
            ip(self._pid, *[f"rule add {_line(rule)}" for rule in new])
        self._rules |= new


def _tc(pid: int, *arguments: str) -> None:
    """Run `tc` in the network namespace of a process."""
    run(in_network_of(pid, ["tc", *arguments]))


def _line(rule: tuple[str, ...]) -> str:
    return f"pref {_SILENT_RULES} {' '.join(rule)} blackhole"
