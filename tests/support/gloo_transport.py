"""Run all collectives with tensors through torch's Gloo. Bytes go around the ring. Gloo is a double of NCCL here: both
use torch_group.py and kept_group.py.

The file has the transport, its construction from a ring, the process group of Gloo, and the group's connections, which
have to be found and closed because Gloo's own abort() does nothing (torch 2.13 and 2.15,
torch/csrc/distributed/c10d: Backend::abort() in Backend.hpp, which ProcessGroupGloo does not override).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from farandole.base.machine import now_s
from farandole.errors import ConfigError
from farandole.training.collectives.connection_pair import Broken, combiner, flat_view
from farandole.training.collectives.kept_group import (
    KeptGroup,
    Members,
    Offer,
    ReconfigurableGroup,
    agreed_members,
    make_reconfigurable,
)
from farandole.training.collectives.ring import RingTransport
from farandole.training.collectives.ring_header import TransportOperation
from farandole.training.collectives.torch_group import NO_LIMIT_S, OPS, Construction, ExchangedStore, GroupOperations
from farandole.training.collectives.transport import Reduction

logger = logging.getLogger("farandole")


class GlooTransport:
    """A Transport (transport.py) that moves tensors through Gloo.

    Args:
        ring: Connects all ranks in the same order; close() closes it.
        group: The group of the same ranks; close() releases it, in the background.
    """

    def __init__(self, ring: RingTransport, group: GlooGroup) -> None:
        self._ring, self._group = ring, group
        self._operations = GroupOperations(ring, group)

    @property
    def rank(self) -> int:
        return self._ring.rank

    @property
    def size(self) -> int:
        return self._ring.size

    @property
    def is_lasting(self) -> bool:
        """True if the next generation may have the group."""
        return self._group.is_lasting

    def all_reduce(self, tensor: torch.Tensor, trailer: bytes = b"", op: Reduction = Reduction.SUM) -> list[bytes]:
        flat = flat_view(tensor)
        combiner(op)
        if flat.numel() == 0:
            return self._ring.all_reduce(flat, trailer, op)
        return self._operations.all_reduce(flat, trailer, op)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if not 0 <= source < self.size:
            raise ValueError(f"broadcast: source must be a rank from 0 to {self.size - 1}, got {source}")
        flat = flat_view(tensor)
        if flat.numel() == 0:
            self._ring.broadcast(flat, source)
            return
        self._operations.broadcast(flat, source)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self._ring.all_gather(payload)

    def barrier(self) -> None:
        self._ring.barrier()

    def wait_for_peer(self, wake: int) -> bool | None:
        return self._ring.wait_for_peer(wake)

    def abort(self, reason: str) -> None:
        self._ring.abort(reason)
        self._operations.abort()

    def close(self) -> None:
        """Close the transport; no collective may run. Later calls raise GenerationEnded."""
        self._ring.close()
        self._group.release()


# Construction from a ring ---------------------------------------------------------------------------------------------

_CONNECT_TIMEOUT_S = 5.0


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer of one rank to the others: its offer, then its address; or the reason why it has no Gloo."""

    listening: ListeningAddress | None = None
    problem: str = ""
    offer: Offer = Offer()


def use_gloo(ring: RingTransport, kept: KeptGroup | None = None) -> GlooTransport:
    """Return the transport, which closes the ring when it is closed. All ranks of the ring call it at once.

    Args:
        kept: Holds the group from one generation to the next, where torch can exchange its members. None: it is made
            anew.

    Raises PeerLost and GenerationEnded, and ConfigError, on all ranks alike, when one of them has no Gloo.
    """
    return GlooTransport(ring, connect_gloo(ring, kept))


def connect_gloo(ring: RingTransport, kept: KeptGroup | None = None) -> GlooGroup:
    """Return the group of all ranks. Arguments and errors are those of use_gloo()."""
    lasting, device, problem = _own_part(ring, kept)
    answers = _exchange_answers(ring, _Answer(problem=problem, offer=Offer() if lasting is None else lasting.offer()))
    offers = [each.offer for each in answers]
    members = agreed_members(offers)
    if kept is not None and lasting is not None and members is not None:
        group = _connected(ring, partial(_reconfigure, lasting, members), lasting)
        kept.is_used_by(group)
        return group
    if any(each.handle for each in offers):  # a rank that has made an offer may have no device for a new group
        device, problem = _gloo_device(host_of(ring))
        _exchange_answers(ring, _Answer(problem=problem))
    return _connected(ring, lambda store: dist.ProcessGroupGloo(store, ring.rank, ring.size, _options(device)))


def host_of(ring: RingTransport) -> str:
    """Return the address of this host on the route to the next rank."""
    return str(ring._connections._to_next.getsockname()[0])


def _own_part(ring: RingTransport, kept: KeptGroup | None) -> tuple[ReconfigurableGroup | None, object, str]:
    """Return this rank's group that lives through the generations, if there is one; a device for a new group, and the
    problem with it, if any."""
    lasting = None if kept is None else kept.take()
    if lasting is not None:
        return lasting, None, ""
    device, problem = _gloo_device(host_of(ring))
    if kept is None or problem:
        return None, device, problem

    def make(store: dist.Store) -> dist.ProcessGroupGloo:  # type: ignore[name-defined]
        options = _options(device)
        options.enable_reconfigure = True
        # Until the group has members, its handle contains this rank: so the handles of new groups differ.
        return dist.ProcessGroupGloo(store, ring.rank, ring.size, options)

    return make_reconfigurable(make), device, ""


