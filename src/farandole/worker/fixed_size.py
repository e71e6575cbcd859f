"""Meeting the other workers of a fixed-size launcher (torchrun, mpirun, srun), through torch's TCPStore."""

from __future__ import annotations

import contextlib
import secrets
from datetime import timedelta

import msgspec
from torch.distributed import DistError, DistStoreError, TCPStore  # type: ignore[attr-defined]

from farandole.env import FixedEnv, restart_count, uses_agent_store
from farandole.errors import JobEnded
from farandole.membership import Address, GenerationId, Peer, Placement
from farandole.messages import Start

_KEY_BYTES = 32


class Meeting:
    """Where the workers tell each other their data addresses. Rank 0 may be host of the store: keep this object
    until the job is over."""

    def __init__(self, env: FixedEnv, timeout_s: float) -> None:
        self._env = env
        self._timeout_s = timeout_s
        try:
            self._store = TCPStore(
                env.master_addr,
                env.master_port,
                is_master=env.rank == 0 and not uses_agent_store(),
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
        except (DistError, RuntimeError) as error:
            raise JobEnded(
                f"rank {env.rank} of {env.size} under {env.launcher} cannot reach, or serve, the meeting point "
                f"{env.master_addr}:{env.master_port} within {timeout_s:g} s ({error}); see MASTER_ADDR and MASTER_PORT"
            ) from error

    def meet(self, address: Address) -> Start:
        """Tell everybody our address and learn the neighbours'. Rank 0 makes up the generation and its data key.

        TCPStore has no authentication: whoever reaches its port can read the key. Raises JobEnded when ranks do
        not come within the time limit, naming them.
        """
        env, prefix = self._env, f"farandole/{restart_count()}"
        if env.rank == 0:
            secret = secrets.token_hex(8) + secrets.token_bytes(_KEY_BYTES).hex()
            self._store.set(f"{prefix}/secret", secret)
        self._store.set(f"{prefix}/{env.rank}", msgspec.json.encode(address).decode())
        neighbours = [(env.rank - 1) % env.size, (env.rank + 1) % env.size]
        wanted = [f"{prefix}/secret", *(f"{prefix}/{rank}" for rank in neighbours)]
        try:
            self._store.wait(wanted, timedelta(seconds=self._timeout_s))
            secret = self._store.get(wanted[0]).decode()
            addresses = [msgspec.json.decode(self._store.get(key), type=Address) for key in wanted[1:]]
        except (DistStoreError, DistError, RuntimeError) as error:
            raise JobEnded(self._who_is_missing(prefix)) from error
        previous, following = (
            Peer(f"rank{rank}", rank, each) for rank, each in zip(neighbours, addresses, strict=True)
        )
        return Start(
            id=GenerationId(lineage=1, incarnation=1, number=1, nonce=secret[:16]),
            placement=Placement(env.rank, env.size, env.local_rank, env.local_size, env.cross_rank, env.cross_size),
            previous=previous,
            next=following,
            founding=True,
            data_key=bytes.fromhex(secret[16:]),
        )

    def _who_is_missing(self, prefix: str) -> str:
        env = self._env
        missing: list[int] = []
        with contextlib.suppress(DistError, RuntimeError):
            missing = [rank for rank in range(env.size) if not self._store.check([f"{prefix}/{rank}"])]
        return (
            f"rank {env.rank} of {env.size} under {env.launcher} waited {self._timeout_s:g} s in init() at "
            f"{env.master_addr}:{env.master_port}; ranks that did not come: {missing or 'unknown'}"
        )
