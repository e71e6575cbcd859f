"""Worlds whose members name each other by handles: no coordinator decides who they are, and no agent gives them a key.

process_group/ builds its groups outside of a job with them, and the groups that a script reconfigures by itself.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable, Sequence

import msgspec

from farandole.base.env import read_worker_env
from farandole.base.membership import DataAddress, GenerationId, Peer, Placement
from farandole.base.wire.authentication import derive_key
from farandole.base.wire.encryption import Certificates
from farandole.base.wire.link_messages import Start
from farandole.base.wire.user_secret import user_secret
from farandole.errors import ConfigError
from farandole.training.collectives.data_listener import DataListener
from farandole.training.collectives.point_to_point import Endpoint, PointToPoint
from farandole.training.collectives.ring_builder import RingBuilder
from farandole.training.collectives.world import World

_NONCE_BYTES = 16


class Handle(msgspec.Struct, frozen=True, tag="farandole"):
    """A process that may be a member of a world.

    Handles are no secret: they may lie in a store that everybody reads. The key of the data connections is derived from
    them and from a secret that never leaves its processes: the job's, or the user's (wire/user_secret.py).

    Attributes:
        worker: Different for each process.
        address: The address at which it accepts data connections.
        machine: The name of its machine.
        nonce: Random, so that each listener has other keys.
    """

    worker: str
    address: DataAddress
    machine: str
    nonce: str

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


def parse_handle(text: str) -> Handle:
    """Return the handle that `text` describes. Raises ConfigError for a text that no member has made."""
    try:
        return msgspec.json.decode(text, type=Handle)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(
            f'{text!r} is no handle of the backend "farandole" ({error}): pass the results of '
            f"torch.distributed._get_reconfigure_handle() of all members"
        ) from error


class HandleListener:
    """The end of a process at which other members connect to it, for any number of worlds one after the other.

    Args:
        hosts: The numeric addresses of this machine at which the others may reach this process; none: loopback.
        tls: The job's certificates, with which the connections are encrypted; None: they are not.

    Raises:
        ConfigError: There is no secret that only this user's processes know.
    """

    def __init__(self, *hosts: str, tls: Certificates | None = None) -> None:
        self._secret = _secret()
        self._listener = DataListener(*hosts, tls=tls)
        self.handle = Handle(
            secrets.token_hex(4), self._listener.address, socket.gethostname(), secrets.token_hex(_NONCE_BYTES)
        )

    def check(self, handles: Sequence[str]) -> None:
        """Raise ConfigError as connect() does."""
        self._place_among([parse_handle(each) for each in handles])

    def connect(
        self, number: int, handles: Sequence[str], timeout_s: float, check: Callable[[], None] | None = None
    ) -> World:
        """Return a world of the members that `handles` name, by rank; all of them call it at once.

        Args:
            number: The same for all members, and only for this world.
            handles: The handles of all members, in the same order everywhere.
            timeout_s: The time limit, in seconds.
            check: Called at least once a second while a member waits for others, now and later; may raise.

        Raises:
            ConfigError: A handle is invalid, occurs twice or cannot be reached from here, or none is this process's.
            PeerLost: A member did not connect in time.
        """
        members = [parse_handle(each) for each in handles]
        rank = self._place_among(members)
        start = _start(self._secret, number, handles, members, rank)
        builder = RingBuilder(self._listener, start, self.handle.worker, timeout_s, check=check)
        ring = builder.build()
        if len(members) == 1:
            return World(start.id, start.placement, ring)
        for_messages = DataListener(*self._listener.address.hosts, tls=self._listener.tls)
        try:
            own = msgspec.msgpack.encode(for_messages.address)
            addresses = [msgspec.msgpack.decode(each, type=DataAddress) for each in ring.all_gather(own)]
            endpoints = [Endpoint(member.worker, at) for member, at in zip(members, addresses, strict=True)]
            p2p = PointToPoint(for_messages, start.id, start.data_key, rank, endpoints, check=check)
            p2p.open()
        except BaseException:
            ring.close()
            for_messages.close()
            raise
        return World(start.id, start.placement, ring, p2p=p2p)

    def close(self) -> None:
        """Stop listening. Worlds that are connected already are not affected."""
        self._listener.close()

    def _place_among(self, members: Sequence[Handle]) -> int:
        if self.handle not in members:
            raise ConfigError(
                f"none of the {len(members)} handles is this process's: it can only connect to members of a group "
                f"that it is a member of"
            )
        if len(set(members)) < len(members):
            raise ConfigError(f"one of the {len(members)} handles occurs twice: each member has one rank")
        machines = sorted({member.machine for member in members})
        for member in members:
            if len(machines) > 1 and all(ipaddress.ip_address(host).is_loopback for host in member.address.hosts):
                raise ConfigError(
                    f"the members are on the machines {', '.join(machines)}, and one on {member.machine} can be "
                    f"reached at {member.address.host} only: start the workers with `farandole run`, whose agents "
                    f"tell each worker its address"
                )
        return members.index(self.handle)


def _secret() -> bytes:
    """Return the secret of the job that an agent has started this process for, or of this user."""
    env = read_worker_env()
    return bytes.fromhex(env.group_secret) if env is not None and env.group_secret else user_secret()


def _start(secret: bytes, number: int, handles: Sequence[str], members: Sequence[Handle], rank: int) -> Start:
    """Return what the coordinator of a job would tell this member. The key is derived from the secret, for these
    members alone."""
    text = msgspec.msgpack.encode((number, *handles))
    size = len(members)
    peers = [Peer(member.worker, place, member.address) for place, member in enumerate(members)]
    return Start(
        id=GenerationId(
            run_id=1, coordinator_epoch=1, number=number, nonce=derive_key(secret, b"name of members", text)[:16].hex()
        ),
        placement=Placement(rank, size, rank, size, 0, 1),
        previous=peers[rank - 1],
        next=peers[(rank + 1) % size],
        bootstrap=True,
        data_key=derive_key(secret, b"key of members", text),
    )