def _reconfigure(lasting: ReconfigurableGroup, members: Members, store: ExchangedStore) -> dist.ProcessGroupGloo:
    lasting.reconfigure(store, members, _CONNECT_TIMEOUT_S)
    group: dist.ProcessGroupGloo = lasting.group
    return group


def _options(device: object) -> Any:
    # Private: the public constructor takes neither a device nor a number of threads (torch 2.13,
    # torch/_C/_distributed_c10d.pyi, ProcessGroupGloo).
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads = [device], 1
    options._timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
    return options


def _connected(
    ring: RingTransport,
    make: Callable[[ExchangedStore], dist.ProcessGroupGloo],
    lasting: ReconfigurableGroup | None = None,
) -> GlooGroup:
    """Return the group that `make` connects, when it can be used on all ranks."""
    construction = Construction(ring, make, lambda _: None, lambda _: None, _CONNECT_TIMEOUT_S, "gloo")
    group = construction.finish()
    if isinstance(group, str):
        header = ring.next_header(TransportOperation.BARRIER, trailer_bytes=1)
        ring.end_by(Broken("receive", f"Gloo cannot connect: {group}"), header)
    own = find_listening_address(b"".join(construction.store.mine.values()))
    answers = _exchange_answers(
        ring, _Answer(own, "" if own else f"rank {ring.rank} cannot determine which sockets belong to Gloo")
    )
    addresses = [each.listening for each in answers if each.listening]
    return GlooGroup(group, find_connections(addresses[ring.rank], addresses), lasting)


def _gloo_device(host: str) -> tuple[object, str]:
    """Return Gloo's device at the address that the ring uses, and the problem with it, if any."""
    try:
        return dist.ProcessGroupGloo.create_device(hostname=host), ""
    except (AttributeError, RuntimeError) as error:  # a torch without Gloo; an address that it cannot use
        return None, f"cannot listen at {host}: {error}"


def _exchange_answers(ring: RingTransport, mine: _Answer) -> list[_Answer]:
    """Return the answers of all ranks, by rank. Raises ConfigError, on all alike, when one of them has a problem."""
    answers = [msgspec.msgpack.decode(each, type=_Answer) for each in ring.all_gather(msgspec.msgpack.encode(mine))]
    for rank, each in enumerate(answers):
        if each.problem:
            raise ConfigError(f"--transport gloo: rank {rank}: {each.problem}; use auto, shm or tcp")
    return answers


# The process group, a TorchGroup (torch_group.py) ---------------------------------------------------------------------

_NO_LIMIT = timedelta(seconds=NO_LIMIT_S)
_RELEASE_S = 5.0
_HAND_OVER_S = 0.05  # about the time that a new group takes
_REPEAT_S = 0.01
_REPEAT_IN_A_REGROUP_S = 0.002

_stuck: list[dist.ProcessGroupGloo] = []
"""Groups that cannot be released."""


class GlooGroup:
    """A process group of Gloo in one generation.

    Args:
        group: torch's group.
        connections: Its connections to the other ranks.
        lasting: The same group, if the next generation may have it.
    """

    name = "Gloo"
    look_every_s = 0.002

    def __init__(
        self,
        group: dist.ProcessGroupGloo,
        connections: Collection[Connection],
        lasting: ReconfigurableGroup | None = None,
    ) -> None:
        self._group: Any = group  # torch's stubs lack its operations
        self._connections, self._lasting = connections, lasting
        self._work: dist.Work | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()  # of shut_down(), which other threads call

    @property
    def is_lasting(self) -> bool:
        return self._lasting is not None

    def take(self, flat: torch.Tensor, dtype: torch.dtype, is_read: bool) -> torch.Tensor:
        nbytes = flat.numel() * dtype.itemsize
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        copy = self._memory[:nbytes].view(dtype)
        return copy.copy_(flat) if is_read else copy

    def all_reduce(self, copy: torch.Tensor, op: Reduction, when_done: Callable[[], None]) -> dist.Work:
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = OPS[op], _NO_LIMIT  # type: ignore[assignment]
        return self._begun(self._present().allreduce([copy], options), when_done)

    def broadcast(self, copy: torch.Tensor, source: int, when_done: Callable[[], None]) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = source, 0, _NO_LIMIT
        return self._begun(self._present().broadcast([copy], options), when_done)

    def give(self, copy: torch.Tensor, flat: torch.Tensor) -> None:
        flat.copy_(copy)

    def shut_down(self) -> None:
        with self._lock:
            if self._group is not None:  # other sockets may have its ports once it is gone
                shut_down_connections(self._connections)

    def hand_over(self) -> ReconfigurableGroup | None:
        """End the running operation, and return the group for the next generation; None if that cannot have it.

        The operation has to end first, since the group has one thread. It may not end: an operation of which a part is
        on its way does not learn that its connection is gone (torch 2.15: it waits in UnboundBuffer::waitSend() or
        waitRecv() of Gloo, for ever).
        """
        group, work = self._leave()
        lasting, self._lasting = self._lasting, None
        if group is None or lasting is None:
            return None
        if _has_ended(work, _HAND_OVER_S, self._connections, _REPEAT_IN_A_REGROUP_S):
            return lasting
        _release_in_background(group, work, self._connections)
        return None

    def release(self) -> None:
        """Release the group in the background, since Gloo takes its time."""
        group, work = self._leave()
        self._lasting = None
        if group is not None:
            _release_in_background(group, work, self._connections)

    def _present(self) -> Any:
        if self._group is None:
            raise dist.DistError("the group belongs to another generation, or was released")
        return self._group

    def _begun(self, work: dist.Work, when_done: Callable[[], None]) -> dist.Work:
        """Call `when_done` in a thread of Gloo when the operation has ended."""
        self._work = work
        work.get_future().add_done_callback(lambda _: when_done())
        return work

    def _leave(self) -> tuple[dist.ProcessGroupGloo | None, dist.Work | None]:
        """End the connections, and return the group and its last operation, which this object no longer uses."""
        with self._lock:
            group, work = self._group, self._work
            self._group = self._work = None
            if group is not None:
                shut_down_connections(self._connections)
        return group, work


