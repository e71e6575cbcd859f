"""A worker in a job of fixed size (torchrun, mpirun, srun): no coordinator, one generation."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from typing import Literal, TypeVar

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from farandole.base.env import FixedEnv, restart_count, run_name, uses_agent_store
from farandole.base.membership import DataAddress, GenerationId, Peer, Placement
from farandole.base.wire.authentication import derive_key
from farandole.base.wire.link_messages import Start
from farandole.base.wire.user_secret import user_secret
from farandole.errors import ConfigError, FarandoleError, JobEnded
from farandole.training.collectives import world
from farandole.training.collectives.data_listener import DataListener
from farandole.training.collectives.extension import extenders
from farandole.training.worker.world_builder import WorldBuilder


class FixedJob:
    """The worker's connection from the first init() to the end of the process. All ranks call init() and shutdown()
    equally often."""

    def __init__(self, env: FixedEnv, timeout_s: float) -> None:
        self._env, self._timeout_s = env, timeout_s
        self._listener = DataListener()
        self._builder = WorldBuilder(self._listener, f"rank{env.rank}", str(env.cross_rank), extenders())
        self._start: Start | None = None
        self._session = 0

    def meet(self) -> Literal[True]:
        """Find the other ranks through the launcher's rendezvous, the first time, and enter their world, also after
        leave(). Raises what Rendezvous and WorldBuilder raise."""
        if self._start is None:
            self._start = Rendezvous(self._env, self._timeout_s).meet(self._listener.address)
        self._session += 1
        world.enter(self._builder.build(self._start, self._session, self._timeout_s)[0])
        return True

    def leave(self) -> None:
        """Close the connections to the other ranks, for shutdown()."""
        self._builder.forget_settings()
        if world.is_entered():
            here = world.current()
            world.enter(None)
            here.close()

    def close(self) -> None:
        self.leave()
        self._listener.close()


# The rendezvous with the other workers, through torch's TCPStore ------------------------------------------------------

_NONCE_DIGITS = 16
_SEAL_DIGITS = 64
_GRACE_S = 1.0  # for TCPStore to enforce a time limit by itself: its message then says more than "late"

T = TypeVar("T")


class Rendezvous:
    """The exchange, once, of the workers' data addresses.

    TCPStore has no authentication: any process that reaches its port may read and change its entries, and torchrun's
    own store listens on all addresses. So it only holds a nonce, and addresses that the ranks have sealed. The data key
    is derived from a secret of this user's processes (wire/user_secret.py). Where there is no store yet, rank 0 opens
    one on MASTER_ADDR only, which is loopback unless it was set otherwise.

    Raises:
        JobEnded: The store cannot be opened or reached in time.
        ConfigError: There is no secret that only this user's processes know.
    """

    def __init__(self, env: FixedEnv, timeout_s: float) -> None:
        self._env = env
        self._timeout_s = timeout_s
        self._prefix = f"farandole/{restart_count()}"
        self._is_host = env.rank == 0 and not uses_agent_store()
        # What tells this job from others of the same user, which have the same secret.
        names = (env.launcher, env.size, env.master_addr, env.master_port, run_name(), self._prefix)
        self._secret = derive_key(user_secret(), b"job of fixed size", *(str(each).encode() for each in names))
        try:
            self._store = _within(timeout_s + _GRACE_S, self._open)
        except (futures.TimeoutError, RuntimeError, OSError) as error:
            why = str(error).partition("\n")[0] or type(error).__name__
            raise JobEnded(
                f"rank {env.rank} of {env.size} under {env.launcher} cannot {'serve' if self._is_host else 'reach'} "
                f"the rendezvous {env.master_addr}:{env.master_port} within {timeout_s:g} s "
                f"({why}); see MASTER_ADDR and MASTER_PORT"
            ) from error

    def meet(self, address: DataAddress) -> Start:
        """Send our address to all workers and receive the neighbours'. Rank 0 creates the generation.

        Returns when all ranks have arrived. Raises JobEnded when some do not within the time limit, with their names,
        and ConfigError when a rank on another host could not reach `address`, or an address in the store is not from a
        process that has this user's secret.
        """
        env = self._env
        if env.local_size < env.size and ipaddress.ip_address(address.host).is_loopback:
            raise ConfigError(
                f"{env.size} workers under {env.launcher}, {env.local_size} of them on this host: workers on several "
                f"hosts are not supported, since this worker can be reached at {address.host} only"
            )
        try:
            return _within(self._timeout_s + _GRACE_S, lambda: self._exchange(address))
        except FarandoleError:
            raise
        except (futures.TimeoutError, RuntimeError) as error:
            raise JobEnded(
                f"rank {env.rank} of {env.size} under {env.launcher} waited {self._timeout_s:g} s in init() at "
                f"{env.master_addr}:{env.master_port}; missing ranks: {self._missing()}"
            ) from error

    def _open(self) -> TCPStore:
        env, listening = self._env, None
        if self._is_host:
            listening = _listen(env.master_addr, env.master_port)
        return TCPStore(
            env.master_addr,
            env.master_port,
            is_master=self._is_host,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
            master_listen_fd=listening,
        )

    def _exchange(self, address: DataAddress) -> Start:
        env, store = self._env, self._store
        if env.rank == 0:
            store.set(self._key("nonce"), secrets.token_hex(_NONCE_DIGITS // 2))
        text = msgspec.json.encode(address)
        store.set(self._key(env.rank), (text + self._seal(env.rank, text)).decode())
        store.wait([self._key("nonce"), *map(self._key, range(env.size))])
        nonce = store.get(self._key("nonce"))[: 2 * _NONCE_DIGITS]
        previous, following = (self._peer((env.rank + step) % env.size) for step in (-1, 1))
        store.set(self._key(f"{env.rank}/read"), "")
        if self._is_host:  # The store ends with this process, which may end as soon as init() has returned.
            store.wait([self._key(f"{rank}/read") for rank in range(env.size)])
        return Start(
            id=GenerationId(run_id=1, coordinator_epoch=1, number=1, nonce=nonce.decode(errors="replace")),
            placement=Placement(env.rank, env.size, env.local_rank, env.local_size, env.cross_rank, env.cross_size),
            previous=previous,
            next=following,
            bootstrap=True,
            data_key=derive_key(self._secret, b"data", nonce),
        )

    def _peer(self, rank: int) -> Peer:
        sealed: bytes = self._store.get(self._key(rank))
        text, seal = sealed[:-_SEAL_DIGITS], sealed[-_SEAL_DIGITS:]
        if not hmac.compare_digest(seal, self._seal(rank, text)):
            raise ConfigError(
                f"the address of rank {rank} at the rendezvous {self._env.master_addr}:{self._env.master_port} is not "
                f"from a process that has the secret of this user: all ranks must be processes of one user, with the "
                f"same XDG_RUNTIME_DIR; or set FARANDOLE_TOKEN to the same text of at least 32 random characters for "
                f"all of them"
            )
        return Peer(f"rank{rank}", rank, msgspec.json.decode(text, type=DataAddress))

    def _seal(self, rank: int, text: bytes) -> bytes:
        """Return the proof, in hexadecimal digits, that a process with the secret has written the address."""
        return derive_key(self._secret, b"address", str(rank).encode(), text).hex().encode()

    def _key(self, name: str | int) -> str:
        return f"{self._prefix}/{name}"

    def _missing(self) -> str:
        def look() -> list[int]:
            return [rank for rank in range(self._env.size) if not self._store.check([self._key(rank)])]

        try:
            return str(_within(_GRACE_S, look))
        except (futures.TimeoutError, RuntimeError):
            return "unknown, the rendezvous cannot be reached"


def _listen(host: str, port: int) -> int:
    """Return the descriptor of a listening socket on this address alone; TCPStore itself would listen on all."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((address[0], port), family=family).detach()


def _within(limit_s: float, call: Callable[[], T]) -> T:
    """Return or raise what `call` returns or raises; raise futures.TimeoutError after `limit_s`. TCPStore's own limits
    do not hold when a peer accepts and never answers. The abandoned thread ends with the process."""
    result: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 (the caller gets it)
            result.set_exception(error)

    threading.Thread(target=run, name="farandole-rendezvous", daemon=True).start()
    return result.result(timeout=limit_s)