def _has_ended(
    work: dist.Work | None, limit_s: float, connections: Collection[Connection], repeat_s: float = _REPEAT_S
) -> bool:
    """Return whether an operation ends in time, because its connections are shut down."""
    deadline_s, pause = now_s() + limit_s, threading.Event()
    while work is not None and not work.is_completed():
        if now_s() >= deadline_s:
            return False
        pause.wait(repeat_s)
        shut_down_connections(connections)
    return True


def _release_in_background(
    group: dist.ProcessGroupGloo, work: dist.Work | None, connections: Collection[Connection]
) -> None:
    # Not a daemon, for the reason given in torch_group.py (Construction).
    threading.Thread(target=_release, args=(group, work, connections), name="farandole-gloo-release").start()


def _release(group: dist.ProcessGroupGloo, work: dist.Work | None, connections: Collection[Connection]) -> None:
    """Return when the group is gone. Its destructor waits for the running operation, so that must end first."""
    if not _has_ended(work, _RELEASE_S, connections):
        logger.warning("an operation of Gloo has not ended within %g s; its memory is not released", _RELEASE_S)
        _stuck.append(group)


# The connections of a group -------------------------------------------------------------------------------------------
#
# The ports at which the group's ranks listen identify its connections. A listing of descriptors before and after a
# group is built would be simpler, but other threads open sockets meanwhile.

ListeningAddress = tuple[str, int]
"""(host, port)"""

Connection = tuple[ListeningAddress, ListeningAddress]
"""The addresses of its own end and of the other one."""


def find_listening_address(message: bytes) -> ListeningAddress | None:
    """Return the address at which this process listens; None where it cannot be found.

    It is that of the listening socket whose address occurs in Gloo's message to the other ranks.
    """
    for sock in _sockets():
        if _is_listening(sock):
            host, port = sock.getsockname()[:2]
            if _packed(sock.family, host, port) in message:
                return host, port
    return None


def find_connections(own: ListeningAddress, others: Collection[ListeningAddress]) -> frozenset[Connection]:
    """Return the connections from and to the addresses at which a group's ranks listen, this one at `own`.

    They are known by both their ends: a group that lives through the generations listens at the same addresses in the
    next one, whose connections must not end with those of this one.
    """
    found = []
    for sock in _sockets():
        with contextlib.suppress(OSError):  # not connected
            local, peer = _ends(sock)
            if not _is_listening(sock) and (local == own or peer in others):
                found.append((local, peer))
    return frozenset(found)


def shut_down_connections(connections: Collection[Connection]) -> None:
    """End these connections. Callable from any thread."""
    for sock in _sockets():
        with contextlib.suppress(OSError):  # not connected
            # Never the listening socket itself: Gloo ends the process when accept() fails (GLOO_ENFORCE in
            # gloo/transport/tcp/listener.cc, Listener::handleEvents(), on the thread of its loop).
            if not _is_listening(sock) and _ends(sock) in connections:
                sock.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
    """Yield all TCP sockets of the process, as copies of their descriptors that are valid until the next one."""
    try:
        names = os.listdir("/dev/fd")
    except OSError:
        return
    for name in names:
        try:
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            copy = os.dup(descriptor)
        except OSError:
            continue  # closed since, or the listing itself
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock


def _ends(sock: socket.socket) -> Connection:
    return sock.getsockname()[:2], sock.getpeername()[:2]


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _packed(family: int, host: str, port: int) -> bytes:
    """Return the beginning of a sockaddr, as in Gloo's message."""
    address = socket.inet_pton(family, host.partition("%")[0])
    begin = struct.pack("=H", family) + struct.pack("!H", port)
    return begin + (b"\0\0\0\0" if family == socket.AF_INET6 else b"") + address
